"""Reasoning and tool calls are told from content, whole, and nothing that only looked like a call is lost."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_models import TEMPLATE, load_tokens_only, make_byte_level
from hypothesis import given, settings
from hypothesis import strategies as st
from test_model_answer import take_all

from muster.model.answer import Answer
from muster.model.load import LoadedModel
from muster.model.request import prepare
from muster.protocol import Generate
from muster.replies import Chunk
from muster.sampling import Message, SamplingParams, Tool, ToolCall

TOOLS = (Tool(name="weather"), Tool(name="clock"))
CALL = '<tool_call>\n{"name": "weather", "arguments": {"at": "Tromsø", "days": [1, 2]}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
USER = (Message(role="user", content="Hm?"),)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory = tmp_path_factory.mktemp("tokens") / "m"
    make_byte_level(directory)
    return load_tokens_only(directory)


def answer(
    loaded: LoadedModel, tools: Sequence[Tool] = TOOLS, template: dict[str, Any] | None = None, **params: Any
) -> Answer:
    sampling = SamplingParams(**params)
    request = Generate(instance="m", messages=USER, tools=tuple(tools), template=template or {}, sampling=sampling)
    return Answer(loaded, prepare(loaded, request), sampling)


def say(
    loaded: LoadedModel, one: Answer, text: str, *, ends: bool = True, limit: int = 1_000_000
) -> tuple[str, str, list[ToolCall]]:
    """Text, reasoning and calls of an answer that says `text`."""
    tokens: list[int] = loaded.tokenizer.encode(text, add_special_tokens=False)
    (end,) = loaded.tokenizer.eos_token_ids
    chunks = take_all(one, [*tokens, end] if ends else tokens, limit=limit)
    return joined(chunks)


def joined(chunks: Sequence[Chunk]) -> tuple[str, str, list[ToolCall]]:
    calls = [call for chunk in chunks for call in chunk.tool_calls]
    return "".join(chunk.text for chunk in chunks), "".join(chunk.reasoning for chunk in chunks), calls


# --- calls --------------------------------------------------------------------------------------------------


def test_a_call_comes_whole_as_soon_as_its_block_is_complete(loaded: LoadedModel) -> None:
    one = answer(loaded)
    tokens = loaded.tokenizer.encode(f"I look.{CALL}", add_special_tokens=False)
    chunks = take_all(one, tokens)
    (call,) = chunks[-1].tool_calls
    assert (call.name, json.loads(call.arguments)) == ("weather", {"at": "Tromsø", "days": [1, 2]})
    assert re.fullmatch(r"call_[0-9a-f]{24}", call.id)
    assert joined(chunks[:-1]) == ("I look.", "", [])


def test_several_calls_have_ids_of_their_own(loaded: LoadedModel) -> None:
    one = answer(loaded)
    text, _, calls = say(loaded, one, f"{CALL}\n{OTHER}\n{CALL}")
    assert [call.name for call in calls] == ["weather", "clock", "weather"]
    assert len({call.id for call in calls}) == 3
    assert (text, one.finish) == ("", "tool_calls")


def test_several_calls_in_one_block_come_in_order(tmp_path: Path) -> None:
    template = TEMPLATE.replace("<tool_call>", "<|tool_call_start|>")
    make_byte_level(tmp_path / "m", template=template, markers=("<|tool_call_start|>", "<|tool_call_end|>"))
    loaded = load_tokens_only(tmp_path / "m")
    one = answer(loaded)
    _, _, calls = say(loaded, one, '<|tool_call_start|>[weather(at="Oslo"), clock()]<|tool_call_end|>')
    assert [(call.name, call.arguments) for call in calls] == [("weather", '{"at": "Oslo"}'), ("clock", "{}")]
    assert one.finish == "tool_calls"


def test_a_format_without_an_end_marker_is_parsed_at_the_end(tmp_path: Path) -> None:
    make_byte_level(tmp_path / "m", template="[TOOL_CALLS]", markers=("[TOOL_CALLS]",))
    loaded = load_tokens_only(tmp_path / "m")
    one = answer(loaded)
    said = '[TOOL_CALLS]weather[ARGS]{"at": "Oslo"}[TOOL_CALLS]clock[ARGS]{}'
    assert [call.name for call in say(loaded, one, said)[2]] == ["weather", "clock"]
    assert one.finish == "tool_calls"
    one = answer(loaded)
    assert say(loaded, one, said, ends=False, limit=len(loaded.tokenizer.encode(said))) == (said, "", [])
    assert one.finish == "length"


def test_text_after_a_call_is_content_with_its_white_space(loaded: LoadedModel) -> None:
    one = answer(loaded)
    text, _, calls = say(loaded, one, f"{CALL}\n\nDone.")
    assert (text, len(calls), one.finish) == ("\n\nDone.", 1, "tool_calls")


@pytest.mark.parametrize("length", range(2, 79, 11))
def test_a_call_that_the_limit_cuts_comes_as_text(loaded: LoadedModel, length: int) -> None:
    one = answer(loaded)
    tokens = loaded.tokenizer.encode(CALL, add_special_tokens=False)[:length]
    chunks = take_all(one, tokens, limit=length)
    assert joined(chunks) == (loaded.tokenizer.decode(tokens).rstrip("\ufffd"), "", [])
    assert one.finish == "length"


def test_the_limit_at_the_end_of_a_call_is_still_the_limit(loaded: LoadedModel) -> None:
    one = answer(loaded)
    tokens = loaded.tokenizer.encode(CALL, add_special_tokens=False)
    assert len(joined(take_all(one, tokens, limit=len(tokens)))[2]) == 1
    assert one.finish == "length"


@pytest.mark.parametrize(
    "body",
    ["no JSON", "[]", "3", "null", '{"name": "weather"', '{"arguments": {}}', '{"name": 3, "arguments": {}}',
     '{"name": "weather", "arguments": [1]}', '{"name": "weather", "arguments": "no JSON"}', "[[[" * 20_000,
     '{"name": "weather", "arguments": {"a": "\\ud800"}}', '{"name": "weather", "arguments": {"a": NaN}}'],
)  # fmt: skip
def test_a_block_that_is_no_call_comes_as_text(loaded: LoadedModel, body: str) -> None:
    said = f"a<tool_call>{body}</tool_call>b"
    one = answer(loaded)
    assert say(loaded, one, said) == (said, "", [])
    assert one.finish == "stop"


def test_a_call_without_its_end_marker_counts_where_the_model_ended_it(loaded: LoadedModel) -> None:
    one = answer(loaded)
    assert len(say(loaded, one, CALL.removesuffix("</tool_call>"))[2]) == 1
    assert one.finish == "tool_calls"


def test_a_stop_string_inside_a_call_cuts_it(loaded: LoadedModel) -> None:
    one = answer(loaded, stop=('"days"',))
    text, _, calls = say(loaded, one, CALL)
    assert (text, calls) == (CALL[: CALL.index('"days"')], [])
    assert (one.finish, one.stop) == ("stop", '"days"')


def test_without_tools_what_looks_like_a_call_is_content(loaded: LoadedModel) -> None:
    one = answer(loaded, tools=())
    tokens = loaded.tokenizer.encode(f"a{CALL}b", add_special_tokens=False)
    chunks = take_all(one, tokens)
    assert joined(chunks) == (f"a{CALL}b", "", [])
    assert chunks[1].text == "<tool_call>", "it is not held back"


def test_a_plain_prompt_s_answer_has_no_markers(loaded: LoadedModel) -> None:
    sampling = SamplingParams()
    one = Answer(loaded, prepare(loaded, Generate(instance="m", prompt="x", sampling=sampling)), sampling)
    said = f"<think>a</think>{CALL}"
    assert say(loaded, one, said) == (said, "", [])
    assert one.reasoning_tokens == 0


# --- reasoning ----------------------------------------------------------------------------------------------


def test_reasoning_that_the_prompt_opened(loaded: LoadedModel) -> None:
    one = answer(loaded, template={"force": True})
    assert say(loaded, one, "so</think>Yes.") == ("Yes.", "so", [])
    assert (one.reasoning_tokens, one.completion_tokens, one.finish) == (3, 8, "stop")


def test_reasoning_that_the_model_opens(loaded: LoadedModel) -> None:
    one = answer(loaded)
    text, reasoning, calls = say(loaded, one, f"<think>so</think>\n{CALL}")
    assert (text.strip(), reasoning, len(calls)) == ("", "so", 1)
    assert one.reasoning_tokens == 4


def test_without_tools_what_looks_like_a_call_does_not_end_the_reasoning(loaded: LoadedModel) -> None:
    one = answer(loaded, template={"force": True}, tools=())
    assert say(loaded, one, "a<tool_call>b</tool_call>c</think>Yes.") == ("Yes.", "a<tool_call>b</tool_call>c", [])


def test_reasoning_that_the_limit_cuts_stays_reasoning(loaded: LoadedModel) -> None:
    one = answer(loaded, template={"force": True})
    assert say(loaded, one, "so <", ends=False, limit=4) == ("", "so <", [])
    assert (one.finish, one.reasoning_tokens) == ("length", 4)


def test_markers_spelled_out_in_several_tokens_count(loaded: LoadedModel) -> None:
    one = answer(loaded, template={"force": True})
    letters = [token for letter in "a</think>b" for token in loaded.tokenizer.encode(letter)]
    assert joined(take_all(one, letters)) == ("b", "a", [])


def test_headers_between_the_parts_do_not_show(tmp_path: Path) -> None:
    make_byte_level(tmp_path / "m", markers=("<|message|>", "<|eom|>", "<|eot|>"))
    loaded = load_tokens_only(tmp_path / "m", chat_template_type="muse_spark")
    one = answer(loaded, tools=())
    said = "to=self<|message|>so<|eom|>to=user<|message|>Yes.<|eot|>"
    assert say(loaded, one, said) == ("Yes.", "so", [])


# --- any text -----------------------------------------------------------------------------------------------

fragments = st.lists(
    st.sampled_from(["<tool_call>", "</tool_call>", "<think>", "</think>", OTHER, "<tool", "a", " ", "é", "{}"]),
    max_size=12,
)


@settings(deadline=None, max_examples=200)
@given(said=fragments, ends=st.booleans(), tools=st.booleans())
def test_no_text_is_lost_or_doubled(loaded: LoadedModel, said: list[str], ends: bool, tools: bool) -> None:
    text = "x" + "".join(said)
    one = answer(loaded, tools=TOOLS if tools else ())
    tokens = loaded.tokenizer.encode(text, add_special_tokens=False)
    (end,) = loaded.tokenizer.eos_token_ids
    chunks = take_all(one, [*tokens, end], limit=len(tokens) + 1 if ends else len(tokens))
    content, reasoning, calls = joined(chunks)
    letters = content + reasoning
    for kept in ("a", "é", "x"):
        assert letters.count(kept) == text.count(kept) - _inside(OTHER, kept, len(calls))
    assert one.finish == ("length" if not ends else "tool_calls" if calls else "stop")
    assert len(calls) <= said.count(OTHER)


def _inside(call: str, letter: str, count: int) -> int:
    return call.count(letter) * count if count else 0
