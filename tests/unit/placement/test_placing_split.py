"""Layers by memory and speed: each exactly once, at least one per rank, none where it does not fit."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from muster.bench.random_clusters import GIB, MIB, model, wish
from muster.needs import LayerNeeds, ModelNeeds, even_split
from muster.placement.costs import StageCosts, with_headroom
from muster.placement.split import fits, speed_classes, split_layers
from muster.predict import rank_memory
from muster.spec import ModelWorkload

ROOMY = 1000 * GIB


def costs_of(needs: ModelNeeds, **fields: int) -> StageCosts:
    workload = wish(**{f"workload_{name}": value for name, value in fields.items()}).workload
    assert isinstance(workload, ModelWorkload)
    return StageCosts(needs, workload)


def test_equal_ranks_that_have_room_share_evenly() -> None:
    for layers in range(1, 20):
        costs = costs_of(model(layers))
        for ranks in range(1, layers + 1):
            assert split_layers(costs, [ROOMY] * ranks, [1.0] * ranks) == even_split(layers, ranks)


def test_speeds_that_are_about_equal_are_equal_and_others_count() -> None:
    assert speed_classes([100, 80, 400]) == [100, 100, 400]
    assert speed_classes([100, 76, 400]) == [100, 76, 400]
    assert speed_classes([100, None, 400]) == [1, 1, 1]
    costs = costs_of(model(12))
    assert split_layers(costs, [ROOMY] * 3, [100, 100, 400]) == (2, 2, 8)
    assert split_layers(costs, [ROOMY] * 3, speed_classes([100, 110, 95])) == (4, 4, 4)


def test_a_small_rank_takes_what_fits_and_the_others_share_the_rest() -> None:
    costs = costs_of(model(12))
    little = with_headroom(costs.of(5, 7).total)
    assert split_layers(costs, [ROOMY, little, ROOMY, ROOMY], [1.0] * 4) == (4, 2, 3, 3)
    assert split_layers(costs, [little] * 4, [1.0] * 4) is None
    assert split_layers(costs, [ROOMY, 0], [1.0, 1.0]) is None
    assert split_layers(costs, [ROOMY] * 13, [1.0] * 13) is None, "thirteen ranks, and twelve layers"


def test_what_is_counted_is_what_is_predicted() -> None:
    needs = model(6, kv=4096)
    costs = costs_of(needs, concurrency=3, context_tokens=5000, prompt_cache_bytes=10 * MIB, max_batch=2)
    for start, stop in combinations(range(7), 2):
        predicted = rank_memory(
            needs,
            "pipeline",
            2,
            range(start, stop),
            context_tokens=5000,
            sequences=3,
            prefill_chunk_tokens=512,
            prompt_cache_bytes=min(10 * MIB, 2 * 4096 * 5120 * (stop - start)),
        )
        assert costs.of(start, stop).total == predicted.total


layer_sizes = st.lists(st.integers(1, 40), min_size=1, max_size=7)
ranks = st.lists(st.tuples(st.integers(0, 120), st.sampled_from([1.0, 2.0, 4.0])), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(layer_sizes, ranks)
def test_the_slowest_stage_is_as_fast_as_can_be(sizes: list[int], have: list[tuple[int, float]]) -> None:
    needs = ModelNeeds(
        model="m",
        model_type="m",
        layers=tuple(LayerNeeds(size * 32 * MIB) for size in sizes),
        outside_bytes=100 * MIB,
        embedding_bytes=50 * MIB,
        head_bytes=50 * MIB,
        pipeline=True,
    )
    costs = costs_of(needs)
    free = [400 * MIB + room * 16 * MIB for room, _ in have]
    speeds = [speed for _, speed in have]
    found = split_layers(costs, free, speeds)
    every = [
        tuple(stop - start for start, stop in zip((0, *cuts), (*cuts, len(sizes)), strict=True))
        for cuts in combinations(range(1, len(sizes)), len(have) - 1)
    ]
    possible = [split for split in every if fits(costs, split, free)]
    if found is None:
        assert not possible
        return
    assert found in possible
    assert _slowest(found, speeds) == min(_slowest(split, speeds) for split in possible)


def _slowest(split: tuple[int, ...], speeds: list[float]) -> float:
    return max(layers / speed for layers, speed in zip(split, speeds, strict=True))
