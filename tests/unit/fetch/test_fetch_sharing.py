"""Files taken from the node that downloads them for others too: while they come, with the hub left if it fails."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.abc
import anyio.from_thread
import pytest
from bringing import MODEL, Go, parts_below

from muster.errors import FetchError
from muster.fetch import hub as fetch_hub
from muster.fetch import sharing
from muster.fetch.choice import is_weights
from muster.fetch.held import LOCKS
from muster.fetch.lock import DownloadLock, underway
from muster.fetch.obtain import Wish, obtain
from muster.fetch.progress import Meter, Moved
from muster.layout import Sharer
from muster.model.files import inspect
from muster.model.hub import blob_path, cache_directory
from muster.peer_protocol import BlobFollows, FollowBlob
from muster.spec import BootId, NodeAddress, NodeId
from muster.testing.hub import Fault, Hub
from muster.worker.giving import Transfers
from muster.worker.peer import PeerServer
from muster.worker.sharing import Sharing


class Owner:
    """Node a: its worker, and what the runner of its rank 0 does; its cache is `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.port = 0
        self.answer: Callable[[FollowBlob], BlobFollows] | None = None  #: instead of the worker's own
        self.asked: list[FollowBlob] = []

    async def serve(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        server = PeerServer(NodeId("a"), BootId("a1"))
        real = Sharing(lambda: (self.root,), Transfers())

        async def follow(request: FollowBlob, connection: Any) -> BlobFollows | None:
            self.asked.append(request)
            return await real.follow_blob(request, connection) if self.answer is None else self.answer(request)

        server.handle(FollowBlob, follow)
        self.port = server.listen([NodeAddress(host="127.0.0.1", network="127.0.0.0/8")])
        async with anyio.create_task_group() as group:
            group.start_soon(server.run)
            task_status.started()

    def sharer(self, port: int | None = None) -> Sharer:
        return Sharer(node=NodeId("a"), host="127.0.0.1", port=self.port if port is None else port, ranks=(0,))

    @contextmanager
    def holding(self, *claims: str) -> Generator[None]:
        """Its runner holds the download lock and brings these hashes; without any, it has not said yet what."""
        lock = DownloadLock(self.root / LOCKS, MODEL)
        with lock.held(lambda moved: None, "rank 0 of i-1") as tell:
            tell(Moved(done=1, total=2))
            if claims:
                lock.claim(claims)
            yield

    def download(self, *names: str) -> None:
        """Its runner downloads these files, as `obtain` does."""
        listed = fetch_hub.listing(MODEL, None)
        files = [file for file in listed.files if file.name in names]
        lock = DownloadLock(self.root / LOCKS, MODEL)
        with lock.held(lambda moved: None, "rank 0 of i-1") as tell:
            lock.claim(file.hash for file in files)
            meter = Meter(tell, "from the hub", sum(file.bytes for file in files))
            for file in files:
                fetch_hub.download(self.root, listed, file, meter)

    def place(self, name: str, content: bytes) -> None:
        """The file has come, at once, with this content."""
        blob = blob_path(self.root, MODEL, hash_of(name))
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.with_name("new").write_bytes(content)
        blob.with_name("new").rename(blob)

    @contextmanager
    def downloading(self, *names: str) -> Generator[threading.Thread]:
        """The same, in a thread beside the block."""
        thread = threading.Thread(target=self.download, args=names)
        thread.start()
        try:
            yield thread
        finally:
            thread.join(20)


class Follower(Go):
    """Rank 1 on node b: rank 0 downloads all weights but those named."""

    def __init__(self, owner: Owner, *, own: Collection[str] = (), port: int | None = None) -> None:
        super().__init__(sharers=(owner.sharer(port),))
        self._own = own

    def path(self) -> Path:
        return obtain(self._wish, self._choose, self.moved.append, self.brought.append, self._share)

    def _share(self, path: Path, weights: Collection[str]) -> Mapping[str, int]:
        assert (path / "config.json").is_file()
        return {name: 1 if name in self._own else 0 for name in weights}

    @property
    def sources(self) -> set[str]:
        return {one.source for one in self.brought}


@pytest.fixture
def owner(weights: list[str], hub_here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Owner]:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-b"))
    monkeypatch.setattr(fetch_hub, "_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(sharing, "_PAUSE_SECONDS", 0.01)
    made = Owner(tmp_path / "hf-a" / "hub")
    with anyio.from_thread.start_blocking_portal() as portal:
        future, _ = portal.start_task(made.serve)
        yield made
        future.cancel()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def downloaded(stand_in: Hub) -> list[str]:
    return sorted(name for name in stand_in.downloads() if is_weights(name))


def hash_of(name: str) -> str:
    return next(file.hash for file in fetch_hub.listing(MODEL, None).files if file.name == name)


# --- it goes well ---------------------------------------------------------------------------------------------


def test_a_file_is_followed_while_it_comes_and_downloaded_once(owner: Owner, stand_in: Hub, weights: list[str]) -> None:
    gate = threading.Event()
    stand_in.faults[weights[1]] = Fault(cut_after=50_000, times=1, gate=gate)
    follower = Follower(owner)
    following = threading.Thread(target=follower.path)
    with owner.downloading(*weights):
        following.start()
        until(lambda: any(one.offset == 50_000 for one in owner.asked))
        gate.set()
        following.join(20)
    inspect(obtain(Wish(model=MODEL), lambda path, weights: weights, lambda moved: None, lambda brought: None))
    assert downloaded(stand_in) == weights
    assert follower.sources == {"hub", "node a"}
    assert follower.moved[-1].note == "from node a"
    assert parts_below(cache_directory()) == []


def test_it_waits_for_files_whose_turn_has_not_come(
    owner: Owner, stand_in: Hub, weights: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr("muster.worker.sharing._WAIT_SECONDS", 0.05)
    follower, last = Follower(owner), weights[-1]
    follower._choose = lambda path, weights: [last]
    thread = threading.Thread(target=follower.path)
    with owner.holding(hash_of(weights[-1])):
        thread.start()
        until(lambda: len(owner.asked) > 3)
        owner.place(weights[-1], stand_in.models[MODEL][weights[-1]])
        thread.join(20)
    assert (follower.sources, downloaded(stand_in)) == ({"hub", "node a"}, [])
    assert any(moved.note == "waits for node a, which downloads it" for moved in follower.moved)


def test_own_files_come_first_and_are_claimed(owner: Owner, stand_in: Hub, weights: list[str]) -> None:
    follower, claims = Follower(owner, own=weights[:2]), list[frozenset[str] | None]()

    def look(request: FollowBlob) -> BlobFollows:
        found = underway(cache_directory() / LOCKS, MODEL)
        claims.append(None if found is None else found.claims)
        return BlobFollows(bytes=0, prospect="elsewhere")

    owner.answer = look
    follower.path()
    own = frozenset(map(hash_of, weights[:2]))
    assert claims == [own], "one that fails is asked once"
    assert stand_in.downloads()[-len(weights) :] == weights
    assert underway(cache_directory() / LOCKS, MODEL) is None


def test_what_came_before_is_gone_on_with(owner: Owner, stand_in: Hub, weights: list[str]) -> None:
    owner.download(*weights)
    content = stand_in.models[MODEL][weights[1]]
    blob = blob_path(cache_directory(), MODEL, hash_of(weights[1]))
    blob.parent.mkdir(parents=True)
    blob.with_name(blob.name + ".muster-part").write_bytes(content[:50_000])
    inspect(Follower(owner).path())
    assert [one.offset for one in owner.asked if one.hash == blob.name] == [50_000]
    assert downloaded(stand_in) == weights


def test_a_wrong_part_is_thrown_away_and_the_owner_asked_again(owner: Owner, stand_in: Hub, weights: list[str]) -> None:
    owner.download(*weights)
    blob = blob_path(cache_directory(), MODEL, hash_of(weights[1]))
    blob.parent.mkdir(parents=True)
    blob.with_name(blob.name + ".muster-part").write_bytes(b"x" * 50_000)
    inspect(Follower(owner).path())
    assert [one.offset for one in owner.asked if one.hash == blob.name] == [50_000, 0]
    assert downloaded(stand_in) == weights


# --- it does not ----------------------------------------------------------------------------------------------


def test_an_owner_that_is_gone_costs_one_try(owner: Owner, stand_in: Hub, weights: list[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        follower = Follower(owner, port=taken.getsockname()[1])
        inspect(follower.path())
    assert downloaded(stand_in) == weights
    assert follower.sources == {"hub"}
    assert follower.moved[-1].note == "from the hub instead of node a"


def test_why_the_hub_was_asked_is_said_where_that_fails_too(owner: Owner, stand_in: Hub, weights: list[str]) -> None:
    stand_in.faults[weights[0]] = Fault(status=503)
    owner.answer = lambda request: BlobFollows(bytes=0, prospect="elsewhere")
    with pytest.raises(FetchError, match=rf"503.*; before that, .*node a.*does not bring {weights[0]}"):
        Follower(owner).path()


def test_an_owner_that_brings_nothing_is_left_after_a_while(
    owner: Owner, stand_in: Hub, weights: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "SILENCE_SECONDS", 0.1)
    owner.answer = lambda request: BlobFollows(bytes=0, prospect="coming", moved=7)
    inspect(Follower(owner).path())
    assert downloaded(stand_in) == weights
    assert {one.hash for one in owner.asked} == {hash_of(weights[0])}, "further files do not wait"


def test_an_owner_that_never_begins_is_left_after_a_while(
    owner: Owner, stand_in: Hub, weights: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "PATIENCE_SECONDS", 0.1)
    owner.answer = lambda request: BlobFollows(bytes=0)
    inspect(Follower(owner).path())
    assert len(owner.asked) < 100, "it is not asked until the silence is over"
    assert downloaded(stand_in) == weights
    assert {one.hash for one in owner.asked} == {hash_of(weights[0])}


def test_an_owner_that_moves_on_is_waited_for_however_long_it_takes(
    owner: Owner, weights: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(sharing, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    asks = int(3 * sharing.SILENCE_SECONDS)

    def answer(request: FollowBlob) -> BlobFollows:
        moved = len(owner.asked)
        return BlobFollows(bytes=0, prospect="coming" if moved < asks else "elsewhere", moved=moved)

    owner.answer = answer
    monkeypatch.setattr(sharing, "_PAUSE_SECONDS", 0.0)
    inspect(Follower(owner).path())
    assert len(owner.asked) == asks


@pytest.mark.parametrize(
    "made_up",
    [
        BlobFollows(bytes=-1),
        BlobFollows(bytes=2**60),
        BlobFollows(bytes=1000),  # and nothing comes
    ],
)
def test_what_a_giver_makes_up_leads_to_the_hub(
    owner: Owner,
    stand_in: Hub,
    weights: list[str],
    made_up: BlobFollows,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("muster.fetch.peers.SILENCE_SECONDS", 0.2)
    owner.answer = lambda request: made_up
    inspect(Follower(owner).path())
    assert downloaded(stand_in) == weights


def test_a_lie_is_found_out_by_the_hubs_hash(owner: Owner, stand_in: Hub, weights: list[str]) -> None:
    for name in weights:
        content = stand_in.models[MODEL][name]
        owner.place(name, content[:-1] + bytes([content[-1] ^ 1]))
    follower = Follower(owner)
    inspect(follower.path())
    assert downloaded(stand_in) == weights
    assert follower.moved[-1].note == "from the hub instead of node a"
    assert parts_below(cache_directory()) == []


def test_an_owner_that_fails_midway_leaves_what_came_to_the_hub(
    owner: Owner, stand_in: Hub, weights: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr("muster.worker.sharing._WAIT_SECONDS", 0.05)
    owner.download(weights[0])
    blob = blob_path(owner.root, MODEL, hash_of(weights[1]))
    blob.with_name(blob.name + ".muster-part").write_bytes(stand_in.models[MODEL][weights[1]][:70_000])
    stand_in.asked.clear()
    follower = Follower(owner)
    inspect(follower.path())
    assert downloaded(stand_in) == weights[1:]
    assert stand_in.offsets(weights[1]) == [70_000]
    assert follower.sources == {"hub", "node a"}


# --- two that wait for each other -----------------------------------------------------------------------------


def test_another_download_that_does_not_bring_it_is_not_waited_for(
    owner: Owner, stand_in: Hub, weights: list[str]
) -> None:
    """As where another instance's rank holds the owner's lock, and waits for this node."""
    with owner.holding("0" * 64):
        inspect(Follower(owner).path())
    assert len(owner.asked) == 1
    assert downloaded(stand_in) == weights


def test_one_that_has_not_said_what_it_brings_is_waited_for(
    owner: Owner, stand_in: Hub, weights: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.worker.sharing._WAIT_SECONDS", 0.05)
    monkeypatch.setattr(sharing, "PATIENCE_SECONDS", 0.0)
    follower = Follower(owner)
    thread = threading.Thread(target=follower.path)
    with owner.holding():
        thread.start()
        until(lambda: len(owner.asked) > 3)
        assert downloaded(stand_in) == []
    thread.join(20)
    assert downloaded(stand_in) == weights


def test_whoever_waits_for_the_lock_does_not_see_what_a_killed_one_claimed(tmp_path: Path) -> None:
    first, second = (DownloadLock(tmp_path, MODEL) for _ in range(2))
    told: list[Moved] = []
    assert underway(tmp_path, MODEL) is None
    with first.held(told.append, "one") as tell:
        tell(Moved(done=5, total=9, note="from the hub"))
        assert underway(tmp_path, MODEL) == underway(tmp_path, MODEL)
        first.claim(["b" * 64, "a" * 64])
        found = underway(tmp_path, MODEL)
        assert found is not None and (found.moved, found.claims) == (5, {"a" * 64, "b" * 64})
        kept = (tmp_path / "muster-owner--tiny.lock").read_bytes()
    (tmp_path / "muster-owner--tiny.lock").write_bytes(kept)  # as SIGKILL leaves it
    assert underway(tmp_path, MODEL) is None
    with second.held(told.append, "two"):
        found = underway(tmp_path, MODEL)
        assert found is not None and (found.moved, found.claims) == (0, None)
        second.claim(())
        found = underway(tmp_path, MODEL)
        assert found is not None and found.claims == frozenset()


def test_silence_of_an_owner_is_over_before_the_phase_is() -> None:
    assert sharing.SILENCE_SECONDS + sharing.PATIENCE_SECONDS <= 60
