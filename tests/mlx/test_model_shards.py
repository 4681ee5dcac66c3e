"""Real groups: a model over several ranks gives the tokens of mlx-lm on one, and reads only what it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlx_lm import load, stream_generate
from shard_ranks import Ask, Job, Ranks
from tiny_models import LLAMA, QWEN2, QWEN3_MOE, make_model

from muster.model.files import inspect

pytestmark = [pytest.mark.mlx, pytest.mark.process]

PROMPT = tuple(b"Which ranks hold what?")
COUNT = 12
ASKS = (Ask(prompt=PROMPT, count=COUNT),)
ONE = (Ask(prompt=PROMPT, count=1),)
TWO = (Ask(prompt=PROMPT, count=2),)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def pair(root: Path) -> Iterator[Ranks]:
    ranks = Ranks(2, root)
    yield ranks
    ranks.close()


def one_rank(path: Path) -> tuple[int, ...]:
    """mlx-lm's own greedy tokens."""
    model, tokenizer = load(str(path))[:2]
    answers: list[Any] = list(stream_generate(model, tokenizer, list(PROMPT), max_tokens=COUNT))
    return tuple(answer.token for answer in answers)


CASES: list[Any] = [
    pytest.param(QWEN2, "tensor", {"files": 3}, id="qwen2-tensor"),
    pytest.param(QWEN2, "pipeline", {}, id="qwen2-pipeline-single-file"),
    pytest.param(QWEN2, "tensor", {"quantised": True}, id="qwen2-tensor-quantised"),
    pytest.param(LLAMA, "auto", {}, id="llama-auto"),
    pytest.param(QWEN3_MOE, "tensor", {}, id="qwen3_moe-tensor"),
    pytest.param(QWEN3_MOE, "pipeline", {"files": 2}, id="qwen3_moe-pipeline"),
]


@pytest.mark.parametrize(("config", "sharding", "options"), CASES)
def test_two_ranks_give_the_tokens_of_one(
    root: Path, pair: Ranks, config: dict[str, Any], sharding: str, options: dict[str, Any], request: Any
) -> None:
    path = make_model(root / request.node.callspec.id, config, **options)
    outcomes = pair.run(Job(path=str(path), sharding=sharding, asks=ASKS))
    assert [outcome.error for outcome in outcomes] == ["", ""]
    assert [outcome.tokens for outcome in outcomes] == [(one_rank(path),)] * 2
    for outcome in outcomes:
        own = outcome.layers[1] - outcome.layers[0]
        assert outcome.progress == tuple((done, own) for done in range(own + 1))


def test_uneven_pipeline_of_three_ranks_gives_the_tokens_of_one(root: Path) -> None:
    path = make_model(root / "uneven", QWEN2, files=2)
    job = Job(path=str(path), sharding="pipeline", asks=ASKS)
    ranks = Ranks(3, root)
    try:
        even = ranks.run(job)
        chosen = ranks.run(Job(path=str(path), sharding="auto", asks=ASKS, split=(1, 3, 1)))
    finally:
        ranks.close()
    assert [outcome.layers for outcome in even] == [(3, 5), (1, 3), (0, 1)]
    assert [outcome.layers for outcome in chosen] == [(4, 5), (1, 4), (0, 1)]
    expected = one_rank(path)
    assert [outcome.tokens for outcome in (*even, *chosen)] == [(expected,)] * 6


def test_a_rank_reads_and_keeps_its_own_layers_only(root: Path, pair: Ranks) -> None:
    config = QWEN2 | {"hidden_size": 256, "head_dim": 32, "intermediate_size": 1024, "num_hidden_layers": 8}
    path = make_model(root / "wide", config)
    tensors = inspect(path).tensors
    layer_bytes = [
        sum(tensor.bytes for name, tensor in tensors.items() if f"layers.{layer}." in name) for layer in range(8)
    ]
    for outcome in pair.run(Job(path=str(path), sharding="pipeline", asks=ONE, split=(3, 5))):
        own = sum(layer_bytes[outcome.layers[0] : outcome.layers[1]])
        assert own <= outcome.resident_bytes < own + 200_000
        assert outcome.read_bytes == 0 or own <= outcome.read_bytes < own + layer_bytes[0] // 2
    for outcome in pair.run(Job(path=str(path), sharding="tensor", asks=ONE)):
        assert outcome.error == ""
        half = sum(layer_bytes) // 2
        assert half <= outcome.resident_bytes < half + 600_000
        assert outcome.peak_bytes < outcome.resident_bytes + 1.5 * layer_bytes[0]


def test_a_pipeline_keeps_the_embedding_and_the_head_only_where_they_are_used(root: Path, pair: Ranks) -> None:
    path = make_model(root / "wordy", QWEN2 | {"vocab_size": 20_000, "tie_word_embeddings": False})
    table_bytes = inspect(path).tensors["lm_head.weight"].bytes
    for outcome in pair.run(Job(path=str(path), sharding="pipeline", asks=TWO)):
        assert outcome.error == ""
        others = outcome.served_bytes - outcome.resident_bytes
        assert table_bytes <= others < 1.2 * table_bytes  # the head on rank 0, the embedding on rank 1


def test_heads_that_do_not_divide_are_refused_before_anything_is_read(root: Path, pair: Ranks) -> None:
    path = make_model(root / "odd", LLAMA | {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16})
    for outcome in pair.run(Job(path=str(path), sharding="tensor", asks=ONE)):
        assert "num_key_value_heads is 3, which does not divide by 2 ranks" in outcome.error
