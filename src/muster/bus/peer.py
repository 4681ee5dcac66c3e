"""Messages of `muster.peer_protocol` on a TCP connection, and asking for one answer.

The socket is non-blocking and the connection its only owner; nothing is read ahead, so that raw bytes behind a
message can be moved by whoever knows best, a thread with `sendfile` for example.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket as std_socket
from collections.abc import AsyncGenerator, Generator
from typing import Final, TypeVar

import anyio
import msgspec

from muster.errors import MusterError, PeerError, ProtocolError
from muster.peer_protocol import MAXIMUM_BYTES, AnyPeerReply, AnyPeerRequest

#: The longest request: a worker takes them from anybody who reaches its port, replies only from whom it asked.
MAXIMUM_REQUEST_BYTES: Final = 64 * 1024
#: How long a message may take from its first to its last byte, and how long the other end may take to read one.
MESSAGE_SECONDS: Final = 10.0

_HEADER_BYTES: Final = 4
#: A line without traffic is probed after so long, so often and so many times before it counts as cut; in seconds.
_KEEPALIVE_OPTIONS: Final = {"TCP_KEEPIDLE": 3, "TCP_KEEPALIVE": 3, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}
_request_decoder = msgspec.msgpack.Decoder[AnyPeerRequest](AnyPeerRequest)
_reply_decoder = msgspec.msgpack.Decoder[AnyPeerReply](AnyPeerReply)
_encoder = msgspec.msgpack.Encoder()

T = TypeVar("T")


class PeerConnection:
    """One end of a connection to a peer port. `socket` may be lent to one user at a time, and comes back non-blocking.

    All methods that move bytes raise `PeerError` where the other end is gone or the time is over.
    """

    def __init__(self, socket: std_socket.socket) -> None:
        socket.setblocking(False)
        socket.setsockopt(std_socket.IPPROTO_TCP, std_socket.TCP_NODELAY, 1)
        socket.setsockopt(std_socket.SOL_SOCKET, std_socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE_OPTIONS.items():
            if (option := getattr(std_socket, name, None)) is not None:  # systems name the first one differently
                socket.setsockopt(std_socket.IPPROTO_TCP, option, value)
        self.socket = socket
        self.own = str(socket.getsockname()[0])  #: the address of this end
        self.other = str(socket.getpeername()[0])  #: the address of the other end

    def close(self) -> None:
        """Close the socket; more than once is no harm."""
        self.socket.close()

    async def send(self, message: AnyPeerRequest | AnyPeerReply, *, seconds: float = MESSAGE_SECONDS) -> None:
        """Send one message.

        Raises:
            MusterError: it cannot be encoded, or is too long; nothing was sent.
        """
        body = _encoded(message)
        await self.send_bytes(len(body).to_bytes(_HEADER_BYTES, "big") + body, seconds=seconds)

    async def send_bytes(self, data: bytes | bytearray | memoryview, *, seconds: float = MESSAGE_SECONDS) -> None:
        """Send raw bytes."""
        with self._talking(seconds):
            await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def request(self, *, idle_seconds: float, seconds: float = MESSAGE_SECONDS) -> AnyPeerRequest | None:
        """The next request; `None` where the other end closes, or keeps silent for `idle_seconds`, instead.

        Raises:
            ProtocolError: what came is no request, or too long for one.
        """
        first = b""
        with anyio.move_on_after(idle_seconds), self._talking(float("inf")):
            first = await asyncio.get_running_loop().sock_recv(self.socket, 1)
        if not first:
            return None
        return self._decoded(await self._message(first, MAXIMUM_REQUEST_BYTES, seconds), _request_decoder)

    async def reply(self, *, seconds: float = MESSAGE_SECONDS) -> AnyPeerReply:
        """The answer to the request that was sent last, a `PeerRefused` too.

        Raises:
            ProtocolError: what came is no reply.
        """
        return self._decoded(await self._message(b"", MAXIMUM_BYTES, seconds), _reply_decoder)

    async def receive(self, count: int, *, seconds: float = MESSAGE_SECONDS) -> bytes:
        """Exactly `count` raw bytes, all in memory."""
        data = bytearray(count)
        view = memoryview(data)
        got = 0
        with self._talking(seconds):
            while got < count:
                got += await self._some(view[got:])
        return bytes(data)

    async def skip(self, count: int, *, seconds: float = MESSAGE_SECONDS) -> None:
        """Read `count` raw bytes and keep none."""
        view = memoryview(bytearray(min(count, 256 * 1024)))
        with self._talking(seconds):
            while count:
                count -= await self._some(view[: min(count, len(view))])

    async def until_gone(self) -> None:
        """Wait until the other end closes, while nobody reads here; for ever where bytes came instead."""
        with contextlib.suppress(OSError):
            await anyio.wait_readable(self.socket)
            if self.socket.recv(1, std_socket.MSG_PEEK):
                await anyio.sleep_forever()

    async def _some(self, buffer: memoryview) -> int:
        got = await asyncio.get_running_loop().sock_recv_into(self.socket, buffer)
        if not got:
            raise PeerError(f"{self.other} closed the connection")
        return got

    async def _message(self, begun: bytes, limit: int, seconds: float) -> bytes:
        with _deadline(seconds, f"{self.other} sent no whole message"):
            header = begun + await self.receive(_HEADER_BYTES - len(begun), seconds=float("inf"))
            length = int.from_bytes(header, "big")
            if length > limit:
                raise ProtocolError(f"{self.other} announces a message of {length} bytes; at most {limit} are taken")
            return await self.receive(length, seconds=float("inf"))

    def _decoded(self, body: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
        try:
            return decoder.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ProtocolError(f"{self.other} sent what is no message: {error}") from error

    @contextlib.contextmanager
    def _talking(self, seconds: float) -> Generator[None, None, None]:
        with _deadline(seconds, f"{self.other} does not go on"):
            try:
                yield
            except OSError as error:
                raise PeerError(f"the connection to {self.other} broke: {error.strerror or error}") from error


def _encoded(message: AnyPeerRequest | AnyPeerReply) -> bytes:
    """Files on a disk may have names that are no UTF-8, and say numbers that no message holds."""
    what = type(message).__name__
    try:
        body = _encoder.encode(message)
    except (OverflowError, UnicodeError, RecursionError) as error:
        reason = "a name that is no UTF-8" if isinstance(error, UnicodeError) else str(error)
        raise MusterError(f"{what} cannot be told to another node: {reason}") from error
    if len(body) > MAXIMUM_BYTES:
        raise MusterError(f"{what} has {len(body)} bytes; at most {MAXIMUM_BYTES} can be told to another node")
    return body


@contextlib.contextmanager
def _deadline(seconds: float, what: str) -> Generator[None, None, None]:
    try:
        with anyio.fail_after(seconds):
            yield
    except TimeoutError as error:
        raise PeerError(f"{what} within {seconds:g} s") from error


@contextlib.asynccontextmanager
async def dialled(host: str, port: int, *, own: str = "", seconds: float = 5.0) -> AsyncGenerator[PeerConnection, None]:
    """A connection to a peer port, from the address `own` where that is given, closed on exit.

    Raises:
        PeerError: nobody listens there, nobody answers within `seconds`, `own` is no address of this machine, or
            `host` or `port` is none at all.
    """
    socket = std_socket.socket(std_socket.AF_INET, std_socket.SOCK_STREAM)
    try:
        socket.setblocking(False)
        with _deadline(seconds, f"{host}:{port} does not answer"):
            try:
                if own:
                    socket.bind((own, 0))
                await asyncio.get_running_loop().sock_connect(socket, (host, port))
                connection = PeerConnection(socket)
            except TimeoutError as error:  # the kernel's, which gives up by itself
                raise PeerError(f"{host}:{port} does not answer") from error
            except OSError as error:
                way = f" from {own}" if own else ""
                reason = os.strerror(error.errno) if error.errno is not None else str(error)
                raise PeerError(f"{host}:{port} cannot be reached{way}: {reason}") from error
            except (OverflowError, ValueError) as error:  # a port or a host that is none
                raise PeerError(f"{host!r}:{port} cannot be reached: {error}") from error
        yield connection
    finally:
        socket.close()


async def ask(host: str, port: int, request: AnyPeerRequest, *, seconds: float = 5.0, own: str = "") -> AnyPeerReply:
    """The answer of the worker whose peer port this is, over a connection of its own; a `PeerRefused` too.

    Raises:
        PeerError: nobody is there, or no answer came within `seconds`.
        ProtocolError: what answers is no worker.
    """
    with _deadline(seconds, f"{host}:{port} does not answer"):
        async with dialled(host, port, own=own, seconds=seconds) as connection:
            await connection.send(request, seconds=seconds)
            return await connection.reply(seconds=seconds)
