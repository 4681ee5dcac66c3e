"""Real groups: batches over several ranks give mlx-lm's tokens, and every rank has rank 0's, whatever it computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from demo_prompts import DEMO, Known, known_answers
from shard_ranks import Ask, Job, Outcome, Ranks, run_alone

from muster.sampling import SamplingParams

pytestmark = [pytest.mark.mlx, pytest.mark.process]

BYTES = 2**24
SHARDINGS = ("pipeline", "tensor")


@pytest.fixture(scope="module")
def known() -> tuple[Known, ...]:
    return known_answers()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(2, tmp_path_factory.mktemp("ring"))
    yield ranks
    ranks.close()


def tokens_of(outcomes: list[Outcome]) -> tuple[tuple[int, ...], ...]:
    """What all ranks agree on."""
    assert [outcome.error for outcome in outcomes] == [""] * len(outcomes)
    assert {outcome.tokens for outcome in outcomes} == {outcomes[0].tokens}
    assert {outcome.cached for outcome in outcomes} == {outcomes[0].cached}
    assert {outcome.entries for outcome in outcomes} == {outcomes[0].entries}
    return outcomes[0].tokens


def job_of(sharding: str, *asks: Ask, spoiled_rank: int = -1, cache_bytes: int = BYTES, sequences: int = 8) -> Job:
    return Job(
        path=str(DEMO),
        sharding=sharding,
        asks=asks,
        chunk_tokens=16,
        prompt_cache_bytes=cache_bytes,
        max_sequences=sequences,
        spoiled_rank=spoiled_rank,
    )


def mixed(known: tuple[Known, ...], count: int = 160) -> tuple[Ask, ...]:
    """Requests that enter and leave at different steps; every fourth is cancelled."""
    return tuple(
        Ask(prompt=one.prompt, count=count, enter=number * 3, cancel=number if number % 4 == 3 else -1)
        for number, one in enumerate(known)
    )


@pytest.mark.parametrize(("sharding", "every"), [("pipeline", 1), ("tensor", 4)])
def test_two_ranks_answer_a_mixed_batch_as_mlx_lm_does(
    pair: Ranks, known: tuple[Known, ...], sharding: str, every: int
) -> None:
    asked = known[::every]
    answers = tokens_of(pair.run(job_of(sharding, *mixed(asked), sequences=16)))
    for ask, tokens, one in zip(mixed(asked), answers, asked, strict=True):
        if ask.cancel < 0:
            assert tokens == one.tokens
        else:
            assert tokens == one.tokens[: len(tokens)]


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_two_ranks_hit_and_forget_the_same_prompts(pair: Ranks, known: tuple[Known, ...], sharding: str) -> None:
    asked = (known[0], known[3], known[0], known[6], known[3], known[0])
    asks = tuple(Ask(prompt=one.prompt, count=12, after=number) for number, one in enumerate(asked))
    outcomes = pair.run(job_of(sharding, *asks))
    assert tokens_of(outcomes) == tuple(one.tokens[:12] for one in asked)
    assert all(cached >= len(one.prompt) - 2 for cached, one in zip(outcomes[0].cached[4:], asked[4:], strict=True))
    bounded = pair.run(job_of(sharding, *asks, cache_bytes=40_000))
    assert tokens_of(bounded) == tuple(one.tokens[:12] for one in asked)
    assert bounded[0].entries < outcomes[0].entries


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_the_ids_stay_rank_0_s_when_another_rank_computes_otherwise(
    pair: Ranks, known: tuple[Known, ...], sharding: str
) -> None:
    # As with mixed hardware, but so much that greedy tokens differ too: the others could not agree by themselves.
    asks = tuple(Ask(prompt=one.prompt, count=12, enter=number) for number, one in enumerate(known[:3]))
    answers = tokens_of(pair.run(job_of(sharding, *asks, spoiled_rank=1)))
    assert answers != tuple(one.tokens[:12] for one in known[:3])


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_a_seed_gives_the_same_tokens_on_two_ranks(pair: Ranks, known: tuple[Known, ...], sharding: str) -> None:
    asks = tuple(
        Ask(prompt=one.prompt, count=20, sampling=SamplingParams(temperature=5.0, seed=number, top_k=50))
        for number, one in enumerate(known[:3])
    )
    alone = run_alone(job_of("auto", *asks)).tokens
    assert tokens_of(pair.run(job_of(sharding, *asks))) == alone
    assert alone != tuple(one.tokens[:20] for one in known[:3])


def test_four_ranks_answer_as_mlx_lm_does(tmp_path: Path, known: tuple[Known, ...]) -> None:
    ranks = Ranks(4, tmp_path)
    try:
        piped = tokens_of(ranks.run(job_of("pipeline", *mixed(known[:4], 30))))  # four ranks spin on two cores
        tensor = tokens_of(ranks.run(job_of("tensor", *[Ask(prompt=one.prompt, count=6) for one in known[:2]])))
    finally:
        ranks.close()
    assert piped[:3] == tuple(one.tokens[:30] for one in known[:3])
    assert tensor == tuple(one.tokens[:6] for one in known[:2])
