"""Which nodes, in which order, how sharded; and that nothing is given twice."""

from __future__ import annotations

import random
from itertools import combinations

import msgspec
import pytest

from muster.bench.random_clusters import GIB, Table, full_mesh, model, node, nodes_of, random_cluster, wish
from muster.needs import LayerNeeds, ModelNeeds
from muster.placement import Cluster, Placement, Refusal
from muster.placement.core import place
from muster.placement.costs import StageCosts, with_headroom
from muster.placement.rings import judge, worth
from muster.spec import InstanceSpec, ModelWorkload, NodeId


def placed(cluster: Cluster, links: Table, spec: InstanceSpec, needs: ModelNeeds | None = None) -> Placement:
    found = place(cluster, links, needs or model(), spec)
    assert isinstance(found, Placement), found
    return found


def mesh(**rooms: float) -> Cluster:
    return Cluster(nodes=tuple(node(name, int(room * GIB)) for name, room in rooms.items()))


def test_as_few_ranks_as_fit_are_taken() -> None:
    links = full_mesh("abc")
    auto = wish(1, auto_ranks=True)
    assert nodes_of(placed(mesh(a=20, b=20, c=20), links, auto)) == ["a"]
    assert len(nodes_of(placed(mesh(a=5, b=5, c=5), links, auto))) == 2
    found = placed(mesh(a=3.2, b=3.2, c=3.2), links, auto)
    assert (nodes_of(found), found.layout.sharding) == (["a", "b", "c"], "pipeline"), "heads do not divide by 3"
    assert sum(found.layout.split) == 12


def test_better_links_then_speed_then_the_model_then_memory_decide() -> None:
    spec = wish(2, workload_sharding="pipeline")
    nodes = [node(name, 20 * GIB, gbps=100) for name in "abcd"]
    slow = dict.fromkeys(combinations("abcd", 2), (1000.0, 100.0))
    assert nodes_of(placed(Cluster(nodes=tuple(nodes)), Table(slow | {("b", "d"): (9000.0, 100.0)}), spec)) == [
        "b",
        "d",
    ]
    even = Table(dict.fromkeys(combinations("abcd", 2), (1000.0, 100.0)))
    faster = [*nodes[:2], node("c", 20 * GIB, gbps=400), node("d", 20 * GIB, gbps=380)]
    assert nodes_of(placed(Cluster(nodes=tuple(faster)), even, spec)) == ["c", "d"]
    holding = [nodes[0], node("b", 20 * GIB, gbps=100, holds=True), nodes[2], node("d", 20 * GIB, gbps=100, holds=True)]
    assert nodes_of(placed(Cluster(nodes=tuple(holding)), even, spec)) == ["b", "d"]
    roomy = [nodes[0], nodes[1], node("c", 30 * GIB, gbps=100), node("d", 25 * GIB, gbps=100)]
    assert nodes_of(placed(Cluster(nodes=tuple(roomy)), even, spec)) == ["c", "d"]


def test_links_that_are_about_as_fast_leave_the_choice_to_the_model() -> None:
    nodes = tuple(node(name, 20 * GIB, holds=name in "bc") for name in "abc")
    links = Table({("a", "b"): (9400.0, 90.0), ("a", "c"): (9390.0, 90.0), ("b", "c"): (9200.0, 95.0)})
    assert nodes_of(placed(Cluster(nodes=nodes), links, wish(2))) == ["b", "c"]


def test_the_ring_avoids_the_slow_links() -> None:
    fast = {
        ("a", "c"): (9000.0, 50.0),
        ("b", "c"): (9000.0, 50.0),
        ("b", "d"): (9000.0, 50.0),
        ("a", "d"): (9000.0, 50.0),
    }
    links = Table(fast | {("a", "b"): (100.0, 50.0), ("c", "d"): (100.0, 50.0)})
    found = placed(mesh(a=20, b=20, c=20, d=20), links, wish(4))
    assert nodes_of(found) == ["a", "c", "b", "d"]
    assert [rank.next and rank.next.host for rank in found.layout.ranks] == ["c-a", "b-c", "d-b", "a-d"]


def test_nodes_that_were_asked_for_keep_their_order() -> None:
    nodes = tuple(node(name, 20 * GIB) for name in "cab")
    found = placed(Cluster(nodes=nodes, named=True), full_mesh("abc"), wish(3, nodes=tuple(map(NodeId, "cab"))))
    assert nodes_of(found) == ["c", "a", "b"]


def test_a_slow_link_is_for_a_pipeline() -> None:
    cluster = mesh(a=20, b=20)
    assert placed(cluster, full_mesh("ab", 10_000), wish(2)).layout.sharding == "tensor"
    assert placed(cluster, full_mesh("ab", 940), wish(2)).layout.sharding == "pipeline"
    assert placed(cluster, full_mesh("ab", 10_000, 3_000), wish(2)).layout.sharding == "pipeline"
    asked = wish(2, workload_sharding="tensor")
    assert placed(cluster, full_mesh("ab", 940), asked).layout.sharding == "tensor"


def test_where_the_smallest_cannot_hold_its_slice_it_is_a_pipeline() -> None:
    found = placed(mesh(a=20, b=2), full_mesh("ab"), wish(2))
    assert found.layout.sharding == "pipeline"
    assert found.layout.split[0] > found.layout.split[1] >= 1


def test_a_machine_has_its_memory_once() -> None:
    nodes = (node("a", 8 * GIB, machine="m"), node("b", 8 * GIB, machine="m"))
    links = full_mesh("ab")
    assert isinstance(place(Cluster(nodes=nodes, pools={"m": 6 * GIB}), links, model(), wish(2)), Refusal)
    found = placed(Cluster(nodes=nodes, pools={"m": 8 * GIB}), links, wish(2))
    assert sum(rank.memory_bytes for rank in found.layout.ranks) <= 8 * GIB


def test_several_ranks_share_a_node_only_where_there_are_too_few_nodes() -> None:
    found = placed(mesh(a=20, b=20), full_mesh("ab"), wish(4))
    assert nodes_of(found) == ["a", "a", "b", "b"]
    assert len(set(nodes_of(placed(mesh(a=20, b=20, c=20, d=20), full_mesh("abcd"), wish(4))))) == 4


def test_a_split_that_was_asked_for_is_kept_or_refused() -> None:
    cluster, links = mesh(a=20, b=20), full_mesh("ab")
    found = placed(cluster, links, wish(2, split=(9, 3)))
    assert (found.layout.sharding, found.layout.split) == ("pipeline", (9, 3))
    for spec, named in (
        (wish(2, split=(9, 4)), "split is [9, 4]"),
        (wish(3, split=(9, 3)), "split is [9, 3]"),
        (wish(2, split=(9, 3), workload_sharding="tensor"), "sharding is tensor"),
        (wish(1, workload_context_tokens=40_000), "context_tokens is 40000"),
        (wish(2, addresses=(("1.2.3.4",),)), "addresses has 1"),
        (wish(2, devices=((None,),)), "devices has rows"),
        (wish(1, auto_ranks=True, split=(9, 3)), "the number of ranks is left open"),
        (wish(1, network="banana"), "network is 'banana'"),
        (wish(2, network="10.0.0.0"), "network is '10.0.0.0'"),
        (wish(2, addresses=(("banana",), ("1.2.3.4",))), "addresses[0][0] is 'banana'"),
        (wish(2, addresses=(("1.2.3.4",), ("1.2.3.5", "::1"))), "addresses[1][1] is '::1'"),
        (wish(1, backend="jaccl"), "backend is jaccl and ranks is 1"),
    ):
        refused = place(cluster, links, model(), spec)
        assert isinstance(refused, Refusal) and named in refused.message and refused.remedies, refused


def test_an_explicit_memory_counts_for_every_rank() -> None:
    spec = wish(2, memory_bytes=6 * GIB)
    assert isinstance(place(mesh(a=5, b=20), full_mesh("ab"), model(), spec), Refusal)
    assert nodes_of(placed(mesh(a=13), full_mesh("a"), spec)) == ["a", "a"]
    found = placed(mesh(a=7, b=7), full_mesh("ab"), spec)
    assert [rank.memory_bytes for rank in found.layout.ranks] == [6 * GIB] * 2


@pytest.mark.parametrize("seed", range(6))
def test_no_rank_gets_more_than_there_is_and_every_layer_one_rank(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(60):
        cluster, links, needs, spec = random_cluster(draw, most=12)
        found = place(cluster, links, needs, spec)
        if isinstance(found, Refusal):
            assert found.remedies or found.shortfalls
            continue
        assert found == place(cluster, links, needs, spec)
        check(found, cluster, needs, spec)


def check(found: Placement, cluster: Cluster, needs: ModelNeeds, spec: InstanceSpec) -> None:
    layout = found.layout
    assert [one.rank for one in found.assignments] == list(range(len(found.assignments)))
    if layout.sharding == "pipeline":
        assert sum(layout.split) == len(needs.layers)
        assert min(layout.split) >= 1
        assert isinstance(spec.workload, ModelWorkload)
        costs, stop = StageCosts(needs, spec.workload), len(needs.layers)
        for rank in layout.ranks:
            assert rank.memory_bytes == costs.of(stop - rank.layers, stop).total
            stop -= rank.layers
    for pool, names in (
        *((candidate.free_bytes, {candidate.node}) for candidate in cluster.nodes),
        *(
            (room, {candidate.node for candidate in cluster.nodes if candidate.machine == machine})
            for machine, room in cluster.pools.items()
        ),
    ):
        given = [
            with_headroom(rank.memory_bytes)
            for rank, one in zip(layout.ranks, found.assignments, strict=True)
            if one.node in names
        ]
        assert sum(given) <= max(0, pool)


def test_a_large_cluster_finds_the_island_of_fast_links() -> None:
    draw = random.Random(1)
    names = [f"n{number:03}" for number in range(120)]
    island = {"n017", "n055", "n083", "n101"}
    rates = {
        pair: (38_000.0, 20.0) if set(pair) <= island else (draw.uniform(900, 940), 100.0)
        for pair in combinations(names, 2)
    }
    nodes = tuple(node(name, (9 if name in island else 8) * GIB) for name in names)
    links = Table(rates)
    found = placed(Cluster(nodes=nodes), links, wish(4))
    assert set(nodes_of(found)) == island
    assert links.asked < 2_000, "not every pair is looked at"
    many = placed(Cluster(nodes=nodes), links, wish(40, workload_sharding="pipeline"), model(120))
    order = [int(name[1:]) for name in nodes_of(many)]
    assert len(set(order)) == 40
    assert judge(order, lambda a, b: worth(links.between(NodeId(f"n{a:03}"), NodeId(f"n{b:03}")))) is not None


def test_layers_follow_the_measured_speed_of_the_machines() -> None:
    links, spec = full_mesh("ab"), wish(2, workload_sharding="pipeline")
    apart = Cluster(nodes=(node("a", 20 * GIB, gbps=100), node("b", 20 * GIB, gbps=400)))
    assert placed(apart, links, spec).layout.split == (2, 10)
    together = Cluster(nodes=(node("a", 20 * GIB, gbps=100, machine="m"), node("b", 20 * GIB, gbps=400, machine="m")))
    assert placed(together, links, spec).layout.split == (6, 6), "one machine is as fast as itself"


def test_where_nothing_else_differs_the_best_link_decides() -> None:
    links = Table({("a", "b"): (9400.0, 90.0), ("a", "c"): (9390.0, 90.0), ("b", "c"): (9200.0, 95.0)})
    assert nodes_of(placed(mesh(a=20, b=20, c=30), links, wish(2))) == ["a", "b"]


def test_layers_that_fit_in_no_turn_of_the_best_ring_go_round_another() -> None:
    needs = msgspec.structs.replace(model(4), layers=tuple(LayerNeeds(size * GIB) for size in (8, 1, 8, 1)))
    fast = dict.fromkeys((("a", "c"), ("b", "c"), ("b", "d"), ("a", "d")), (9000.0, 50.0))
    links = Table(fast | {("a", "b"): (900.0, 50.0), ("c", "d"): (900.0, 50.0)})
    found = placed(mesh(a=10, c=10, b=3, d=3), links, wish(4, workload_sharding="pipeline"), needs)
    assert found.layout.split == (1, 1, 1, 1)
    assert [one in "ac" for one in nodes_of(found)] == [False, True, False, True], "rank 0 has the last layer"
