"""The fold of events into the state."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stories import BOOT, NAMES, ONE, Step, assignments, created, envelope, failure, info, rank_event

from muster.events import (
    AttemptStarted,
    CoordinatorStarted,
    Envelope,
    Event,
    InstanceDeleted,
    InstanceDeleting,
    InstanceFailed,
    InstanceFinished,
    InstanceReady,
    NodeJoined,
    NodeLost,
    ReportId,
    encode_event,
)
from muster.fold import FAILURES_KEPT, apply
from muster.spec import BootId, InstanceId, ScriptWorkload
from muster.state import (
    Assigned,
    Broken,
    Deleting,
    Failed,
    Finished,
    Gone,
    Instance,
    Ready,
    Running,
    Starting,
    State,
    all_gone,
    status_name,
    wants_ranks,
)

OTHER = BootId("other")


def after(*events: Event, state: State | None = None) -> State:
    state = state or State()
    for event in events:
        state = apply(state, envelope(state.sequence + 1, event, time_ns=state.sequence + 1))
    return state


def only(state: State) -> Instance:
    (instance,) = state.instances.values()
    return instance


def rest(state: State) -> State:
    """The state without its sequence."""
    return msgspec.structs.replace(state, sequence=0)


# --- any events in any order ----------------------------------------------------------------------------------

_STEPS: list[Step] = ["prepared", "listening", "connected", "loaded", "ready", "failed", "gone"]
_attempts = st.integers(1, 3)
_boots = st.sampled_from([BOOT, OTHER])
_instances = st.sampled_from([ONE, InstanceId("two")])
_rank_events = st.builds(
    rank_event, st.sampled_from(_STEPS), st.integers(0, 2), attempt=_attempts, boot=_boots, instance=_instances
)
_events: st.SearchStrategy[Event] = st.one_of(
    _rank_events,
    _rank_events,
    st.builds(created, st.integers(1, 3), instance=_instances),
    st.builds(
        AttemptStarted,
        instance=_instances,
        attempt=_attempts,
        assignments=st.builds(assignments, st.integers(1, 3), _boots),
        backend=st.just("ring"),
    ),
    st.builds(InstanceReady, instance=_instances, attempt=_attempts),
    st.builds(InstanceFailed, instance=_instances, attempt=_attempts, failure=st.builds(failure, st.integers(0, 2))),
    st.builds(InstanceFinished, instance=_instances, attempt=_attempts),
    st.builds(InstanceDeleting, instance=_instances, attempt=_attempts, drain_seconds=st.sampled_from((0.0, 10.0))),
    st.builds(InstanceDeleted, instance=_instances, attempt=_attempts),
    st.builds(NodeJoined, info=st.builds(info, st.sampled_from(NAMES), _boots)),
    st.builds(NodeLost, node=st.sampled_from(NAMES), boot=_boots, reason=st.just("left")),
    st.builds(CoordinatorStarted, epoch=st.just("e"), boot=_boots, version=st.just("1")),
)
_histories = st.lists(_events, max_size=40)


@given(_histories)
@settings(deadline=None)
def test_state_goes_through_msgpack_unchanged_at_any_point(history: list[Event]) -> None:
    state = State()
    for event in history:
        before = msgspec.msgpack.encode(state)
        following = after(event, state=state)
        assert msgspec.msgpack.encode(state) == before, "the state before is left as it was"
        assert following.sequence == state.sequence + 1
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(following), type=State) == following
        state = following


@given(_histories)
@settings(deadline=None)
def test_ranks_are_in_order_and_gone_stays_gone(history: list[Event]) -> None:
    state = State()
    for event in history:
        before, state = state, after(event, state=state)
        for instance in state.instances.values():
            assert [rank.rank for rank in instance.ranks] == list(range(len(instance.ranks)))
            assert len(instance.failures) <= FAILURES_KEPT
            earlier = before.instances.get(instance.id)
            if earlier is None or earlier.caused_by != instance.caused_by:
                continue
            for was, now in zip(earlier.ranks, instance.ranks, strict=True):
                assert not isinstance(was.state, Gone) or was == now
                assert not isinstance(was.state, Failed) or isinstance(now.state, Failed | Gone)


@given(_histories, st.sampled_from(_STEPS), st.integers(0, 2), st.sampled_from(["attempt", "boot", "node", "rank"]))
@settings(deadline=None)
def test_stale_rank_event_changes_nothing_but_the_sequence(
    history: list[Event], step: Step, rank: int, change: str
) -> None:
    state = after(*history, created(3))
    good = rank_event(step, rank)
    assert rest(after(good, state=state)) != rest(state)
    stale = {"attempt": 2, "boot": OTHER, "node": "elsewhere", "rank": 99}
    assert rest(after(msgspec.structs.replace(good, **{change: stale[change]}), state=state)) == rest(state)
    gone = msgspec.structs.replace(good, instance=InstanceId("never"))
    assert rest(after(gone, state=state)) == rest(state)


@given(_histories, st.sampled_from(_STEPS), st.integers(0, 2))
@settings(deadline=None)
def test_event_of_a_gone_rank_changes_nothing(history: list[Event], step: Step, rank: int) -> None:
    state = after(created(3), *history)
    instance = state.instances.get(ONE)
    if instance is None or rank >= len(instance.ranks):
        return
    boot = BootId(instance.ranks[rank].boot)
    state = after(rank_event("gone", rank, attempt=instance.attempt, boot=boot), state=state)
    assert isinstance(state.instances[ONE].ranks[rank].state, Gone)
    late = rank_event(step, rank, attempt=instance.attempt, boot=boot)
    assert rest(after(late, state=state)) == rest(state)


@given(_histories, st.integers(-3, 100))
@settings(deadline=None)
def test_gap_in_the_sequence_is_refused(history: list[Event], offset: int) -> None:
    state = after(*history)
    if offset == 1:
        return
    with pytest.raises(ValueError, match=f"event {state.sequence + offset} does not follow {state.sequence}"):
        apply(state, envelope(state.sequence + offset, created()))


@given(_histories)
@settings(deadline=None)
def test_unknown_kind_changes_nothing_but_the_sequence(history: list[Event]) -> None:
    state = after(*history)
    body = msgspec.Raw(msgspec.msgpack.encode({"type": "rank.teleported", "instance": "one", "attempt": 1}))
    item = Envelope(sequence=state.sequence + 1, time_ns=1, origin=NAMES[0], cause=0, body=body)
    assert rest(apply(state, item)) == rest(state)


@given(_histories, st.sampled_from(NAMES))
@settings(deadline=None)
def test_no_rank_outlives_its_node(history: list[Event], node: str) -> None:
    state = after(*history)
    for name, known in state.nodes.items():
        if name == node and known.lost is None:
            state = after(NodeLost(node=name, boot=known.info.boot, reason="lease ran out"), state=state)
            assert state.nodes[name].lost == "lease ran out"
            for instance in state.instances.values():
                for rank in instance.ranks:
                    on_it = (rank.node, rank.boot) == (name, known.info.boot)
                    assert not on_it or isinstance(rank.state, Gone)


# --- one story after another ----------------------------------------------------------------------------------


def test_instance_comes_up_and_goes() -> None:
    steps: tuple[Step, ...] = ("prepared", "listening", "connected", "loaded", "ready")
    state = after(created(2))
    assert isinstance(only(state).status, Starting)
    for step in steps:
        state = after(rank_event(step, 0), rank_event(step, 1), state=state)
        assert [status_name(rank.state) for rank in only(state).ranks] == [step, step]
    rank = only(state).ranks[0]
    assert (rank.pid, rank.process_started, rank.layers, rank.since_ns) == (7, 1.5, (0, 2), state.sequence - 1)
    state = after(InstanceReady(instance=ONE, attempt=1), state=state)
    assert isinstance(only(state).status, Running)
    assert wants_ranks(only(state))
    state = after(InstanceDeleting(instance=ONE, attempt=1, drain_seconds=10.0), state=state)
    assert only(state).status == Deleting(10.0)
    state = after(InstanceDeleting(instance=ONE, attempt=1), state=state)
    assert only(state).status == Deleting(0.0)
    assert not wants_ranks(only(state))
    state = after(rank_event("gone", 0), rank_event("gone", 1), state=state)
    assert all_gone(only(state))
    assert after(InstanceDeleted(instance=ONE, attempt=1), state=state).instances == {}


def test_script_finishes() -> None:
    state = after(created(1, ScriptWorkload(path="s.py")), rank_event("ready", 0), rank_event("gone", 0))
    assert isinstance(only(after(InstanceFinished(instance=ONE, attempt=1), state=state)).status, Finished)


def test_failed_rank_keeps_its_reason_when_it_is_gone_and_is_not_brought_back() -> None:
    state = after(created(2), rank_event("failed", 0), rank_event("ready", 0))
    assert only(state).ranks[0].state == Failed(failure(0))
    assert only(after(rank_event("gone", 0), state=state)).ranks[0].state == Gone(-9, failure(0))


def test_next_attempt_starts_afresh_and_ignores_the_one_before() -> None:
    failed = InstanceFailed(instance=ONE, attempt=1, failure=failure(1), retry_at_ns=5)
    second = AttemptStarted(instance=ONE, attempt=2, assignments=assignments(2, OTHER), backend="ring")
    state = after(created(2), rank_event("ready", 0), failed)
    assert only(state).status == Broken(failure(1), 5)
    state = after(second, state=state)
    instance = only(state)
    assert (instance.attempt, instance.failed_attempts, instance.failures) == (2, 1, (failure(1),))
    assert [rank.state for rank in instance.ranks] == [Assigned(), Assigned()]
    late = (failed, second, rank_event("ready", 0), InstanceReady(instance=ONE, attempt=1))
    assert rest(after(*late, state=state)) == rest(state)
    state = after(rank_event("ready", 0, attempt=2, boot=OTHER), state=state)
    assert only(state).ranks[0].state == Ready()


def test_lost_node_fails_its_ranks_with_the_cause() -> None:
    state = after(NodeJoined(info=info(NAMES[0])), NodeJoined(info=info(NAMES[1])), created(2), rank_event("ready", 0))
    wrong = NodeLost(node=NAMES[0], boot=OTHER, reason="old news")
    assert rest(after(wrong, state=state)) == rest(state)
    state = after(NodeLost(node=NAMES[0], boot=BOOT, reason="its lease ran out"), state=state)
    lost, kept = only(state).ranks
    assert isinstance(lost.state, Gone)
    assert lost.state.failure is not None
    assert (lost.state.failure.kind, lost.state.failure.rank, lost.state.failure.node) == ("node-lost", 0, NAMES[0])
    assert "its lease ran out" in lost.state.failure.message
    assert kept.state == Assigned()
    joined = after(NodeJoined(info=info(NAMES[0], OTHER)), state=state)
    assert joined.nodes[NAMES[0]].lost is None
    assert only(joined).ranks[0] == lost


def test_loss_of_a_later_boot_leaves_the_ranks_of_an_earlier_one() -> None:
    state = after(NodeJoined(info=info(NAMES[0])), created(1), NodeJoined(info=info(NAMES[0], OTHER)))
    state = after(NodeLost(node=NAMES[0], boot=OTHER, reason="left"), state=state)
    assert state.nodes[NAMES[0]].lost == "left"
    assert only(state).ranks[0].state == Assigned()


def test_reports_are_remembered_also_of_events_that_change_nothing() -> None:
    report = ReportId(node=NAMES[0], boot=BOOT, n=4)
    item = Envelope(
        sequence=1, time_ns=1, origin=NAMES[0], cause=0, body=encode_event(rank_event("ready", 0)), report=report
    )
    assert apply(State(), item).reports == {NAMES[0]: report}


def test_coordinator_names_the_epoch() -> None:
    state = after(CoordinatorStarted(epoch="e1", boot=BOOT, version="1"))
    assert (state.epoch, state.coordinator_boot) == ("e1", BOOT)
