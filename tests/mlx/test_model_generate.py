"""Generation on one rank against mlx-lm's own, and the checks on prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import load, stream_generate
from mlx_lm.sample_utils import make_logits_processors
from tiny_models import LLAMA, make_model

from muster.errors import RequestError
from muster.model.files import inspect
from muster.model.generate import Decoder, Generation, Sampler
from muster.model.load import LoadedModel, load_shard
from muster.model.params import Message, Piece, SamplingParams
from muster.model.plan import Supports, plan
from muster.model.prompt import encode

pytestmark = pytest.mark.mlx

PROMPT = list(b"Say it in order.")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "m", LLAMA)


@pytest.fixture(scope="module")
def loaded(path: Path) -> LoadedModel:
    shards = plan(inspect(path), "auto", 1, Supports(tensor=False, pipeline=False))
    return load_shard(path, shards, 0, None, on_layer=lambda done, total: None)


def generate(loaded: LoadedModel, prompt: list[int], params: SamplingParams, chunk_tokens: int = 4) -> list[Piece]:
    generation, decoder = Generation(loaded, prompt, params), Decoder(loaded, prefill_chunk_tokens=chunk_tokens)
    pieces = [generation.advance(decoder.prefill(prompt))]
    while pieces[-1].finish is None:
        pieces.append(generation.advance(decoder.step(pieces[-1].token)))
    return pieces


def mlx_lm_pieces(path: Path, count: int, **options: Any) -> list[Any]:
    model, tokenizer = load(str(path))[:2]
    return list(stream_generate(model, tokenizer, PROMPT, max_tokens=count, **options))


def test_greedy_pieces_equal_mlx_lm_s(path: Path, loaded: LoadedModel) -> None:
    expected = mlx_lm_pieces(path, 30)
    pieces = generate(loaded, PROMPT, SamplingParams(max_tokens=30))
    assert len({piece.token for piece in pieces}) > 5, "the model is too monotonous to test anything"
    assert [(piece.token, piece.text) for piece in pieces] == [(one.token, one.text) for one in expected]
    assert [piece.finish for piece in pieces] == [None] * 29 + ["length"]


def test_penalties_equal_mlx_lm_s(path: Path, loaded: LoadedModel) -> None:
    processors = make_logits_processors(repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=0.3)
    expected = mlx_lm_pieces(path, 30, logits_processors=processors)
    params = SamplingParams(max_tokens=30, repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=0.3)
    pieces = generate(loaded, PROMPT, params)
    assert [piece.token for piece in pieces] == [one.token for one in expected]
    assert [piece.token for piece in pieces] != [piece.token for piece in generate(loaded, PROMPT, SamplingParams())][
        :30
    ]


@pytest.mark.parametrize("chunk_tokens", [1, 3, 15, 16, 2048])
def test_chunks_of_any_size_give_the_same_logits(loaded: LoadedModel, chunk_tokens: int) -> None:
    seen: list[tuple[int, int]] = []
    decoder = Decoder(loaded, prefill_chunk_tokens=chunk_tokens)
    logits = decoder.prefill(PROMPT, lambda done, total: seen.append((done, total)))
    assert decoder.position == len(PROMPT)
    assert mx.allclose(logits, Decoder(loaded).prefill(PROMPT), atol=1e-3)
    assert seen[-1] == (16, 16)
    assert seen == sorted(seen)


def test_an_end_token_stops_and_carries_no_text(loaded: LoadedModel) -> None:
    generation = Generation(loaded, PROMPT, SamplingParams())
    logits = mx.zeros((1, 260)).at[0, 65].add(5.0)
    assert generation.advance(logits).finish is None
    piece = generation.advance(logits.at[0, 256].add(9.0))
    assert (piece.token, piece.finish, generation.finish, generation.generated_tokens) == (256, "stop", "stop", 2)


def test_a_seed_gives_the_same_draws_beside_any_neighbour() -> None:
    logits = mx.zeros((1, 260))
    params = SamplingParams(temperature=1.0, seed=7, top_k=400, top_p=0.95, min_p=0.01)
    lone, first, second = (Sampler(params, PROMPT, 260) for _ in range(3))
    neighbour = Sampler(SamplingParams(temperature=1.0), PROMPT, 260)
    expected = [lone.sample(logits) for _ in range(20)]
    mixed: list[int] = []
    for _ in range(20):
        neighbour.sample(logits)
        mixed.append(first.sample(logits))
    assert mixed == expected
    assert len(set(expected)) > 10
    other = Sampler(SamplingParams(temperature=1.0, seed=8), PROMPT, 260)
    assert [other.sample(logits) for _ in range(20)] != [second.sample(logits) for _ in range(20)]


def test_the_context_limits_prompt_and_answer(loaded: LoadedModel) -> None:
    with pytest.raises(RequestError, match="128 tokens and the model's context only 128"):
        Generation(loaded, [65] * 128, SamplingParams())
    pieces = generate(loaded, [65] * 120, SamplingParams(max_tokens=50))
    assert (len(pieces), pieces[-1].finish) == (8, "length")


def test_ids_beyond_the_vocabulary_are_refused(loaded: LoadedModel) -> None:
    with pytest.raises(RequestError, match="token 260 is outside the model's vocabulary of 260"):
        Generation(loaded, [1, 260], SamplingParams())


def test_encode_takes_a_prompt_or_messages(loaded: LoadedModel) -> None:
    tokenizer = loaded.tokenizer
    assert tokenizer.decode(encode(tokenizer, "höre", None)) == "höre"
    chat = encode(tokenizer, None, (Message(role="user", content="Hello"),))
    assert tokenizer.decode(chat) == "user: Hello\nassistant: "
    for prompt, messages in ((None, None), ("a", (Message(role="user", content="b"),)), ("", None), (None, ())):
        with pytest.raises(RequestError):
            encode(tokenizer, prompt, messages)
