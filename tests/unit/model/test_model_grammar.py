"""A constraint allows exactly what its schema allows next, and steps aside for reasoning and tool calls."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from chat_models import load_tokens_only, make_byte_level, make_sentencepiece

from muster.errors import RequestError
from muster.model import grammar
from muster.model.answer import Answer
from muster.model.grammar import Constraint, compile_schema
from muster.model.load import LoadedModel
from muster.model.request import prepare
from muster.protocol import Generate
from muster.sampling import Message, SamplingParams, Tool

PERSON = """{"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "kind": {"enum": ["ä", "b"]}},
"required": ["name", "kind"], "additionalProperties": false}"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory = tmp_path_factory.mktemp("tokens") / "m"
    make_byte_level(directory, merges=('{"', '":', "name"))
    return load_tokens_only(directory)


def size(loaded: LoadedModel) -> int:
    assert loaded.vocabulary is not None
    return loaded.vocabulary


def all_but_the_end(loaded: LoadedModel) -> set[int]:
    return set(range(size(loaded))) - loaded.tokenizer.eos_token_ids


class Walk:
    """Calls a constraint as the batch does: once per step, with all tokens so far."""

    def __init__(self, loaded: LoadedModel, one: Constraint) -> None:
        self.loaded, self.constraint = loaded, one
        self.tokens = [1, 2, 3]

    def allowed(self) -> set[int]:
        logits = self.constraint(mx.array(self.tokens), mx.zeros((1, size(self.loaded)), dtype=mx.float16))
        assert logits.dtype == mx.float16
        row: Any = mx.isinf(logits)[0].tolist()
        return {token for token, masked in enumerate(row) if not masked}

    def say(self, text: str) -> set[int]:
        """What is allowed after `text`, every token of which must be allowed."""
        for token in self.loaded.tokenizer.encode(text, add_special_tokens=False):
            assert token in self.allowed(), (text, self.loaded.tokenizer.decode([token]))
            self.tokens.append(token)
        return self.allowed()


def walk(loaded: LoadedModel, schema: str = PERSON, *, reasoning: Any = "closed", calls_tools: bool = False) -> Walk:
    return Walk(loaded, Constraint(compile_schema(loaded, schema, calls_tools=calls_tools), reasoning))


def ids(loaded: LoadedModel, *pieces: str) -> set[int]:
    return set(loaded.tokenizer.convert_tokens_to_ids(list(pieces)))


def test_only_tokens_that_lead_on_are_allowed(loaded: LoadedModel) -> None:
    assert walk(loaded).allowed() == ids(loaded, "{", '{"')


def test_at_the_end_only_end_tokens_are_allowed(loaded: LoadedModel) -> None:
    one = walk(loaded)
    assert one.say('{"name": "Ö", "kind": "ä"}') == loaded.tokenizer.eos_token_ids
    one.tokens.extend(loaded.tokenizer.eos_token_ids)
    assert one.allowed() == loaded.tokenizer.eos_token_ids, "the batch runs a step ahead of the answer's end"
    one.tokens.append(65)
    assert (one.allowed(), one.constraint.error) == (loaded.tokenizer.eos_token_ids, "")


def test_any_of_several_end_tokens_may_end_it(tmp_path: Path) -> None:
    make_byte_level(tmp_path / "m")
    loaded = load_tokens_only(tmp_path / "m")
    loaded.tokenizer.add_eos_token("<|user|>")
    one = walk(loaded, '{"type": "integer"}')
    assert ids(loaded, "<|end|>", "<|user|>", "1") <= one.say("1")
    one = walk(loaded, '{"type": "boolean"}')
    assert one.say("true") == ids(loaded, "<|end|>", "<|user|>")


def test_pretty_printing_is_allowed_and_bounded(loaded: LoadedModel) -> None:
    one = walk(loaded)
    after = one.say('{\n    "name": "x",\n    "kind": "b"\n')
    assert ids(loaded, "}") <= after
    one.tokens.pop()
    one = walk(loaded)
    assert ids(loaded, "Ġ").isdisjoint(one.say("{\n" + " " * 40))
    one = walk(loaded)
    assert ids(loaded, "Ġ", "Ċ").isdisjoint(one.say("{ "))


def test_two_sequences_do_not_share_their_place(loaded: LoadedModel) -> None:
    one, other = walk(loaded), walk(loaded)
    one.say('{"name": "a')
    assert other.allowed() == ids(loaded, "{", '{"')
    assert ids(loaded, "b") <= one.allowed()


def test_any_object_is_a_schema_too(loaded: LoadedModel) -> None:
    one = walk(loaded, '{"type": "object"}')
    assert one.say('{"a": [1, {"b": null}], "ü": "\\n\\""}') == loaded.tokenizer.eos_token_ids


def test_an_open_block_of_reasoning_is_free_but_must_close(loaded: LoadedModel) -> None:
    one = walk(loaded, reasoning="open")
    assert one.say("so { anything") == all_but_the_end(loaded)
    assert one.say("</think>") == ids(loaded, "{", '{"')


def test_reasoning_may_close_with_several_tokens(tmp_path: Path) -> None:
    make_byte_level(tmp_path / "m", markers=("<|channel>", "<channel|>", "thought"))
    loaded = load_tokens_only(tmp_path / "m")
    assert loaded.tokenizer.think_start == "<|channel>thought"
    one = walk(loaded, reasoning="open")
    assert one.say("so <channel|>") == ids(loaded, "{")
    make_byte_level(tmp_path / "x", markers=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"))
    loaded = load_tokens_only(tmp_path / "x")
    one = walk(loaded, reasoning="open")
    assert one.say("so <|close|>think <|sep|>") == all_but_the_end(loaded)
    assert one.say("<|close|>think<|sep|>") == ids(loaded, "{")


def test_a_model_may_reason_first_and_only_once(loaded: LoadedModel) -> None:
    one = walk(loaded, reasoning="none")
    assert one.allowed() == ids(loaded, "{", '{"', "<think>")
    one.tokens.extend(ids(loaded, "<think>"))
    assert one.allowed() == all_but_the_end(loaded)
    assert one.say("so</think>") == ids(loaded, "{", '{"')


def test_a_call_may_come_instead_and_is_free(loaded: LoadedModel) -> None:
    one = walk(loaded, calls_tools=True)
    assert one.allowed() == ids(loaded, "{", '{"', "<tool_call>")
    one.tokens.extend(ids(loaded, "<tool_call>"))
    assert len(one.say("anything</tool_call>")) == size(loaded)
    one = walk(loaded, calls_tools=True)
    assert ids(loaded, "<tool_call>").isdisjoint(one.say("{"))


def test_a_call_may_come_out_of_reasoning(loaded: LoadedModel) -> None:
    one = walk(loaded, reasoning="open", calls_tools=True)
    assert len(one.say("so<tool_call>x")) == size(loaded)


def test_a_plain_prompt_s_answer_does_not_reason(loaded: LoadedModel) -> None:
    sampling = SamplingParams(json_schema=PERSON)
    one = Answer(loaded, prepare(loaded, Generate(instance="m", prompt="x", sampling=sampling)), sampling)
    (constraint,) = one.processors
    assert isinstance(constraint, Constraint)
    assert Walk(loaded, constraint).allowed() == ids(loaded, "{", '{"')


def test_logits_of_any_width_are_masked(loaded: LoadedModel) -> None:
    for width in (size(loaded) + 100, 200):
        one = Constraint(compile_schema(loaded, PERSON, calls_tools=False), "closed")
        row: Any = mx.isinf(one(mx.array([1]), mx.zeros((1, width))))[0].tolist()
        assert {token for token, masked in enumerate(row) if not masked} <= ids(loaded, "{", '{"')


def test_schemas_seen_before_are_not_compiled_again(loaded: LoadedModel) -> None:
    one = compile_schema(loaded, PERSON, calls_tools=False)
    assert compile_schema(loaded, PERSON, calls_tools=True).matcher is one.matcher


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path: Path) -> None:
    make_sentencepiece(tmp_path / "m")
    loaded = load_tokens_only(tmp_path / "m")
    loaded.tokenizer.eos_token_ids = []
    with pytest.raises(RequestError, match="no end token") as caught:
        compile_schema(loaded, PERSON, calls_tools=False)
    assert caught.value.field == "json_schema"


def test_a_model_with_headers_in_its_answers_is_refused(tmp_path: Path) -> None:
    make_byte_level(tmp_path / "m")
    with pytest.raises(RequestError, match="format of their own") as caught:
        compile_schema(load_tokens_only(tmp_path / "m", chat_template_type="muse_spark"), PERSON, calls_tools=False)
    assert caught.value.field == "json_schema"


def test_a_grammar_that_gives_up_ends_the_answer_with_the_reason(loaded: LoadedModel) -> None:
    sampling = SamplingParams(json_schema=PERSON)
    messages = (Message(role="user", content="x"),)
    one = Answer(loaded, prepare(loaded, Generate(instance="m", messages=messages, sampling=sampling)), sampling)
    (process,) = one.processors
    wrong, (end,) = 65, loaded.tokenizer.eos_token_ids
    process(mx.array([1]), mx.zeros((1, size(loaded))))
    logits = process(mx.array([1, wrong]), mx.zeros((1, size(loaded))))  # stands for a limit of the library's
    assert int(mx.argmax(logits).item()) == end  # pyright: ignore[reportArgumentType]
    with pytest.raises(RequestError, match="gave up") as caught:
        one.take(end, None, at_limit=False)
    assert caught.value.field == "json_schema"


@pytest.mark.parametrize("seed", range(6))
def test_random_choices_make_valid_json(loaded: LoadedModel, seed: int) -> None:
    chance = random.Random(seed)
    one = walk(loaded)
    while (allowed := one.allowed()) != loaded.tokenizer.eos_token_ids:
        one.tokens.append(chance.choice(sorted(allowed)))
    value = msgspec.json.decode(loaded.tokenizer.decode(one.tokens[3:]))
    assert set(value) == {"name", "kind"}
    assert value["kind"] in ("ä", "b")
    assert len(value["name"]) <= 8


def test_tools_and_a_schema_are_prepared_together(loaded: LoadedModel) -> None:
    sampling = SamplingParams(json_schema=PERSON)
    messages = (Message(role="user", content="x"),)
    request = Generate(instance="m", messages=messages, tools=(Tool(name="t"),), sampling=sampling)
    grammar = prepare(loaded, request).grammar
    assert grammar is not None
    assert {grammar.opens_call} == ids(loaded, "<tool_call>")


def test_patterns_that_multiply_are_refused(loaded: LoadedModel) -> None:
    patterns = ",".join(f'{{"pattern": ".*a.{{{count}}}"}}' for count in range(20, 40))
    schema = f'{{"type": "object", "properties": {{"a": {{"type": "string", "allOf": [{patterns}]}}}}}}'
    with pytest.raises(RequestError, match="an allOf holds 20 patterns") as caught:
        compile_schema(loaded, schema, calls_tools=False)
    assert caught.value.field == "json_schema"


def test_a_schema_that_takes_too_long_is_refused_and_others_go_on(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    real = grammar._make_matcher

    def slow(tokenizer: Any, schema: str) -> Any:
        if "slow" in schema:
            assert release.wait(30)
        return real(tokenizer, schema)

    monkeypatch.setattr(grammar, "_make_matcher", slow)
    monkeypatch.setattr(grammar, "_COMPILE_SECONDS", 0.05)
    try:
        with pytest.raises(RequestError, match="takes more than"):
            compile_schema(loaded, '{"type": "object", "title": "slow"}', calls_tools=False)
        monkeypatch.setattr(grammar, "_COMPILE_SECONDS", 30.0)
        assert compile_schema(loaded, '{"type": "object", "title": "fast"}', calls_tools=False)
    finally:
        release.set()
