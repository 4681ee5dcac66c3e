"""Draws depend on the request's own seed and step; filters keep what their parameters say."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from muster.model.choose import Sampler, make_draw, make_processors
from muster.sampling import SamplingParams

SIZE = 50


def row(seed: int = 1) -> mx.array:
    logits = mx.random.normal((1, SIZE), key=mx.random.key(seed))
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def sampler(**options: Any) -> Sampler:
    options = {"temperature": 1.0, "seed": 7} | options
    made = make_draw(SamplingParams(**options))
    assert made is not None
    return made


def draws(made: Sampler, count: int = 30) -> list[int]:
    return [int(made(row()).item()) for _ in range(count)]  # pyright: ignore[reportArgumentType]


def test_greedy_requests_share_the_batch_s_sampler() -> None:
    assert make_draw(SamplingParams(seed=7, top_k=3)) is None


def test_a_seed_gives_the_same_draws_whatever_is_drawn_between() -> None:
    alone = draws(sampler())
    assert len(set(alone)) > 5
    mine, other = sampler(), sampler(seed=8)
    lazy: list[mx.array] = []
    for _ in range(30):  # as a batch does it: all graphs are built before any is evaluated
        lazy.append(mine(row()))
        lazy.append(other(row()))
        lazy.append(mx.random.uniform(shape=(1,)))
    mx.eval(lazy)
    assert [int(one.item()) for one in lazy[::3]] == alone  # pyright: ignore[reportArgumentType]
    assert [int(one.item()) for one in lazy[1::3]] != alone  # pyright: ignore[reportArgumentType]


def test_without_a_seed_draws_differ() -> None:
    assert draws(sampler(seed=None)) != draws(sampler(seed=None))


def test_the_largest_seed_is_taken() -> None:
    assert len(draws(sampler(seed=2**63 - 1))) == 30


def best(count: int) -> set[int]:
    ranked: Any = mx.argsort(-row()[0])[:count].tolist()
    return set(ranked)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 3}, 3),
        ({"top_k": 1}, 1),
        ({"top_p": 0.0}, 1),
        ({"min_p": 1.0}, 1),
        ({"temperature": 1e-4}, 1),
    ],
)
def test_filters_keep_only_the_likeliest(options: dict[str, Any], kept: int) -> None:
    assert set(draws(sampler(**options), 60)) == best(kept)


@pytest.mark.parametrize("top_k", [SIZE, SIZE + 1, 2**31 - 1])
def test_a_top_k_that_keeps_everything_is_no_filter(top_k: int) -> None:
    assert draws(sampler(top_k=top_k)) == draws(sampler())


def test_a_request_without_biases_and_penalties_has_no_processor() -> None:
    assert make_processors(SamplingParams(repetition_penalty=1.0, logit_bias={})) == []


def test_biases_and_penalties_change_the_logits_of_their_tokens_alone() -> None:
    params = SamplingParams(
        logit_bias={3: 5.0, 4: -100.0}, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25
    )
    logits = mx.ones((1, SIZE))
    for process in make_processors(params):
        logits = process(mx.array([7, 8, 8]), logits)
    values: Any = logits[0].tolist()
    assert values[3] == 6.0
    assert values[4] == -99.0
    assert values[7] == pytest.approx(1.0 / 2 - 0.5 - 0.25)
    assert values[8] == pytest.approx(1.0 / 2 - 0.5 - 0.5)
    assert {values[n] for n in range(SIZE) if n not in (3, 4, 7, 8)} == {1.0}
