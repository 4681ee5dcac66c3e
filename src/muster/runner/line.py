"""Rank 0's line to the coordinator's gateway: requests in, pieces of answers out."""

from __future__ import annotations

import msgspec
import zmq

from muster.rank_protocol import Ask, Cancel, Piece, ToRunner
from muster.spec import InstanceId

#: Messages that wait for the gateway or from it; the gateway refuses requests before this is reached.
_QUEUE_MESSAGES = 1000
_LINGER_MS = 500
#: A coordinator that is away now is dialled again by ZeroMQ for as long as it takes.
_DIAL_MS = 1_000

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[ToRunner] = msgspec.msgpack.Decoder(ToRunner)


class GenerationLine:
    """The DEALER that dials the gateway under the name "instance/attempt"."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, instance: InstanceId, attempt: int
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        # The gateway addresses a runner by this name, so that a restarted gateway finds it again by itself.
        self.socket.set(zmq.IDENTITY, f"{instance}/{attempt}".encode())
        self.socket.set(zmq.LINGER, _LINGER_MS)
        self.socket.set(zmq.SNDHWM, _QUEUE_MESSAGES)
        self.socket.set(zmq.RCVHWM, _QUEUE_MESSAGES)
        self._endpoint = endpoint
        self._dial(endpoint)

    def dial_instead(self, endpoint: str) -> None:
        """Leave the gateway for another one; what waits for the old one is dropped with it."""
        if endpoint != self._endpoint:
            self.socket.disconnect(self._endpoint)
            self._endpoint = endpoint
            self._dial(endpoint)

    def _dial(self, endpoint: str) -> None:
        """Connect, and see the gateway take it: who is told that the instance is ready may ask at once."""
        monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.socket.connect(endpoint)
        monitor.poll(_DIAL_MS)
        self.socket.disable_monitor()
        monitor.close()

    def receive(self) -> list[Ask | Cancel]:
        """What has arrived; a message that cannot be read is dropped."""
        messages: list[Ask | Cancel] = []
        while True:
            try:
                body = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                messages.append(_decoder.decode(body))
            except (msgspec.DecodeError, ValueError, RecursionError):
                continue

    def send(self, pieces: tuple[Piece, ...]) -> bool:
        """Send what one step brought, without waiting; `False` where a thousand messages wait already."""
        try:
            self.socket.send(_encoder.encode(pieces), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Close the socket; what was sent still goes out until the context ends."""
        self.socket.close()
