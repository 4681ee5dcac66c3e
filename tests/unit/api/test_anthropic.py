"""Anthropic's dialect, asked by Anthropic's own client."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import anthropic
import httpx
import msgspec
import pytest
from anthropic.types import Message as Answer
from anthropic.types import MessageParam, TextBlock, ThinkingBlock, ToolUseBlock
from fake_backend import MODEL, FakeBackend, answer, calling, done, refused, started
from pydantic import BaseModel
from serving import Served, served

from muster.api.settings import ApiSettings
from muster.coordinator.served import ServedModel
from muster.replies import Chunk, Prefilled
from muster.sampling import Message, Tool, ToolCall
from muster.spec import InstanceId

HI: list[MessageParam] = [{"role": "user", "content": "hi"}]
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
SNOW = [{"type": "text", "text": "snow"}]
CALLS = (
    ToolCall(id="call_a", name="weather", arguments='{"city":"Rome"}'),
    ToolCall(id="call_b", name="weather", arguments='{"city":"Oslo"}'),
)


@pytest.fixture
def client(server: Served) -> Generator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0, timeout=20) as client:
        yield client


def texts(message: Answer) -> list[str]:
    return [block.text for block in message.content if isinstance(block, TextBlock)]


# --- answers ------------------------------------------------------------------------------------------------


def test_an_answer(client: anthropic.Anthropic, backend: FakeBackend) -> None:
    backend.script = [started(7, 3), Chunk(text="Hello"), Chunk(text=" there."), done(prompt_tokens=7, cached_tokens=3)]
    message = client.messages.create(
        model=MODEL,
        max_tokens=50,
        messages=HI,
        system="Be kind.",
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 40, "metadata": {"user_id": "u"}},
        stop_sequences=["END"],
    )
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert message.id.startswith("msg_")
    assert texts(message) == ["Hello there."]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (4, 3, 2)
    asked = backend.requests[0]
    assert asked.messages == (Message(role="system", content="Be kind."), Message(role="user", content="hi"))
    sampling = asked.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (50, 0.5, 0.9, 40)
    assert sampling.stop == ("END",)
    assert asked.template == {}
    assert message._request_id is not None


@pytest.mark.parametrize(
    ("reason", "stop", "expected"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("length", None, ("max_tokens", None)),
    ],
)
def test_why_it_ended(
    client: anthropic.Anthropic, backend: FakeBackend, reason: str, stop: str | None, expected: tuple[str, str | None]
) -> None:
    backend.script = answer("a", reason=reason, stop=stop)
    whole = client.messages.create(model=MODEL, max_tokens=5, messages=HI)
    assert (whole.stop_reason, whole.stop_sequence) == expected
    with client.messages.stream(model=MODEL, max_tokens=5, messages=HI) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == expected


def test_a_streamed_answer(client: anthropic.Anthropic, backend: FakeBackend) -> None:
    backend.script = [
        started(9, 4),
        Prefilled(done=6, total=9),
        Chunk(reasoning="I "),
        Chunk(),
        Chunk(reasoning="think.", text="Hel"),
        Chunk(text="lo"),
        done("stop", 5, prompt_tokens=9, cached_tokens=4, reasoning_tokens=2),
    ]
    with client.messages.stream(model=MODEL, max_tokens=5, messages=HI) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text"]
    thought = message.content[0]
    assert isinstance(thought, ThinkingBlock)
    assert (thought.thinking, texts(message)) == ("I think.", ["Hello"])
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (5, 4, 5)
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


def test_the_events_of_a_stream_are_those_of_the_dialect_in_order(
    web: httpx.Client, server: Served, backend: FakeBackend
) -> None:
    backend.script = [started(), Chunk(text="a"), Chunk(tool_calls=CALLS[:1]), Chunk(text="b"), done("tool_calls", 3)]
    body = {"model": MODEL, "max_tokens": 5, "messages": HI, "stream": True}
    text = web.post(f"{server.url}/v1/messages", json=body).text
    events = [block.split("\n") for block in text.strip().split("\n\n")]
    data = [msgspec.json.decode(lines[1].removeprefix("data: ")) for lines in events]
    assert [lines[0].removeprefix("event: ") for lines in events] == [item["type"] for item in data]
    assert [(item["type"], item.get("index")) for item in data] == [
        ("message_start", None),
        ("ping", None),
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("content_block_start", 2),
        ("content_block_delta", 2),
        ("content_block_stop", 2),
        ("message_delta", None),
        ("message_stop", None),
    ]


@pytest.mark.parametrize("streamed", [False, True])
def test_calls_of_tools(client: anthropic.Anthropic, backend: FakeBackend, streamed: bool) -> None:
    backend.script = calling(*CALLS, text="Let me see.")
    settings: dict[str, Any] = {"model": MODEL, "max_tokens": 50, "messages": HI, "tools": [WEATHER]}
    if streamed:
        with client.messages.stream(**settings) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**settings)
    assert message.stop_reason == "tool_use"
    calls = [block for block in message.content if isinstance(block, ToolUseBlock)]
    assert [(call.id, call.name, call.input) for call in calls] == [
        ("call_a", "weather", {"city": "Rome"}),
        ("call_b", "weather", {"city": "Oslo"}),
    ]
    assert texts(message) == ["Let me see."]
    tool = Tool(name="weather", description="Tells the weather.", parameters=WEATHER["input_schema"])
    assert backend.requests[0].tools == (tool,)


def test_the_results_of_calls_become_turns_of_their_own(client: anthropic.Anthropic, backend: FakeBackend) -> None:
    backend.script = calling(*CALLS, text="Let me see.")
    first = client.messages.create(model=MODEL, max_tokens=50, messages=HI, tools=[WEATHER])  # pyright: ignore
    backend.script = answer("Sunny.")
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": "call_a", "content": "sun"},
        {
            "type": "tool_result",
            "tool_use_id": "call_b",
            "content": [{"type": "text", "text": "snow"}],
            "is_error": True,
        },
        {"type": "text", "text": "And?"},
    ]
    turns: list[MessageParam] = [
        *HI,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    second = client.messages.create(model=MODEL, max_tokens=50, messages=turns, tools=[WEATHER])  # pyright: ignore
    assert texts(second) == ["Sunny."]
    assert backend.requests[1].messages[1:] == (
        Message(role="assistant", content="Let me see.", tool_calls=CALLS),
        Message(role="tool", content="sun", tool_call_id="call_a"),
        Message(role="tool", content="Error: snow", tool_call_id="call_b"),
        Message(role="user", content="And?"),
    )


def test_turns_of_one_role_in_a_row_are_one(client: anthropic.Anthropic, backend: FakeBackend) -> None:
    turns: list[Any] = [
        {"role": "user", "content": "one"},
        {"role": "user", "content": [{"type": "text", "text": "two", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}]},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": "four"},
    ]
    system: Any = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    client.messages.create(model=MODEL, max_tokens=5, messages=turns, system=system)
    assert backend.requests[0].messages == (
        Message(role="system", content="a\nb"),
        Message(role="user", content="one\ntwo"),
        Message(role="assistant", content="three", reasoning="hm"),
        Message(role="user", content="four"),
    )


@pytest.mark.parametrize(
    ("thinking", "template"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False}),
        ({"type": "adaptive"}, {}),
    ],
)
def test_thinking(client: anthropic.Anthropic, backend: FakeBackend, thinking: Any, template: dict[str, bool]) -> None:
    client.messages.create(model=MODEL, max_tokens=2048, messages=HI, thinking=thinking)
    assert backend.requests[0].template == template


def test_without_a_choice_of_tools_the_model_is_not_shown_them(
    client: anthropic.Anthropic, backend: FakeBackend
) -> None:
    settings: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "messages": HI, "tools": [WEATHER]}
    client.messages.create(**settings, tool_choice={"type": "auto"})
    client.messages.create(**settings, tool_choice={"type": "none"})
    assert [len(asked.tools) for asked in backend.requests] == [1, 0]


TIME: dict[str, Any] = {"name": "time", "input_schema": {"type": "object"}}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("choice", "said", "called"),
    [
        ({"type": "tool", "name": "weather"}, '{"city":"Rome"}', ("weather", {"city": "Rome"})),
        ({"type": "any"}, '{"name":"time","arguments":{"zone":1}}', ("time", {"zone": 1})),
    ],
)
def test_a_forced_call(
    client: anthropic.Anthropic, backend: FakeBackend, choice: Any, said: str, called: Any, streamed: bool
) -> None:
    backend.script = answer(said[:5], said[5:])
    settings: dict[str, Any] = {"model": MODEL, "max_tokens": 50, "messages": HI, "tools": [WEATHER, TIME]}
    message = ask(client, streamed, **settings, tool_choice=choice)
    (block,) = message.content
    assert isinstance(block, ToolUseBlock)
    assert (block.name, block.input) == called
    assert message.stop_reason == "tool_use"
    assert backend.requests[0].sampling.json_schema is not None
    # What the limit cut is no call.
    backend.script = answer(said[:-2], reason="length")
    message = ask(client, streamed, **settings, tool_choice=choice)
    assert (texts(message), message.stop_reason) == ([said[:-2]], "max_tokens")
    # A call in the model's own syntax is one too.
    backend.script = calling(CALLS[0])
    message = ask(client, streamed, **settings, tool_choice=choice)
    assert [block.type for block in message.content] == ["tool_use"]


@pytest.mark.parametrize("streamed", [False, True])
def test_one_call_at_most(client: anthropic.Anthropic, backend: FakeBackend, streamed: bool) -> None:
    backend.script = [
        started(),
        Chunk(text="So:"),
        Chunk(tool_calls=CALLS),
        Chunk(tool_calls=CALLS),
        done("tool_calls"),
    ]
    settings: dict[str, Any] = {"model": MODEL, "max_tokens": 50, "messages": HI, "tools": [WEATHER]}
    message = ask(client, streamed, **settings, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in message.content] == ["text", "tool_use"]
    assert message.stop_reason == "tool_use"
    assert len(ask(client, streamed, **settings, tool_choice={"type": "auto"}).content) == 5


def ask(client: anthropic.Anthropic, streamed: bool, **settings: Any) -> Answer:
    if not streamed:
        return client.messages.create(**settings)
    with client.messages.stream(**settings) as stream:
        return stream.get_final_message()


class City(BaseModel):
    name: str
    people: int


def test_structured_output(client: anthropic.Anthropic, backend: FakeBackend) -> None:
    backend.script = answer('{"name": "Rome",', ' "people": 3}')
    parsed = client.messages.parse(model=MODEL, max_tokens=50, messages=HI, output_format=City)
    assert parsed.parsed_output == City(name="Rome", people=3)
    schema = backend.requests[0].sampling.json_schema
    assert schema is not None
    assert set(msgspec.json.decode(schema)["properties"]) == {"name", "people"}
    earlier = {"output_format": {"type": "json_schema", "schema": {}}}
    client.messages.create(model=MODEL, max_tokens=5, messages=HI, extra_body=earlier)
    assert backend.requests[1].sampling.json_schema == "{}"


def test_counting_tokens(client: anthropic.Anthropic, backend: FakeBackend) -> None:
    backend.script = [started(123), done("length", 0, prompt_tokens=123)]
    count = client.messages.count_tokens(model=MODEL, messages=HI, system="x", tools=[WEATHER])  # pyright: ignore
    assert count.input_tokens == 123
    assert backend.requests[0].sampling.max_tokens == 0
    assert len(backend.requests[0].tools) == 1


def test_the_models(client: anthropic.Anthropic, backend: FakeBackend) -> None:
    page = client.models.list()
    assert [(model.id, model.display_name, model.created_at.year) for model in page.data] == [(MODEL, MODEL, 2023)]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(anthropic.NotFoundError, match=MODEL):
        client.models.retrieve("other")
    backend.served = tuple(
        ServedModel(name=f"m{number}", instances=(InstanceId("x"),), ready=1, created_ns=0) for number in range(5)
    )
    assert [model.id for model in client.models.list(limit=2)] == ["m0", "m1", "m2", "m3", "m4"]
    assert [model.id for model in client.models.list(limit=2, before_id="m4").data] == ["m2", "m3"]
    with pytest.raises(anthropic.BadRequestError, match="limit"):
        client.models.list(limit=0)


# --- errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "error", "name"),
    [
        ("request-invalid", anthropic.BadRequestError, "invalid_request_error"),
        ("context-exceeded", anthropic.BadRequestError, "invalid_request_error"),
        ("model-unknown", anthropic.NotFoundError, "not_found_error"),
        ("queue-full", anthropic.RateLimitError, "rate_limit_error"),
        ("model-unavailable", anthropic.InternalServerError, "overloaded_error"),
        ("wait-exceeded", anthropic.InternalServerError, "timeout_error"),
        ("answer-lost", anthropic.InternalServerError, "api_error"),
    ],
)
def test_errors_are_the_exceptions_of_the_client(
    client: anthropic.Anthropic, backend: FakeBackend, kind: str, error: type[anthropic.APIStatusError], name: str
) -> None:
    backend.script = [refused(kind, "so it is", field="template")]
    for streamed in (False, True):
        with pytest.raises(error, match="thinking: so it is") as caught:
            client.messages.create(model=MODEL, max_tokens=5, messages=HI, stream=streamed)
        body: Any = caught.value.body
        assert (body["type"], body["error"]["type"]) == ("error", name)
        assert caught.value.request_id is not None


def test_an_error_within_a_stream_is_raised_too(client: anthropic.Anthropic, backend: FakeBackend) -> None:
    backend.script = [started(), Chunk(text="Hel"), refused("answer-lost", "rank 1 was killed")]
    with (
        pytest.raises(anthropic.APIStatusError, match="rank 1 was killed"),
        client.messages.stream(model=MODEL, max_tokens=5, messages=HI) as stream,
    ):
        stream.until_done()


def test_a_key_that_is_wrong(backend: FakeBackend) -> None:
    with served(backend, ApiSettings(api_key="sesame")) as server:
        with (
            anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as client,
            pytest.raises(anthropic.AuthenticationError, match="the API key is wrong"),
        ):
            client.messages.create(model=MODEL, max_tokens=5, messages=HI)
        with anthropic.Anthropic(base_url=server.url, api_key="sesame", max_retries=0) as client:
            client.messages.create(model=MODEL, max_tokens=5, messages=HI)


USER: dict[str, Any] = {"role": "user", "content": "hi"}


def turn(*blocks: dict[str, Any], role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": list(blocks)}, *([USER] if role == "assistant" else [])]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 10**400}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ({"stop_sequences": "END"}, "stop_sequences"),
    ({"stream": "yes"}, "stream"),
    ({"messages": [*turn(), {"role": "assistant", "content": "So"}]}, "messages[1].role"),
    ({"messages": turn({"type": "image", "source": {"type": "base64", "data": ""}})}, "messages[0].content[0].type"),
    ({"messages": turn({"type": "document", "source": {}})}, "messages[0].content[0].type"),
    ({"messages": turn({"type": "search_result"})}, "messages[0].content[0].type"),
    ({"messages": turn({"type": "hologram"})}, "messages[0].content[0].type"),
    ({"messages": turn({"type": "redacted_thinking", "data": ""}, role="assistant")}, "messages[0].content[0].type"),
    ({"messages": turn({"type": "text", "text": "a", "citations": [{}]})}, "messages[0].content[0].citations"),
    ({"messages": turn({"type": "text", "text": "a"}, {"text": "b"})}, "messages[0].content[1].type"),
    ({"messages": turn({"type": "tool_use", "id": "1", "name": "f", "input": {}})}, "messages[0].content[0].type"),
    (
        {"messages": turn({"type": "tool_result", "tool_use_id": "1"}, role="assistant")},
        "messages[0].content[0].type",
    ),
    (
        {"messages": turn({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]})},
        "messages[0].content[0].content[0].type",
    ),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{**WEATHER, "strict": True}]}, "tools[0].strict"),
    ({"tools": [{**WEATHER, "input_examples": [{}]}]}, "tools[0].input_examples"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "f"}, "tools": [WEATHER]}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}, "tools": [WEATHER]}, "tool_choice.name"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    (
        {
            "tool_choice": {"type": "any"},
            "tools": [WEATHER],
            "output_config": {"format": {"type": "json_schema", "schema": {}}},
        },
        "output_config.format",
    ),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
    ({"output_config": {"effort": "high"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ({"container": "c"}, "container"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"context_management": {}}, "context_management"),
    ({"inference_geo": "eu"}, "inference_geo"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"speed": "fast"}, "speed"),
    ({"n": 2}, "n"),
]


@pytest.mark.parametrize(("change", "field"), REFUSED, ids=[field + repr(change)[:40] for change, field in REFUSED])
def test_what_cannot_be_is_refused_by_name(
    web: httpx.Client, server: Served, backend: FakeBackend, change: dict[str, Any], field: str
) -> None:
    body = {"model": MODEL, "max_tokens": 5, "messages": [USER], **change}
    response = web.post(f"{server.url}/v1/messages", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert field in error["message"]
    assert backend.requests == []


def test_what_changes_nothing_is_accepted(web: httpx.Client, server: Served, backend: FakeBackend) -> None:
    body = {
        "model": MODEL,
        "max_tokens": 5,
        "messages": [USER],
        "service_tier": "auto",
        "speed": "standard",
        "mcp_servers": [],
        "cache_control": {"type": "ephemeral", "ttl": "1h"},
        "tools": [{**WEATHER, "type": "custom", "strict": False, "allowed_callers": ["direct"]}],
        "system": None,
        "stream": None,
    }
    web.post(f"{server.url}/v1/messages", json=body).raise_for_status()
    assert len(backend.requests) == 1
