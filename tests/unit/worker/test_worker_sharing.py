"""What a worker gives of a file that is on its way, and what it does with strangers that ask for others."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path

import anyio
import pytest

from muster.bus.peer import PeerConnection, ask, dialled
from muster.errors import PeerError
from muster.fetch.held import LOCKS
from muster.fetch.lock import DownloadLock
from muster.model.hub import blob_path
from muster.peer_protocol import BlobFollows, FollowBlob, PeerRefused, Ping, Pong
from muster.spec import BootId, NodeAddress, NodeId
from muster.worker import sharing
from muster.worker.giving import Transfers
from muster.worker.peer import PeerServer
from muster.worker.sharing import Sharing

MODEL, HERE = "owner/name", "127.0.0.1"
CONTENT = bytes(range(256)) * 1000
HASH = sha256(CONTENT).hexdigest()
ALL = FollowBlob(model=MODEL, hash=HASH)


@pytest.fixture
def blob(tmp_path: Path) -> Path:
    """Where the file is when it is whole."""
    path = blob_path(tmp_path / "hub", MODEL, HASH)
    path.parent.mkdir(parents=True)
    return path


@pytest.fixture
def part(blob: Path) -> Path:
    return blob.with_name(blob.name + ".muster-part")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "_WAIT_SECONDS", 0.1)
    monkeypatch.setattr(sharing, "_LOOK_SECONDS", 0.01)


@asynccontextmanager
async def served(*roots: Path) -> AsyncGenerator[PeerServer, None]:
    server = PeerServer(NodeId("a"), BootId("b1"))
    Sharing(lambda: roots, Transfers()).register(server)
    server.listen([NodeAddress(host=HERE, network="127.0.0.0/8")])
    async with anyio.create_task_group() as group:
        group.start_soon(server.run)
        yield server
        group.cancel_scope.cancel()


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        with anyio.fail_after(20):
            await work()

    anyio.run(limited)


async def take(connection: PeerConnection, request: FollowBlob) -> tuple[bytes, str]:
    await connection.send(request)
    reply = await connection.reply()
    assert isinstance(reply, BlobFollows), reply
    return await connection.receive(reply.bytes), reply.prospect


async def until(true: Callable[[], bool]) -> None:
    with anyio.fail_after(15):
        while True:
            if true():
                return
            await anyio.sleep(0.005)


def put(path: Path, content: bytes | None, *, whole: bool = True) -> None:
    """Have the file with this content, at once where it appears `whole`, or not at all."""
    if content is None:
        path.unlink(missing_ok=True)
    elif whole:
        path.with_name("new").write_bytes(content)
        path.with_name("new").rename(path)
    else:
        path.write_bytes(content)


def from_byte(offset: int) -> FollowBlob:
    return FollowBlob(model=MODEL, hash=HASH, offset=offset)


def test_what_is_there_is_given_and_nothing_of_what_is_not(blob: Path, part: Path, tmp_path: Path) -> None:
    async def work() -> None:
        async with served(tmp_path / "none", tmp_path / "hub") as server, dialled(HERE, server.port) as connection:
            put(part, CONTENT[:1000])
            assert await take(connection, ALL) == (CONTENT[:1000], "open")
            assert await take(connection, from_byte(1000)) == (b"", "open")
            assert await take(connection, from_byte(5000)) == (b"", "open")
            put(blob, CONTENT)
            assert await take(connection, from_byte(1000)) == (CONTENT[1000:], "open")
            assert await take(connection, from_byte(len(CONTENT))) == (b"", "open")

    run(work)


def test_what_comes_while_somebody_waits_is_given_at_once(
    blob: Path, part: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "_WAIT_SECONDS", 15.0)
    put(part, CONTENT[:1000])

    async def work() -> None:
        async with served(tmp_path / "hub") as server, dialled(HERE, server.port) as connection:
            await connection.send(from_byte(1000))
            put(part, CONTENT[:3000])
            reply = await connection.reply()
            assert isinstance(reply, BlobFollows)
            assert await connection.receive(reply.bytes) == CONTENT[1000:3000]
            await connection.send(from_byte(3000))
            put(blob, CONTENT)
            put(part, None)
            reply = await connection.reply()
            assert isinstance(reply, BlobFollows)
            assert await connection.receive(reply.bytes) == CONTENT[3000:]

    run(work)


def test_it_says_what_is_going_to_come(tmp_path: Path, blob: Path) -> None:
    async def work() -> None:
        async with served(tmp_path / "hub") as server, dialled(HERE, server.port) as connection:
            lock = DownloadLock(tmp_path / "hub" / LOCKS, MODEL)
            with lock.held(lambda moved: None, "me"):
                assert await take(connection, ALL) == (b"", "coming"), "it has not decided yet"
                lock.claim(["0" * 64])
                assert await take(connection, ALL) == (b"", "elsewhere")
                put(blob, CONTENT)
                assert await take(connection, ALL) == (CONTENT, "elsewhere")
                put(blob, None)
                lock.claim([HASH, "0" * 64])
                assert await take(connection, ALL) == (b"", "coming")
            assert await take(connection, ALL) == (b"", "open")

    run(work)


def test_several_follow_at_once_and_one_that_goes_is_forgotten(
    blob: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "_WAIT_SECONDS", 15.0)
    got, begun = list[bytes](), list[PeerConnection]()

    async def work() -> None:
        async with served(tmp_path / "hub") as server:

            async def follow() -> None:
                async with dialled(HERE, server.port) as connection:
                    await connection.send(ALL)
                    begun.append(connection)
                    reply = await connection.reply(seconds=15)
                    assert isinstance(reply, BlobFollows)
                    got.append(await connection.receive(reply.bytes))

            async with anyio.create_task_group() as group:
                for _ in range(4):
                    group.start_soon(follow)
                async with dialled(HERE, server.port) as leaving:
                    await leaving.send(ALL)
                await until(lambda: len(begun) == 4)
                await until(lambda: server._open.total() == 4)
                put(blob, CONTENT)

    run(work)
    assert got == [CONTENT] * 4


@pytest.mark.parametrize(
    "request_",
    [
        FollowBlob(model=MODEL, hash=""),
        FollowBlob(model=MODEL, hash="../../secret"),
        FollowBlob(model=MODEL, hash=HASH[:-1]),
        FollowBlob(model=MODEL, hash=HASH[:-1] + "/"),
        FollowBlob(model=MODEL, hash=HASH.upper()),
        FollowBlob(model=MODEL, hash=HASH + "\n"),
        FollowBlob(model=MODEL, hash=HASH, offset=-1),
        FollowBlob(model="", hash=HASH),
        FollowBlob(model="../hub", hash=HASH),
        FollowBlob(model="owner/name/..", hash=HASH),
        FollowBlob(model="/etc/passwd", hash=HASH),
        FollowBlob(model="owner/na\0me", hash=HASH),
        FollowBlob(model="owner", hash=HASH),
        FollowBlob(model="o" * 50_000, hash="h" * 10_000),
    ],
)
def test_nothing_else_can_be_asked_for(blob: Path, tmp_path: Path, request_: FollowBlob) -> None:
    blob.write_bytes(CONTENT)
    (tmp_path / "secret").write_text("x")

    async def work() -> None:
        async with served(tmp_path / "hub") as server:
            reply = await ask(HERE, server.port, request_)
            assert isinstance(reply, PeerRefused), reply
            assert reply.failure.kind == "request-invalid" and reply.failure.remedy
            assert isinstance(await ask(HERE, server.port, Ping(node=NodeId("a"), boot=BootId("b1"))), Pong)

    run(work)


def test_a_name_that_no_file_system_takes_and_offsets_beyond_are_no_files(blob: Path, tmp_path: Path) -> None:
    blob.write_bytes(CONTENT)

    async def work() -> None:
        async with served(tmp_path / "hub") as server, dialled(HERE, server.port) as connection:
            assert await take(connection, FollowBlob(model=f"o/{'n' * 5000}", hash=HASH)) == (b"", "open")
            assert await take(connection, from_byte(2**63 - 1)) == (b"", "open")

    run(work)


@pytest.mark.parametrize("suffix", ["", ".muster-part"])
def test_links_and_pipes_lead_nowhere(blob: Path, tmp_path: Path, suffix: str) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    path = blob.with_name(blob.name + suffix)

    async def work() -> None:
        async with served(tmp_path / "hub") as server, dialled(HERE, server.port) as connection:
            path.symlink_to(tmp_path / "secret")
            assert await take(connection, ALL) == (b"", "open")
            path.unlink()
            path.symlink_to(path)
            assert await take(connection, ALL) == (b"", "open")
            path.unlink()
            os.mkfifo(path)
            assert await take(connection, ALL) == (b"", "open")
            path.unlink()
            path.mkdir()
            assert await take(connection, ALL) == (b"", "open")

    run(work)


def test_a_file_that_becomes_shorter_while_it_is_sent_ends_the_connection(
    part: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part.write_bytes(CONTENT)
    send = Transfers.send

    async def cut(self: Transfers, *args: object) -> None:
        put(part, CONTENT[:10], whole=False)
        await send(self, *args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(Transfers, "send", cut)

    async def work() -> None:
        async with served(tmp_path / "hub") as server, dialled(HERE, server.port) as connection:
            await connection.send(ALL)
            reply = await connection.reply()
            assert isinstance(reply, BlobFollows) and reply.bytes == len(CONTENT)
            with pytest.raises(PeerError, match="closed"):
                await connection.receive(reply.bytes)
            assert isinstance(await ask(HERE, server.port, Ping(node=NodeId("a"), boot=BootId("b1"))), Pong)

    run(work)
