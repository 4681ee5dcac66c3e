"""Answers of a model with random weights in mlx-lm's own batch: schemas, draws and limits, alone and together."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.generate import BatchGenerator
from tiny_models import LLAMA, make_model

from muster.model.answer import Answer
from muster.model.files import inspect
from muster.model.load import LoadedModel, load_shard
from muster.model.plan import Supports, plan
from muster.model.request import prepare
from muster.protocol import Generate
from muster.replies import Chunk
from muster.sampling import SamplingParams

pytestmark = pytest.mark.mlx

ENUM = {"enum": ["ä", "日本", 3, None, 'a"b']}
NUMBERS = {
    "type": "object",
    "properties": {
        "whole": {"type": "integer", "minimum": -5, "maximum": 120},
        "real": {"type": "number", "minimum": 0, "maximum": 1},
        "on": {"type": "boolean"},
    },
    "required": ["whole", "real", "on"],
    "additionalProperties": False,
}
LIST = {"type": "array", "minItems": 2, "maxItems": 3, "items": ENUM}
NESTED = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        "inner": NUMBERS,
        "list": LIST,
    },
    "required": ["name", "code", "inner", "list"],
    "additionalProperties": False,
}
CHOICE = {"anyOf": [{"type": "null"}, {"type": "string", "const": "Ünï"}, {"$ref": "#/$defs/x"}], "$defs": {"x": LIST}}
SCHEMAS = (ENUM, NUMBERS, LIST, NESTED, CHOICE)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory: Path = make_model(tmp_path_factory.mktemp("model") / "m", LLAMA | {"max_position_embeddings": 1024})
    shards = plan(inspect(directory), "auto", 1, Supports(tensor=False, pipeline=False))
    return load_shard(directory, shards, 0, None, on_layer=lambda done, total: None)


def follows(value: Any, schema: dict[str, Any], root: dict[str, Any] | None = None) -> bool:
    """Whether a value follows a schema, for the few keywords that are used here."""
    root = root or schema
    match schema:
        case {"anyOf": options}:
            return any(follows(value, option, root) for option in options)
        case {"$ref": _}:
            return follows(value, root["$defs"]["x"], root)
        case {"enum": values}:
            return value in values
        case {"const": wanted}:
            return value == wanted
        case {"type": "object", "properties": properties}:
            return set(value) == set(properties) and all(follows(value[key], properties[key], root) for key in value)
        case {"type": "array", "items": items}:
            return schema["minItems"] <= len(value) <= schema["maxItems"] and all(
                follows(x, items, root) for x in value
            )
        case {"type": "string", "pattern": pattern}:
            return re.search(pattern, value) is not None
        case {"type": "string"}:
            return schema["minLength"] <= len(value) <= schema["maxLength"]
        case {"type": "integer"}:
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case {"type": "number"}:
            return type(value) in (int, float) and schema["minimum"] <= value <= schema["maximum"]
        case {"type": "boolean"}:
            return type(value) is bool
        case {"type": "null"}:
            return value is None
        case {"type": "object"}:
            return isinstance(value, dict)
        case _:
            raise AssertionError(schema)


def ask(prompt: str, schema: dict[str, Any] | None = None, **params: Any) -> Generate:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 1, "max_tokens": 400} | params
    text = json.dumps(schema, ensure_ascii=False) if schema is not None else None
    return Generate(instance="m", prompt=prompt, sampling=SamplingParams(json_schema=text, **options))


def run(loaded: LoadedModel, *requests: Generate) -> list[tuple[str, str | None]]:
    """The text and the finish of each request, all in one batch."""
    return [("".join(chunk.text for chunk in chunks), finish) for chunks, finish in run_chunks(loaded, *requests)]


def run_chunks(loaded: LoadedModel, *requests: Generate) -> list[tuple[list[Chunk], str | None]]:
    """What each request's answer brings, and its finish, all in one batch."""
    prepared = [prepare(loaded, request) for request in requests]
    answers = [Answer(loaded, one, request.sampling) for one, request in zip(prepared, requests, strict=True)]
    batch: Any = BatchGenerator(loaded.model)
    uids = batch.insert(
        [list(one.tokens) for one in prepared],
        max_tokens=[one.limit + 1 for one in prepared],
        samplers=[answer.sampler for answer in answers],
        logits_processors=[answer.processors for answer in answers],
    )
    live = {uid: (answer, one.limit) for uid, answer, one in zip(uids, answers, prepared, strict=True)}
    chunks: dict[int, list[Chunk]] = {uid: [] for uid in uids}
    try:
        while live:
            for response in batch.next()[1]:
                answer, limit = live[response.uid]
                last = answer.completion_tokens + 1 >= limit
                chunks[response.uid].append(answer.take(response.token, response.logprobs, at_limit=last))
                if answer.finish is not None:
                    del live[response.uid]
                    batch.remove([response.uid])
    finally:
        batch.close()
    return [(chunks[uid], answer.finish) for uid, answer in zip(uids, answers, strict=True)]


@pytest.mark.parametrize("schema", SCHEMAS, ids=["enum", "numbers", "list", "nested", "choice"])
def test_answers_follow_their_schema(loaded: LoadedModel, schema: dict[str, Any]) -> None:
    asked = [ask(f"Say {seed}", schema, seed=seed, temperature=seed % 3 * 0.75) for seed in range(9)]
    answers = run(loaded, *asked)
    assert [finish for _, finish in answers] == ["stop"] * 9
    values = [json.loads(text) for text, _ in answers]
    assert all(follows(value, schema) for value in values), values
    assert len({text for text, _ in answers}) > 1


def test_any_object_parses(loaded: LoadedModel) -> None:
    any_object = {"type": "object"}
    answers = run(loaded, *(ask("x", any_object, seed=seed, temperature=2.0, max_tokens=60) for seed in range(6)))
    ended = [text for text, finish in answers if finish == "stop"]
    assert ended
    assert all(isinstance(json.loads(text), dict) for text in ended)


def test_the_limit_in_the_middle_is_a_limit(loaded: LoadedModel) -> None:
    (whole,) = run(loaded, ask("x", NESTED))
    (cut,) = run(loaded, ask("x", NESTED, max_tokens=15))
    assert (cut[1], whole[0].startswith(cut[0])) == ("length", True)


def test_answers_are_the_same_alone_and_beside_others(loaded: LoadedModel) -> None:
    asked = [
        ask("One", NESTED, seed=4),
        ask("Another and longer prompt", max_tokens=40, seed=4),
        ask("One", max_tokens=30, seed=5, top_p=0.9, top_k=50),
        ask("Two", max_tokens=25, temperature=0.0, frequency_penalty=0.5, logit_bias={70: 3.0}),
        ask("Three", LIST, seed=6),
        ask("Two", max_tokens=35, temperature=0.0),
        ask("Another and longer prompt", max_tokens=40, seed=4),
    ]
    together = run(loaded, *asked)
    assert together == [run(loaded, one)[0] for one in asked]
    assert together[1] == together[6], "the same seed gives the same answer"
    assert run(loaded, ask("Another and longer prompt", max_tokens=40, seed=5))[0] != together[1]


def test_a_ban_and_a_wish_are_heeded(loaded: LoadedModel) -> None:
    (free,) = run(loaded, ask("x", temperature=0.0, max_tokens=20))
    letter = next(letter for letter in free[0] if letter.isascii())
    (token,) = prepare(loaded, ask(letter)).tokens
    (banned,) = run(loaded, ask("x", temperature=0.0, max_tokens=20, logit_bias={token: -100.0}))
    assert letter not in banned[0]
    (end,) = loaded.tokenizer.eos_token_ids
    assert run(loaded, ask("x", temperature=0.0, logit_bias={end: 100.0})) == [("", "stop")]


def test_log_probabilities_do_not_depend_on_what_changes_the_choice(loaded: LoadedModel) -> None:
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "logprobs": True, "top_logprobs": 3}
    plain, biased = run_chunks(loaded, ask("x", **options), ask("x", logit_bias={5: 0.0}, **options))
    shown = [[entry for chunk in chunks for entry in chunk.logprobs] for chunks, _ in (plain, biased)]
    assert [entry.token for entry in shown[0]] == [entry.top[0].token for entry in shown[0]], "greedy takes the best"
    assert len(shown[0]) == 12
    for one, other in zip(*shown, strict=True):
        assert (one.token, one.data) == (other.token, other.data)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [top.token for top in one.top] == [top.token for top in other.top]
