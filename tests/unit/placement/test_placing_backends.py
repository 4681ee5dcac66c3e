"""JACCL mesh, JACCL ring, TCP ring: the first that can be, with the reason for each step down."""

from __future__ import annotations

from itertools import combinations

import msgspec
import pytest

from muster.bench.random_clusters import GIB, full_mesh, node, nodes_of, wish
from muster.facts import NodeFacts, Rdma, RdmaDevice, ThunderboltPort
from muster.known import Known
from muster.placement import Candidate, Cluster, Placement, Refusal
from muster.placement.core import place
from muster.placement.deciding import alternatives, decide
from muster.rdma import taken
from muster.spec import GroupWorkload, InstanceSpec, NodeAddress, NodeId
from muster.state import Node, State

GROUP = InstanceSpec(workload=GroupWorkload(), ranks=2, memory_bytes=0, side_channel="bus")


def cabled(names: str, pairs: tuple[tuple[str, str], ...], *, generation: int = 5) -> Cluster:
    """Nodes with a Thunderbolt port and an RDMA device for each of these cables."""
    ports: dict[str, list[ThunderboltPort]] = {name: [] for name in names}
    for cable, (one, other) in enumerate(pairs):
        for here, there in ((one, other), (other, one)):
            number = len(ports[here])
            ports[here].append(
                ThunderboltPort(
                    port=str(number),
                    domain=f"{here}-{there}-{cable}",
                    peer_domain=f"{there}-{here}-{cable}",
                    generation=generation,
                    interface=f"en{number}",
                )
            )
    return Cluster(nodes=tuple(_mac(name, ports[name]) for name in names))


def _mac(name: str, ports: list[ThunderboltPort]) -> Candidate:
    devices = tuple(
        RdmaDevice(name=f"rdma_{port.interface}", interface=port.interface, active=True, ipv4_gid=True)
        for port in ports
    )
    plain = node(name, 20 * GIB, backends=("ring", "jaccl"))
    facts = NodeFacts(
        node=plain.node,
        boot=plain.info.boot,
        thunderbolt=tuple(ports),
        rdma=Rdma(enabled=True, devices=devices),
    )
    return msgspec.structs.replace(plain, facts=facts)


def group(ranks: int, **fields: object) -> InstanceSpec:
    return msgspec.structs.replace(GROUP, ranks=ranks, **fields)


def placed(cluster: Cluster, spec: InstanceSpec) -> Placement:
    found = place(cluster, full_mesh([candidate.node for candidate in cluster.nodes]), None, spec)
    assert isinstance(found, Placement), found
    return found


def told_of(cluster: Cluster) -> tuple[State, Known]:
    """A state with these nodes, and their facts."""
    infos = {
        one.node: msgspec.structs.replace(one.info, addresses=(NodeAddress(host=f"10.0.0.{n}", network="10.0.0.0/24"),))
        for n, one in enumerate(cluster.nodes)
    }
    facts = {one.node: one.facts for one in cluster.nodes if one.facts is not None}
    return State(nodes={name: Node(info=info, since_ns=0) for name, info in infos.items()}), Known(facts=facts)


def test_a_full_mesh_is_taken_first() -> None:
    cluster = cabled("abc", tuple(combinations("abc", 2)))
    found = placed(cluster, group(3))
    assert (found.backend, found.layout.jaccl_ring, found.layout.steps_down) == ("jaccl", False, ())
    assert found.layout.devices[0] == (None, "rdma_en0", "rdma_en1")


def test_the_nodes_that_are_cabled_are_chosen() -> None:
    cluster = cabled("abcd", (("b", "d"),))
    found = placed(cluster, group(2))
    assert (nodes_of(found), found.backend) == (["b", "d"], "jaccl")


def test_a_ring_of_cables_is_the_second_choice_and_says_why_there_is_no_mesh() -> None:
    cluster = cabled("abcd", (("a", "c"), ("c", "b"), ("b", "d"), ("d", "a")))
    found = placed(cluster, group(4))
    assert (found.backend, found.layout.jaccl_ring) == ("jaccl", True)
    assert nodes_of(found) in (["a", "c", "b", "d"], ["a", "d", "b", "c"])
    (reason,) = found.layout.steps_down
    assert reason.startswith("no jaccl mesh: ")


def test_a_missing_cable_ends_in_the_tcp_ring_with_both_reasons() -> None:
    cluster = cabled("abc", (("a", "b"), ("b", "c")))
    found = placed(cluster, group(3))
    assert (found.backend, found.layout.devices) == ("ring", ())
    mesh, ring = found.layout.steps_down
    assert (mesh[:13], ring[:13]) == ("no jaccl mesh", "no jaccl ring")
    assert "a" in mesh and "c" in mesh


def test_jaccl_that_was_asked_for_and_cannot_be_is_refused_with_the_reason() -> None:
    for cluster, told in (
        (cabled("ab", ()), "a"),
        (cabled("ab", (("a", "b"),), generation=4), "Thunderbolt"),
        (
            Cluster(nodes=(node("a", GIB, backends=("ring", "jaccl")), node("b", GIB, backends=("ring", "jaccl")))),
            "RDMA",
        ),
    ):
        found = place(cluster, full_mesh("ab"), None, group(2, backend="jaccl"))
        assert isinstance(found, Refusal)
        assert told in found.message and found.remedies[0] == "use --backend ring", found
    plain = Cluster(nodes=(node("a", GIB), node("b", GIB)))
    found = place(plain, full_mesh("ab"), None, group(2, backend="jaccl"))
    assert isinstance(found, Refusal)
    assert found.message == "; ".join(f"MLX on node {name} has no jaccl backend (it has: ring)" for name in "ab")


def test_a_jaccl_ring_is_formed_where_it_is_asked_for_with_all_cables() -> None:
    cluster = cabled("ab", (("a", "b"), ("a", "b")))
    found = placed(cluster, group(2))
    assert (found.layout.jaccl_ring, found.layout.devices[0]) == (False, (None, "rdma_en0")), "auto: a mesh first"
    found = placed(cluster, group(2, backend="jaccl-ring"))
    assert (found.backend, found.layout.jaccl_ring, found.layout.steps_down) == ("jaccl", True, ())
    assert found.layout.devices == ((None, ("rdma_en0", "rdma_en1")), (("rdma_en0", "rdma_en1"), None))


def test_a_jaccl_ring_goes_where_the_thinnest_pair_has_most_cables() -> None:
    cluster = cabled("abcd", (*combinations("abcd", 2), ("a", "c"), ("c", "b"), ("b", "d"), ("d", "a")))
    found = placed(cluster, group(4, backend="jaccl-ring"))
    assert nodes_of(found) in (["a", "c", "b", "d"], ["a", "d", "b", "c"])
    assert len(found.layout.devices[0][1] or ()) == 2


def test_a_jaccl_ring_that_cannot_be_is_refused_without_a_word_of_meshes() -> None:
    found = place(cabled("ab", ()), full_mesh("ab"), None, group(2, backend="jaccl-ring"))
    assert isinstance(found, Refusal)
    assert found.message.startswith("these ranks cannot form a jaccl ring: no jaccl ring: ")
    assert "mesh" not in found.message
    plain = Cluster(nodes=(node("a", GIB), node("b", GIB)))
    found = place(plain, full_mesh("ab"), None, group(2, backend="jaccl-ring"))
    assert isinstance(found, Refusal)
    assert "MLX on node a has no jaccl backend (it has: ring)" in found.message


def test_named_nodes_in_another_order_than_their_cables_are_told_the_order() -> None:
    """As `muster doctor` says of them that all is well."""
    cables = (("a", "c"), ("c", "b"), ("b", "d"), ("d", "a"))
    cluster = msgspec.structs.replace(cabled("abcd", cables), named=True)
    for backend in ("jaccl", "jaccl-ring"):
        found = place(cluster, full_mesh("abcd"), None, group(4, backend=backend))
        assert isinstance(found, Refusal)
        assert found.remedies[0] == "use --nodes a,c,b,d, an order in which each is cabled to the next"
        assert found.remedies[1] == "use --backend ring"
    named = group(4, backend="jaccl", nodes=tuple(map(NodeId, "abcd")))
    whole = decide(named, *told_of(cluster))
    assert isinstance(whole, Refusal)
    assert whole.remedies[0].startswith("use --nodes a,c,b,d")
    stepped = placed(cluster, group(4))
    assert stepped.backend == "ring"
    assert stepped.layout.steps_down[-1].startswith("use --nodes a,c,b,d")
    order = msgspec.structs.replace(cluster, nodes=tuple(cluster.nodes[index] for index in (0, 2, 1, 3)))
    assert placed(order, group(4, backend="jaccl")).layout.jaccl_ring


def test_of_two_pairs_of_nodes_the_one_whose_cable_is_free_is_taken() -> None:
    cluster = cabled("abcd", (("a", "b"), ("c", "d")))
    first = placed(cluster, group(2))
    assert nodes_of(first) == ["a", "b"]
    held = taken([([one.node for one in first.assignments], first.layout)], {})
    second = placed(msgspec.structs.replace(cluster, in_use=held), group(2))
    assert (nodes_of(second), second.backend) == (["c", "d"], "jaccl")


def test_devices_that_were_given_are_checked_by_mlx_rules() -> None:
    cluster = cabled("ab", (("a", "b"),))
    given = ((None, "rdma_en0"), ("rdma_en0", None))
    found = placed(cluster, group(2, backend="jaccl", devices=given))
    assert (found.backend, found.layout.devices) == ("jaccl", given)
    wrong = group(2, backend="jaccl", devices=((None, "rdma_en9"), ("rdma_en0", None)))
    refused = place(cluster, full_mesh("ab"), None, wrong)
    assert isinstance(refused, Refusal)
    assert "rdma_en9" in refused.message


@pytest.mark.parametrize(
    ("backend", "ring"), [("auto", False), ("jaccl", False), ("jaccl-ring", True)], ids=lambda value: str(value)
)
def test_a_matrix_of_single_devices_becomes_what_is_asked_for(backend: str, ring: bool) -> None:
    for names in ("ab", "abc"):
        cluster = cabled(names, tuple(combinations(names, 2)))
        devices = placed(cluster, group(len(names))).layout.devices
        found = placed(cluster, group(len(names), backend=backend, devices=devices))
        assert (found.backend, found.layout.jaccl_ring, found.layout.devices) == ("jaccl", ring, devices)


@pytest.mark.parametrize(("backend", "ring"), [("auto", True), ("jaccl", False), ("jaccl-ring", True)])
def test_a_matrix_of_several_devices_becomes_what_is_asked_for(backend: str, ring: bool) -> None:
    """`mlx.launch` makes a mesh of it with "jaccl", which uses the first device of each pair."""
    cluster = cabled("ab", (("a", "b"), ("a", "b")))
    devices = ((None, ("rdma_en0", "rdma_en1")), (("rdma_en0", "rdma_en1"), None))
    found = placed(cluster, group(2, backend=backend, devices=devices))
    assert (found.backend, found.layout.jaccl_ring) == ("jaccl", ring)


def test_a_matrix_with_gaps_is_a_ring_whatever_was_asked_for() -> None:
    cluster = cabled("abcd", (("a", "b"), ("b", "c"), ("c", "d"), ("d", "a")))
    devices = placed(cluster, group(4)).layout.devices
    for backend in ("jaccl", "jaccl-ring"):
        assert placed(cluster, group(4, backend=backend, devices=devices)).layout.jaccl_ring


def test_a_matrix_that_is_a_mesh_alone_is_no_jaccl_ring() -> None:
    cluster = cabled("abc", (*combinations("abc", 2), ("a", "b")))
    both = ("rdma_en0", "rdma_en2")
    devices = ((None, both, "rdma_en1"), (both, None, "rdma_en1"), ("rdma_en0", "rdma_en1", None))
    found = place(cluster, full_mesh("abc"), None, group(3, backend="jaccl-ring", devices=devices))
    assert isinstance(found, Refusal)
    assert "they form no ring (rank 0 has 1 devices to its left" in found.message
    assert found.remedies[0] == "use --backend jaccl"
    assert not placed(cluster, group(3, devices=devices)).layout.jaccl_ring, "a ring is preferred, and is none"


def test_ranks_on_one_node_have_no_jaccl_between_them() -> None:
    cluster = cabled("a", ())
    found = placed(cluster, group(2))
    assert found.backend == "ring"
    assert "ranks 0 and 1 are both on node a" in found.layout.steps_down[0]


def test_only_a_model_says_how_many_ranks_it_takes() -> None:
    found = place(cabled("ab", ()), full_mesh("ab"), None, group(2, auto_ranks=True))
    assert isinstance(found, Refusal)
    assert "auto_ranks is set" in found.message


def test_without_a_ring_in_common_there_is_none() -> None:
    nodes = (node("a", GIB, backends=("mpi",)), node("b", GIB, backends=()))
    found = place(Cluster(nodes=nodes), full_mesh("ab"), None, group(2))
    assert isinstance(found, Refusal)
    assert found.message == (
        "MLX on node a has no ring backend (it has: mpi); MLX on node b has no ring backend (it has: none)"
    )
    assert [(one.node, one.what) for one in found.shortfalls] == [("a", "backend"), ("b", "backend")]
    assert isinstance(place(Cluster(nodes=nodes), full_mesh("ab"), None, wish(1)), Placement), "alone it needs none"


def test_the_ring_of_several_cables_is_among_the_alternatives() -> None:
    """And where there is none, one refusal tells of jaccl, not two."""
    for cluster, rings, refusals in ((cabled("ab", (("a", "b"), ("a", "b"))), 1, 0), (cabled("ab", ()), 0, 1)):
        found = [answer for spec, answer in alternatives(group(2), *told_of(cluster), None) if spec.ranks == 2]
        assert sum(isinstance(one, Placement) and one.layout.jaccl_ring for one in found) == rings
        assert sum(isinstance(one, Refusal) for one in found) == refusals
