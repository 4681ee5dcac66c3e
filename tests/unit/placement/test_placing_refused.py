"""A refusal names each candidate with what it was short of, and what would fit, which then does."""

from __future__ import annotations

import random

import msgspec
import pytest

from muster.bench.random_clusters import GIB, Table, full_mesh, model, node, random_cluster, replaced, wish
from muster.needs import ModelNeeds
from muster.placement import Cluster, Placement, Refusal
from muster.placement.core import place
from muster.placement.nearest import nearest
from muster.spec import InstanceSpec, ModelWorkload


def mesh(**rooms: float) -> Cluster:
    return Cluster(nodes=tuple(node(name, int(room * GIB)) for name, room in rooms.items()))


def refused(
    cluster: Cluster, spec: InstanceSpec, needs: ModelNeeds | None = None, links: Table | None = None
) -> Refusal:
    found = place(cluster, links or full_mesh("abc"), needs or model(), spec)
    assert isinstance(found, Refusal), found
    return found


def test_every_node_is_named_with_what_it_lacks() -> None:
    found = refused(mesh(a=3, b=1.5, c=0.2), wish(1, auto_ranks=True))
    assert "does not fit on 1 to 3 ranks as a pipeline (6.2 GiB of weights" in found.message
    assert "5 of 12 layers find no room" in found.message
    assert "node a has 3.0 GiB free, room for 5 layer(s); " in found.message
    assert "node c has 205 MiB free, room for 0 layer(s), 2.2 GiB short of 4" in found.message
    assert [one.node for one in found.shortfalls] == ["a", "b", "c"]


def test_a_slice_that_is_too_large_says_by_how_much() -> None:
    found = refused(mesh(a=3, b=20), wish(2, workload_sharding="tensor", memory_bytes=None), links=full_mesh("ab"))
    assert "does not fit on 2 rank(s) with tensor sharding" in found.message
    (short,) = found.shortfalls
    assert short.node == "a"
    assert GIB < short.missing_bytes < 2 * GIB


def test_a_full_node_says_so() -> None:
    nodes = (node("a", 20 * GIB, ranks=0), node("b", GIB))
    assert "node a has all its 0 ranks in use" in refused(Cluster(nodes=nodes), wish(1)).message


def test_heads_that_do_not_divide_are_named_with_a_way_out() -> None:
    found = refused(mesh(a=20, b=20, c=20), wish(3, workload_sharding="tensor"))
    assert found.kind == "sharding-unsupported"
    assert "num_attention_heads is 8, which does not divide by 3 ranks" in found.message
    assert found.remedies == ("use --ranks 2", "use --sharding pipeline")


def test_a_link_that_works_in_one_direction_only_is_named() -> None:
    found = refused(mesh(a=20, b=20), wish(2), links=Table({}))
    assert found.message == "no 2 of the nodes reach each other in a ring: a does not reach b"
    elsewhere = place(mesh(a=20, b=20, c=20), Table({("b", "c"): (1000.0, 100.0)}), model(), wish(2))
    assert isinstance(elsewhere, Placement)
    assert [one.node for one in elsewhere.assignments] == ["b", "c"]


def test_a_context_of_one_token_has_none_that_is_shorter() -> None:
    found = nearest(mesh(a=0.5), Table({}), model(), wish(1, workload_context_tokens=1))
    assert not any("--context" in one for one in found)


def test_the_nearest_things_are_told() -> None:
    links = full_mesh("ab")
    thirsty = model(12, kv=65_536)
    long = wish(1, auto_ranks=True, workload_context_tokens=32_768)
    assert "use --context 8192 instead of 32768" in nearest(mesh(a=8, b=8), links, thirsty, long)
    assert "use an 8-bit version of this model" in nearest(mesh(a=4.5), links, model(), wish(1))
    assert "use a 4-bit version of this model" in nearest(mesh(a=3), links, model(), wish(1))
    assert "use --ranks 2" in nearest(mesh(a=5, b=5), links, model(), wish(1))
    assert "use --sharding pipeline" in nearest(mesh(a=2, b=8), links, model(), wish(2, workload_sharding="tensor"))
    assert "leave --split out" in nearest(mesh(a=4, b=8), links, model(), wish(2, split=(9, 3)))
    several = wish(1, workload_concurrency=8, workload_context_tokens=1024, workload_prompt_cache_bytes=0)
    assert "use --concurrency 1 instead of 8" in nearest(mesh(a=8, b=8), links, thirsty, several)
    assert "start one more node with at least 4 GiB free" in nearest(
        mesh(a=4), links, model(), wish(1, auto_ranks=True)
    )
    assert nearest(Cluster(nodes=(node("a", GIB),), named=True), links, model(), wish(1, nodes=("a",))) == ()


@pytest.mark.parametrize("seed", range(3))
def test_what_is_advised_does_fit(seed: int) -> None:
    draw = random.Random(seed)
    advised = 0
    while advised < 10:
        cluster, links, needs, spec = random_cluster(draw, most=5)
        if isinstance(place(cluster, links, needs, spec), Placement):
            continue
        for remedy in nearest(cluster, links, needs, spec):
            words = remedy.split()
            if words[:2] == ["use", "--ranks"]:
                again = replaced(spec, ranks=int(words[2]))
            elif words[:2] == ["use", "--context"]:
                assert isinstance(spec.workload, ModelWorkload)
                again = replaced(spec, workload=replaced_context(spec.workload, int(words[2])))
            else:
                continue
            advised += 1
            assert isinstance(place(cluster, links, needs, again), Placement), remedy


def replaced_context(workload: ModelWorkload, tokens: int) -> ModelWorkload:
    return msgspec.structs.replace(workload, context_tokens=tokens)


def test_no_more_pairs_are_looked_at_than_it_takes_to_say_that_nobody_reaches_anybody() -> None:
    names = [f"n{number:03}" for number in range(120)]
    links = Table({})
    found = place(Cluster(nodes=tuple(node(name, 8 * GIB) for name in names)), links, model(), wish(2))
    assert isinstance(found, Refusal)
    assert "n000 does not reach n001; " in found.message and found.message.endswith("and many more pairs")
    assert {one.node for one in found.shortfalls} == set(names)
    assert links.asked < 20 * len(names)  # of 7,140 pairs
