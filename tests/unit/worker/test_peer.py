"""A worker's peer port: what it answers, and what it does with strangers."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import pytest

from muster.bus.peer import MAXIMUM_REQUEST_BYTES, PeerConnection, ask, dialled
from muster.errors import ModelError, PeerError, ProtocolError
from muster.peer_protocol import (
    Burst,
    DialBack,
    DialledBack,
    FetchFile,
    FileFollows,
    Files,
    InspectModel,
    ListFiles,
    PeerFile,
    PeerRefused,
    Ping,
    Pong,
    Watch,
)
from muster.spec import BootId, NodeAddress, NodeId
from muster.worker import peer
from muster.worker.peer import MAXIMUM_BURST_BYTES, PeerServer, whoever
from muster.worker.ports import PortRange

NODE, BOOT = NodeId("a"), BootId("b1")
PING = Ping(node=NODE, boot=BOOT)
HERE = "127.0.0.1"


@asynccontextmanager
async def served(
    host: str = HERE, node: NodeId = NODE, prepare: Callable[[PeerServer], None] = lambda server: None
) -> AsyncGenerator[PeerServer, None]:
    server = PeerServer(node, BOOT)
    prepare(server)
    server.listen([NodeAddress(host=host, network="127.0.0.0/8")])
    async with anyio.create_task_group() as group:
        group.start_soon(server.run)
        yield server
        group.cancel_scope.cancel()


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        with anyio.fail_after(20):
            await work()

    anyio.run(limited)


def test_it_says_who_it_is_and_whom_it_sees() -> None:
    async def work() -> None:
        async with served() as server:
            reply = await ask(HERE, server.port, PING, own="127.0.0.5")
            assert reply == Pong(node=NODE, boot=BOOT, seen="127.0.0.5")

    run(work)


def test_it_listens_on_loopback_alone_where_nothing_else_is_offered() -> None:
    server = PeerServer(NODE, BOOT)
    assert server.listen([NodeAddress(host=HERE, network="127.0.0.0/8")])
    with pytest.raises(OSError), socket.create_connection(("127.0.0.9", server.port), 1):
        pass
    server.close()
    assert server.port == 0


def test_of_a_range_it_takes_the_last_free_port_and_does_without_where_none_is() -> None:
    with socket.socket() as taken:
        taken.bind((HERE, 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = PeerServer(NODE, BOOT)
        assert server.listen([NodeAddress(host=HERE, network="127.0.0.0/8")], PortRange(port, port)) == 0
        first, second = (PeerServer(NODE, BOOT) for _ in range(2))
        address = [NodeAddress(host="127.0.0.3", network="127.0.0.0/8")]
        ports = PortRange(port - 3, port)
        assert first.listen(address, ports) > second.listen(address, ports) > 0
        first.close()
        second.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        (MAXIMUM_REQUEST_BYTES + 1).to_bytes(4, "big"),
        b"\xff\xff\xff\xff" + b"x" * 1000,
        (3).to_bytes(4, "big") + b"abc",
        (len(body := msgspec.msgpack.encode({"type": "nothing known"}))).to_bytes(4, "big") + body,
        (len(body := b"\x91" * 5_000)).to_bytes(4, "big") + body,  # nested deeper than anything of ours
    ],
)
def test_garbage_closes_its_connection_and_nothing_else(garbage: bytes) -> None:
    async def work() -> None:
        async with served() as server, dialled(HERE, server.port) as other:
            async with dialled(HERE, server.port) as stranger:
                await stranger.send_bytes(garbage)
                with pytest.raises(PeerError):
                    await stranger.reply(seconds=5)
            await other.send(PING)
            assert isinstance(await other.reply(), Pong)

    run(work)


def test_a_stranger_that_says_nothing_or_half_a_message_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "IDLE_SECONDS", 0.05)

    async def work() -> None:
        async with served() as server:
            async with dialled(HERE, server.port) as silent:
                with pytest.raises(PeerError, match="closed"):
                    await silent.receive(1, seconds=5)
            with socket.create_server((HERE, 0)) as listener, socket.create_connection(listener.getsockname()) as half:
                half.sendall(b"\0\0\0\x05ab")
                connection = PeerConnection(listener.accept()[0])
                with pytest.raises(PeerError, match=r"no whole message within 0\.05 s"):
                    await connection.request(idle_seconds=5, seconds=0.05)
                connection.close()

    run(work)


def test_a_flood_of_connections_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "MAXIMUM_FROM_ONE", 2)

    async def work() -> None:
        async with served() as server:
            async with dialled(HERE, server.port) as one, dialled(HERE, server.port) as two:
                for connection in (one, two):
                    await connection.send(PING)
                    assert isinstance(await connection.reply(), Pong)
                with pytest.raises(PeerError):
                    await ask(HERE, server.port, PING)
                assert isinstance(await ask(HERE, server.port, PING, own="127.0.0.7"), Pong)
            while True:  # until the server has seen that they are gone
                try:
                    assert isinstance(await ask(HERE, server.port, PING), Pong)
                    break
                except PeerError:
                    await anyio.sleep(0.01)

    run(work)


def test_handlers_are_plugged_in_and_their_errors_are_refusals() -> None:
    async def listing(request: ListFiles, connection: PeerConnection) -> Files:
        if request.path != "/m":
            raise ModelError("no such model", remedy="look elsewhere")
        return Files(files=(), revision="r")

    async def broken(request: InspectModel, connection: PeerConnection) -> None:
        raise RuntimeError("a mistake")

    def prepare(server: PeerServer) -> None:
        server.handle(ListFiles, listing)
        server.handle(InspectModel, broken)

    async def work() -> None:
        async with served(prepare=prepare) as server, dialled(HERE, server.port) as connection:
            await connection.send(ListFiles(path="/m"))
            assert await connection.reply() == Files(files=(), revision="r")
            await connection.send(ListFiles(path="/n"))
            refused = await connection.reply()
            assert isinstance(refused, PeerRefused)
            assert (refused.failure.kind, refused.failure.remedy) == ("model-invalid", "Look elsewhere.")
            await connection.send(FetchFile(path="/m", name="x"))
            unknown = await connection.reply()
            assert isinstance(unknown, PeerRefused)
            assert "answers no FetchFile" in unknown.failure.message
            with pytest.raises(PeerError):
                await ask(HERE, server.port, InspectModel(model="m"))
            await connection.send(PING)
            assert isinstance(await connection.reply(), Pong)

    run(work)


def test_raw_bytes_go_by_sendfile_from_a_thread_and_the_connection_goes_on(tmp_path: Path) -> None:
    content = os.urandom(3 * 2**20)
    path = tmp_path / "weights"
    path.write_bytes(content)

    async def sending(request: FetchFile, connection: PeerConnection) -> None:
        await connection.send(FileFollows(bytes=len(content) - request.offset, size=len(content)))
        with path.open("rb") as file:
            connection.socket.settimeout(10)
            try:
                await anyio.to_thread.run_sync(connection.socket.sendfile, file, request.offset)
            finally:
                connection.socket.setblocking(False)

    async def work() -> None:
        plugged = served(prepare=lambda server: server.handle(FetchFile, sending))
        async with plugged as server, dialled(HERE, server.port) as connection:
            for offset in (0, 1_000_000):
                await connection.send(FetchFile(path="", name="", offset=offset))
                follows = await connection.reply()
                assert isinstance(follows, FileFollows)
                assert await connection.receive(follows.bytes) == content[offset:]

    run(work)


def test_a_burst_goes_both_ways_and_one_at_a_time() -> None:
    async def work() -> None:
        async with served() as server, dialled(HERE, server.port) as connection:
            await connection.send(Burst(upload=300_000))
            assert isinstance(await connection.reply(), Pong)
            await connection.send_bytes(bytes(300_000))
            assert isinstance(await connection.reply(), Pong)
            await connection.send(
                Burst(download=MAXIMUM_BURST_BYTES)
            )  # more than the system keeps for who does not read
            assert isinstance(await connection.reply(), Pong)
            busy = await ask(HERE, server.port, Burst(upload=1))
            assert isinstance(busy, PeerRefused)
            assert busy.failure.retryable
            await connection.skip(MAXIMUM_BURST_BYTES)
            assert isinstance(await connection.reply(), Pong)
            assert not server.bursting.locked()
            with pytest.raises(PeerError):
                await ask(HERE, server.port, Burst(download=2**40))

    run(work)


def test_it_dials_back_only_to_the_caller_and_says_who_is_there() -> None:
    async def work() -> None:
        caller, other = NodeId("b"), NodeId("c")
        async with served() as server, served("127.0.0.2", caller) as callers, served("127.0.0.3", other) as others:
            request = DialBack(node=caller, boot=BOOT, host="127.0.0.2", port=callers.port)

            async def asked(request: DialBack, own: str) -> DialledBack:
                reply = await ask(HERE, server.port, request, own=own)
                assert isinstance(reply, DialledBack)
                return reply

            assert await asked(request, "127.0.0.2") == DialledBack(reached=True)
            elsewhere = await asked(request, "127.0.0.3")
            assert (elsewhere.reached, "127.0.0.2 is seen as 127.0.0.3" in elsewhere.error) == (False, True)
            twice = await asked(msgspec.structs.replace(request, host="127.0.0.3", port=others.port), "127.0.0.3")
            assert "two nodes behind the same address" in twice.error
            for port in (-1, 0, 99_999, 2**63):
                none = await asked(msgspec.structs.replace(request, port=port), "127.0.0.2")
                assert none == DialledBack(reached=False, error=f"{port} is no port")
            closed = await asked(msgspec.structs.replace(request, port=1), "127.0.0.2")
            assert (closed.reached, "127.0.0.2:1 cannot be reached" in closed.error) == (False, True)

    run(work)


def test_who_answers_is_compared_with_who_was_meant() -> None:
    pong = Pong(node=NODE, boot=BOOT)
    assert whoever(HERE, pong, NODE, BOOT) == ""
    assert "another boot of node a" in whoever(HERE, pong, NODE, BootId("b2"))
    assert "node a answers at 127.0.0.1, which node b offers" in whoever(HERE, pong, NodeId("b"), BOOT)
    assert "answers a ping with Files" in whoever(HERE, Files(files=()), NODE, BOOT)


def test_who_watches_hears_of_the_end_and_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "IDLE_SECONDS", 0.05)

    async def work() -> None:
        server = PeerServer(NODE, BOOT)
        server.listen([NodeAddress(host=HERE, network="127.0.0.0/8")])
        async with anyio.create_task_group() as group:
            group.start_soon(server.run)
            async with dialled(HERE, server.port) as connection:
                await connection.send(Watch())
                assert isinstance(await connection.reply(), Pong)
                with pytest.raises(PeerError, match="does not go on"):
                    await connection.skip(1, seconds=0.2)
                group.cancel_scope.cancel()
                with anyio.CancelScope(shield=True), pytest.raises(PeerError, match="closed"):
                    await connection.skip(1, seconds=5)

    run(work)


def test_nobody_at_the_port_and_no_worker_at_it_are_told_apart() -> None:
    async def work() -> None:
        with socket.socket() as closed:
            closed.bind((HERE, 0))
            with pytest.raises(PeerError, match="cannot be reached"):
                await ask(HERE, closed.getsockname()[1], PING)
        with pytest.raises(PeerError, match=r"cannot be reached from 192\.0\.2\.1"):
            await ask(HERE, 1, PING, own="192.0.2.1")
        with socket.create_server((HERE, 0)) as mute, pytest.raises(PeerError, match="does not answer"):
            await ask(HERE, mute.getsockname()[1], PING, seconds=0.1)
        stranger = await anyio.create_tcp_listener(local_host=HERE)

        async def babble(stream: anyio.abc.SocketStream) -> None:
            async with stream:
                await stream.send(b"SSH-2.0-OpenSSH_9.9\r\n")

        async with stranger, anyio.create_task_group() as group:
            group.start_soon(stranger.serve, babble)
            with pytest.raises(ProtocolError):
                await ask(HERE, stranger.extra(anyio.abc.SocketAttribute.local_port), PING)
            group.cancel_scope.cancel()

    run(work)


def test_a_reply_that_cannot_be_told_is_a_refusal_and_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.bus.peer.MAXIMUM_BYTES", 10_000)

    async def listing(request: ListFiles, connection: PeerConnection) -> Files:
        match request.path:
            case "number":
                return Files(files=(PeerFile(name="x", bytes=2**65),))
            case "name":
                return Files(files=(PeerFile(name="x\udc80", bytes=1),))
            case "long":
                return Files(files=(PeerFile(name="x" * 10_000, bytes=1),))
            case _:
                raise ModelError("\udc80" * 5_000, remedy="see \udc80")

    async def work() -> None:
        async with (
            served(prepare=lambda server: server.handle(ListFiles, listing)) as server,
            dialled(HERE, server.port) as connection,
        ):
            for path, said in (
                ("number", "Files cannot be told to another node"),
                ("name", "no UTF-8"),
                ("long", "at most 10000"),
                ("odd", "\\udc80"),
            ):
                await connection.send(ListFiles(path=path))
                refused = await connection.reply()
                assert isinstance(refused, PeerRefused)
                assert said in refused.failure.message
            await connection.send(PING)
            assert isinstance(await connection.reply(), Pong)

    run(work)


def test_watches_leave_room_for_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "MAXIMUM_WATCHES", 3)
    monkeypatch.setattr(peer, "MAXIMUM_WATCHES_FROM_ONE", 2)

    async def work() -> None:
        async with served() as server, AsyncExitStack() as opened:

            async def watch(own: str) -> object:
                connection = await opened.enter_async_context(dialled(HERE, server.port, own=own))
                await connection.send(Watch())
                return await connection.reply()

            owners = ("127.0.0.2", "127.0.0.2", "127.0.0.2", "127.0.0.3", "127.0.0.4")
            replies = [await watch(own) for own in owners]
            assert [isinstance(reply, Pong) for reply in replies] == [True, True, False, True, False]
            assert isinstance(replies[-1], PeerRefused)
            assert replies[-1].failure.kind == "in-use"
            assert isinstance(await ask(HERE, server.port, PING, own="127.0.0.2"), Pong)
            await opened.aclose()
            while not isinstance(await watch("127.0.0.4"), Pong):  # until the server has seen that they are gone
                await opened.aclose()
                await anyio.sleep(0.01)

    run(work)


@pytest.mark.parametrize(("host", "port"), [(HERE, 70_000), (HERE, -1), ("a\0b", 80)])
def test_a_port_or_host_that_is_none_is_nobody_at_home(host: str, port: int) -> None:
    async def work() -> None:
        with pytest.raises(PeerError, match="cannot be reached"):
            await ask(host, port, PING)

    run(work)
