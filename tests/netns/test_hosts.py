"""Hosts with one link each: a coordinator, three workers, and a fourth worker that comes late."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest
from bed import Bed
from net_cluster import LEASE_SECONDS, NetClient, NetCluster, group, wait_until

from muster.demo.answers import CONVERSATIONS, MODEL_DIRECTORY
from muster.events import NodeLost, RankPrepared
from muster.spec import InstanceSpec, ModelWorkload, NodeId, Phase, ShardingWish

pytestmark = [pytest.mark.netns, pytest.mark.process, pytest.mark.mlx, pytest.mark.usefixtures("mended")]

#: What a busy machine may add to the lease.
_SLACK_SECONDS = 10.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetCluster]:
    directory = tmp_path_factory.mktemp("hosts")
    with Bed(hosts=5) as bed, NetCluster(bed, directory, nodes=("h1", "h2", "h3")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: NetCluster) -> Iterator[NetClient]:
    with cluster.client() as client:
        yield client


def test_a_group_over_three_hosts_forms_between_their_own_addresses(cluster: NetCluster, client: NetClient) -> None:
    instance = client.create(group("h1", "h2", "h3"))
    ranks = client.wait_ready(instance).ranks
    prepared = [event for _, event in client.events(instance) if isinstance(event, RankPrepared)]
    client.delete(instance)

    offered = {event.node: [(address.host, address.network) for address in event.addresses] for event in prepared}
    assert offered == {node: [(cluster.bed.address(node), "10.91.0.0/24")] for node in ("h1", "h2", "h3")}
    cluster.wait_nothing_left(ranks)


@pytest.mark.parametrize("sharding", ["pipeline", "tensor"])
def test_a_model_over_two_hosts_answers_right(cluster: NetCluster, client: NetClient, sharding: ShardingWish) -> None:
    workload = ModelWorkload(model=str(MODEL_DIRECTORY), sharding=sharding)
    instance = client.create(InstanceSpec(workload=workload, ranks=2, nodes=(NodeId("h1"), NodeId("h2"))))
    ranks = client.wait_ready(instance).ranks
    asked = CONVERSATIONS[4]
    answer = client.ask(instance, asked.prompt)
    client.delete(instance)

    assert [rank.sharding for rank in ranks] == [sharding, sharding]
    assert answer == asked.answer
    cluster.wait_nothing_left(ranks)


def test_a_host_cut_off_while_ready_is_the_cause_and_rejoins_by_itself_when_healed(
    cluster: NetCluster, client: NetClient
) -> None:
    instance = client.create(group("h1", "h2", "h3"))
    before = client.wait_ready(instance).ranks
    boot = client.state().nodes[NodeId("h3")].info.boot

    cluster.bed.cut("h3")
    failed, broken = client.wait_failed(instance, LEASE_SECONDS + _SLACK_SECONDS)
    assert (broken.failure.kind, broken.failure.node, broken.failure.rank) == ("node-lost", "h3", 2)
    assert broken.failure.phase is Phase.RUNNING
    cluster.wait_nothing_left(before[:2])

    cluster.bed.heal("h3")
    client.wait_node("h3", lost=False)
    assert client.state().nodes[NodeId("h3")].info.boot == boot, "the same worker, not a new one"
    cluster.wait_nothing_left(before)
    lost = [event for _, event in client.events() if isinstance(event, NodeLost) and event.node == "h3"]
    assert len(lost) == 1
    assert cluster.members["h3"].process.poll() is None

    again = client.create(group("h3", "h1"))
    ranks = client.wait_ready(again).ranks
    client.delete(again)
    client.delete(failed.id)
    cluster.wait_nothing_left(ranks)


@pytest.mark.parametrize(
    ("fault", "mend", "address_given"),
    [
        pytest.param(Bed.cut, Bed.heal, False, id="cable"),
        pytest.param(Bed.take_down, Bed.bring_up, True, id="route"),
        pytest.param(Bed.take_down, Bed.bring_up, False, id="route and own address unknown"),
    ],
)
def test_a_worker_that_cannot_reach_the_coordinator_says_so_and_joins_once_it_can(
    cluster: NetCluster,
    client: NetClient,
    fault: Callable[[Bed, str], None],
    mend: Callable[[Bed, str], None],
    address_given: bool,
) -> None:
    earlier = len(cluster.log_of("h4")) if "h4" in cluster.members else 0
    fault(cluster.bed, "h4")
    options = ("--address", cluster.bed.address("h4")) if address_given else ()
    worker = cluster.start_worker("h4", wait=False, options=options).process

    def says_so() -> bool:
        said = cluster.log_of("h4")[earlier:]
        assert worker.poll() is None, said
        return "trying again" in said and cluster.address in said

    try:
        wait_until(says_so, lambda: f"it said only: {cluster.log_of('h4')[earlier:]}")
    finally:
        mend(cluster.bed, "h4")

    client.wait_node("h4", lost=False)
    instance = client.create(group("h4", "h1"))
    ranks = client.wait_ready(instance).ranks
    client.delete(instance)
    cluster.wait_nothing_left(ranks)
    worker.terminate()
    assert worker.wait(10) == 0


def test_a_coordinator_and_a_worker_that_are_restarted_are_where_they_were(
    cluster: NetCluster, client: NetClient
) -> None:
    address, boot = cluster.address, client.state().nodes[NodeId("h1")].info.boot
    cluster.stop_process("h1")
    client.wait_node("h1", lost=True)
    cluster.proceed("h1")
    client.wait_node("h1", lost=False)
    cluster.restart("coordinator")
    cluster.restart("h1", signal.SIGTERM)
    assert cluster.address == address
    node = client.wait_for(lambda state: state.nodes[NodeId("h1")].info.boot != boot, "h1 joins again").nodes[
        NodeId("h1")
    ]
    assert node.lost is None
