"""How far a search goes: no further than it must, and never past what fits."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import combinations, permutations
from typing import Any

import msgspec
import pytest

from muster.bench.random_clusters import GIB, MIB, Table, full_mesh, model, node, nodes_of, wish
from muster.needs import LayerNeeds, ModelNeeds
from muster.placement import Cluster, Placement, Refusal, choose
from muster.placement.core import place
from muster.placement.costs import StageCosts
from muster.placement.nearest import nearest
from muster.placement.split import split_layers
from muster.spec import ModelWorkload


def heavy(layers: int = 48, layer_bytes: int = 200 * MIB) -> ModelNeeds:
    """A model whose embedding and head are as large as many of its layers."""
    return msgspec.structs.replace(
        model(layers, layer_bytes, tensor=False),
        outside_bytes=2000 * MIB,
        embedding_bytes=1000 * MIB,
        head_bytes=1000 * MIB,
    )


def workload(needs: ModelNeeds) -> ModelWorkload:
    found = wish(1).workload
    assert isinstance(found, ModelWorkload)
    return msgspec.structs.replace(found, model=needs.model)


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many nodes each set had all of whose orders were looked at."""
    found: list[int] = []

    def counted(items: Iterable[Any], *more: int) -> Iterator[tuple[Any, ...]]:
        taken = list(items)
        found.append(len(taken) + 1)
        return permutations(taken, *more)

    monkeypatch.setattr(choose, "permutations", counted)
    return found


@pytest.mark.parametrize("free", [1.45, 1.5, 1.55, 1.6, 1.8])
@pytest.mark.parametrize("ranks", [5, 6])
def test_what_cannot_fit_for_its_ends_is_not_tried_in_every_order(
    free: float, ranks: int, looked_at: list[int]
) -> None:
    names = [f"n{number}" for number in range(8)]
    cluster = Cluster(nodes=tuple(node(name, int((free + 0.013 * at) * GIB)) for at, name in enumerate(names)))
    assert isinstance(place(cluster, full_mesh(names), heavy(), wish(ranks)), Refusal)
    assert not looked_at
    looked_at.clear()
    nearest(cluster, full_mesh(names), heavy(), wish(ranks))
    assert len(looked_at) <= 40


@pytest.mark.parametrize("seed", range(40))
def test_what_fits_in_any_order_of_any_nodes_is_found(seed: int) -> None:
    draw = random.Random(seed)
    needs = heavy(layers=draw.randint(6, 14), layer_bytes=draw.choice([150, 400, 900]) * MIB)
    if draw.random() < 0.5:
        sizes = [draw.choice([100, 400, 1200]) * MIB for _ in needs.layers]
        needs = msgspec.structs.replace(needs, layers=tuple(LayerNeeds(size, size, 4096) for size in sizes))
    names = [f"n{number}" for number in range(5)]
    free = {name: int(draw.uniform(0.8, 5.5) * GIB) for name in names}
    ranks = draw.randint(2, 4)
    costs = StageCosts(needs, workload(needs))
    some = False
    for chosen in combinations(names, ranks):
        shares = [free[name] for name in chosen]
        fits = [split_layers(costs, order, [1.0] * ranks) is not None for order in permutations(shares)]
        assert costs.may_fit_somehow(shares) or not any(fits)
        for order, fit in zip(permutations(shares), fits, strict=True):
            assert costs.may_fit(order) or not fit
        some = some or any(fits)
    cluster = Cluster(nodes=tuple(node(name, free[name]) for name in names))
    found = place(cluster, full_mesh(names), needs, wish(ranks, workload_sharding="pipeline"))
    assert isinstance(found, Placement) == some


@pytest.mark.parametrize(("left", "right"), [(4, 5), (5, 6), (3, 9), (6, 12)])
def test_of_networks_apart_the_one_that_is_large_enough_is_found(left: int, right: int) -> None:
    one, other = ([f"{name}{number:02}" for number in range(size)] for name, size in (("a", left), ("b", right)))
    rates = dict.fromkeys(combinations(one, 2), (10000.0, 50.0))
    rates |= dict.fromkeys(combinations(other, 2), (9000.0, 50.0))
    cluster = Cluster(nodes=tuple(node(name, (9 if name in one else 8) * GIB) for name in (*one, *other)))
    spec = wish(left + 1, workload_sharding="pipeline")
    found = place(cluster, Table(rates), model(24), spec)
    assert isinstance(found, Placement), found
    assert set(nodes_of(found)) <= set(other)
    too_many = place(cluster, Table(rates), model(24), wish(right + 1, workload_sharding="pipeline"))
    assert isinstance(too_many, Refusal)


def test_the_fast_network_is_found_wherever_its_nodes_stand_in_the_order() -> None:
    names = [f"n{number:02}" for number in range(40)]
    fast = set(names[-4:])
    rates = {(a, b): (40_000.0 if {a, b} <= fast else 940.0, 80.0) for a, b in combinations(names, 2)}
    cluster = Cluster(nodes=tuple(node(name, 8 * GIB) for name in names))
    found = place(cluster, Table(rates), model(24), wish(4))
    assert isinstance(found, Placement)
    assert set(nodes_of(found)) == fast
