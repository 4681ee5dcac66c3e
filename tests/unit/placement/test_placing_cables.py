"""Where only some of the nodes are cabled: those are found among many, and what they can do decides."""

from __future__ import annotations

from itertools import combinations

import pytest
from test_placing_backends import cabled, group, placed

from muster.bench.random_clusters import Table, full_mesh, model, nodes_of, wish
from muster.placement import Placement, Refusal
from muster.placement.cabling import APART, MESH, RING, joined, pockets
from muster.placement.core import place

SLOW = 940.0


@pytest.mark.parametrize("names", ["abcdefgh", "abcdefghi", "abcdefghijklmnop"])
@pytest.mark.parametrize("backend", ["auto", "jaccl"])
def test_the_only_cabled_pair_is_found_among_many_nodes(names: str, backend: str) -> None:
    cluster = cabled(names, ((names[-2], names[-1]),))
    found = placed(cluster, group(2, backend=backend))
    assert (nodes_of(found), found.backend) == ([names[-2], names[-1]], "jaccl")


def test_among_many_nodes_a_mesh_comes_before_a_ring_and_a_ring_before_tcp() -> None:
    names = "abcdefghijklm"
    ring = (("b", "c"), ("c", "d"), ("d", "e"), ("e", "b"))
    mesh = tuple(combinations("ijkl", 2))
    found = placed(cabled(names, ring + mesh), group(4))
    assert (nodes_of(found), found.backend, found.layout.jaccl_ring) == (list("ijkl"), "jaccl", False)
    found = placed(cabled(names, ring), group(4))
    assert (set(nodes_of(found)), found.backend, found.layout.jaccl_ring) == (set("bcde"), "jaccl", True)
    found = placed(cabled(names, ring), group(3))
    assert found.backend == "ring"


def test_among_few_nodes_too_a_mesh_comes_before_a_ring_of_better_nodes() -> None:
    ring = (("a", "b"), ("b", "c"), ("c", "d"), ("d", "a"))
    found = placed(cabled("abcdefgh", ring + tuple(combinations("efgh", 2))), group(4))
    assert (nodes_of(found), found.layout.jaccl_ring) == (list("efgh"), False)


def test_a_pair_is_found_where_all_of_many_nodes_hang_together() -> None:
    names = "abcdefghijkl"
    circle = tuple(zip(names, names[1:] + names[0], strict=True))
    assert placed(cabled(names, circle), group(2)).backend == "jaccl"
    found = placed(cabled(names, circle), group(12))
    assert (found.backend, found.layout.jaccl_ring) == ("jaccl", True)
    more = names + "mnop"
    found = placed(cabled(more, circle), group(12))
    assert (set(nodes_of(found)), found.backend) == (set(names), "jaccl")


def test_a_model_that_fits_on_one_node_needs_no_backend() -> None:
    found = place(cabled("ab", ()), full_mesh("ab"), model(), wish(1, auto_ranks=True, backend="jaccl"))
    assert isinstance(found, Placement)
    assert (len(found.assignments), found.backend) == (1, "ring")


def test_pockets_are_small_around_the_best_nodes_first_and_not_too_many() -> None:
    pairs = [(0, 1), (4, 5), (5, 6)]
    assert list(pockets([6, 0, 1, 2, 3, 4, 5], pairs, 2)) == [[4, 5, 6], [0, 1]]
    assert list(pockets([6, 0, 1, 2, 3, 4, 5], pairs, 3)) == [[4, 5, 6]]
    assert list(pockets([0, 1, 2], [(0, 7)], 2)) == [], "a node that is of no use is in none"
    chain = [(number, number + 1) for number in range(500)]
    found = list(pockets(range(501), chain, 2))
    assert max(map(len, found)) == 8
    assert len(found) <= 16


def test_how_nodes_are_joined() -> None:
    square = {(0, 1), (1, 2), (2, 3), (0, 3)}
    assert joined((0, 1), square) == MESH
    assert joined((0, 2), square) == APART
    assert joined((0, 2, 1, 3), square) == RING
    assert joined((0, 0), square) == APART
    circle = {(number, number + 1) for number in range(9)} | {(0, 9)}
    assert joined(range(10), circle) == RING
    assert joined(range(9), circle) == APART


def test_cabled_nodes_that_do_not_reach_each_other_leave_the_others() -> None:
    cluster = cabled("abcd", (("a", "b"),))
    links = Table({pair: (1000.0, 100.0) for pair in combinations("abcd", 2) if pair != ("a", "b")})
    found = place(cluster, links, None, group(2))
    assert isinstance(found, Placement), found
    assert (set(nodes_of(found)) != {"a", "b"}, found.backend) == (True, "ring")
    both = cabled("abcd", (("a", "b"), ("c", "d")))
    found = place(both, links, None, group(2))
    assert isinstance(found, Placement)
    assert (nodes_of(found), found.backend) == (["c", "d"], "jaccl")
    assert isinstance(place(both, Table({}), None, group(2)), Refusal)


def test_what_goes_over_rdma_is_sharded_whatever_the_rate_of_tcp_is() -> None:
    spec = wish(2, side_channel="bus")
    links = full_mesh("ab", SLOW)
    found = place(cabled("ab", (("a", "b"),)), links, model(), spec)
    assert isinstance(found, Placement)
    assert (found.backend, found.layout.sharding) == ("jaccl", "tensor")
    found = place(cabled("ab", ()), links, model(), spec)
    assert isinstance(found, Placement)
    assert (found.backend, found.layout.sharding) == ("ring", "pipeline")


def test_cables_do_not_count_where_the_side_channel_has_no_way() -> None:
    found = place(cabled("ab", (("a", "b"),)), full_mesh("ab", SLOW), model(), wish(2, network="10.9.0.0/16"))
    assert isinstance(found, Placement)
    assert (found.backend, found.layout.sharding) == ("ring", "pipeline")
