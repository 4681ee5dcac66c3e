"""The coordinator's control socket: calls in, answers out, and strangers' bytes counted and dropped."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import cast

import anyio
import msgspec
import zmq
import zmq.asyncio
from anyio.streams.memory import MemoryObjectReceiveStream
from loguru import logger

from muster.bus.sockets import MAXIMUM_CALL_BYTES, Resident, Throttle, bind_socket, open_socket, receive, send_now
from muster.protocol import Call
from muster.replies import Answer, Refused
from muster.spec import Failure

#: Calls that wait in the process, over all clients; then reading stops and TCP holds the senders back.
QUEUED_CALLS = 128
#: Calls of one client that ZeroMQ reads ahead; it takes turns between clients.
QUEUED_CALLS_PER_CLIENT = 32
#: Answers that wait for one slow client before further ones are dropped.
QUEUED_ANSWERS_PER_CLIENT = 1_000
#: From this size on, answers are counted in bytes until they have left, and a client may have this many on the way.
LARGE_ANSWER_BYTES = 64 * 1024
LARGE_ANSWERS_BYTES_PER_CLIENT = 32 * 1024 * 1024

_decoder = msgspec.msgpack.Decoder(Call)
_encoder = msgspec.msgpack.Encoder()


class _Numbered(msgspec.Struct):
    id: int


_id_decoder = msgspec.msgpack.Decoder(_Numbered)


class Incoming(msgspec.Struct, frozen=True):
    """A call, and the connection to answer on. The identity is ZeroMQ's, new with each connection."""

    identity: bytes
    call: Call


class ServerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the socket was opened. `garbage` were no calls at all, `refused` had a bad request inside."""

    calls: int
    garbage: int
    refused: int
    answers: int
    answers_dropped: int


class ControlServer(Resident):
    """The ROUTER socket.

    Memory is bounded whatever clients do: reading stops while `QUEUED_CALLS` wait in `incoming`, and a client
    that does not read its answers loses them.

    Raises (on entering):
        PortError: the port is taken, or `host` is no address of this machine.
    """

    #: Calls in the order of their arrival. The server closes it when it stops.
    incoming: MemoryObjectReceiveStream[Incoming]

    def __init__(self, host: str, port: int = 0) -> None:
        super().__init__()
        self._host = host
        self._port = port
        self._socket: zmq.asyncio.Socket | None = None
        self._large: dict[bytes, deque[tuple[zmq.MessageTracker, int]]] = {}
        self._garbage_line = Throttle()
        self._dropped_line = Throttle()
        self._accepted = self._garbage = self._refused = self._answers = self._answers_dropped = 0

    @property
    def port(self) -> int:
        """The port that is bound."""
        return self._port

    def send(self, identity: bytes, answer: Answer) -> None:
        """Answer a call. Never waits: the answer to a client that is gone or too slow is dropped."""
        if self._socket is None or self._socket.closed:
            return
        payload = _encoder.encode(answer)
        sent = (
            send_now(self._socket, [identity, payload])
            if len(payload) < LARGE_ANSWER_BYTES
            else self._send_large(self._socket, identity, payload)
        )
        if sent:
            self._answers += 1
            return
        self._answers_dropped += 1
        if count := self._dropped_line.count():
            logger.warning("dropped {} answers to clients that do not read them", count)

    def statistics(self) -> ServerStatistics:
        """Counts since the socket was opened."""
        return ServerStatistics(
            calls=self._accepted,
            garbage=self._garbage,
            refused=self._refused,
            answers=self._answers,
            answers_dropped=self._answers_dropped,
        )

    def _send_large(self, socket: zmq.asyncio.Socket, identity: bytes, payload: bytes) -> bool:
        """ZeroMQ bounds a queue in messages only; snapshots need a bound in bytes."""
        for other in [key for key, queue in self._large.items() if _settled(queue)]:
            del self._large[other]
        queue = self._large.get(identity, deque())
        if queue and sum(size for _, size in queue) + len(payload) > LARGE_ANSWERS_BYTES_PER_CLIENT:
            return False
        future = cast(
            "asyncio.Future[zmq.MessageTracker]",
            socket.send_multipart([identity, payload], flags=zmq.NOBLOCK, copy=False, track=True),
        )
        if not future.done() or future.exception() is not None:
            future.cancel()
            return False
        queue.append((future.result(), len(payload)))
        self._large[identity] = queue
        return True

    async def _open(self) -> None:
        socket = open_socket(
            zmq.ROUTER,
            receive_messages=QUEUED_CALLS_PER_CLIENT,
            send_messages=QUEUED_ANSWERS_PER_CLIENT,
            maximum_bytes=MAXIMUM_CALL_BYTES,
        )
        self._port = await bind_socket(socket, self._host, self._port, "control")
        self._socket = socket
        self._calls, self.incoming = anyio.create_memory_object_stream[Incoming](QUEUED_CALLS)

    async def _serve(self) -> None:
        assert self._socket is not None
        async with self._calls:
            while True:
                frames = await receive(self._socket)
                incoming = self._decode(frames)
                if incoming is not None:
                    self._accepted += 1
                    await self._calls.send(incoming)

    def _decode(self, frames: list[bytes]) -> Incoming | None:
        if len(frames) != 2:
            return self._drop(frames[0], f"{len(frames) - 1} frames instead of 1")
        identity, payload = frames
        try:
            return Incoming(identity, _decoder.decode(payload))
        except msgspec.ValidationError as error:
            return self._refuse(identity, payload, str(error))
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            return self._drop(identity, str(error))

    def _refuse(self, identity: bytes, payload: bytes, reason: str) -> None:
        """A call with an id gets an answer, so that its sender need not wait for the timeout to learn what is wrong."""
        try:
            number = _id_decoder.decode(payload).id
        except (msgspec.DecodeError, ValueError, RecursionError):
            return self._drop(identity, reason)
        self._refused += 1
        failure = Failure(
            kind="request-invalid",
            message=f"the request cannot be read: {reason}",
            remedy="Correct the field that the path names, or use the same version of muster on both ends.",
        )
        self.send(identity, Answer(id=number, reply=Refused(failure=failure)))
        return None

    def _drop(self, identity: bytes, reason: str) -> None:
        self._garbage += 1
        if count := self._garbage_line.count():
            logger.warning(
                "dropped {} messages on the control socket that are no calls; the last from connection {}: {}",
                count,
                identity.hex(),
                reason,
            )

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._calls.close()
            self.incoming.close()
        self._large.clear()


def _settled(queue: deque[tuple[zmq.MessageTracker, int]]) -> bool:
    while queue and queue[0][0].done:
        queue.popleft()
    return not queue
