"""The frames between a worker and its runner: a 4-byte big-endian length, then a msgpack message.

They travel over a socket pair of their own, so that what the workload prints can never be taken for a message.
"""

from __future__ import annotations

import socket
import struct

import msgspec

from muster.errors import ProtocolError
from muster.rank_protocol import FromRank, ToRank

#: No frame is larger; a longer one is the mark of a broken peer.
MAX_FRAME_BYTES = 16 * 2**20

_HEADER = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: ToRank | FromRank) -> bytes:
    """The message with its length in front."""
    body = _encoder.encode(message)
    return _HEADER.pack(len(body)) + body


def frame_length(header: bytes) -> int:
    """The length that a frame's header announces.

    Raises:
        ProtocolError: it is above `MAX_FRAME_BYTES`.
    """
    (length,) = _HEADER.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {length} bytes was announced; the limit is {MAX_FRAME_BYTES}")
    return length


HEADER_BYTES = _HEADER.size


class Channel:
    """The runner's end: blocking, so that a runner that waits uses no CPU."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)

    def fileno(self) -> int:
        """The descriptor to poll for the next frame."""
        return self._connection.fileno()

    def send(self, frame: FromRank) -> None:
        """Send a frame; raises `OSError` when the worker is gone."""
        self._connection.sendall(encode_frame(frame))

    def receive(self) -> ToRank | None:
        """Wait for the next frame; `None` when the worker closed its end.

        Raises:
            ProtocolError: the bytes are no frame.
        """
        header = self._read(HEADER_BYTES)
        if header is None:
            return None
        body = self._read(frame_length(header))
        if body is None:
            return None
        try:
            return self._decoder.decode(body)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"a frame from the worker cannot be decoded: {error}") from error

    def _read(self, count: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < count:
            piece = self._connection.recv(count - len(parts))
            if not piece:
                return None
            parts += piece
        return bytes(parts)
