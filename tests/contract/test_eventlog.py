"""One suite over every event log, and what only the one on disk has to stand."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muster.errors import LogError, RequestError
from muster.eventlog import EventLog, MemoryEventLog, Retention, SqliteEventLog
from muster.eventlog.api import QUERY_KINDS_MAXIMUM
from muster.events import (
    CoordinatorStarted,
    Envelope,
    Event,
    InstanceCreated,
    InstanceDeleted,
    InstanceFailed,
    NodeChanged,
    NodeDraining,
    NodeHeard,
    NodeJoined,
    NodeLost,
    NodeResumed,
    NodeSetAside,
    NodeSuspected,
    RankGone,
    RankPrepared,
    RankReady,
    ReportId,
    encode_event,
)
from muster.fold import apply
from muster.protocol import Query
from muster.spec import (
    COORDINATOR,
    Assignment,
    BootId,
    Failure,
    GroupWorkload,
    InstanceId,
    InstanceSpec,
    NodeId,
    NodeInfo,
)
from muster.state import State

SECOND_NS = 1_000_000_000
NODES = (NodeId("a"), NodeId("b"))
BOOT = BootId("boot")
INSTANCES = tuple(InstanceId(f"i{n}") for n in range(4))

#: `make_log` gives a new log each time, so one fixture serves all examples.
MANY_LOGS = (HealthCheck.function_scoped_fixture,)

MakeLog = Callable[[Retention], EventLog]


# --- events to log ----------------------------------------------------------------------------------------------


def joined(node: NodeId) -> NodeJoined:
    info = NodeInfo(
        node=node,
        boot=BOOT,
        hostname=node,
        machine="m",
        pid=1,
        addresses=(),
        backends=("ring",),
        memory_bytes=2**30,
        max_ranks=4,
    )
    return NodeJoined(info=info)


def created(instance: InstanceId) -> InstanceCreated:
    assignments = tuple(Assignment(rank=rank, node=node, boot=BOOT) for rank, node in enumerate(NODES))
    spec = InstanceSpec(workload=GroupWorkload(), ranks=2)
    return InstanceCreated(instance=instance, attempt=1, spec=spec, assignments=assignments, backend="ring")


def ready(instance: InstanceId, rank: int) -> RankReady:
    return RankReady(instance=instance, attempt=1, rank=rank, node=NODES[rank], boot=BOOT)


def failed(instance: InstanceId, rank: int) -> InstanceFailed:
    failure = Failure(kind="test", message="it broke", rank=rank, node=NODES[rank])
    return InstanceFailed(instance=instance, attempt=1, failure=failure)


def envelope(sequence: int, event: Event, *, time_ns: int | None = None, cause: int = 0) -> Envelope:
    return Envelope(
        sequence=sequence,
        time_ns=sequence * SECOND_NS if time_ns is None else time_ns,
        origin=COORDINATOR,
        cause=cause,
        body=encode_event(event),
        report=ReportId(node=NODES[0], boot=BOOT, n=sequence) if isinstance(event, RankReady) else None,
    )


def unknown(sequence: int) -> Envelope:
    fields = {"type": "rank.teleported", "instance": "i1", "attempt": 2**70 % 2**64, "rank": 1, "node": "b", "x": [1]}
    body = msgspec.Raw(msgspec.msgpack.encode(fields))
    return Envelope(sequence=sequence, time_ns=sequence * SECOND_NS, origin=NODES[1], cause=3, body=body)


def story(count: int, *, start: int = 1) -> list[Envelope]:
    """`count` events in which instances come and go."""
    events: list[Event] = []
    while len(events) < count:
        instance = INSTANCES[len(events) // 5 % len(INSTANCES)]
        events += [created(instance), ready(instance, 0), ready(instance, 1), failed(instance, 1)]
        events.append(InstanceDeleted(instance=instance, attempt=1))
    return [envelope(start + offset, event) for offset, event in enumerate(events[:count])]


def folded(envelopes: list[Envelope]) -> State:
    state = State()
    for item in envelopes:
        state = apply(state, item)
    return state


_instances = st.sampled_from(INSTANCES)
_ranks = st.integers(0, 1)
_events: st.SearchStrategy[Event] = st.one_of(
    st.builds(joined, st.sampled_from(NODES)),
    st.builds(NodeLost, node=st.sampled_from(NODES), boot=st.just(BOOT), reason=st.just("lease ran out")),
    st.builds(created, _instances),
    st.builds(ready, _instances, _ranks),
    st.builds(failed, _instances, _ranks),
    st.builds(InstanceDeleted, instance=_instances, attempt=st.just(1)),
    st.builds(CoordinatorStarted, epoch=st.just("e"), boot=st.just(BOOT), version=st.text(max_size=4)),
)


@st.composite
def histories(draw: st.DrawFn) -> list[Envelope]:
    """Any events in any order, at times that a clock which is set now and then would give."""
    events = draw(st.lists(_events, max_size=40))
    times = draw(st.lists(st.integers(0, 100), min_size=len(events), max_size=len(events)))
    return [
        envelope(sequence, event, time_ns=seconds * SECOND_NS, cause=sequence - 1)
        for sequence, (event, seconds) in enumerate(zip(events, times, strict=True), start=1)
    ]


# --- the logs ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "sqlite"])
def make_log(request: pytest.FixtureRequest) -> Iterator[MakeLog]:
    """Makes empty logs of one implementation; usable many times within one test."""
    with tempfile.TemporaryDirectory() as directory:
        opened: list[EventLog] = []

        def make(retention: Retention) -> EventLog:
            path = Path(directory) / f"{len(opened)}.db"
            log = (
                MemoryEventLog(retention=retention)
                if request.param == "memory"
                else SqliteEventLog(path, retention=retention)
            )
            opened.append(log)
            return log

        yield make
        for log in opened:
            log.close()


@pytest.fixture
def log(make_log: MakeLog) -> EventLog:
    return make_log(Retention())


def test_new_log_is_empty(log: EventLog) -> None:
    assert (log.head, log.oldest) == (0, 1)
    assert log.read(0, 10) == []
    assert log.load() == State()
    assert log.prune(10**18) == 0


def test_every_log_has_its_own_epoch(make_log: MakeLog) -> None:
    assert make_log(Retention()).epoch != make_log(Retention()).epoch


def test_reads_back_what_was_appended(log: EventLog) -> None:
    envelopes = [*story(7), unknown(8)]
    log.append(envelopes[:3])
    log.append(())
    log.append(envelopes[3:])
    assert (log.head, log.oldest) == (8, 1)
    assert log.read(0, 100) == envelopes
    assert log.read(2, 3) == envelopes[2:5]
    assert log.read(8, 5) == log.read(0, 0) == log.read(0, -1) == log.read(2**64, 5) == []


def test_bytes_of_unknown_events_are_kept(log: EventLog) -> None:
    log.append([unknown(1)])
    assert bytes(log.read(0, 1)[0].body) == bytes(unknown(1).body)
    assert log.load().sequence == 1


@pytest.mark.parametrize("sequences", [(2,), (1, 3), (1, 1), (0,), (1, 2, 2)])
def test_refuses_a_gap_and_adds_nothing(log: EventLog, sequences: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="does not follow"):
        log.append([envelope(sequence, ready(INSTANCES[0], 0)) for sequence in sequences])
    assert (log.head, log.read(0, 10)) == (0, [])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"body": msgspec.Raw(b"\x93\x01")}, "event 2 is no event"),
        ({"body": msgspec.Raw(msgspec.msgpack.encode({"type": "rank.ready"}))}, "event 2 is no event"),
        ({"cause": 2**64 - 1}, "cause 18446744073709551615"),
        ({"time_ns": -1}, "time_ns -1"),
    ],
)
def test_refuses_what_it_could_not_give_back(log: EventLog, change: dict[str, object], words: str) -> None:
    good, bad = envelope(1, ready(INSTANCES[0], 0)), envelope(2, ready(INSTANCES[0], 1))
    with pytest.raises(ValueError, match=words):
        log.append([good, msgspec.structs.replace(bad, **change)])
    assert log.head == 0
    log.append([good, bad])
    assert log.head == 2


QUERIES: list[tuple[Query, list[int]]] = [
    (Query(), [1, 2, 3, 4, 5, 6, 7, 8]),
    (Query(after=6), [7, 8]),
    (Query(instance="i0"), [3, 4, 6]),
    (Query(instance="i1"), [5, 8]),
    (Query(instance="nobody"), []),
    (Query(node=NodeId("b")), [2, 6, 7, 8]),
    (Query(instance="i0", node=NodeId("b")), [6]),
    (Query(kinds=("rank.",)), [4, 8]),
    (Query(kinds=("node.", "rank.ready", "rank.ready")), [1, 2, 4, 7]),
    (Query(kinds=("rank",)), []),
    (Query(kinds=("instance.failed",)), [6]),
    (Query(since_ns=3 * SECOND_NS, until_ns=5 * SECOND_NS), [3, 4]),
    (Query(until_ns=2**64 - 1, since_ns=-(2**63)), [1, 2, 3, 4, 5, 6, 7, 8]),
    (Query(limit=2), [1, 2]),
    (Query(limit=2, newest=True), [7, 8]),
    (Query(limit=1, newest=True, instance="i0"), [6]),
    (Query(limit=0), []),
    (Query(limit=-1), []),
    (Query(limit=2**64 - 1), [1, 2, 3, 4, 5, 6, 7, 8]),
]


@pytest.mark.parametrize(("query", "sequences"), QUERIES, ids=lambda value: str(value)[:60])
def test_query_filters(log: EventLog, query: Query, sequences: list[int]) -> None:
    events = [joined(NODES[0]), joined(NODES[1]), created(INSTANCES[0]), ready(INSTANCES[0], 0), created(INSTANCES[1])]
    events += [failed(INSTANCES[0], 1), NodeLost(node=NODES[1], boot=BOOT, reason="left")]
    log.append([envelope(sequence, event) for sequence, event in enumerate(events, start=1)])
    log.append([unknown(8)])
    assert [item.sequence for item in log.query(query)] == sequences


def test_a_change_of_a_nodes_addresses_is_found_by_the_node(log: EventLog) -> None:
    log.append([envelope(1, joined(NODES[0])), envelope(2, NodeChanged(node=NODES[0], boot=BOOT, candidates=()))])
    assert [item.sequence for item in log.query(Query(node=NODES[0]))] == [1, 2]


def test_query_with_too_many_kinds_is_refused(log: EventLog) -> None:
    with pytest.raises(RequestError, match="101 kinds"):
        log.query(Query(kinds=tuple(f"k{n}." for n in range(QUERY_KINDS_MAXIMUM + 1))))
    assert log.query(Query(kinds=tuple(f"k{n}." for n in range(QUERY_KINDS_MAXIMUM)))) == []


@given(histories(), st.integers(0, 40), st.integers(0, 40))
@settings(max_examples=40, deadline=None, suppress_health_check=MANY_LOGS)
def test_load_equals_folding_every_event(make_log: MakeLog, history: list[Envelope], first: int, second: int) -> None:
    log = make_log(Retention(keep_events=0, max_age_seconds=0))
    log.append(history[:first])
    log.snapshot(log.load())
    log.append(history[first:])
    assert log.load() == folded(history)
    log.snapshot(folded(history[:second]))
    assert log.load() == folded(history)
    log.close()


@given(
    histories(),
    st.lists(st.integers(0, 40), max_size=4),
    st.integers(0, 120),
    st.integers(0, 10),
    st.sampled_from([0, 10**9]),
)
@settings(max_examples=60, deadline=None, suppress_health_check=MANY_LOGS)
def test_pruning_never_changes_the_state_nor_leaves_a_gap(
    make_log: MakeLog, history: list[Envelope], snapshots: list[int], now: int, keep: int, max_bytes: int
) -> None:
    log = make_log(Retention(keep_events=keep, max_age_seconds=20, max_bytes=max_bytes))
    log.append(history)
    for sequence in snapshots:
        log.snapshot(folded(history[:sequence]))
    deleted = log.prune(now * SECOND_NS)
    newest = max((min(sequence, len(history)) for sequence in snapshots), default=0)
    assert log.load() == folded(history)
    assert log.head == len(history)
    assert log.oldest == deleted + 1 <= newest + 1
    assert log.read(0, 100) == history[deleted:]
    assert deleted == 0 or deleted <= len(history) - keep
    log.close()


def test_prune_by_age_stops_at_the_first_young_event(make_log: MakeLog) -> None:
    log = make_log(Retention(keep_events=0, max_age_seconds=10))
    history = story(30)
    log.append(history)
    assert log.prune(25 * SECOND_NS) == 0, "nothing goes without a snapshot"
    log.snapshot(folded(history[:20]))
    assert log.prune(25 * SECOND_NS) == 14
    assert log.oldest == 15
    assert log.prune(1000 * SECOND_NS) == 6, "what the snapshot does not hold stays"
    assert log.oldest == 21
    assert log.load() == folded(history)


def test_prune_leaves_what_the_older_snapshot_needs(make_log: MakeLog) -> None:
    log = make_log(Retention(keep_events=0, max_age_seconds=0))
    history = story(30)
    log.append(history)
    for sequence in (5, 10, 20):
        log.snapshot(folded(history[:sequence]))
    assert log.prune(1000 * SECOND_NS) == 10


def test_prune_by_size(make_log: MakeLog) -> None:
    log = make_log(Retention(keep_events=10, max_age_seconds=1e9, max_bytes=200_000))
    history = story(4_000)
    log.append(history)
    log.snapshot(log.load())
    log.prune(0)
    log.prune(0)
    assert 0 < log.head - log.oldest < 3_000
    kept = log.oldest
    log.prune(0)
    assert log.oldest - kept < 100, "no more than the size asks for"
    assert log.load() == folded(history)


def test_head_survives_a_log_whose_every_event_was_pruned(make_log: MakeLog) -> None:
    log = make_log(Retention(keep_events=0, max_age_seconds=0))
    log.append(story(5))
    log.snapshot(log.load())
    assert log.prune(1000 * SECOND_NS) == 5
    assert (log.head, log.oldest) == (5, 6)
    log.append(story(1, start=6))
    assert log.load().sequence == 6


def test_snapshots_are_due_every_so_many_events(make_log: MakeLog) -> None:
    log = make_log(Retention(snapshot_every_events=10))
    log.append(story(25))
    assert not log.should_snapshot(folded(story(9)))
    assert log.should_snapshot(folded(story(10)))
    log.snapshot(folded(story(10)))
    assert not log.should_snapshot(folded(story(19)))
    assert log.should_snapshot(folded(story(20)))


def test_snapshot_ahead_of_the_log_is_refused(log: EventLog) -> None:
    with pytest.raises(ValueError, match="at 1, the log only at 0"):
        log.snapshot(State(sequence=1))


@pytest.mark.parametrize("before", [0, 7, 25])
def test_a_replaced_log_is_a_copy_of_the_other_from_its_snapshot_on(make_log: MakeLog, before: int) -> None:
    log, history = make_log(Retention(snapshot_every_events=5, keep_events=0, max_age_seconds=0)), story(20)
    log.append(story(before))
    if before:
        log.snapshot(log.load())
    log.replace("of another", folded(history[:12]))
    assert (log.epoch, log.head, log.oldest) == ("of another", 12, 13)
    assert log.read(0, 100) == log.query(Query()) == []
    assert log.load() == folded(history[:12])
    assert not log.should_snapshot(folded(history[:16]))
    assert log.should_snapshot(folded(history[:17]))
    with pytest.raises(ValueError, match="does not follow 12"):
        log.append(history[13:])
    log.append(history[12:])
    assert log.read(0, 100) == log.query(Query(after=3)) == history[12:]
    assert log.load() == folded(history)
    log.snapshot(folded(history))
    assert log.prune(10**18) == 0, "the snapshot that it began with holds none of them"


def test_a_log_replaced_by_an_empty_one_takes_the_first_event(log: EventLog) -> None:
    log.append(story(3))
    log.replace("of another", State())
    assert (log.epoch, log.head, log.oldest, log.load()) == ("of another", 0, 1, State())
    log.append(story(2))
    assert log.load() == folded(story(2))


def test_closed_log_says_so(log: EventLog) -> None:
    log.close()
    log.close()
    with pytest.raises(LogError, match="closed"):
        log.read(0, 1)
    with pytest.raises(LogError, match="closed"):
        log.append([envelope(1, ready(INSTANCES[0], 0))])


@pytest.mark.parametrize(
    "change",
    [
        {"max_age_seconds": -1},
        {"max_age_seconds": float("nan")},
        {"max_bytes": -1},
        {"keep_events": -1},
        {"snapshot_every_events": 0},
    ],
)
def test_retention_refuses_nonsense(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=rf"retention\.{next(iter(change))} is"):
        msgspec.convert(change, Retention)


def test_year_of_events_stays_bounded(make_log: MakeLog) -> None:
    day = 86_400
    retention = Retention(max_age_seconds=7 * day, max_bytes=2**20, keep_events=500, snapshot_every_events=1_000)
    log = make_log(retention)
    state, largest_bytes = State(), 0
    for batch in range(60):
        events = story(500, start=batch * 500 + 1)
        events = [msgspec.structs.replace(item, time_ns=item.sequence * 1_000 * SECOND_NS) for item in events]
        log.append(events)
        for item in events:
            state = apply(state, item)
        if log.should_snapshot(state):
            log.snapshot(state)
            log.prune(events[-1].time_ns)
        largest_bytes = max(largest_bytes, log.bytes_used)
    assert log.head == 30_000  # 347 days at one event per 1,000 s
    assert log.head - log.oldest <= 3 * 1_000
    assert largest_bytes < 8 * 2**20
    assert log.load() == state


# --- only on disk -------------------------------------------------------------------------------------------------


def test_reopened_log_is_the_same(tmp_path: Path) -> None:
    history = story(12)
    log = SqliteEventLog(tmp_path / "deep" / "events.db", retention=Retention())
    log.append(history)
    log.snapshot(folded(history[:7]))
    epoch = log.epoch
    log.close()
    log = SqliteEventLog(tmp_path / "deep" / "events.db", retention=Retention(), synchronous="FULL")
    assert (log.epoch, log.head, log.read(0, 100)) == (epoch, 12, history)
    assert log.load() == folded(history)
    log.close()


def test_what_was_replaced_is_kept_beside_the_log(tmp_path: Path) -> None:
    path, history = tmp_path / "events.db", story(9)
    log = SqliteEventLog(path, retention=Retention())
    own = log.epoch
    assert log.replace("first", State()) == "", "an empty log is nothing to keep"
    log.append(history)
    kept = [Path(log.replace(f"copy {number}", folded(history[:number]))) for number in (4, 2)]
    log.close()
    log = SqliteEventLog(path, retention=Retention())
    assert (log.epoch, log.head, log.load()) == ("copy 2", 2, folded(history[:2]))
    log.close()
    assert own != "first"
    assert len(set(kept)) == 2
    assert all(one.name.startswith("events.db.fenced-") and one.stat().st_mode & 0o777 == 0o600 for one in kept)
    old = SqliteEventLog(kept[0], retention=Retention())
    assert (old.epoch, old.read(0, 100), old.load()) == ("first", history, folded(history))
    old.close()


def test_a_log_that_cannot_be_replaced_is_as_it_was(tmp_path: Path) -> None:
    log = SqliteEventLog(tmp_path / "events.db", retention=Retention())
    epoch, history = log.epoch, story(5)
    log.append(history)
    log._open_connection().execute("CREATE TRIGGER kept BEFORE DELETE ON events BEGIN SELECT RAISE(ABORT, 'no'); END")
    with pytest.raises(LogError, match="cannot be written: no"):
        log.replace("other", State())
    assert (log.epoch, log.head, log.read(0, 9), log.load()) == (epoch, 5, history, folded(history))
    assert list(tmp_path.glob("*.fenced-*")) == []
    log._open_connection().execute("DROP TRIGGER kept")
    log._open_connection().execute("PRAGMA query_only = 1")
    with pytest.raises(LogError, match=r"cannot be (copied aside|written)"):
        log.replace("other", State())
    assert (log.epoch, log.head, log.read(0, 9)) == (epoch, 5, history)
    assert list(tmp_path.glob("*.fenced-*")) == []
    log.close()


def test_files_are_private(tmp_path: Path) -> None:
    (tmp_path / "events.db").touch(mode=0o644)
    log = SqliteEventLog(tmp_path / "events.db", retention=Retention())
    log.append(story(3))
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    log.close()
    assert len(modes) == 4
    assert set(modes.values()) == {0o600}


def test_second_opener_is_told_who_has_it(tmp_path: Path) -> None:
    log = SqliteEventLog(tmp_path / "events.db", retention=Retention())
    with pytest.raises(LogError, match=f"in use by process {os.getpid()}"):
        SqliteEventLog(tmp_path / "events.db", retention=Retention())
    log.append(story(1))
    log.close()
    SqliteEventLog(tmp_path / "events.db", retention=Retention()).close()


def test_anyone_may_read_while_it_is_written(tmp_path: Path) -> None:
    log = SqliteEventLog(tmp_path / "events.db", retention=Retention())
    log.append(story(4))
    reader = sqlite3.connect(f"file:{tmp_path / 'events.db'}?mode=ro", uri=True)
    rows = reader.execute("SELECT kind, instance, attempt, rank, node FROM events WHERE instance = 'i0'").fetchall()
    reader.close()
    log.close()
    assert rows[1] == ("rank.ready", "i0", 1, 0, "a")
    assert rows[3] == ("instance.failed", "i0", 1, 1, "b")


def test_foreign_files_are_refused_with_a_remedy(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("no database, " * 100)
    with pytest.raises(LogError, match="file is not a database") as caught:
        SqliteEventLog(text, retention=Retention())
    assert "move that file away" in caught.value.remedy
    assert text.read_text() == "no database, " * 100

    other = sqlite3.connect(tmp_path / "other.db")
    other.execute("CREATE TABLE songs (title TEXT)")
    other.close()
    with pytest.raises(LogError, match="no event log of muster"):
        SqliteEventLog(tmp_path / "other.db", retention=Retention())

    with pytest.raises(LogError, match="cannot be opened"):
        (tmp_path / "directory").mkdir()
        SqliteEventLog(tmp_path / "directory", retention=Retention())
    with pytest.raises(LogError, match="cannot be made"):
        SqliteEventLog(text / "events.db", retention=Retention())


def test_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.db"
    SqliteEventLog(path, retention=Retention()).close()
    edit(path, "UPDATE meta SET value = 2 WHERE name = 'schema'")
    with pytest.raises(LogError, match="schema 2; this muster knows 1") as caught:
        SqliteEventLog(path, retention=Retention())
    assert "newer muster" in caught.value.remedy


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE events SET body = x'93' WHERE sequence = 4", "event 4 "),
        ("UPDATE events SET body = x'81a474797065aa72616e6b2e7265616479' WHERE sequence = 4", "event 4 "),
        ("DELETE FROM events WHERE sequence = 4", "event 5 .*does not follow 3"),
        ("UPDATE events SET report = x'93' WHERE sequence = 2", "cannot be read"),
        ("DELETE FROM events WHERE sequence < 4", "begins at event 4"),
    ],
)
def test_damaged_log_names_the_event(tmp_path: Path, statement: str, words: str) -> None:
    path = tmp_path / "events.db"
    log = SqliteEventLog(path, retention=Retention())
    log.append(story(6))
    log.close()
    edit(path, statement)
    log = SqliteEventLog(path, retention=Retention())
    with pytest.raises(LogError, match=words):
        log.load()
    log.close()


@pytest.mark.parametrize("damage", ["x'93'", "x'80'", "x''", "'text'"])
def test_unreadable_snapshot_falls_back_to_the_one_before(tmp_path: Path, damage: str) -> None:
    path, history = tmp_path / "events.db", story(20)
    log = SqliteEventLog(path, retention=Retention(keep_events=0, max_age_seconds=0))
    log.append(history)
    log.snapshot(folded(history[:8]))
    log.snapshot(folded(history[:15]))
    assert log.prune(10**18) == 8
    log.close()
    edit(path, f"UPDATE snapshots SET state = {damage} WHERE sequence = 15")
    log = SqliteEventLog(path, retention=Retention())
    assert log.load() == folded(history)
    log.close()


def edit(path: Path, statement: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.commit()
    connection.close()


def test_full_database_refuses_the_batch_and_goes_on_later(tmp_path: Path) -> None:
    log = SqliteEventLog(tmp_path / "events.db", retention=Retention())
    log.append(story(5))
    connection = log._open_connection()
    connection.execute("PRAGMA max_page_count = 1")  # SQLite takes the present size where that is larger
    with pytest.raises(LogError, match="full") as caught:
        log.append(story(500, start=6))
    assert "Make room" in caught.value.remedy
    assert (log.head, log.read(5, 10)) == (5, [])
    connection.execute("PRAGMA max_page_count = 100000")
    log.append(story(500, start=6))
    assert log.load().sequence == 505
    log.close()


def test_error_within_a_batch_leaves_nothing_of_it(tmp_path: Path) -> None:
    path, history = tmp_path / "events.db", story(6)
    SqliteEventLog(path, retention=Retention()).close()
    # FAIL keeps the rows before it, as an error of the disk may do.
    edit(
        path,
        "CREATE TRIGGER broken BEFORE INSERT ON events WHEN NEW.sequence = 4"
        " BEGIN SELECT RAISE(FAIL, 'the disk broke'); END",
    )
    log = SqliteEventLog(path, retention=Retention())
    log.append(history[:2])
    with pytest.raises(LogError, match="cannot be written: the disk broke"):
        log.append(history[2:])
    assert (log.head, log.read(0, 10)) == (2, history[:2])
    log._open_connection().execute("DROP TRIGGER broken")
    log.append(history[2:])
    assert log.read(0, 10) == history
    log.close()


def test_reopened_log_whose_every_event_was_pruned_goes_on_where_it_was(tmp_path: Path) -> None:
    retention = Retention(keep_events=0, max_age_seconds=0)
    log = SqliteEventLog(tmp_path / "events.db", retention=retention)
    log.append(story(5))
    log.snapshot(log.load())
    assert log.prune(10**18) == 5
    log.close()
    log = SqliteEventLog(tmp_path / "events.db", retention=retention)
    assert (log.head, log.oldest, log.load()) == (5, 6, folded(story(5)))
    log.append(story(1, start=6))
    log.close()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root on Linux")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "muster-test", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"mounting a tmpfs is not allowed here: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


@pytest.mark.process
def test_full_disk_refuses_the_batch_and_goes_on_later(tiny_disk: Path) -> None:
    log = SqliteEventLog(tiny_disk / "events.db", retention=Retention())
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(bytes(500_000))
    with pytest.raises(LogError) as caught:
        while True:
            log.append(story(50, start=log.head + 1))
    assert "Make room" in caught.value.remedy
    head = log.head
    assert head > 0
    assert [item.sequence for item in log.read(0, 100_000)] == list(range(1, head + 1))
    with pytest.raises(LogError):
        log.append(story(1_000, start=head + 1))
    ballast.unlink()
    log.append(story(50, start=head + 1))
    expected = log.read(0, 100_000)
    log.close()
    log = SqliteEventLog(tiny_disk / "events.db", retention=Retention())
    assert log.read(0, 100_000) == expected
    assert log.head == head + 50
    log.close()


_WRITER = """
import sys
from pathlib import Path
from muster.eventlog import Retention, SqliteEventLog
from muster.events import Envelope, RankGone, encode_event
log = SqliteEventLog(Path(sys.argv[1]), retention=Retention())
while True:
    first = log.head + 1
    body = encode_event(RankGone(instance="i", attempt=1, rank=0, node="a", boot="b"))
    log.append([Envelope(sequence=first + n, time_ns=first, origin="a", cause=0, body=body) for n in range(3)])
    print(log.head, flush=True)
"""


@pytest.mark.process
def test_killed_writer_loses_nothing_that_it_had_appended(tmp_path: Path) -> None:
    path = tmp_path / "events.db"
    for lines in (1, 40, 300, 7):
        child = subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        with child.stdout:
            said = [int(child.stdout.readline()) for _ in range(lines)]
            with pytest.raises(LogError, match=f"in use by process {child.pid}"):
                SqliteEventLog(path, retention=Retention())
            child.send_signal(signal.SIGKILL)
            said += [int(line) for line in child.stdout.read().split("\n")[:-1]]
            child.wait(10)
        log = SqliteEventLog(path, retention=Retention())
        assert log.head >= said[-1]
        assert log.head % 3 == 0, "a batch is in whole or not at all"
        assert [item.sequence for item in log.read(0, 10**6)] == list(range(1, log.head + 1))
        assert log.load().sequence == log.head
        log.close()


def test_space_of_pruned_events_is_given_back(tmp_path: Path) -> None:
    log = SqliteEventLog(tmp_path / "events.db", retention=Retention(keep_events=10, max_age_seconds=0))
    log.append(story(5_000))
    log.snapshot(log.load())
    full_bytes = log.bytes_used
    assert log.prune(10**18) == 4_990
    log.append(story(1, start=5_001))
    log.close()
    assert (tmp_path / "events.db").stat().st_size < full_bytes / 10


def test_rank_prepared_is_found_by_its_node(log: EventLog) -> None:
    prepared = RankPrepared(
        instance=INSTANCES[0], attempt=3, rank=1, node=NODES[1], boot=BOOT, pid=7, process_started=1
    )
    gone = RankGone(instance=INSTANCES[0], attempt=3, rank=1, node=NODES[1], boot=BOOT, exit_code=-9)
    log.append([envelope(1, prepared), envelope(2, gone)])
    assert [item.event() for item in log.query(Query(node=NODES[1], kinds=("rank.",)))] == [prepared, gone]


def test_whatever_is_about_a_node_is_found_by_it(log: EventLog) -> None:
    node = NODES[0]
    about: list[Event] = [
        NodeSuspected(node=node, boot=BOOT, reason="late"),
        NodeHeard(node=node, boot=BOOT),
        NodeDraining(node=node),
        NodeSetAside(node=node, boot=BOOT, reason="it keeps failing"),
        NodeResumed(node=node),
    ]
    log.append([envelope(sequence, event) for sequence, event in enumerate(about, start=1)])
    assert [item.event() for item in log.query(Query(node=node))] == about
