"""What a standby, the right to write, and a witness are made of; in one process."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import anyio
import msgspec
import pytest
from books import Books, info
from fleet import DONE, FAILED, Fleet

from muster.bus import ControlClient, ControlServer, Endpoint, Publisher
from muster.coordinator.authority import Authority
from muster.coordinator.reads import Reads
from muster.coordinator.replica import Replica
from muster.coordinator.role import term_of
from muster.coordinator.standby import Following, Promotion, Standby
from muster.coordinator.standing import load_standing, save_standing
from muster.coordinator.voting import Grant, Standing, Tenure
from muster.coordinator.witness import Witness, WitnessSettings
from muster.errors import FencedError, LogError, ProtocolError, QuorumError, UnreachableError
from muster.eventlog import EventLog, MemoryEventLog, Retention, SqliteEventLog
from muster.events import CoordinatorStarted, Envelope, NodeJoined, encode_envelope, encode_event
from muster.lifecycle import Settings
from muster.protocol import AnyRequest, Beat, Claim, Create, Get, Hello, Promote, Query, Replay, Who
from muster.replies import AnyReply, Found, Refused, Replayed, Role, Snapshot, Vote, Welcome
from muster.spec import COORDINATOR, BootId, GroupWorkload, InstanceSpec, NodeId
from muster.state import State

HEIR = Endpoint("10.0.0.2", 5710)
BOOT = BootId("of the active one")


# --- the right to write ---------------------------------------------------------------------------------------


class Watch:
    """A clock that is set by hand, and an authority that goes by it."""

    def __init__(self, *, voted: bool, renewed: float = 0.0) -> None:
        self.now = 0.0
        self.fenced_by: list[int] = []
        tenure = Tenure(term=2, seconds=10.0, renewed=renewed, voted=voted)
        self.authority = Authority("e", tenure, heir=HEIR, on_fenced=self.fenced_by.append, now=lambda: self.now)


def test_a_higher_term_of_the_same_epoch_fences_once_and_for_good() -> None:
    watch = Watch(voted=False)
    for epoch, term in (("e", 1), ("e", 2), ("other", 9), ("", 9)):
        watch.authority.hear(epoch, term)
        assert watch.authority.objection() is None
    for term in (4, 3, 4):
        watch.authority.hear("e", term)
    watch.authority.count(Vote(granted=True, term=2), sent=1.0)
    objection = watch.authority.objection()
    assert isinstance(objection, FencedError)
    assert watch.authority.fenced
    assert watch.fenced_by == [4]
    assert "term 2" in objection.message
    assert "term 4" in objection.message
    assert "--standby-of 10.0.0.2:5710" in objection.remedy
    assert objection.retryable


def test_without_a_vote_nothing_is_written_until_one_is_renewed() -> None:
    watch = Watch(voted=True)
    assert watch.authority.objection() is None
    watch.now = 9.5
    assert isinstance(watch.authority.objection(), QuorumError)
    assert not watch.authority.fenced
    watch.authority.count(Vote(granted=True, term=2), sent=9.0)
    assert watch.authority.objection() is None
    watch.now = 17.0
    assert watch.authority.objection() is None
    watch.authority.count(Vote(granted=False, term=3), sent=9.0)
    assert isinstance(watch.authority.objection(), FencedError)


@pytest.mark.anyio
async def test_a_coordinator_waits_for_its_first_vote() -> None:
    watch = Watch(voted=True, renewed=float("-inf"))
    decided: list[bool] = []

    async def wait() -> None:
        await watch.authority.decided()
        decided.append(True)

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        watch.authority.count(Vote(granted=False, term=2), sent=0.0)
        await anyio.wait_all_tasks_blocked()
        assert not decided
        watch.authority.count(Vote(granted=True, term=2), sent=0.0)
    assert decided
    watch.authority.hear("e", 3)
    with pytest.raises(FencedError):
        await watch.authority.decided()


def test_what_may_not_be_written_has_not_happened() -> None:
    books = Books("a")
    before, logged = books.ledger.state, books.log.head
    fenced = FencedError("another one has taken over")
    books.ledger.objection = lambda: fenced
    with pytest.raises(FencedError):
        books.ledger.commit(NodeJoined(info=info("b")))
    books.ledger.heard_ns.clear()
    assert (books.ledger.state, books.log.head, len(books.published)) == (before, logged, logged)
    assert books.ledger.trouble is None, "the log itself is well"


def test_a_fenced_coordinator_lets_go_of_what_has_no_token_yet() -> None:
    fleet = Fleet()
    fleet.ready("one", max_batch=1)
    begun, sent = fleet.ask(), fleet.ask()
    fleet.token(begun)
    waiting = [fleet.ask() for _ in range(20)]
    fleet.dispatcher.shut(FAILED)
    assert [asked.refusal for asked in (sent, *waiting, fleet.ask())] == [FAILED] * 22
    assert not begun.ended
    fleet.say(begun, DONE)
    assert begun.replies[-1] == DONE
    assert list(fleet.dispatcher.open_requests()) == []


# --- beside the log -------------------------------------------------------------------------------------------


def test_a_standing_is_remembered_and_a_new_one_has_a_name(tmp_path: Path) -> None:
    new, other = load_standing(tmp_path), load_standing(tmp_path)
    assert new.role == "standby"
    assert len(new.holder) == 16
    assert new.holder != other.holder
    led = msgspec.structs.replace(new, role="active", epoch="e", term=3)
    save_standing(tmp_path, led)
    assert load_standing(tmp_path) == led
    assert [path.name for path in tmp_path.iterdir()] == ["standing.json"]
    assert (tmp_path / "standing.json").stat().st_mode & 0o777 == 0o600


def test_a_damaged_standing_is_named(tmp_path: Path) -> None:
    (tmp_path / "standing.json").write_text("{")
    with pytest.raises(LogError, match=r"standing\.json") as caught:
        load_standing(tmp_path)
    assert "no other coordinator is active" in caught.value.remedy
    with pytest.raises(LogError, match="cannot be written"):
        save_standing(tmp_path / "not there", Standing(role="active"))


# --- a replica ------------------------------------------------------------------------------------------------


def story(count: int, *, term: int = 1, tag: str = "n") -> list[Envelope]:
    events = [CoordinatorStarted(epoch="e", boot=BOOT, version="1", term=term)]
    bodies = [*events, *(NodeJoined(info=info(f"{tag}{number}")) for number in range(count - 1))][:count]
    return [
        Envelope(sequence=number, time_ns=number, origin=COORDINATOR, cause=0, body=encode_event(body))
        for number, body in enumerate(bodies, start=1)
    ]


class Active:
    """In the place of a client of the active coordinator, whose log this is."""

    def __init__(self, log: EventLog, batch: int = 3) -> None:
        self.log = log
        self.batch = batch
        self.silent_after = 1_000

    async def call(self, request: AnyRequest, *, timeout_seconds: float) -> AnyReply:
        self.silent_after -= 1
        if self.silent_after < 0:
            raise UnreachableError(f"nothing in {timeout_seconds}")
        assert isinstance(request, Replay)
        if request.after + 1 < self.log.oldest or request.after > self.log.head:
            state = msgspec.Raw(msgspec.msgpack.encode(self.log.load()))
            return Welcome(
                epoch=self.log.epoch,
                coordinator_boot=BOOT,
                version="1",
                state=state,
                events_port=1,
                generation_port=1,
                heartbeat_seconds=1,
                lease_seconds=5,
            )
        found = self.log.read(request.after, self.batch)
        return Replayed(envelopes=tuple(map(encode_envelope, found)), head=self.log.head)


class Copy:
    """A replica, and what it tells."""

    def __init__(self, history: list[Envelope], *, epoch: str = "") -> None:
        self.log = MemoryEventLog()
        self.told: list[int | str] = []
        if epoch:
            self.log.replace(epoch, State())
        self.log.append(history)
        self.replica = Replica(
            self.log, lambda envelope: self.told.append(envelope.sequence), lambda: self.told.append("again")
        )

    async def follow(self, active: Active) -> None:
        await self.replica.catch_up(cast(ControlClient, active), active.log.epoch)
        assert self.log.epoch == active.log.epoch
        assert self.log.head == active.log.head
        assert self.replica.state == active.log.load() == self.log.load()


def active_log(history: list[Envelope], *, prune: int = 0) -> MemoryEventLog:
    log = MemoryEventLog(retention=Retention(keep_events=0, max_age_seconds=0))
    log.append(history[:prune])
    if prune:
        log.snapshot(log.load())
        log.prune(10**18)
    log.append(history[prune:])
    return log


@pytest.mark.parametrize("own", [0, 1, 4, 9, 10])
@pytest.mark.anyio
async def test_what_is_missing_is_fetched(own: int) -> None:
    log = active_log(story(10))
    copy = Copy(story(own), epoch=log.epoch)
    await copy.follow(Active(log))
    assert copy.log.read(0, 99) == log.read(0, 99)
    assert copy.told == list(range(own + 1, 11))


@pytest.mark.parametrize(
    ("own", "what"),
    [
        (story(6, tag="m"), "another event at the head"),
        (story(10, term=2), "as long, but other"),
        (story(14), "longer than the active one's"),
        (story(11), "longer by one"),
    ],
)
@pytest.mark.anyio
async def test_another_history_is_replaced_from_the_beginning(own: list[Envelope], what: str) -> None:
    log = active_log(story(10))
    if what == "as long, but other":
        own = [*story(9), *story(10, tag="m")[9:]]
    copy = Copy(own, epoch=log.epoch)
    await copy.follow(Active(log))
    assert copy.log.read(0, 99) == log.read(0, 99), what
    assert copy.told == ["again", *range(1, 11)]


@pytest.mark.anyio
async def test_a_log_of_another_epoch_is_replaced() -> None:
    log = active_log(story(10))
    copy = Copy(story(10))
    await copy.follow(Active(log))
    assert copy.told == ["again", *range(1, 11)]


@pytest.mark.parametrize("own", [0, 3, 5])
@pytest.mark.anyio
async def test_where_the_events_are_gone_it_begins_with_the_snapshot(own: int) -> None:
    log = active_log(story(10), prune=6)
    copy = Copy(story(own), epoch=log.epoch)
    await copy.follow(Active(log))
    assert copy.log.oldest == 11, "the state is as new as the events that follow"
    log.append([msgspec.structs.replace(story(11)[10], sequence=11)])
    await copy.follow(Active(log))
    assert copy.log.read(0, 99) == log.read(10, 99)


@pytest.mark.anyio
async def test_what_came_before_it_broke_off_is_kept() -> None:
    log = active_log(story(10))
    copy, active = Copy([], epoch=log.epoch), Active(log)
    active.silent_after = 2
    with pytest.raises(UnreachableError):
        await copy.follow(active)
    assert 0 < copy.log.head < 10
    active.silent_after = 1_000
    await copy.follow(active)


@pytest.mark.anyio
async def test_a_coordinator_that_gives_nothing_is_not_asked_for_ever() -> None:
    active = Active(active_log(story(10)), batch=0)
    with pytest.raises(ProtocolError, match="nothing came after event 0"):
        await Copy([], epoch=active.log.epoch).follow(active)


def test_an_event_is_taken_once_and_in_order() -> None:
    copy, history = Copy([]), story(5)
    copy.replica.take(history[:2])
    copy.replica.take(history[:4])
    copy.replica.take(history[:1])
    assert copy.told == [1, 2, 3, 4]
    with pytest.raises(LogError):
        copy.replica.take([msgspec.structs.replace(history[4], sequence=9)])
    assert (copy.log.head, copy.replica.state.sequence) == (4, 4)


def test_a_replica_keeps_house() -> None:
    log = MemoryEventLog(retention=Retention(snapshot_every_events=5, keep_events=0, max_age_seconds=0))
    replica = Replica(log)
    replica.take(story(7))
    replica.keep_house(10**18)
    assert (log.oldest, log.head, log.load()) == (8, 7, replica.state)


def test_the_term_of_a_log(tmp_path: Path) -> None:
    log = SqliteEventLog(tmp_path / "events.db")
    assert term_of(log) == 1
    log.append(story(4, term=3))
    assert term_of(log) == 3
    log.replace("e", log.load())
    assert term_of(log) == 3, "from the snapshot, where the event is gone"
    log.close()


# --- what a standby answers -----------------------------------------------------------------------------------


def test_a_standby_answers_reads_and_names_the_active_one_for_the_rest() -> None:
    copy = Copy(story(5), epoch="e")
    reads = Reads(copy.log, copy.replica, Settings(), 4711, HEIR, BootId("its own"))
    role = reads.answer(Who())
    assert isinstance(role, Role)
    assert (role.role, role.term, role.head, role.epoch, role.follows) == ("standby", 1, 5, "e", HEIR.url)
    snapshot = reads.answer(Get())
    assert isinstance(snapshot, Snapshot)
    assert msgspec.msgpack.decode(snapshot.state, type=State) == copy.replica.state
    found = reads.answer(Query(after=2, limit=2))
    assert isinstance(found, Found)
    assert (len(found.envelopes), found.head, found.oldest) == (2, 5, 1)
    replayed = reads.answer(Replay(after=3))
    assert isinstance(replayed, Replayed)
    assert (len(replayed.envelopes), replayed.coordinator_boot) == (2, "its own")
    for request in (Hello(), Replay(after=6)):
        welcome = reads.answer(request)
        assert isinstance(welcome, Welcome)
        assert (welcome.coordinator_boot, welcome.events_port, welcome.http_port) == ("its own", 4711, None)
    assert reads.answer(Beat(node=NodeId("a"), boot=BOOT)) is None
    create = Create(spec=InstanceSpec(workload=GroupWorkload(), ranks=2))
    for request in (create, Hello(info=info("a"))):
        refused = reads.answer(request)
        assert isinstance(refused, Refused)
        assert (refused.failure.kind, refused.failure.retryable) == ("standby", True)
        assert "10.0.0.2:5710" in refused.failure.remedy
    reads.reason = "nothing heard"
    refused = reads.answer(create)
    assert isinstance(refused, Refused)
    assert "muster promote" in refused.failure.remedy
    too_many = reads.answer(Query(kinds=tuple(map(str, range(200)))))
    assert isinstance(too_many, Refused)
    assert too_many.failure.kind == "request-invalid"


def test_a_standby_without_a_log_welcomes_nobody() -> None:
    copy = Copy([])
    refused = Reads(copy.log, copy.replica, Settings(), 1, HEIR, BOOT).answer(Hello())
    assert isinstance(refused, Refused)
    assert refused.failure.retryable


class Promotions(list[Promotion]):
    """Those of one standby: one at most."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived = anyio.Event()


@asynccontextmanager
async def standing_by(
    log: EventLog, promotions: Promotions, *, term: int = 0, lease_seconds: float = 5.0
) -> AsyncGenerator[ControlClient]:
    """A standby of nobody who answers, and a client of it."""
    clocks = Settings(heartbeat_seconds=0.05, lease_seconds=lease_seconds)
    nobody = Endpoint("127.0.0.1", 9)
    async with ControlServer("127.0.0.1") as server, Publisher("127.0.0.1") as publisher:

        async def run() -> None:
            following = Following(target=nobody, holder="me", term=term)
            promotions.append(await Standby(log, server, publisher, clocks, following).run())
            promotions.arrived.set()

        async with ControlClient(Endpoint("127.0.0.1", server.port)) as client, anyio.create_task_group() as group:
            group.start_soon(run)
            yield client
            group.cancel_scope.cancel()


@pytest.mark.anyio
async def test_a_standby_without_a_log_is_not_promoted() -> None:
    promotions = Promotions()
    async with standing_by(MemoryEventLog(), promotions) as client:
        for force in (False, True):
            refused = await client.call(Promote(force=force), timeout_seconds=10.0)
            assert isinstance(refused, Refused)
            assert "has nothing of the log" in refused.failure.message
    assert not promotions


@pytest.mark.anyio
async def test_a_standby_whose_active_one_is_gone_is_promoted_beyond_every_term_that_it_knows() -> None:
    for known, expected in ((0, 3), (2, 3), (6, 7)):
        promotions = Promotions()
        log = MemoryEventLog()
        log.append(story(4, term=2))
        async with standing_by(log, promotions, term=known) as client:
            number = await client.submit(Promote(), lambda answer: None)  # the member answers once it leads
            with anyio.fail_after(10.0):
                await promotions.arrived.wait()
            assert (promotions[0].term, promotions[0].renewed) == (expected, None)
            assert promotions[0].asked is not None
            assert promotions[0].asked.call.id == number


@pytest.mark.anyio
async def test_a_standby_votes_for_the_active_one_of_its_log() -> None:
    log = MemoryEventLog()
    log.append(story(4, term=2))
    async with standing_by(log, Promotions(), lease_seconds=0.2) as client:
        denied = await ask(client, 2, "a", log.epoch)
        assert not denied.granted, "it was just started, and may have voted for another before"
        assert denied.remaining_seconds <= 0.2
        await anyio.sleep(denied.remaining_seconds)
        assert (await ask(client, 2, "a", log.epoch)).granted
        assert not (await ask(client, 1, "a", log.epoch)).granted
        other = await ask(client, 9, "a", "another epoch")
        assert (other.granted, other.term) == (False, 0)


# --- the witness ----------------------------------------------------------------------------------------------


async def ask(client: ControlClient, term: int, holder: str, epoch: str = "e") -> Vote:
    claim = Claim(epoch=epoch, term=term, holder=holder, seconds=300.0)
    return await client.ask(claim, 10.0, Vote)


@pytest.mark.anyio
async def test_a_witness_remembers_its_votes(tmp_path: Path) -> None:
    settings = WitnessSettings(directory=tmp_path / "witness", quiet_seconds=0.0)
    for life in range(3):
        async with anyio.create_task_group() as group:
            port: int = await group.start(Witness(settings).run)
            async with ControlClient(Endpoint("127.0.0.1", port)) as client:
                assert (await ask(client, 1 + life, "a")).granted
                assert (await ask(client, 1 + life, "a")).granted
                denied = await ask(client, 9, "b")
                assert (denied.granted, denied.term, denied.holder) == (False, 1 + life, "a")
                assert 290 < denied.remaining_seconds <= 300
                assert not (await ask(client, life, "a")).granted
                refused = await client.call(Get(), timeout_seconds=10.0)
                assert isinstance(refused, Refused)
                assert refused.failure.kind == "witness"
            group.cancel_scope.cancel()
    assert (tmp_path / "witness" / "votes.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.anyio
async def test_a_new_witness_waits_before_it_votes(tmp_path: Path) -> None:
    settings = WitnessSettings(directory=tmp_path, quiet_seconds=600.0)
    async with anyio.create_task_group() as group:
        port: int = await group.start(Witness(settings).run)
        async with ControlClient(Endpoint("127.0.0.1", port)) as client:
            assert not (await ask(client, 1, "a")).granted
        group.cancel_scope.cancel()
    async with anyio.create_task_group() as group:
        port = await group.start(Witness(settings).run)
        async with ControlClient(Endpoint("127.0.0.1", port)) as client:
            assert (await ask(client, 1, "a")).granted, "its memory says that nobody has the vote"
            (tmp_path / "votes.json").unlink()
            (tmp_path / "votes.json.new").mkdir()  # nothing can be written there
            refused = await client.call(Claim(epoch="other", term=1, holder="a", seconds=1.0), timeout_seconds=10.0)
            assert isinstance(refused, Refused), "what would be forgotten is not granted"
            assert (await ask(client, 1, "a")).granted, "a renewal needs no memory"
        group.cancel_scope.cancel()


@pytest.mark.anyio
async def test_a_witness_that_was_away_keeps_its_word_for_one_more_lease(tmp_path: Path) -> None:
    given = Grant(term=3, holder="a", until=0.0, seconds=300.0)
    (tmp_path / "votes.json").write_bytes(msgspec.json.encode({"grants": {"e": given}}))
    async with anyio.create_task_group() as group:
        port: int = await group.start(Witness(WitnessSettings(directory=tmp_path)).run)
        async with ControlClient(Endpoint("127.0.0.1", port)) as client:
            assert not (await ask(client, 4, "b")).granted
            assert (await ask(client, 3, "a")).granted
        group.cancel_scope.cancel()


@pytest.mark.anyio
async def test_a_damaged_memory_of_votes_is_named(tmp_path: Path) -> None:
    (tmp_path / "votes.json").write_text("[]")
    with pytest.raises(LogError, match=r"votes\.json") as caught:
        await Witness(WitnessSettings(directory=tmp_path)).run()
    assert "Delete the file" in caught.value.remedy
