"""Looks at files that hang: what is told meanwhile, and that the others go on."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from muster.bus.peer import ask, dialled
from muster.errors import FetchError
from muster.facts import HeldModel
from muster.fetch.looks import Looks
from muster.peer_protocol import FetchFile, FileFollows, InspectModel, ListFiles, PeerRefused, Ping, Pong
from muster.spec import BootId, NodeAddress, NodeId
from muster.worker import giving, inspecting
from muster.worker.giving import Giving
from muster.worker.inspecting import Inspector
from muster.worker.peer import PeerServer

HERE = "127.0.0.1"
PING = Ping(node=NodeId("a"), boot=BootId("b1"))
ENTRIES: dict[int, int] = {}


async def until(there: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while True:
            if there():
                return
            await anyio.sleep(0.01)


def test_errors_come_through_and_a_look_that_hangs_keeps_only_its_turn() -> None:
    free = threading.Event()

    async def work() -> None:
        one = Looks(1)
        assert await one.find(lambda: 7, "it") == 7
        with pytest.raises(KeyError):
            await one.find(lambda: ENTRIES[1], "it")
        with pytest.raises(FetchError, match=r"it could not be read within 0\.05 s"):
            await one.find(free.wait, "it", seconds=0.05)
        with pytest.raises(FetchError, match="it waits for others"):
            await one.find(lambda: 7, "it", seconds=0.05)
        free.set()
        assert await one.find(lambda: 7, "it", seconds=5) == 7

    anyio.run(work)


def test_a_file_system_that_hangs_takes_no_connection_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspecting, "LOOK_SECONDS", 0.2)
    free = threading.Event()
    begun: list[int] = []

    def held() -> tuple[HeldModel, ...]:
        begun.append(1)
        free.wait(20)
        return ()

    async def work() -> None:
        server = PeerServer(NodeId("a"), BootId("b1"))
        inspector = Inspector(held)
        server.handle(InspectModel, inspector.answer)
        server.listen([NodeAddress(host=HERE, network="127.0.0.0/8")])
        async with anyio.create_task_group() as group:
            group.start_soon(server.run)
            reply = await ask(HERE, server.port, InspectModel(model="owner/name"))
            assert isinstance(reply, PeerRefused)
            assert "model 'owner/name' could not be read within 0.2 s" in reply.failure.message
            monkeypatch.setattr(inspecting, "LOOK_SECONDS", 20)
            async with dialled(HERE, server.port) as leaving:
                await leaving.send(InspectModel(model="owner/name"))
                await until(lambda: len(begun) == 2)
            await until(lambda: not server._open)  # who asked is gone: so is the connection
            assert isinstance(await ask(HERE, server.port, PING), Pong)
            group.cancel_scope.cancel()

    async def limited() -> None:
        with anyio.fail_after(10):
            await work()

    anyio.run(limited)
    free.set()


@pytest.mark.parametrize("model", ["~nobodyx", "~nobodyx/model", "x" * 60_000, "a\0b"])
def test_a_name_that_is_none_is_refused_in_a_sentence(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[object] = []
    monkeypatch.setattr("muster.worker.peer.logger.opt", lambda **kinds: failed.append(kinds))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]

    async def work() -> None:
        server = PeerServer(NodeId("a"), BootId("b1"))
        server.handle(InspectModel, Inspector(tuple).answer)
        Giving(lambda: (HeldModel(model="m", path="/m", bytes=1, complete=True),)).register(server)
        server.listen([NodeAddress(host=HERE, network="127.0.0.0/8")])
        async with anyio.create_task_group() as group:
            group.start_soon(server.run)
            for request in (
                InspectModel(model=model),
                ListFiles(path=model),
                FetchFile(path=model, name="x"),
                FetchFile(path="/m", name=model),
            ):
                reply = await ask(HERE, server.port, request)
                assert isinstance(reply, PeerRefused), request
                assert 0 < len(reply.failure.message) < 1100
            group.cancel_scope.cancel()

    anyio.run(work)
    assert failed == []


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        giving.opened(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"abc")
    with giving.opened(tmp_path / "file") as stream:
        assert stream.read() == b"abc"


def test_a_transfer_whose_disk_hangs_ends_when_the_receiver_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, begun = threading.Event(), threading.Event()
    (tmp_path / "config.json").write_text("{}")

    def hang(target: socket.socket, source: int, offset: int, end: int) -> None:
        begun.set()
        free.wait(20)

    monkeypatch.setattr(giving, "send_file", hang)

    async def work() -> None:
        server = PeerServer(NodeId("a"), BootId("b1"))
        held = HeldModel(model="m", path=str(tmp_path), bytes=1, complete=True)
        Giving(lambda: (held,)).register(server)
        server.listen([NodeAddress(host=HERE, network="127.0.0.0/8")])
        async with anyio.create_task_group() as group:
            group.start_soon(server.run)
            async with dialled(HERE, server.port) as leaving:
                await leaving.send(FetchFile(path=str(tmp_path), name="config.json"))
                assert await leaving.reply() == FileFollows(bytes=2, size=2)
                await until(begun.is_set)
            await until(lambda: not server._open)
            group.cancel_scope.cancel()

    anyio.run(work)
    free.set()
