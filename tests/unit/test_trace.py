"""The timeline of an attempt, from its events."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stories import BOOT, MODEL, MS, NAMES, ONE, Step, assignments, created, envelope, failure, logged, rank_event

from muster.errors import RequestError
from muster.events import (
    AdoptedRank,
    AttemptEnding,
    AttemptStarted,
    Envelope,
    Event,
    InstanceAdopted,
    InstanceDeleted,
    InstanceDeleting,
    InstanceFailed,
    InstanceFinished,
    InstanceReady,
    NodeLost,
    RankFact,
    ReportId,
)
from muster.spec import BootId, InstanceId, InstanceSpec, Phase, ScriptWorkload
from muster.trace import Span, Timeline, timeline

READY = InstanceReady(instance=ONE, attempt=1)

#: A model over two ranks: rank 1 prepares late, rank 0 listens, rank 1 dials, rank 1 loads late, rank 0 warms late.
GOOD: list[tuple[float, Event]] = [
    (0, created(2, MODEL)),
    (2, rank_event("prepared", 0)),
    (14, rank_event("prepared", 1)),
    (19, rank_event("listening", 0)),
    (41, rank_event("connected", 1)),
    (42, rank_event("connected", 0)),
    (131, rank_event("loaded", 0)),
    (170, rank_event("loaded", 1)),
    (201, rank_event("ready", 1)),
    (203, rank_event("ready", 0)),
    (204, READY),
]


def brief(told: Timeline, rank: int) -> list[tuple[str, float, float | None, str | None, float]]:
    """(phase, start, end, waited for, waited) of a rank, in milliseconds from the attempt's start."""
    return [
        (
            span.name,
            (span.start_ns - told.started_ns) / MS,
            None if span.end_ns is None else (span.end_ns - told.started_ns) / MS,
            span.waited_for,
            span.waited_ns / MS,
        )
        for span in told.spans
        if span.rank == rank
    ]


def test_says_who_waited_for_whom() -> None:
    told = timeline(logged(*GOOD), ONE, None)
    assert (told.attempt, told.outcome, told.ended_ns - told.started_ns) == (1, "ready", 204 * MS)
    assert brief(told, 0) == [
        ("preparing", 0, 2, None, 0),
        ("listening", 14, 19, "rank 1 on node b", 12),
        ("forming", 19, 42, None, 0),
        ("loading", 42, 131, None, 0),
        ("warming", 170, 203, "rank 1 on node b", 39),
    ]
    assert brief(told, 1) == [
        ("preparing", 0, 14, None, 0),
        ("forming", 19, 41, "rank 0 on node a", 5),
        ("loading", 41, 170, None, 0),
        ("warming", 170, 201, None, 0),
    ]
    assert brief(told, -1) == [("starting", 0, 204, "rank 0 on node a", 2)]


def test_dialling_rank_waits_for_the_last_listener() -> None:
    steps: tuple[tuple[Step, int], ...] = (
        ("prepared", 0),
        ("prepared", 1),
        ("prepared", 2),
        ("listening", 1),
        ("listening", 0),
        ("connected", 2),
        ("connected", 1),
        ("connected", 0),
    )
    events: list[tuple[float, Event]] = [(0, created(3))]
    events += [(at, rank_event(step, rank)) for at, (step, rank) in enumerate(steps, start=1)]
    told = timeline(logged(*events), ONE, 1)
    assert brief(told, 2)[1] == ("forming", 5, 6, "rank 0 on node a", 2)
    assert brief(told, 1)[1:3] == [("listening", 3, 4, "rank 2 on node c", 1), ("forming", 5, 7, "rank 0 on node a", 1)]


def test_script_of_one_rank_waits_for_nobody() -> None:
    steps: list[Step] = ["prepared", "connected", "ready"]
    events: list[tuple[float, Event]] = [(0, created(1, ScriptWorkload(path="s.py")))]
    events += [(at, rank_event(step, 0)) for at, step in enumerate(steps, start=1)]
    events += [(4, READY), (9, rank_event("gone", 0)), (10, InstanceFinished(instance=ONE, attempt=1))]
    told = timeline(logged(*events), ONE, 1)
    assert told.outcome == "finished"
    assert brief(told, 0) == [
        ("preparing", 0, 1, None, 0),
        ("forming", 1, 2, None, 0),
        ("warming", 2, 3, None, 0),
        ("running", 3, 9, None, 0),
    ]
    assert [item[:3] for item in brief(told, -1)] == [("starting", 0, 4), ("running", 4, 10), ("stopping", 10, 10)]


def test_what_has_not_ended_has_no_end() -> None:
    told = timeline(logged(*GOOD[:2]), ONE, 1)
    assert told.outcome == "starting"
    assert brief(told, 0) == [("preparing", 0, 2, None, 0), ("listening", 2, None, "rank 1 on node b", 0)]
    assert brief(told, 1) == [("preparing", 0, None, None, 0)]
    told = timeline(logged(*GOOD[:5]), ONE, 1)
    assert brief(told, 0)[-1] == ("forming", 19, None, None, 0)
    assert brief(told, 1)[-1] == ("loading", 41, None, None, 0)


def test_rank_that_never_comes_is_what_the_others_waited_for() -> None:
    failed = InstanceFailed(instance=ONE, attempt=1, failure=failure(1, "deadline", Phase.PREPARING))
    events: list[tuple[float, Event]] = [
        (0, created(3)),
        (2, rank_event("prepared", 0)),
        (5, rank_event("prepared", 2)),
    ]
    events += [(60_002, failed), (60_010, rank_event("gone", 0)), (60_011, rank_event("gone", 2))]
    told = timeline(logged(*events), ONE, 1)
    assert (told.outcome, told.failure) == ("failed", failed.failure)
    assert brief(told, 0)[1:] == [
        ("listening", 60_002, 60_002, "rank 1 on node b", 60_000),
        ("stopping", 60_002, 60_010, None, 0),
    ]
    assert brief(told, 2)[1] == ("forming", 60_002, 60_002, "rank 1 on node b", 59_997)
    assert brief(told, 1) == [("preparing", 0, 60_002, None, 0), ("stopping", 60_002, None, None, 0)]
    assert [span.began for span in told.spans if span.rank == 0] == [True, False, True]


def test_failure_is_in_the_phase_that_it_happened_in() -> None:
    events = [*GOOD[:6], (50, rank_event("failed", 1))]
    events += [(51, InstanceFailed(instance=ONE, attempt=1, failure=failure(1)))]
    events += [(55, rank_event("gone", 1)), (60, rank_event("gone", 0))]
    told = timeline(logged(*events), ONE, 1)
    failed = [(span.rank, span.name) for span in told.spans if span.failure]
    assert failed == [(-1, "starting"), (1, "loading")]
    assert brief(told, 1)[-2:] == [("loading", 41, 50, None, 0), ("stopping", 50, 55, None, 0)]
    assert brief(told, 0)[-2:] == [("loading", 42, 51, None, 0), ("stopping", 51, 60, None, 0)]
    assert brief(told, -1)[-1] == ("stopping", 51, 60, "rank 0 on node a", 5)


def test_lost_node_takes_its_ranks_along() -> None:
    events = [*GOOD, (300, NodeLost(node=NAMES[1], boot=BOOT, reason="lease ran out"))]
    told = timeline(logged(*events), ONE, 1)
    assert brief(told, 1)[-1] == ("running", 201, 300, None, 0)
    other = timeline(logged(*GOOD, (300, NodeLost(node=NAMES[1], boot=BootId("new"), reason="?"))), ONE, 1)
    assert brief(other, 1)[-1][0] == "warming"


def test_deleted_instance_ran_and_stopped() -> None:
    events = [*GOOD, (1000, InstanceDeleting(instance=ONE, attempt=1)), (1001, rank_event("gone", 1))]
    events += [(1005, rank_event("gone", 0)), (1006, InstanceDeleted(instance=ONE, attempt=1))]
    told = timeline(logged(*events), ONE, 1)
    assert told.outcome == "deleted"
    assert [item[:3] for item in brief(told, 0)[-2:]] == [("running", 203, 1000), ("stopping", 1000, 1005)]
    assert told.ended_ns - told.started_ns == 1006 * MS


def test_attempts_are_told_apart_and_stale_events_skipped() -> None:
    first = [*GOOD[:3], (20, InstanceFailed(instance=ONE, attempt=1, failure=failure(0), retry_at_ns=1))]
    second: list[tuple[float, Event]] = [
        (30, AttemptStarted(instance=ONE, attempt=2, assignments=assignments(2), backend="ring")),
        (31, rank_event("prepared", 0)),
        (32, rank_event("prepared", 0, attempt=2, boot=BootId("old"))),
        (33, rank_event("prepared", 0, attempt=2)),
        (34, rank_event("prepared", 0, attempt=2)),
        (35, rank_event("prepared", 1, attempt=2, instance=InstanceId("other"))),
    ]
    told = timeline(logged(*first, *second), ONE)
    assert (told.attempt, told.started_ns) == (2, 30 * MS)
    assert brief(told, 0)[0] == ("preparing", 0, 3, None, 0)
    assert timeline(logged(*first, *second), ONE, 1).outcome == "failed"


def reported(event: Event, n: int, happened: float, *, logged_ms: float, cause: int = 1) -> Envelope:
    """An event of a worker that happened at one time and was logged at another, in milliseconds."""
    assert isinstance(event, RankFact)
    report = ReportId(node=event.node, boot=event.boot, n=n, happened_ns=round(happened * MS))
    found = envelope(n + 1, event, time_ns=round(logged_ms * MS), report=report)
    return msgspec.structs.replace(found, cause=cause)


def story(*events: tuple[Step, int, float, float]) -> list[Envelope]:
    """A group of two that is created at 100 ms: each step with its rank, when it happened and when it was logged."""
    found = [envelope(1, created(2), time_ns=100 * MS)]
    for n, (step, rank, happened, logged_ms) in enumerate(events, start=1):
        found.append(reported(rank_event(step, rank), n, happened, logged_ms=logged_ms))
    return found


def test_a_phase_ends_when_it_did_and_not_when_it_was_logged() -> None:
    told = timeline(
        story(
            ("prepared", 0, 160, 161),
            ("prepared", 1, 110, 240),  # first, though it was heard of last
            ("listening", 0, 170, 241),
            ("connected", 1, 180, 245),
            ("connected", 0, 181, 246),
        ),
        ONE,
    )
    assert brief(told, 0)[:3] == [
        ("preparing", 0, 60, None, 0),
        ("listening", 60, 70, None, 0),
        ("forming", 70, 81, None, 0),
    ]
    assert brief(told, 1)[:2] == [("preparing", 0, 10, None, 0), ("forming", 70, 80, "rank 0 on node a", 60)]
    assert [span.delay_ns / MS for span in told.spans if span.rank == 1][:2] == [130, 65]
    assert told.ended_ns - told.started_ns == 81 * MS


@pytest.mark.parametrize(
    ("happened", "counted", "delay"),
    [
        (0, 150, 0),  # not known
        (130, 130, 20),
        (90, 100, 50),  # its clock is behind: not before what led to it
        (170, 150, 0),  # its clock is ahead: not after it was logged
    ],
)
def test_a_clock_that_is_off_moves_nothing_out_of_order(happened: float, counted: float, delay: float) -> None:
    for cause in (1, 0):  # the beginning of the attempt is a limit, whatever the worker says of the cause
        found = story(("prepared", 0, happened, 150))
        found[1] = msgspec.structs.replace(found[1], cause=cause)
        (span, *_) = [span for span in timeline(found, ONE).spans if span.rank == 0]
        assert (span.end_ns, span.delay_ns) == (round(counted * MS), delay * MS)


def test_what_a_worker_reports_later_did_not_happen_before() -> None:
    told = timeline(story(("prepared", 0, 140, 150), ("connected", 0, 120, 160)), ONE)
    assert brief(told, 0)[:2] == [("preparing", 0, 40, None, 0), ("forming", 40, 40, None, 0)]


def test_what_is_left_of_an_adopted_instance_is_that_it_runs() -> None:
    ranks = tuple(AdoptedRank(rank=rank, node=NAMES[rank], boot=BOOT, pid=7, process_started=1.5) for rank in range(2))
    spec = InstanceSpec(workload=MODEL, ranks=2)
    adopted = InstanceAdopted(instance=ONE, attempt=3, spec=spec, backend="ring", ranks=ranks)
    events: list[tuple[float, Event]] = [(5, adopted)]
    told = timeline(logged(*events), ONE)
    assert (told.attempt, told.outcome, told.started_ns) == (3, "ready", 5 * MS)
    assert [span.name for span in told.spans if span.end_ns is None] == []
    events += [(9, InstanceDeleting(instance=ONE, attempt=3)), (12, rank_event("gone", 1, attempt=3))]
    assert brief(timeline(logged(*events), ONE), 1)[-2:] == [("running", 0, 4, None, 0), ("stopping", 4, 7, None, 0)]


def test_an_attempt_that_is_ended_on_purpose_stops() -> None:
    ending = AttemptEnding(instance=ONE, attempt=1, reason="node a is being drained")
    told = timeline(logged(*GOOD, (300, ending), (320, rank_event("gone", 0)), (330, rank_event("gone", 1))), ONE)
    assert (told.outcome, told.failure) == ("ending", None)
    assert [item[:3] for item in brief(told, 0)[-2:]] == [("running", 203, 300), ("stopping", 300, 320)]
    assert brief(told, -1)[-1] == ("stopping", 300, 330, "rank 1 on node b", 10)


def test_forgotten_beginning_is_no_obstacle() -> None:
    for start in range(len(GOOD)):
        told = timeline(logged(*GOOD)[start:], ONE)
        assert told.outcome == "ready"
        assert told.started_ns == round(GOOD[start][0] * MS)


@pytest.mark.parametrize(
    ("instance", "attempt", "words"),
    [(InstanceId("two"), None, "nothing of instance two"), (ONE, 7, "nothing of attempt 7 of instance one")],
)
def test_nothing_there_is_said(instance: InstanceId, attempt: int | None, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        timeline(logged(*GOOD), instance, attempt)


_STEPS: list[Step] = ["prepared", "listening", "connected", "loaded", "ready", "failed", "gone"]
_steps = st.tuples(st.sampled_from(_STEPS), st.integers(0, 2))


@st.composite
def envelopes(draw: st.DrawFn) -> list[Envelope]:
    """Any order of events, also ones that cannot happen."""
    events: list[Event] = [rank_event(step, rank) for step, rank in draw(st.lists(_steps, max_size=25))]
    extra: list[Event] = [
        created(3, draw(st.sampled_from([MODEL, ScriptWorkload(path="s")]))),
        READY,
        InstanceFailed(instance=ONE, attempt=1, failure=failure(1)),
        InstanceDeleting(instance=ONE, attempt=1),
        InstanceDeleted(instance=ONE, attempt=1),
        AttemptEnding(instance=ONE, attempt=1, reason="drained"),
        NodeLost(node=NAMES[0], boot=BOOT, reason="left"),
    ]
    for event in draw(st.lists(st.sampled_from(extra), max_size=4)):
        events.insert(draw(st.integers(0, len(events))), event)
    times = sorted(draw(st.lists(st.integers(0, 50), min_size=len(events), max_size=len(events))))
    found = [envelope(n, event, time_ns=at) for n, (event, at) in enumerate(zip(events, times, strict=True), start=1)]
    happened = draw(st.lists(st.integers(0, 60), min_size=len(events), max_size=len(events)))
    causes = draw(st.lists(st.integers(0, len(events)), min_size=len(events), max_size=len(events)))
    return [
        msgspec.structs.replace(
            item,
            cause=cause,
            report=ReportId(node=event.node, boot=event.boot, n=item.sequence, happened_ns=at),
        )
        if isinstance(event, RankFact)
        else item
        for item, event, at, cause in zip(found, events, happened, causes, strict=True)
    ]


@given(envelopes())
@settings(max_examples=150, deadline=None)
def test_phases_of_a_rank_never_overlap(found: list[Envelope]) -> None:
    try:
        told = timeline(found, ONE)
    except RequestError:
        return
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=Timeline) == told
    for rank in {span.rank for span in told.spans}:
        spans: list[Span] = [span for span in told.spans if span.rank == rank]
        for span in spans:
            assert told.started_ns <= span.start_ns <= told.ended_ns
            assert span.end_ns is None or span.start_ns <= span.end_ns <= told.ended_ns
            assert (span.waited_for is None) <= (span.waited_ns == 0)
            assert 0 <= span.delay_ns <= 50
        if rank >= 0:
            for before, after in pairwise(spans):
                assert before.end_ns is not None
                assert after.name == "stopping" or before.end_ns == after.start_ns - after.waited_ns
                assert before.end_ns <= after.start_ns
