"""Against trying everything: what is chosen is as good as can be, and nothing that fits is refused."""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from muster.bench.random_clusters import (
    Table,
    best_of,
    capacities,
    cost_of,
    nodes_of,
    random_cluster,
    stages_fit,
    worst_of,
)
from muster.needs import ModelNeeds
from muster.placement import Cluster, Placement, Refusal
from muster.placement.core import place
from muster.spec import InstanceSpec


@pytest.mark.parametrize("seed", range(12))
def test_the_choice_is_as_good_as_the_best_of_all(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(16):
        cluster, links, needs, spec = random_cluster(draw, most=6)
        best = best_of(cluster, links, needs, spec)
        found = place(cluster, links, needs, spec)
        assert found == place(cluster, links, needs, spec)
        if best is None:
            assert isinstance(found, Refusal) or len(set(nodes_of(found))) < len(found.assignments)
            continue
        assert isinstance(found, Placement), found
        size, worst = best
        assert len(found.assignments) == size
        assert worst_of(nodes_of(found), links) == worst
        assert cost_of(nodes_of(found), links) == least_cost(found, cluster, links, needs, spec)


def least_cost(found: Placement, cluster: Cluster, links: Table, needs: ModelNeeds, spec: InstanceSpec) -> int:
    """The least sum of all orders of the nodes chosen that have the best worst link and in which the layers fit."""
    chosen = [index for index, one in enumerate(cluster.nodes) if one.node in nodes_of(found)]
    most = capacities(cluster, chosen, needs, spec) if found.layout.sharding == "pipeline" else {}
    rings = [
        (worst, cost_of(names, links))
        for order in permutations(chosen)
        if not most or stages_fit(order, most, len(needs.layers))
        if (worst := worst_of(names := [cluster.nodes[index].node for index in order], links)) is not None
    ]
    return min(rings)[1]
