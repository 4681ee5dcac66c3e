"""An address that goes under ranks that run."""

from __future__ import annotations

import msgspec
import pytest
from cluster import A, B, Cluster, boot_of, node_info

from muster.events import NodeChanged
from muster.lifecycle import SECOND
from muster.spec import Address, GroupWorkload, InstanceId, InstanceSpec, ModelWorkload, NodeAddress, NodeId, Workload
from muster.state import Gone, Instance, Node, Rank, Ready, Running, State
from muster.stranded import gone_addresses, stranded, stranded_ns

NETWORK = "10.0.0.0/24"
MODEL = ModelWorkload(model="org/tiny")
PATIENCE_NS = 5 * SECOND
MOVED_NS = 100 * SECOND


def rank(number: int, node: NodeId, host: str) -> Rank:
    return Rank(
        rank=number,
        node=node,
        boot=boot_of(node),
        state=Ready(),
        since_ns=1,
        addresses=(Address(host, 5000, NETWORK),),
    )


def instance(workload: Workload = MODEL, *ranks: Rank) -> Instance:
    return Instance(
        id=InstanceId("one"),
        spec=InstanceSpec(workload=workload, ranks=2),
        created_ns=1,
        attempt=1,
        backend="ring",
        status=Running(),
        since_ns=1,
        ranks=ranks or (rank(0, A, "10.0.0.1"), rank(1, B, "10.0.0.2")),
        created_by=1,
        caused_by=1,
    )


def state(b_has: str = "10.1.0.2") -> State:
    nodes: dict[NodeId, Node] = {}
    for name, host in ((A, "10.0.0.1"), (B, b_has)):
        candidates = (NodeAddress(host=host, network=NETWORK),)
        info = msgspec.structs.replace(node_info(name), candidates=candidates)
        nodes[name] = Node(info=info, since_ns=1, gone_ns={"10.0.0.2": MOVED_NS} if name == B else {})
    return State(nodes=nodes)


def test_a_model_is_given_up_once_its_address_was_gone_for_a_lease() -> None:
    assert stranded_ns(instance(), state(), PATIENCE_NS) == MOVED_NS + PATIENCE_NS
    assert stranded(instance(), state(), MOVED_NS + PATIENCE_NS - 1, PATIENCE_NS) is None
    failure = stranded(instance(), state(), MOVED_NS + PATIENCE_NS, PATIENCE_NS)
    assert failure is not None
    assert (failure.kind, failure.rank, failure.node, failure.retryable) == ("address-gone", 1, B, True)
    assert "node b has not had 10.0.0.2 for 5 s" in failure.message


def test_an_address_that_is_back_is_no_failure() -> None:
    assert stranded_ns(instance(), state(b_has="10.0.0.2"), PATIENCE_NS) is None


@pytest.mark.parametrize("workload", [GroupWorkload()])
def test_only_models_are_given_up(workload: Workload) -> None:
    assert stranded_ns(instance(workload), state(), PATIENCE_NS) is None
    assert [(one.rank, gone) for one, gone in gone_addresses(instance(workload), state().nodes)] == [(1, ["10.0.0.2"])]


def test_a_jaccl_group_does_not_use_its_addresses_any_more() -> None:
    assert stranded_ns(msgspec.structs.replace(instance(), backend="jaccl"), state(), PATIENCE_NS) is None


def test_a_rank_that_is_gone_and_another_boot_count_for_nothing() -> None:
    gone = msgspec.structs.replace(rank(1, B, "10.0.0.2"), state=Gone())
    other = msgspec.structs.replace(rank(1, B, "10.0.0.2"), boot="another")
    for last in (gone, other):
        assert gone_addresses(instance(MODEL, rank(0, A, "10.0.0.1"), last), state().nodes) == []


def test_another_interface_that_flaps_gives_no_further_time() -> None:
    """The cable of the ranks is out, and some other address of the node comes and goes all the time."""
    cluster = Cluster("a", "b")

    def has(*hosts: str) -> None:
        found = tuple(NodeAddress(host=host, network=NETWORK) for host in hosts)
        cluster.commit(NodeChanged(node=B, boot=boot_of("b"), candidates=found))

    has("10.0.0.2", "10.9.0.1")
    has("10.9.0.1")
    went_ns = cluster.now_ns
    for hosts in ((), ("10.9.0.1",), ()):
        cluster.now_ns += SECOND
        has(*hosts, "10.1.1.1")
    assert cluster.state.nodes[B].gone_ns == {"10.0.0.2": went_ns, "10.9.0.1": cluster.now_ns}
    assert stranded_ns(instance(), cluster.state, PATIENCE_NS) == went_ns + PATIENCE_NS
    has("10.0.0.2")
    assert stranded_ns(instance(), cluster.state, PATIENCE_NS) is None


def test_what_a_node_lost_while_it_was_away_counts_from_its_return() -> None:
    cluster = Cluster("a", "b")
    info = cluster.state.nodes[B].info
    for host in ("10.0.0.2", "10.1.0.2", "10.3.0.2"):
        cluster.now_ns += SECOND
        cluster.join(msgspec.structs.replace(info, candidates=(NodeAddress(host=host, network=NETWORK),)))
    assert stranded_ns(instance(), cluster.state, PATIENCE_NS) == cluster.now_ns - SECOND + PATIENCE_NS
