"""A call of any tool, made by constrained decoding: its schema, and what becomes of the answer."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fake_backend import answer, calling, done, started
from llguidance import LLMatcher, LLTokenizer
from openai_kit import asking, events
from test_openai_chat import CALL, TIME, WEATHER

from muster.api.calling import Calling
from muster.replies import Chunk
from muster.sampling import Tool

#: Schemas whose parts refer to each other, as pydantic writes them, and to the whole.
COLOUR: Any = {
    "type": "object",
    "$defs": {"Colour": {"type": "string", "enum": ["red", "blue"]}},
    "properties": {"colour": {"$ref": "#/$defs/Colour"}},
    "required": ["colour"],
    "additionalProperties": False,
}
TREE: Any = {
    "type": "object",
    "properties": {"leaf": {"type": "integer"}, "below": {"type": "array", "items": {"$ref": "#"}}},
    "additionalProperties": False,
}
TOOLS = (Tool(name="paint", parameters=COLOUR), Tool(name="plant", parameters=TREE), Tool(name="rest"))


@pytest.mark.parametrize(
    ("text", "follows"),
    [
        ('{"name":"paint","arguments":{"colour":"red"}}', True),
        ('{"name":"paint","arguments":{"colour":"green"}}', False),
        ('{"name":"paint","arguments":{"leaf":1}}', False),
        ('{"name":"plant","arguments":{"leaf":1,"below":[{"leaf":2,"below":[]}]}}', True),
        ('{"name":"plant","arguments":{"below":[{"colour":"red"}]}}', False),
        ('{"name":"rest","arguments":{"hours":8}}', True),
        ('{"name":"sleep","arguments":{}}', False),
        ('{"colour":"red"}', False),
    ],
)
def test_the_schema_allows_the_tools_and_nothing_else(text: str, follows: bool) -> None:
    schema = Calling(tools=TOOLS, any=True).json_schema
    assert schema is not None
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema))
    tokens = tokenizer.tokenize_str(text)
    assert (matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()) == follows


def ask(stream: bool, *script: Any) -> tuple[dict[str, Any], str]:
    """The message and the finish reason of an answer to a chat with two tools, one of which must be called."""
    with asking(list(script)) as kit:
        response = kit.chat(tools=[WEATHER, TIME], tool_choice="required", stream=stream)
        assert [tool.name for tool in kit.asked.tools] == ["weather", "time"]
        assert "anyOf" in msgspec.json.decode(kit.asked.sampling.json_schema or "")
    if not stream:
        (choice,) = response.json()["choices"]
        return choice["message"], choice["finish_reason"]
    message: dict[str, Any] = {"content": None}
    choices = [chunk["choices"][0] for chunk in events(response)]
    for delta in (choice["delta"] for choice in choices):
        message["content"] = (message["content"] or "") + (delta.get("content") or "") or None
        for part in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if part["index"] == len(calls):
                calls.append({"id": part["id"], "function": {"name": part["function"]["name"], "arguments": ""}})
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return message, choices[-1]["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_becomes_a_call(stream: bool) -> None:
    message, reason = ask(stream, *answer('{"name":"time",', '"arguments":{"zone": 1}}'))
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "time", "arguments": '{"zone": 1}'}
    assert call["id"].startswith("call_")
    assert (message["content"], reason) == (None, "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_in_the_models_own_syntax_stays_as_it_is(stream: bool) -> None:
    message, reason = ask(stream, *calling(CALL))
    assert [call["id"] for call in message["tool_calls"]] == ["call_1"]
    assert (message["content"], reason) == (None, "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_the_limit_cut_is_text(stream: bool) -> None:
    message, reason = ask(stream, started(), Chunk(text='{"name":"ti'), done("length"))
    assert "tool_calls" not in message
    assert (message["content"], reason) == ('{"name":"ti', "length")
