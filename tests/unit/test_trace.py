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
    AttemptStarted,
    Envelope,
    Event,
    InstanceDeleted,
    InstanceDeleting,
    InstanceFailed,
    InstanceFinished,
    InstanceReady,
    NodeLost,
)
from muster.spec import BootId, InstanceId, Phase, ScriptWorkload
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
        NodeLost(node=NAMES[0], boot=BOOT, reason="left"),
    ]
    for event in draw(st.lists(st.sampled_from(extra), max_size=4)):
        events.insert(draw(st.integers(0, len(events))), event)
    times = sorted(draw(st.lists(st.integers(0, 50), min_size=len(events), max_size=len(events))))
    return [envelope(n, event, time_ns=at) for n, (event, at) in enumerate(zip(events, times, strict=True), start=1)]


@given(envelopes())
@settings(max_examples=150, deadline=None)
def test_phases_of_a_rank_never_overlap(story: list[Envelope]) -> None:
    try:
        told = timeline(story, ONE)
    except RequestError:
        return
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=Timeline) == told
    for rank in {span.rank for span in told.spans}:
        spans: list[Span] = [span for span in told.spans if span.rank == rank]
        for span in spans:
            assert told.started_ns <= span.start_ns <= told.ended_ns
            assert span.end_ns is None or span.start_ns <= span.end_ns <= told.ended_ns
            assert (span.waited_for is None) <= (span.waited_ns == 0)
        if rank >= 0:
            for before, after in pairwise(spans):
                assert before.end_ns is not None
                assert after.name == "stopping" or before.end_ns == after.start_ns - after.waited_ns
                assert before.end_ns <= after.start_ns
