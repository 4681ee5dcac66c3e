"""What the coordinator decides, case by case."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import msgspec
import pytest
from cluster import ECHO, ONE, A, B, C, Cluster, boot_of, failed, node_info, rank_event, script

from muster.events import (
    AttemptStarted,
    Event,
    InstanceDeleted,
    InstanceFailed,
    InstanceFinished,
    InstanceReady,
    NodeLost,
    RankConnected,
    RankFact,
    RankFailed,
    RankGone,
    RankListening,
    RankLoaded,
    RankPrepared,
    RankReady,
    kind_of,
)
from muster.lifecycle import SECOND, Observed, Settings, decide, fail, is_over, wake_ns
from muster.placement import place
from muster.spec import (
    Deadlines,
    GroupWorkload,
    InstanceId,
    InstanceSpec,
    ModelWorkload,
    Phase,
    RestartOnFailure,
)
from muster.state import Broken, Finished, Instance, Ready, Running, Starting, State

GROUP = InstanceSpec(workload=GroupWorkload(), ranks=2)
MODEL = InstanceSpec(workload=ModelWorkload(model="/m"), ranks=2)
TWICE = RestartOnFailure(maximum=2, backoff_seconds=1.0, backoff_max_seconds=60.0)


def only_failure(events: Sequence[Event]) -> InstanceFailed:
    found = [event for event in events if isinstance(event, InstanceFailed)]
    assert len(found) == 1, events
    return found[0]


# --- to ready, and to the end ---------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [GROUP, MODEL, script(2)])
def test_an_instance_is_ready_when_its_last_rank_is(spec: InstanceSpec) -> None:
    cluster = Cluster("a", "b")
    cluster.create(spec)
    events = cluster.bring_up()
    assert [kind_of(event) for event in events] == ["instance.ready"]
    assert isinstance(cluster.log[-2], RankReady)
    assert isinstance(cluster.instance().status, Running)


def test_nothing_is_decided_about_an_empty_cluster() -> None:
    state = State()
    assert decide(state, Observed(), 5, Settings()) == []
    assert wake_ns(state, Observed(), 5, Settings()) is None


def test_a_script_is_finished_when_every_rank_ended_with_zero() -> None:
    cluster = Cluster("a", "b")
    cluster.create(script(2))
    cluster.bring_up()
    assert cluster.report(RankGone, 0, exit_code=0) == []
    assert cluster.report(RankGone, 1, exit_code=0) == [InstanceFinished(instance=ONE, attempt=1)]
    assert is_over(cluster.instance())


def test_a_script_rank_that_ends_before_the_other_is_ready_counts_as_up() -> None:
    cluster = Cluster("a", "b")
    cluster.create(script(2))
    cluster.report(RankReady, 0)
    assert cluster.report(RankGone, 0, exit_code=0) == []
    assert cluster.report(RankReady, 1) == [InstanceReady(instance=ONE, attempt=1)]
    assert cluster.report(RankGone, 1, exit_code=0) == [InstanceFinished(instance=ONE, attempt=1)]


def test_a_script_that_ends_before_it_was_ever_ready_is_finished() -> None:
    cluster = Cluster("a")
    cluster.create(script(1))
    assert cluster.report(RankGone, 0, exit_code=0) == [InstanceFinished(instance=ONE, attempt=1)]


@pytest.mark.parametrize("spec", [GROUP, MODEL])
def test_only_a_script_may_end_by_itself(spec: InstanceSpec) -> None:
    cluster = Cluster("a", "b")
    cluster.create(spec)
    cluster.bring_up()
    event = only_failure(cluster.report(RankGone, 1, exit_code=0))
    assert (event.failure.kind, event.failure.rank, event.failure.node) == ("rank-exited", 1, B)


@pytest.mark.parametrize(("code", "told"), [(3, "exited with 3"), (-9, "ended by signal 9")])
def test_a_script_that_ends_otherwise_fails_with_its_code(code: int, told: str) -> None:
    cluster = Cluster("a", "b")
    cluster.create(script(2))
    cluster.bring_up()
    event = only_failure(cluster.report(RankGone, 1, exit_code=code))
    assert event.failure.exit_code == code
    assert told in event.failure.message


def test_deletion_is_over_when_the_last_process_is_gone() -> None:
    cluster = Cluster("a", "b")
    cluster.create(GROUP)
    cluster.bring_up()
    assert cluster.delete() == []
    assert cluster.report(RankGone, 0) == []
    assert cluster.report(RankGone, 1) == [InstanceDeleted(instance=ONE, attempt=1)]
    assert cluster.state.instances == {}


# --- the next attempt -----------------------------------------------------------------------------------------


def test_no_attempt_begins_before_every_rank_of_the_last_is_gone() -> None:
    cluster = Cluster("a", "b")
    cluster.create(msgspec.structs.replace(GROUP, restart=TWICE))
    only_failure(cluster.report(RankFailed, 0))
    assert cluster.advance(30) == []
    assert cluster.report(RankGone, 0) == []
    assert cluster.advance(30) == []
    assert [kind_of(event) for event in cluster.report(RankGone, 1)] == ["attempt.started"]
    assert cluster.instance().attempt == 2


def test_an_attempt_waits_for_its_backoff() -> None:
    cluster = Cluster("a", "b")
    cluster.create(msgspec.structs.replace(GROUP, restart=TWICE))
    cluster.report(RankFailed, 0)
    assert cluster.tear_down() == []
    retry_at = cluster.now_ns + SECOND
    assert wake_ns(cluster.state, cluster.observed, cluster.now_ns, cluster.settings) == retry_at
    assert cluster.advance(0.999) == []
    assert [type(event) for event in cluster.advance(0.001)] == [AttemptStarted]


def test_the_backoff_doubles_up_to_its_limit_and_the_maximum_is_kept() -> None:
    cluster = Cluster("a", "b")
    restart = RestartOnFailure(maximum=5, backoff_seconds=0.5, backoff_max_seconds=3.0)
    cluster.create(msgspec.structs.replace(GROUP, restart=restart))
    waits: list[float] = []
    for attempt in range(1, 6):
        event = only_failure(cluster.report(RankFailed, 0))
        assert event.attempt == attempt
        assert event.retry_at_ns is not None
        waits.append((event.retry_at_ns - cluster.now_ns) / SECOND)
        cluster.tear_down()
        cluster.advance(3)
    assert waits == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert only_failure(cluster.report(RankFailed, 0)).retry_at_ns is None
    cluster.tear_down()
    assert cluster.advance(600) == []
    assert is_over(cluster.instance())


def test_what_came_from_outside_is_waited_for_longer() -> None:
    cluster = Cluster("a", "b")
    cluster.create(msgspec.structs.replace(MODEL, restart=RestartOnFailure()))
    waits: list[float] = []
    for _ in range(5):
        event = only_failure(cluster.report(RankFailed, 0, failure=failed("model-unavailable")))
        assert event.retry_at_ns is not None
        waits.append((event.retry_at_ns - cluster.now_ns) / SECOND)
        cluster.tear_down()
        cluster.advance(30)
    assert waits == [2.0, 4.0, 8.0, 16.0, 30.0]


def test_a_huge_number_of_attempts_does_not_overflow_the_backoff() -> None:
    cluster = Cluster("a", "b")
    restart = RestartOnFailure(maximum=10_000, backoff_seconds=0.5, backoff_max_seconds=3.0)
    instance = cluster.create(msgspec.structs.replace(GROUP, restart=restart))
    for count in (1_000, 5_000):
        tired = msgspec.structs.replace(instance, failed_attempts=count)
        assert fail(tired, failed(), 0).retry_at_ns == 3 * SECOND


def test_a_deterministic_failure_is_not_tried_again() -> None:
    cluster = Cluster("a", "b")
    cluster.create(msgspec.structs.replace(GROUP, restart=TWICE))
    event = only_failure(cluster.report(RankFailed, 1, failure=failed("model-invalid", retryable=False)))
    assert (event.failure.kind, event.retry_at_ns) == ("model-invalid", None)


def test_without_a_restart_policy_the_first_failure_is_the_last() -> None:
    cluster = Cluster("a", "b")
    cluster.create(GROUP)
    assert only_failure(cluster.report(RankFailed, 1)).retry_at_ns is None


def test_a_retry_without_room_waits_for_it_and_says_so_once() -> None:
    cluster = Cluster("a", "b")
    cluster.create(msgspec.structs.replace(GROUP, restart=TWICE, nodes=(A, B)))
    cluster.bring_up()
    lost = cluster.advance(5, heard=("a",))
    assert [kind_of(event) for event in lost] == ["node.lost", "instance.failed"]
    cluster.tear_down()
    event = only_failure(cluster.advance(1))
    assert (event.failure.kind, event.failure.phase) == ("placement-refused", Phase.PLACING)
    assert "node b is lost" in event.failure.message
    assert cluster.instance().failed_attempts == 1, "nothing was started: it does not count"
    for _ in range(100):
        assert cluster.advance(3, heard=("a",)) == []
    cluster.join(node_info("b", boot=2))
    assert [kind_of(event) for event in cluster.advance(0)] == ["attempt.started"]
    assert cluster.instance().ranks[1].boot == boot_of("b", 2)


def test_nobody_looks_for_room_while_nothing_is_new() -> None:
    def place(instance: Instance, state: State) -> None:
        raise AssertionError("it was looked for room")

    cluster = Cluster("a", "b")
    cluster.create(msgspec.structs.replace(GROUP, restart=TWICE, nodes=(A, B)))
    cluster.bring_up()
    cluster.advance(5, heard=("a",))
    cluster.tear_down()
    only_failure(cluster.advance(1))
    observed = msgspec.structs.replace(cluster.observed, place=place, crowded=True)
    assert decide(cluster.state, observed, cluster.now_ns + SECOND, cluster.settings) == []
    with pytest.raises(AssertionError, match="looked for room"):
        decide(
            cluster.state, msgspec.structs.replace(observed, crowded=False), cluster.now_ns + SECOND, cluster.settings
        )


@pytest.mark.parametrize(("seconds", "forgiven"), [(59, False), (60, True)])
def test_failures_are_forgiven_after_a_minute_as_ready(seconds: int, forgiven: bool) -> None:
    cluster = Cluster("a", "b")
    cluster.create(msgspec.structs.replace(GROUP, restart=TWICE))
    for _ in range(2):
        cluster.report(RankFailed, 0)
        cluster.tear_down()
        cluster.advance(4)
    assert cluster.instance().failed_attempts == 2
    cluster.bring_up()
    cluster.advance(seconds)
    event = only_failure(cluster.report(RankFailed, 0))
    assert (event.retry_at_ns is not None) == forgiven
    assert cluster.instance().failed_attempts == (1 if forgiven else 3)


def test_retries_that_are_due_together_see_what_each_other_takes() -> None:
    cluster = Cluster()
    cluster.join(node_info("a", max_ranks=4))
    cluster.join(node_info("b", max_ranks=4))
    names = [InstanceId(f"i{number}") for number in range(4)]
    for name in names:
        cluster.create(msgspec.structs.replace(GROUP, restart=TWICE), name)
        cluster.report(RankFailed, 0, name)
    cluster.tear_down()
    cluster.commit(NodeLost(node=B, boot=boot_of("b"), reason="test"))
    started = [event.instance for event in cluster.advance(1) if isinstance(event, AttemptStarted)]
    assert started == names[:2]
    assert all(isinstance(cluster.instance(name).status, Broken) for name in names[2:])


# --- blame ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(permutations([0, 1, 2])))
def test_a_primary_failure_beats_echoes_whatever_the_order(order: tuple[int, ...]) -> None:
    cluster = Cluster("a", "b", "c")
    cluster.create(msgspec.structs.replace(GROUP, ranks=3))
    cluster.bring_up()
    found: list[Event] = []
    for rank in order:
        cluster.advance(0.1)
        failure = failed("out-of-memory") if rank == 1 else ECHO
        found += cluster.report(RankFailed, rank, failure=failure)
    assert only_failure(found).failure.kind == "out-of-memory"


def test_the_first_of_two_primary_failures_is_the_cause() -> None:
    cluster = Cluster("a", "b", "c")
    cluster.create(msgspec.structs.replace(GROUP, ranks=3))
    cluster.commit(rank_event(RankFailed, cluster.instance(), 2, failure=failed("first")))
    cluster.now_ns += 1
    cluster.commit(rank_event(RankFailed, cluster.instance(), 0, failure=failed("second")))
    assert only_failure(cluster.settle()).failure.kind == "first"


def test_an_echo_alone_is_the_cause_after_a_moment() -> None:
    cluster = Cluster("a", "b")
    cluster.create(GROUP)
    cluster.bring_up()
    assert cluster.report(RankFailed, 0, failure=ECHO) == []
    assert cluster.advance(0.9) == []
    event = only_failure(cluster.advance(0.1))
    assert event.failure == ECHO


def test_a_script_whose_ranks_all_ended_with_an_echo_has_failed_and_is_not_finished() -> None:
    cluster = Cluster("a", "b")
    cluster.create(script(2))
    cluster.bring_up()
    for rank in range(2):
        assert cluster.report(RankFailed, rank, failure=ECHO) == []
        assert cluster.report(RankGone, rank, exit_code=1) == []
    assert only_failure(cluster.advance(1.0)).failure == ECHO


def test_of_ranks_that_are_late_together_the_one_at_the_lowest_step_is_behind() -> None:
    cluster = Cluster("a", "b", "c")
    cluster.create(msgspec.structs.replace(GROUP, ranks=3))
    cluster.bring_up()
    for rank, step in ((0, 42), (1, 41), (2, 42)):
        late = msgspec.structs.replace(failed("step-timeout", secondary=True), rank=rank, step=step)
        assert cluster.report(RankFailed, rank, failure=late) == []
    assert only_failure(cluster.advance(1.0)).failure.rank == 1


def test_the_failure_of_a_rank_outlives_its_process() -> None:
    cluster = Cluster("a", "b")
    cluster.create(GROUP)
    cluster.commit(rank_event(RankFailed, cluster.instance(), 0, failure=failed("first")))
    cluster.commit(rank_event(RankGone, cluster.instance(), 0, exit_code=1))
    assert only_failure(cluster.settle()).failure.kind == "first"


@pytest.mark.parametrize("last_beat_seconds_ago", [0.0, 0.02, 0.5, 0.99, 1.5, 3.0])
def test_a_node_that_fell_silent_is_the_cause_rather_than_the_echo_of_it(last_beat_seconds_ago: float) -> None:
    """Its worker was killed: the echo comes at once, and the lease runs out only seconds later."""
    cluster = Cluster("a", "b")
    cluster.create(GROUP)
    cluster.bring_up()
    cluster.advance(last_beat_seconds_ago, heard=("a",))
    found: list[Event] = list(cluster.report(RankFailed, 0, failure=ECHO))
    for _ in range(60):
        found += cluster.advance(0.1, heard=("a",))
    assert [kind_of(event) for event in found][-2:] == ["node.lost", "instance.failed"]
    failure = only_failure(found).failure
    assert (failure.kind, failure.rank, failure.node) == ("node-lost", 1, B)


def test_an_echo_waits_for_the_silent_node_only() -> None:
    cluster = Cluster("a", "b", "c")
    cluster.create(msgspec.structs.replace(GROUP, ranks=3))
    cluster.bring_up()
    assert cluster.report(RankFailed, 0, failure=ECHO) == []
    assert cluster.advance(1.1, heard=("a", "b")) == [], "c was not heard since"
    assert only_failure(cluster.advance(0.1, heard=("a", "b", "c"))).failure == ECHO


def test_a_lost_node_fails_every_instance_that_had_a_rank_there() -> None:
    cluster = Cluster("a", "b", "c")
    for name, nodes in (("ab", (A, B)), ("bc", (B, C)), ("ac", (A, C))):
        cluster.create(msgspec.structs.replace(GROUP, nodes=nodes), InstanceId(name))
    events = cluster.advance(5, heard=("a", "c"))
    assert [getattr(event, "instance", None) for event in events] == [None, "ab", "bc"]
    assert isinstance(cluster.instance(InstanceId("ac")).status, Starting)


def test_a_lost_node_is_lost_once_and_not_again() -> None:
    cluster = Cluster("a", "b")
    (event,) = cluster.advance(5, heard=("a",))
    assert isinstance(event, NodeLost)
    assert (event.node, event.boot) == (B, boot_of("b"))
    assert "5.0 s" in event.reason
    assert cluster.advance(500, heard=("a",)) == []


# --- deadlines ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reached", "phase"),
    [
        ([], Phase.PREPARING),
        ([RankPrepared], Phase.FORMING),
        ([RankPrepared, RankListening], Phase.FORMING),
        ([RankPrepared, RankConnected], Phase.LOADING),
        ([RankPrepared, RankConnected, RankLoaded], Phase.WARMING),
    ],
)
def test_a_worker_that_does_not_keep_its_deadlines_is_overruled(reached: list[type[RankFact]], phase: Phase) -> None:
    cluster = Cluster("a", "b")
    cluster.create(MODEL)
    for kind in reached:
        cluster.report(kind, 0)
        cluster.report(kind, 1)
    seconds = Deadlines().of(phase)
    assert seconds is not None
    assert cluster.advance(seconds + 4.9) == []
    event = only_failure(cluster.advance(0.1))
    assert (event.failure.kind, event.failure.phase, event.failure.rank) == ("deadline-passed", phase, 0)
    assert event.failure.retryable


def test_the_rank_that_the_others_wait_for_is_the_late_one() -> None:
    cluster = Cluster("a", "b")
    cluster.create(MODEL)
    for kind in (RankPrepared, RankConnected, RankLoaded, RankReady):
        cluster.report(kind, 0)
    event = only_failure(cluster.advance(65))
    assert (event.failure.rank, event.failure.phase) == (1, Phase.PREPARING)


def test_progress_moves_the_deadline_of_loading() -> None:
    cluster = Cluster("a")
    cluster.create(msgspec.structs.replace(MODEL, ranks=1))
    for kind in (RankPrepared, RankConnected):
        cluster.report(kind, 0)
    for _ in range(5):
        assert cluster.advance(200) == []
        cluster.progress_ns[ONE, 1, 0] = cluster.now_ns
    assert cluster.advance(304) == []
    assert only_failure(cluster.advance(1)).failure.phase is Phase.LOADING


def test_a_phase_begins_when_the_last_rank_reached_it() -> None:
    cluster = Cluster("a", "b")
    cluster.create(MODEL)
    for kind in (RankPrepared, RankConnected):
        cluster.report(kind, 0)
        cluster.report(kind, 1)
    cluster.report(RankLoaded, 0)
    cluster.advance(250)
    cluster.report(RankLoaded, 1)
    assert cluster.advance(64) == [], "rank 0 could not warm up before rank 1 had loaded"
    assert only_failure(cluster.advance(1)).failure.phase is Phase.WARMING


def test_a_ready_instance_has_no_deadline() -> None:
    cluster = Cluster("a", "b")
    cluster.create(GROUP)
    cluster.bring_up()
    assert cluster.advance(1e6) == []


# --- when to wake ---------------------------------------------------------------------------------------------


def test_wake_is_the_soonest_of_lease_deadline_and_retry() -> None:
    cluster = Cluster("a", "b", settings=Settings(lease_seconds=1000.0))
    cluster.create(MODEL)
    now = cluster.now_ns
    assert wake_ns(cluster.state, cluster.observed, now, cluster.settings) == now + 65 * SECOND
    cluster.report(RankFailed, 0, failure=ECHO)
    cluster.beat("a", "b")
    cluster.advance(0.5)
    assert wake_ns(cluster.state, cluster.observed, cluster.now_ns, cluster.settings) == now + SECOND
    idle = Cluster("a", settings=Settings(lease_seconds=7.0))
    assert wake_ns(idle.state, idle.observed, idle.now_ns, idle.settings) == idle.now_ns + 7 * SECOND // 2


def test_wake_is_never_now_also_when_what_is_due_cannot_be_logged() -> None:
    cluster = Cluster("a")
    late = cluster.now_ns + 60 * SECOND
    assert decide(cluster.state, cluster.observed, late, cluster.settings)
    wake = wake_ns(cluster.state, cluster.observed, late, cluster.settings)
    assert wake is not None
    assert late < wake <= late + SECOND


# --- what ended -----------------------------------------------------------------------------------------------


def test_ended_instances_are_kept_for_their_time_and_wake_tells_when() -> None:
    cluster = Cluster(settings=Settings(ended_seconds=100.0))
    cluster.join(node_info("a"))
    cluster.create(script(1))
    cluster.report(RankGone, 0, exit_code=0)
    cluster.commit(NodeLost(node=A, boot=boot_of("a"), reason="test"))
    assert wake_ns(cluster.state, cluster.observed, cluster.now_ns, cluster.settings) == cluster.now_ns + 100 * SECOND
    assert cluster.advance(99.9) == []
    assert isinstance(cluster.instance().status, Finished)
    assert cluster.advance(0.1) == [InstanceDeleted(instance=ONE, attempt=1)]


def test_of_too_many_ended_instances_the_oldest_go() -> None:
    cluster = Cluster("a", settings=Settings(ended_kept=2))
    for number in range(5):
        cluster.create(script(1), InstanceId(f"i{number}"))
        cluster.advance(1)
        cluster.report(RankGone, 0, InstanceId(f"i{number}"), exit_code=0)
    assert sorted(cluster.state.instances) == ["i3", "i4"]


def test_an_instance_that_failed_for_good_but_still_has_a_process_stays() -> None:
    cluster = Cluster("a", "b", settings=Settings(ended_seconds=1.0))
    cluster.create(GROUP)
    cluster.report(RankFailed, 0)
    cluster.report(RankGone, 0)
    assert cluster.advance(100) == []
    assert not is_over(cluster.instance())
    assert cluster.report(RankGone, 1) == [InstanceDeleted(instance=ONE, attempt=1)]


# --- stale events ---------------------------------------------------------------------------------------------


def test_a_stale_event_changes_nothing_and_decides_nothing() -> None:
    cluster = Cluster("a", "b")
    cluster.create(msgspec.structs.replace(GROUP, restart=TWICE))
    first = cluster.instance()
    cluster.report(RankFailed, 0)
    cluster.tear_down()
    cluster.advance(1)
    cluster.bring_up()
    assert cluster.instance().attempt == 2
    before = cluster.state
    for kind in (RankPrepared, RankListening, RankConnected, RankLoaded, RankReady, RankFailed, RankGone):
        cluster.commit(rank_event(kind, first, 0))
        assert cluster.settle() == []
        assert msgspec.structs.replace(cluster.state, sequence=before.sequence) == before


def test_an_event_of_an_earlier_boot_of_the_node_changes_nothing() -> None:
    cluster = Cluster("a", "b")
    cluster.create(GROUP)
    old = cluster.instance()
    cluster.commit(NodeLost(node=B, boot=boot_of("b"), reason="its worker was started again"))
    cluster.join(node_info("b", boot=2))
    cluster.settle()
    before = cluster.instance()
    cluster.commit(rank_event(RankReady, old, 1))
    assert cluster.settle() == []
    assert cluster.instance() == before


def test_a_rank_that_became_ready_again_is_a_rank_of_this_attempt() -> None:
    cluster = Cluster("a", "b")
    cluster.create(msgspec.structs.replace(GROUP, restart=TWICE))
    cluster.report(RankFailed, 1)
    cluster.tear_down()
    cluster.advance(1)
    assert [kind_of(event) for event in cluster.bring_up()] == ["instance.ready"]
    assert all(isinstance(rank.state, Ready) for rank in cluster.instance().ranks)
    assert place(GROUP, cluster.state).backend == "ring"
