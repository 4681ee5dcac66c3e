"""Ranks go where there is room, in a fixed order; a refusal says what is missing on which node."""

from __future__ import annotations

import msgspec
import pytest
from cluster import A, B, C, Cluster, boot_of, node_info, script
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.errors import PlacementError
from muster.events import NodeLost, RankGone
from muster.placement import MODEL_RANK_BYTES, RANK_BYTES, Placement, place, rank_memory_bytes
from muster.spec import GroupWorkload, InstanceId, InstanceSpec, ModelWorkload, NodeId
from muster.state import Gone

GROUP = InstanceSpec(workload=GroupWorkload(), ranks=2)
MIB = 2**20


def nodes_of(placement: Placement) -> list[str]:
    return [assignment.node for assignment in placement.assignments]


def refusal(cluster: Cluster, spec: InstanceSpec) -> str:
    with pytest.raises(PlacementError) as caught:
        place(spec, cluster.state)
    assert caught.value.remedy
    return caught.value.message


# --- where ranks go -------------------------------------------------------------------------------------------


def test_ranks_are_numbered_in_order_and_carry_the_boot_of_their_node() -> None:
    placement = place(GROUP, Cluster("b", "a").state)
    assert [assignment.rank for assignment in placement.assignments] == [0, 1]
    assert nodes_of(placement) == ["a", "b"]
    assert [assignment.boot for assignment in placement.assignments] == [boot_of("a"), boot_of("b")]
    assert placement.backend == "ring"


def test_the_order_of_the_nodes_asked_for_is_the_order_of_the_ranks() -> None:
    cluster = Cluster("a", "b", "c")
    spec = msgspec.structs.replace(GROUP, ranks=3, nodes=(C, A, B))
    assert nodes_of(place(spec, cluster.state)) == ["c", "a", "b"]


def test_ranks_are_spread_and_neighbours_share_a_node() -> None:
    spec = msgspec.structs.replace(GROUP, ranks=4)
    assert nodes_of(place(spec, Cluster("a", "b").state)) == ["a", "a", "b", "b"]


def test_only_the_nodes_asked_for_are_used() -> None:
    spec = msgspec.structs.replace(GROUP, ranks=4, nodes=(B,))
    assert nodes_of(place(spec, Cluster("a", "b", "c").state)) == ["b"] * 4


def test_where_few_ranks_are_asked_for_the_nodes_with_most_memory_get_them() -> None:
    cluster = Cluster()
    for name, memory in (("a", 10), ("b", 30), ("c", 20)):
        cluster.join(node_info(name, memory_bytes=memory))
    assert nodes_of(place(GROUP, cluster.state)) == ["b", "c"]


def test_what_others_were_given_counts_until_their_process_is_gone() -> None:
    cluster = Cluster()
    cluster.join(node_info("a", max_ranks=2))
    cluster.create(script(2))
    assert "node a has all its 2 ranks in use" in refusal(cluster, script(1))
    cluster.report(RankGone, 0, exit_code=0)
    assert nodes_of(place(script(1), cluster.state)) == ["a"]


def test_the_answer_is_the_same_whatever_the_order_of_joining() -> None:
    for ranks in range(1, 7):
        spec = script(ranks)
        assert place(spec, Cluster("a", "b", "c").state) == place(spec, Cluster("c", "b", "a").state)


# --- refusals -------------------------------------------------------------------------------------------------


def test_a_cluster_without_nodes_says_how_to_get_one() -> None:
    assert refusal(Cluster(), GROUP) == "no node has joined"


def test_an_unknown_node_is_named_with_those_that_are_known() -> None:
    spec = msgspec.structs.replace(GROUP, nodes=(A, NodeId("z")))
    assert refusal(Cluster("a", "b"), spec) == "node z is unknown; the nodes are a, b"


def test_a_lost_node_is_named_with_the_reason() -> None:
    cluster = Cluster("a", "b")
    cluster.commit(NodeLost(node=B, boot=boot_of("b"), reason="pulled"))
    assert refusal(cluster, msgspec.structs.replace(GROUP, nodes=(B,))) == "node b is lost: pulled"
    assert nodes_of(place(GROUP, cluster.state)) == ["a", "a"]


def test_missing_memory_is_told_in_numbers_for_every_node() -> None:
    cluster = Cluster()
    cluster.join(node_info("a", memory_bytes=150 * MIB))
    cluster.join(node_info("b", memory_bytes=30 * MIB))
    message = refusal(cluster, msgspec.structs.replace(GROUP, memory_bytes=100 * MIB))
    assert message == (
        "2 rank(s) of 100 MiB each do not fit: node a takes 1 of them, then has 50 MiB left, 50 MiB short; "
        "node b has 30 MiB left, 70 MiB short"
    )


def test_a_node_asked_for_that_gets_no_rank_is_refused_by_name() -> None:
    cluster = Cluster()
    cluster.join(node_info("a"))
    cluster.join(node_info("b", max_ranks=1))
    cluster.create(msgspec.structs.replace(script(1), nodes=(B,)))
    message = refusal(cluster, msgspec.structs.replace(script(2), nodes=(A, B)))
    assert message.startswith("node b was asked for but has no room for a rank: node b has all its 1 ranks in use")


def test_a_group_of_one_is_refused() -> None:
    assert "at least 2 ranks, and 1" in refusal(Cluster("a"), msgspec.structs.replace(GROUP, ranks=1))


def test_a_missing_backend_is_told_of_the_node_that_misses_it() -> None:
    cluster = Cluster("a")
    cluster.join(msgspec.structs.replace(node_info("b"), backends=("mpi", "nccl")))
    both = msgspec.structs.replace(GROUP, nodes=(A, B))
    assert refusal(cluster, both) == "MLX on node b has no ring backend (it has: mpi, nccl)"
    assert nodes_of(place(GROUP, cluster.state)) == ["a", "a"], "a node that nobody asked for is left out"
    assert nodes_of(place(script(1), cluster.state)) == ["a"], "one rank alone needs no backend"


def test_jaccl_is_refused_where_nothing_is_known_of_rdma() -> None:
    cluster = Cluster()
    for name in ("a", "b"):
        cluster.join(msgspec.structs.replace(node_info(name), backends=("ring", "jaccl")))
    assert "RDMA devices" in refusal(cluster, msgspec.structs.replace(GROUP, backend="jaccl"))


# --- memory ---------------------------------------------------------------------------------------------------


def test_the_memory_of_a_rank_is_the_wish_or_an_estimate() -> None:
    model = InstanceSpec(workload=ModelWorkload(model="/m"), ranks=4)
    assert rank_memory_bytes(model, 4000) == MODEL_RANK_BYTES + 1100
    assert rank_memory_bytes(GROUP, 0) == RANK_BYTES
    assert rank_memory_bytes(msgspec.structs.replace(model, memory_bytes=7), 4000) == 7
    assert rank_memory_bytes(msgspec.structs.replace(model, memory_bytes=0), 4000) == 0


# --- properties -----------------------------------------------------------------------------------------------

rooms = st.lists(st.tuples(st.integers(0, 400), st.integers(1, 4)), min_size=1, max_size=4)
wishes = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 150), st.sets(st.integers(0, 3))), max_size=6)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(rooms, wishes)
def test_no_node_is_ever_given_more_than_it_has(
    have: list[tuple[int, int]], asked: list[tuple[int, int, set[int]]]
) -> None:
    cluster = Cluster()
    names = [NodeId(f"n{number}") for number in range(len(have))]
    for name, (memory, ranks) in zip(names, have, strict=True):
        cluster.join(node_info(name, memory_bytes=memory, max_ranks=ranks))
    for number, (ranks, memory, wanted) in enumerate(asked):
        nodes = tuple(names[index] for index in sorted(wanted, reverse=True) if index < len(names))[:ranks]
        spec = msgspec.structs.replace(script(ranks), memory_bytes=memory, nodes=nodes)
        try:
            placement = place(spec, cluster.state)
        except PlacementError as error:
            assert error.remedy
            assert any(name in error.message for name in names)
            continue
        assert placement == place(spec, cluster.state)
        assert [assignment.rank for assignment in placement.assignments] == list(range(ranks))
        used = list(dict.fromkeys(nodes_of(placement)))
        assert not nodes or used == list(nodes), "each node asked for has a rank, in the order asked for"
        cluster.create(spec, InstanceId(f"i{number}"))
        for name, (limit_bytes, limit_ranks) in zip(names, have, strict=True):
            held = [
                instance.spec.memory_bytes or 0
                for instance in cluster.state.instances.values()
                for rank in instance.ranks
                if rank.node == name and not isinstance(rank.state, Gone)
            ]
            assert sum(held) <= limit_bytes
            assert len(held) <= limit_ranks


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(rooms, st.integers(1, 5), st.integers(0, 150))
def test_what_fits_is_not_refused(have: list[tuple[int, int]], ranks: int, memory: int) -> None:
    cluster = Cluster()
    for number, (free, most) in enumerate(have):
        cluster.join(node_info(f"n{number}", memory_bytes=free, max_ranks=most))
    spec = msgspec.structs.replace(script(ranks), memory_bytes=memory)
    room = sum(min(most, free // memory if memory else most) for free, most in have)
    if room >= ranks:
        assert len(place(spec, cluster.state).assignments) == ranks
    else:
        assert f"{ranks} rank(s)" in refusal(cluster, spec)
