"""The worker's peer port: answers other workers, and the coordinator, on every address of the node."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket as std_socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar, cast

import anyio
import msgspec
from loguru import logger

from muster.bus.peer import PeerConnection, ask
from muster.bus.sockets import Throttle
from muster.errors import LockError, MusterError, PeerError, ProtocolError
from muster.group.addresses import WILDCARD, is_loopback
from muster.peer_protocol import (
    AnyPeerReply,
    AnyPeerRequest,
    Burst,
    DialBack,
    DialledBack,
    PeerRefused,
    Ping,
    Pong,
    Watch,
)
from muster.spec import BootId, Failure, NodeAddress, NodeId
from muster.worker.diagnosis import failure_of
from muster.worker.ports import PortRange

#: Connections at one time, in all and from one address: a flood takes neither descriptors nor memory from the ranks.
MAXIMUM_CONNECTIONS: Final = 512
MAXIMUM_FROM_ONE: Final = 32
#: Of those, the ones that may last without a request: the rest stays for who asks something.
MAXIMUM_WATCHES: Final = 384
MAXIMUM_WATCHES_FROM_ONE: Final = 16
#: How long a connection may stay open without a request.
IDLE_SECONDS: Final = 30.0
#: The largest burst that is taken or sent, and how long it may take.
MAXIMUM_BURST_BYTES: Final = 16 * 2**20
BURST_SECONDS: Final = 5.0
_DIAL_BACK_SECONDS: Final = 2.0
_ACCEPT_PAUSE_SECONDS: Final = 0.1  #: after the system refused to accept, for want of descriptors for example
_BACKLOG: Final = 128
_REFUSAL_CHARACTERS: Final = 1000  #: a refusal may quote what was asked for
_PIECE_BYTES: Final = 256 * 1024

Q = TypeVar("Q", bound=AnyPeerRequest)
#: Answers one request. `None` says that everything was sent already, by the connection or its socket.
Handler = Callable[[Q, PeerConnection], Awaitable[AnyPeerReply | None]]


class PeerServer:
    """Answers `muster.peer_protocol` on one port. Handlers are plugged in by `handle` before `run`.

    A handler that raises a `MusterError` refuses with it, and a reply that cannot be told is a refusal too; after any
    other error, and after garbage, the connection is closed. A handler may send replies and raw bytes itself, also by
    `connection.socket` from a thread, if it leaves the connection behind the last of them and the socket non-blocking.
    `bursting` is held while a burst goes through this node, so that measurements do not disturb each other; whoever
    asks meanwhile is told to come again.
    """

    def __init__(self, node: NodeId, boot: BootId) -> None:
        self._node = node
        self._boot = boot
        self._socket: std_socket.socket | None = None
        self._handlers: dict[type[AnyPeerRequest], Handler[AnyPeerRequest]] = {}
        self._open: Counter[str] = Counter()
        self._watches: Counter[str] = Counter()
        self._garbage = Throttle()
        self._faults = Throttle()
        self.bursting = anyio.Lock()
        #: Told of each watch from another node that ends: that node's address, and how many seconds it lasted.
        self.on_unwatched: Callable[[str, float], None] = lambda host, seconds: None
        self.handle(Ping, self._ping)
        self.handle(Burst, self._burst)
        self.handle(DialBack, self._dial_back)
        self.handle(Watch, self._watch)

    @property
    def port(self) -> int:
        """The port that is listened on; 0 before `listen`, and where there was none to have."""
        return 0 if self._socket is None else int(self._socket.getsockname()[1])

    def handle(self, kind: type[Q], handler: Handler[Q]) -> None:
        """Let `handler` answer requests of this kind, instead of whoever did before."""
        self._handlers[kind] = cast(Handler[AnyPeerRequest], handler)

    def listen(self, addresses: Iterable[NodeAddress], ports: PortRange | None = None) -> int:
        """Take a port on all addresses, on loopback alone where the node offers nothing else; the port.

        Of a range it is the last free one, since ranks take the first. Without any free port it is 0: the node's
        links are then not measured, and everything else works.
        """
        hosts = [address.host for address in addresses]
        host = hosts[0] if hosts and all(map(is_loopback, hosts)) else WILDCARD
        for port in (0,) if ports is None else range(ports.last, ports.first - 1, -1):
            socket = std_socket.socket(std_socket.AF_INET, std_socket.SOCK_STREAM)
            try:
                socket.setsockopt(std_socket.SOL_SOCKET, std_socket.SO_REUSEADDR, 1)
                socket.bind((host, port))
                socket.listen(_BACKLOG)
                socket.setblocking(False)
            except OSError as error:
                socket.close()
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    logger.warning("no peer port: {}", error.strerror or error)
                    return 0
                continue
            self._socket = socket
            return self.port
        logger.warning("no port is free for other nodes to ask this one; its links are not measured. Widen --ports.")
        return 0

    def close(self) -> None:
        """Stop listening; while `run` runs, cancel that instead."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def run(self) -> None:
        """Answer until cancelled; returns at once where there is no port."""
        if self._socket is None:
            return
        loop = asyncio.get_running_loop()
        try:
            async with anyio.create_task_group() as group:
                while True:
                    try:
                        socket, _ = await loop.sock_accept(self._socket)
                    except OSError as error:
                        logger.warning("the peer port accepts nobody for now: {}", error.strerror or error)
                        await anyio.sleep(_ACCEPT_PAUSE_SECONDS)
                        continue
                    try:
                        connection = PeerConnection(socket)
                    except OSError:  # gone again already
                        socket.close()
                        continue
                    if self._open.total() >= MAXIMUM_CONNECTIONS or self._open[connection.other] >= MAXIMUM_FROM_ONE:
                        connection.close()
                        continue
                    self._open[connection.other] += 1
                    group.start_soon(self._attend, connection)
        finally:
            self.close()

    async def _attend(self, connection: PeerConnection) -> None:
        try:
            with contextlib.suppress(PeerError):
                while (request := await connection.request(idle_seconds=IDLE_SECONDS)) is not None:
                    if not await self._answer(request, connection):
                        return
        except ProtocolError as error:
            if count := self._garbage.count():
                logger.warning("closed {} connections to the peer port; the last: {}", count, error.message)
        except Exception as error:  # the outermost edge of a connection: the worker and its other connections go on
            if count := self._faults.count():
                logger.opt(exception=error).error("{} connections to the peer port failed; the last:", count)
        finally:
            connection.close()
            self._open[connection.other] -= 1
            if not self._open[connection.other]:
                del self._open[connection.other]

    async def _answer(self, request: AnyPeerRequest, connection: PeerConnection) -> bool:
        """Whether the connection can go on."""
        handler = self._handlers.get(type(request))
        if handler is None:
            failure = Failure(
                kind="request-invalid",
                message=f"this worker answers no {type(request).__name__}",
                remedy="Use the same version of muster on all nodes.",
            )
            await connection.send(PeerRefused(failure=failure))
            return True
        try:
            reply = await handler(request, connection)
            if reply is not None:
                await connection.send(reply)
        except (PeerError, ProtocolError):
            raise
        except MusterError as error:
            await connection.send(PeerRefused(failure=_tellable(failure_of(error))))
        return True

    # --- what every worker answers ------------------------------------------------------------------------

    def pong(self, connection: PeerConnection) -> Pong:
        """Who this is."""
        return Pong(node=self._node, boot=self._boot, seen=connection.other)

    async def _ping(self, request: Ping, connection: PeerConnection) -> Pong:
        del request
        return self.pong(connection)

    async def _burst(self, request: Burst, connection: PeerConnection) -> AnyPeerReply:
        """`Pong` says that it is the caller's turn; then the bytes go, and another `Pong` ends it."""
        if not 0 <= request.upload <= MAXIMUM_BURST_BYTES or not 0 <= request.download <= MAXIMUM_BURST_BYTES:
            raise ProtocolError(f"{connection.other} wants a burst of more than {MAXIMUM_BURST_BYTES} bytes")
        try:
            self.bursting.acquire_nowait()
        except anyio.WouldBlock:
            failure = Failure(kind="in-use", message="another link is being measured", retryable=True)
            return PeerRefused(failure=failure)
        try:
            await connection.send(self.pong(connection))
            await connection.skip(request.upload, seconds=BURST_SECONDS)
            await send_burst(connection, request.download)
        finally:
            self.bursting.release()
        return self.pong(connection)

    async def _watch(self, request: Watch, connection: PeerConnection) -> None:
        del request
        other = connection.other
        if self._watches.total() >= MAXIMUM_WATCHES or self._watches[other] >= MAXIMUM_WATCHES_FROM_ONE:
            raise LockError(
                "as many links as may be are watched here", remedy="measure this one again from time to time"
            )
        self._watches[other] += 1
        began = time.monotonic()
        try:
            await connection.send(self.pong(connection))
            await connection.skip(1, seconds=float("inf"))  # nothing comes: the kernel says when the link is gone
        finally:
            self._watches[other] -= 1
            if not self._watches[other]:
                del self._watches[other]
            self.on_unwatched(other, time.monotonic() - began)

    async def _dial_back(self, request: DialBack, connection: PeerConnection) -> DialledBack:
        """Only the caller's own address is dialled: nobody can make this worker knock at another's door."""
        if request.host != connection.other:
            error = f"{request.host} is seen as {connection.other} by node {self._node}: an address is translated"
            return DialledBack(reached=False, error=error)
        if not 0 < request.port < 2**16:
            return DialledBack(reached=False, error=f"{request.port} is no port")
        ping = Ping(node=request.node, boot=request.boot)
        try:
            reply = await ask(request.host, request.port, ping, own=connection.own, seconds=_DIAL_BACK_SECONDS)
        except MusterError as error:
            return DialledBack(reached=False, error=error.message)
        error = whoever(request.host, reply, request.node, request.boot)
        return DialledBack(reached=not error, error=error)


def _tellable(failure: Failure) -> Failure:
    """The failure with what it quotes made fit for a message: names on disks may be no UTF-8, and very long."""

    def fit(text: str) -> str:
        return shortened(text.encode(errors="backslashreplace").decode())

    return msgspec.structs.replace(failure, message=fit(failure.message), remedy=fit(failure.remedy))


def shortened(text: str) -> str:
    """The text, cut where it is longer than anybody reads; other nodes send texts of megabytes."""
    return text if len(text) <= _REFUSAL_CHARACTERS else f"{text[:_REFUSAL_CHARACTERS]}…"


def whoever(host: str, reply: AnyPeerReply, node: NodeId, boot: BootId) -> str:
    """Why an answer from `host` is not the one of this boot of this node; empty where it is."""
    if not isinstance(reply, Pong):
        return f"{host} answers a ping with {type(reply).__name__}"
    if reply.node != node:
        return f"node {reply.node} answers at {host}, which node {node} offers: two nodes behind the same address"
    if reply.boot != boot:
        return f"another boot of node {node} answers at {host}"
    return ""


async def send_burst(connection: PeerConnection, count: int) -> None:
    """Send `count` bytes of no meaning."""
    with anyio.move_on_after(BURST_SECONDS) as scope:
        piece = memoryview(bytes(min(count, _PIECE_BYTES)))
        while count:
            part = piece[: min(count, len(piece))]
            await connection.send_bytes(part, seconds=float("inf"))
            count -= len(part)
    if scope.cancelled_caught:
        raise PeerError(f"{connection.other} does not take a burst within {BURST_SECONDS:g} s")
