"""JACCL mesh, JACCL ring, TCP ring: the first that can be, with the reason for each step down."""

from __future__ import annotations

from itertools import combinations

import msgspec

from muster.bench.random_clusters import GIB, full_mesh, node, nodes_of, wish
from muster.facts import NodeFacts, Rdma, RdmaDevice, ThunderboltPort
from muster.placement import Candidate, Cluster, Placement, Refusal
from muster.placement.core import place
from muster.spec import GroupWorkload, InstanceSpec

GROUP = InstanceSpec(workload=GroupWorkload(), ranks=2, memory_bytes=0, side_channel="bus")


def cabled(names: str, pairs: tuple[tuple[str, str], ...], *, generation: int = 5) -> Cluster:
    """Nodes with a Thunderbolt port and an RDMA device for each of these cables."""
    ports: dict[str, list[ThunderboltPort]] = {name: [] for name in names}
    for one, other in pairs:
        for here, there in ((one, other), (other, one)):
            number = len(ports[here])
            ports[here].append(
                ThunderboltPort(
                    port=str(number),
                    domain=f"{here}-{there}",
                    peer_domain=f"{there}-{here}",
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
    assert found.message == "MLX on node a has no jaccl backend (it has: ring)"


def test_devices_that_were_given_are_checked_by_mlx_rules() -> None:
    cluster = cabled("ab", (("a", "b"),))
    given = ((None, "rdma_en0"), ("rdma_en0", None))
    found = placed(cluster, group(2, backend="jaccl", devices=given))
    assert (found.backend, found.layout.devices) == ("jaccl", given)
    wrong = group(2, backend="jaccl", devices=((None, "rdma_en9"), ("rdma_en0", None)))
    refused = place(cluster, full_mesh("ab"), None, wrong)
    assert isinstance(refused, Refusal)
    assert "rdma_en9" in refused.message


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
    assert found.message == "MLX on node a has no ring backend (it has: mpi)"
    assert isinstance(place(Cluster(nodes=nodes), full_mesh("ab"), None, wish(1)), Placement), "alone it needs none"
