"""What the coordinator decides about nodes: suspect, lost, set aside, drained, and what that means for instances."""

from __future__ import annotations

import msgspec
import pytest
from cluster import ECHO, ONE, A, B, C, Cluster, boot_of, failed, node_info, script

from muster.errors import PlacementError
from muster.events import (
    AttemptEnding,
    AttemptStarted,
    Event,
    InstanceFailed,
    InstanceRetried,
    NodeDraining,
    NodeHeard,
    NodeLost,
    NodeResumed,
    NodeSetAside,
    NodeSuspected,
    RankFailed,
    RankGone,
    kind_of,
)
from muster.lifecycle import SECOND, Settings
from muster.placement import place
from muster.spec import Failure, GroupWorkload, InstanceId, InstanceSpec, ModelWorkload, NodeId, Phase, RestartOnFailure
from muster.state import Aside, Broken, Draining, Ending, Running, Serving

AGAIN = RestartOnFailure(maximum=5, backoff_seconds=0.0)
GROUP = InstanceSpec(workload=GroupWorkload(), ranks=2, restart=AGAIN)
MODEL = InstanceSpec(workload=ModelWorkload(model="/m"), ranks=1, restart=AGAIN)


def kinds(events: list[Event]) -> list[str]:
    return [kind_of(event) for event in events]


def killed(cluster: Cluster, rank: int, instance: InstanceId = ONE) -> list[Event]:
    """A runner is killed, its worker says so, and all are torn down."""
    node = cluster.instance(instance).ranks[rank].node
    failure = msgspec.structs.replace(failed(), rank=rank, node=node)
    return [*cluster.report(RankFailed, rank, instance, failure=failure), *cluster.tear_down()]


def fail_on(cluster: Cluster, node: NodeId, times: int) -> list[Event]:
    """Blame the node so many times, whichever rank is there."""
    events: list[Event] = []
    for _ in range(times):
        (rank,) = [rank.rank for rank in cluster.instance().ranks if rank.node == node]
        events += killed(cluster, rank)
    return events


# --- suspect and lost -----------------------------------------------------------------------------------------


def test_a_late_node_is_suspect_gets_nothing_new_and_is_trusted_again_when_heard() -> None:
    cluster = Cluster("a", "b")
    assert cluster.advance(2.4, heard=("a",)) == []
    assert kinds(cluster.advance(0.2, heard=("a",))) == ["node.suspected"]
    assert "2.6 s" in (cluster.state.nodes[B].suspect or "")
    placed = place(msgspec.structs.replace(GROUP, memory_bytes=0), cluster.state)
    assert {item.node for item in placed.assignments} == {A}
    assert kinds(cluster.advance(0.1)) == ["node.heard"]
    assert cluster.state.nodes[B].suspect is None
    assert isinstance(cluster.log[-1], NodeHeard)


def test_a_suspect_node_keeps_what_it_has_and_is_lost_after_its_lease() -> None:
    cluster = Cluster("a", "b", "c")
    cluster.create(GROUP)
    cluster.bring_up()
    assert isinstance(cluster.advance(3.0, heard=("a", "c"))[0], NodeSuspected)
    assert isinstance(cluster.instance().status, Running)
    events = cluster.advance(2.0, heard=("a", "c"))
    assert kinds(events) == ["node.lost", "instance.failed"]
    assert cluster.state.nodes[B].suspect is None


def test_an_instance_of_a_lost_node_is_placed_on_what_is_left_and_does_not_go_back_by_itself() -> None:
    cluster = Cluster("a", "b", "c")
    cluster.create(GROUP)
    cluster.bring_up()
    cluster.advance(6.0, heard=("a", "c"))
    cluster.tear_down()
    cluster.advance(0.3, heard=("a", "c"))
    assert {rank.node for rank in cluster.instance().ranks} == {A, C}
    cluster.bring_up()
    cluster.join(node_info("b", boot=2))
    assert cluster.advance(1.0) == []
    assert {rank.node for rank in cluster.instance().ranks} == {A, C}


# --- budgets --------------------------------------------------------------------------------------------------


def test_a_siblings_fault_does_not_burn_another_ranks_budget() -> None:
    spec = msgspec.structs.replace(GROUP, nodes=(A, B), restart=RestartOnFailure(maximum=2, backoff_seconds=0.0))
    cluster = Cluster("a", "b")
    cluster.create(spec)
    for rank in (0, 1, 0, 1):
        events = killed(cluster, rank)
        assert "attempt.started" in kinds(events)
    assert cluster.instance().blamed == {0: 2, 1: 2}
    (last,) = [event for event in killed(cluster, 0) if isinstance(event, InstanceFailed)]
    assert last.retry_at_ns is None


def test_a_retry_by_the_operator_has_the_whole_budget_again() -> None:
    cluster = Cluster("a", "b")
    cluster.create(msgspec.structs.replace(GROUP, restart=RestartOnFailure(maximum=1, backoff_seconds=0.0)))
    killed(cluster, 0)
    killed(cluster, 0)
    status = cluster.instance().status
    assert isinstance(status, Broken)
    assert status.retry_at_ns is None
    cluster.commit(InstanceRetried(instance=ONE, attempt=2))
    assert kinds(cluster.settle()) == ["attempt.started"]
    assert cluster.instance().blamed == {}
    assert cluster.instance().attempt == 3


def test_the_wait_grows_with_every_failed_attempt_whoever_is_to_blame() -> None:
    cluster = Cluster("a", "b")
    restart = RestartOnFailure(maximum=3, backoff_seconds=1.0, backoff_max_seconds=60.0)
    cluster.create(msgspec.structs.replace(GROUP, restart=restart))
    waits: list[int] = []
    for rank in (0, 1, 0):
        (failure,) = [event for event in killed(cluster, rank) if isinstance(event, InstanceFailed)]
        assert failure.retry_at_ns is not None
        waits.append((failure.retry_at_ns - cluster.now_ns) // SECOND)
        cluster.advance(waits[-1])
    assert waits == [1, 2, 4]


# --- set aside ------------------------------------------------------------------------------------------------


def test_a_node_that_keeps_failing_is_set_aside_tried_again_and_set_aside_for_longer() -> None:
    cluster = Cluster("a", "b", "c")
    cluster.create(GROUP)
    events = fail_on(cluster, B, 3)
    (aside,) = [event for event in events if isinstance(event, NodeSetAside)]
    assert aside.node == B
    assert "3 failure(s) in 10 minutes" in aside.reason
    assert "rank-killed" in aside.reason
    assert {rank.node for rank in cluster.instance().ranks} == {A, C}, "the attempt after that is elsewhere"
    cluster.bring_up()
    assert cluster.advance(59.0) == []
    (resumed,) = cluster.advance(1.0)
    assert isinstance(resumed, NodeResumed)
    assert resumed.trial
    cluster.commit(NodeDraining(node=C))
    cluster.settle()
    cluster.tear_down()
    assert {rank.node for rank in cluster.instance().ranks} == {A, B}
    (again,) = [event for event in fail_on(cluster, B, 1) if isinstance(event, NodeSetAside)]
    assert again.until_ns == cluster.now_ns + 120 * SECOND


def test_the_last_node_that_takes_instances_is_not_set_aside() -> None:
    cluster = Cluster("a")
    cluster.create(msgspec.structs.replace(MODEL, restart=RestartOnFailure(maximum=9, backoff_seconds=0.0)))
    assert not any(isinstance(event, NodeSetAside) for event in fail_on(cluster, A, 6))


def test_of_nodes_that_all_fail_one_is_left() -> None:
    cluster = Cluster("a", "b")
    cluster.create(msgspec.structs.replace(GROUP, restart=RestartOnFailure(maximum=9, backoff_seconds=0.0)))
    for name in ("a", "b"):
        node = msgspec.structs.replace(cluster.state.nodes[NodeId(name)], faults_ns=(cluster.now_ns,) * 3)
        nodes = {**cluster.state.nodes, NodeId(name): node}
        cluster.state = msgspec.structs.replace(cluster.state, nodes=nodes)
    assert kinds(cluster.settle()) == ["node.set-aside"]
    assert [isinstance(node.duty, Aside) for node in cluster.state.nodes.values()] == [True, False]


@pytest.mark.parametrize(
    "failure",
    [
        failed("script-failed"),
        ECHO,
        failed("model-incomplete", retryable=False),
        msgspec.structs.replace(failed(), phase=Phase.PLACING, node=NodeId("")),
    ],
)
def test_what_is_not_the_nodes_fault_is_not_counted(failure: Failure) -> None:
    cluster = Cluster("a", "b")
    cluster.create(GROUP)
    named = failure if failure.phase is Phase.PLACING else msgspec.structs.replace(failure, rank=1, node=B)
    cluster.commit(InstanceFailed(instance=ONE, attempt=1, failure=named))
    assert cluster.state.nodes[B].faults_ns == ()


def test_old_faults_and_those_before_a_settled_run_do_not_count() -> None:
    cluster = Cluster("a", "b")
    cluster.create(GROUP)
    fail_on(cluster, B, 2)
    cluster.bring_up()
    cluster.advance(61.0)
    assert not any(isinstance(event, NodeSetAside) for event in fail_on(cluster, B, 1))
    assert len(cluster.state.nodes[B].faults_ns) == 1


def test_a_node_that_was_named_is_used_though_it_was_set_aside_for_failures() -> None:
    cluster = Cluster("a", "b")
    cluster.create(msgspec.structs.replace(GROUP, nodes=(A, B)))
    events = fail_on(cluster, B, 3)
    assert any(isinstance(event, NodeSetAside) for event in events)
    assert {rank.node for rank in cluster.instance().ranks} == {A, B}


def test_what_could_not_be_ended_sets_the_node_aside_until_it_is_clean_and_the_instance_goes_on_elsewhere() -> None:
    cluster = Cluster("a", "b", "c")
    cluster.create(GROUP)
    failure = msgspec.structs.replace(failed(), rank=1, node=B)
    cluster.report(RankFailed, 1, failure=failure)
    cluster.report(RankGone, 0, exit_code=-15)
    events = cluster.report(RankGone, 1, left="runner 17 does not end", remedy="Reboot.")
    assert cluster.state.nodes[B].duty == Aside("runner 17 does not end", "Reboot.")
    assert kinds(events) == ["attempt.started"]
    assert {rank.node for rank in cluster.instance().ranks} == {A, C}
    with pytest.raises(PlacementError, match="set aside: runner 17"):
        place(msgspec.structs.replace(GROUP, nodes=(A, B)), cluster.state)
    cluster.advance(10_000.0)
    assert isinstance(cluster.state.nodes[B].duty, Aside)
    cluster.commit(NodeResumed(node=B, reason="clean"))
    assert isinstance(cluster.state.nodes[B].duty, Serving)


def test_a_new_boot_of_the_worker_wipes_its_faults_but_not_the_operators_wish() -> None:
    cluster = Cluster("a", "b", "c")
    cluster.commit(NodeSetAside(node=B, boot=boot_of("b"), reason="x", until_ns=None))
    cluster.commit(NodeDraining(node=C))
    for name in ("b", "c"):
        cluster.commit(NodeLost(node=NodeId(name), boot=boot_of(name), reason="its worker was started again"))
        cluster.join(node_info(name, boot=2))
    assert isinstance(cluster.state.nodes[B].duty, Serving)
    assert isinstance(cluster.state.nodes[C].duty, Draining)


def test_an_event_about_an_earlier_boot_of_a_node_changes_nothing() -> None:
    cluster = Cluster("a")
    cluster.join(node_info("a", boot=2))
    before = cluster.state.nodes[A]
    cluster.commit(NodeSetAside(node=A, boot=boot_of("a", 1), reason="old"))
    cluster.commit(NodeSuspected(node=A, boot=boot_of("a", 1), reason="old"))
    assert cluster.state.nodes[A] == before


# --- drain ----------------------------------------------------------------------------------------------------


def test_a_drained_node_gives_its_model_away_once_its_requests_are_done() -> None:
    cluster = Cluster("a", "b")
    cluster.create(MODEL)
    cluster.bring_up()
    old = cluster.instance().ranks[0].node
    cluster.commit(NodeDraining(node=old))
    (ending,) = cluster.settle()
    assert isinstance(ending, AttemptEnding)
    assert ending.drain_seconds == MODEL.deadlines.drain_seconds
    assert isinstance(cluster.instance().status, Ending)
    assert cluster.advance(1.0) == [], "the next attempt waits for the processes of this one"
    (started,) = cluster.tear_down()
    assert isinstance(started, AttemptStarted)
    assert cluster.instance().ranks[0].node != old
    assert cluster.instance().failed_attempts == 0


def test_a_drained_instance_that_fits_nowhere_waits_for_a_place_and_says_so_once() -> None:
    cluster = Cluster("a")
    cluster.create(MODEL)
    cluster.bring_up()
    cluster.commit(NodeDraining(node=A))
    cluster.settle()
    (waits,) = cluster.tear_down()
    assert isinstance(waits, InstanceFailed)
    assert "is being drained" in waits.failure.message
    assert cluster.advance(100.0) == []
    cluster.commit(NodeResumed(node=A))
    assert kinds(cluster.settle()) == ["attempt.started"]


def test_a_script_is_left_to_its_end_unless_it_must_go_now() -> None:
    cluster = Cluster("a", "b")
    cluster.create(script(1, restart=AGAIN))
    cluster.bring_up()
    old = cluster.instance().ranks[0].node
    cluster.commit(NodeDraining(node=old))
    assert cluster.settle() == []
    cluster.commit(NodeDraining(node=old, now=True))
    assert kinds(cluster.settle()) == ["attempt.ending"]


def test_a_node_that_is_drained_is_refused_by_name() -> None:
    cluster = Cluster("a", "b")
    cluster.commit(NodeDraining(node=A))
    with pytest.raises(PlacementError, match="node a is being drained"):
        place(msgspec.structs.replace(GROUP, nodes=(A, B)), cluster.state)
    cluster.commit(NodeDraining(node=B))
    with pytest.raises(PlacementError, match="a is being drained; b is being drained"):
        place(GROUP, cluster.state)


def test_settings_scale_the_clocks() -> None:
    cluster = Cluster("a", "b", settings=Settings(lease_seconds=1.0))
    assert kinds(cluster.advance(0.6, heard=("a",))) == ["node.suspected"]
    assert kinds(cluster.advance(0.5, heard=("a",))) == ["node.lost"]


def test_one_loss_of_a_node_is_one_fault_however_many_instances_it_hits() -> None:
    cluster = Cluster("a", "b")
    for name in ("one", "two", "three"):
        cluster.create(msgspec.structs.replace(GROUP, nodes=(A, B)), InstanceId(name))
    cluster.advance(6.0, heard=("a",))
    assert all(isinstance(instance.status, Broken) for instance in cluster.state.instances.values())
    assert len(cluster.state.nodes[B].faults_ns) == 1
