"""Against trying everything: what is chosen is as good as can be, and nothing that fits is refused."""

from __future__ import annotations

import random

import pytest

from muster.bench.random_clusters import best_of, nodes_of, random_cluster, worst_of
from muster.placement import Placement, Refusal
from muster.placement.core import place


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
