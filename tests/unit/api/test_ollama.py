"""Ollama's dialect, asked by Ollama's own client."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

import httpx
import msgspec
import ollama
import pytest
from fake_backend import MODEL, FakeBackend, answer, calling, done, refused, started
from serving import Served

from muster import __version__
from muster.replies import Chunk
from muster.sampling import Alternative, Message, TokenLogprob, Tool, ToolCall

HI = [{"role": "user", "content": "hi"}]
CALLS = (
    ToolCall(id="call_a", name="weather", arguments='{"city":"Rome"}'),
    ToolCall(id="call_b", name="weather", arguments='{"city":"Oslo"}'),
)


def weather(city: str) -> str:
    """Tells the weather.

    Args:
        city: where
    """
    return city


@pytest.fixture
def client(server: Served) -> Generator[ollama.Client]:
    client = ollama.Client(host=server.url, timeout=20)
    yield client
    client._client.close()


# --- chats --------------------------------------------------------------------------------------------------


def test_a_chat(client: ollama.Client, backend: FakeBackend) -> None:
    backend.script = [started(), Chunk(reasoning="hm"), Chunk(text="Hello"), Chunk(text=" there."), done()]
    options = {"temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "seed": 7, "num_predict": 50}
    reply = client.chat(MODEL, HI, options={**options, "stop": ["END"]})
    assert (reply.model, reply.done, reply.done_reason) == (MODEL, True, "stop")
    assert (reply.message.role, reply.message.content, reply.message.thinking) == ("assistant", "Hello there.", "hm")
    assert (reply.prompt_eval_count, reply.eval_count) == (7, 2)
    assert (reply.total_duration, reply.load_duration) == (1_500_000_000, 0)
    assert (reply.prompt_eval_duration, reply.eval_duration) == (250_000_000, 1_250_000_000)
    asked = backend.requests[0]
    assert asked.messages == (Message(role="user", content="hi"),)
    sampling = asked.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 40, 0.9, 0.1)
    assert (sampling.seed, sampling.max_tokens, sampling.stop) == (7, 50, ("END",))


def test_a_chat_is_streamed_unless_the_client_says_no(web: httpx.Client, server: Served, backend: FakeBackend) -> None:
    backend.script = [started(), Chunk(text="Hel"), Chunk(), Chunk(text="lo"), done("length", 3)]
    response = web.post(f"{server.url}/api/chat", json={"model": MODEL, "messages": HI})
    assert response.headers["content-type"] == "application/x-ndjson"
    lines = [msgspec.json.decode(line) for line in response.text.splitlines()]
    assert [line["message"]["content"] for line in lines] == ["Hel", "lo", ""]
    assert [line["done"] for line in lines] == [False, False, True]
    assert "done_reason" not in lines[0]
    assert (lines[-1]["done_reason"], lines[-1]["eval_count"]) == ("length", 3)


def test_a_streamed_chat(client: ollama.Client, backend: FakeBackend) -> None:
    backend.script = answer("a", "b", "c")
    parts = list(client.chat(MODEL, HI, stream=True))
    assert "".join(part.message.content or "" for part in parts) == "abc"
    assert [part.done for part in parts] == [False, False, False, True]


@pytest.mark.parametrize("streamed", [False, True])
def test_calls_of_tools(client: ollama.Client, backend: FakeBackend, streamed: bool) -> None:
    backend.script = calling(*CALLS, text="Let me see.")
    reply: Any = client.chat(MODEL, HI, tools=[weather], stream=streamed)
    parts: Iterable[Any] = reply if streamed else [reply]
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("weather", {"city": "Rome"}),
        ("weather", {"city": "Oslo"}),
    ]
    tool = backend.requests[0].tools[0]
    assert (tool.name, tool.description) == ("weather", "Tells the weather.")
    assert tool.parameters["required"] == ["city"]


def test_the_results_of_calls_find_them(client: ollama.Client, backend: FakeBackend) -> None:
    backend.script = calling(*CALLS)
    first = client.chat(MODEL, HI, tools=[weather])
    results = [{"role": "tool", "tool_name": "weather", "content": text} for text in ("sun", "snow")]
    client.chat(MODEL, [*HI, first.message, *results])
    turns = backend.requests[1].messages
    ids = [call.id for call in turns[1].tool_calls]
    assert ids == ["call_1_0", "call_1_1"]
    assert [call.arguments for call in turns[1].tool_calls] == ['{"city":"Rome"}', '{"city":"Oslo"}']
    assert turns[2:] == (
        Message(role="tool", content="sun", tool_call_id=ids[0], name="weather"),
        Message(role="tool", content="snow", tool_call_id=ids[1], name="weather"),
    )


def test_a_call_keeps_the_id_that_it_was_given(web: httpx.Client, server: Served, backend: FakeBackend) -> None:
    function = {"name": "f", "arguments": {"x": 1}, "index": 0}
    messages = [
        *HI,
        {"role": "assistant", "content": "", "tool_calls": [{"id": "own", "type": "function", "function": function}]},
        {"role": "tool", "content": "1", "tool_call_id": "own"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    web.post(f"{server.url}/api/chat", json={"model": MODEL, "messages": messages, "tools": tools})
    asked = backend.requests[0]
    assert asked.messages[1].tool_calls == (ToolCall(id="own", name="f", arguments='{"x":1}'),)
    assert asked.messages[2].tool_call_id == "own"
    assert asked.tools == (Tool(name="f"),)


@pytest.mark.parametrize(
    ("think", "template"),
    [
        (None, {}),
        (True, {"enable_thinking": True}),
        (False, {"enable_thinking": False}),
        ("high", {"enable_thinking": True, "reasoning_effort": "high"}),
    ],
)
def test_thinking(client: ollama.Client, backend: FakeBackend, think: Any, template: dict[str, Any]) -> None:
    client.chat(MODEL, HI, think=think)
    assert backend.requests[0].template == template


def test_a_format(client: ollama.Client, backend: FakeBackend) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    client.chat(MODEL, HI, format="json")
    client.chat(MODEL, HI, format=schema)
    client.chat(MODEL, HI, format="")
    formats = [asked.sampling.json_schema for asked in backend.requests]
    assert formats == ['{"type":"object"}', msgspec.json.encode(schema).decode(), None]


def test_log_probabilities(client: ollama.Client, backend: FakeBackend) -> None:
    token = TokenLogprob(token=3, text="a", data=b"a", logprob=-0.5, top=(Alternative(4, "b", -1.5),))
    backend.script = [started(), Chunk(text="a", logprobs=(token,)), done()]
    reply = client.chat(MODEL, HI, logprobs=True, top_logprobs=1)
    assert reply.logprobs is not None
    found = reply.logprobs[0]
    assert found.top_logprobs is not None
    assert (found.token, found.logprob) == ("a", -0.5)
    assert [(top.token, top.logprob) for top in found.top_logprobs] == [("b", -1.5)]
    assert (backend.requests[0].sampling.logprobs, backend.requests[0].sampling.top_logprobs) == (True, 1)


# --- options ------------------------------------------------------------------------------------------------


def test_limits_and_penalties(client: ollama.Client, backend: FakeBackend) -> None:
    penalties = {"repeat_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    for options in (
        {},
        {"num_predict": -1},
        {"num_predict": 0},
        penalties,
        penalties | {"repeat_last_n": 0},
        penalties | {"repeat_last_n": -1},
    ):
        client.chat(MODEL, HI, options=options)
    found = [asked.sampling for asked in backend.requests]
    assert [sampling.max_tokens for sampling in found[:3]] == [8192, 2**31 - 1, 0]
    assert [sampling.repetition_penalty for sampling in found[3:]] == [1.2, 1.0, 1.2]
    assert [sampling.presence_penalty for sampling in found[3:]] == [0.5, 0.0, 0.5]
    assert [sampling.frequency_penalty for sampling in found[3:]] == [0.25, 0.0, 0.25]
    assert [sampling.penalty_context_tokens for sampling in found[3:]] == [64, 20, 2**31 - 1]


REFUSED: list[tuple[dict[str, Any], str]] = [
    *[
        ({"options": {name: value}}, f"options.{name}")
        for name, value in {
            "num_ctx": 4096,
            "num_keep": 4,
            "num_gpu": 1,
            "num_thread": 4,
            "low_vram": True,
            "mirostat": 2,
            "typical_p": 0.5,
            "tfs_z": 0.5,
            "penalize_newline": False,
            "warmth": 1,
            "temperature": -1,
            "top_p": 2,
            "top_k": "many",
            "num_predict": -3,
            "repeat_last_n": -2,
            "repeat_penalty": 0,
            "seed": -1,
            "stop": [""],
        }.items()
    ],
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user", "content": "x", "images": ["AAAA"]}]}, "messages[0].images"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"think": "hard"}, "think"),
    ({"format": "xml"}, "format"),
    ({"keep_alive": 0}, "keep_alive"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"model": ""}, "model"),
    ({"model": None}, "model"),
    ({"stream": 1}, "stream"),
    ({"n": 1}, "n"),
]


@pytest.mark.parametrize(("change", "field"), REFUSED, ids=[repr(change)[:50] for change, _ in REFUSED])
def test_what_cannot_be_is_refused_by_name(
    web: httpx.Client, server: Served, backend: FakeBackend, change: dict[str, Any], field: str
) -> None:
    response = web.post(f"{server.url}/api/chat", json={"model": MODEL, "messages": HI, **change})
    assert response.status_code == 400
    assert field in response.json()["error"]
    assert backend.requests == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"context": [1, 2]}, "context"),
        ({"images": ["AAAA"]}, "images"),
        ({"raw": True, "system": "x"}, "system"),
        ({"raw": True, "think": True}, "think"),
        ({"messages": HI}, "messages"),
        ({"prompt": 5}, "prompt"),
    ],
)
def test_what_a_prompt_cannot_have_is_refused_by_name(
    web: httpx.Client, server: Served, backend: FakeBackend, change: dict[str, Any], field: str
) -> None:
    response = web.post(f"{server.url}/api/generate", json={"model": MODEL, "prompt": "x", **change})
    assert response.status_code == 400
    assert field in response.json()["error"]
    assert backend.requests == []


def test_what_changes_nothing_is_accepted(web: httpx.Client, server: Served, backend: FakeBackend) -> None:
    body = {
        "model": MODEL,
        "messages": HI,
        "keep_alive": "5m",
        "tools": None,
        "options": {"mirostat": 0, "tfs_z": 1.0, "typical_p": 1, "low_vram": False, "num_ctx": None},
    }
    web.post(f"{server.url}/api/chat", json=body).raise_for_status()
    body = {"model": MODEL, "prompt": "x", "suffix": "", "context": [], "images": [], "template": "", "keep_alive": -1}
    web.post(f"{server.url}/api/generate", json=body).raise_for_status()
    assert len(backend.requests) == 2


# --- prompts ------------------------------------------------------------------------------------------------


def test_a_prompt(client: ollama.Client, backend: FakeBackend) -> None:
    reply = client.generate(MODEL, "hi", system="Be kind.")
    assert (reply.response, reply.done, reply.done_reason) == ("Hello there.", True, "stop")
    turns = backend.requests[0].messages
    assert turns == (Message(role="system", content="Be kind."), Message(role="user", content="hi"))
    parts = list(client.generate(MODEL, "hi", stream=True))
    assert [part.response for part in parts] == ["Hello", " there.", ""]


def test_a_raw_prompt_has_no_turns(client: ollama.Client, backend: FakeBackend) -> None:
    client.generate(MODEL, "Once upon", raw=True)
    assert (backend.requests[0].prompt, backend.requests[0].messages) == ("Once upon", ())


def test_without_a_prompt_it_is_asked_whether_the_model_is_there(client: ollama.Client, backend: FakeBackend) -> None:
    assert client.generate(MODEL).done_reason == "load"
    assert client.chat(MODEL).done_reason == "load"
    for ask in (client.generate, client.chat):
        with pytest.raises(ollama.ResponseError, match=MODEL) as caught:
            ask("other")
        assert caught.value.status_code == 404
    assert backend.requests == []


# --- models -----------------------------------------------------------------------------------------------


def test_the_models(client: ollama.Client, backend: FakeBackend) -> None:
    listed = client.list().models
    assert [(model.model, model.modified_at.year if model.modified_at else 0) for model in listed] == [(MODEL, 2023)]
    assert [model.model for model in client.ps().models] == [MODEL]
    backend.served = (msgspec.structs.replace(backend.served[0], ready=0),)
    assert client.ps().models == []
    shown = client.show(MODEL)
    assert shown.capabilities == ["completion", "tools"]
    with pytest.raises(ollama.ResponseError, match=MODEL) as caught:
        client.show("other")
    assert caught.value.status_code == 404


def test_a_name_may_carry_the_tag_that_clients_append(client: ollama.Client, backend: FakeBackend) -> None:
    assert client.chat(f"{MODEL}:latest", HI).model == f"{MODEL}:latest"
    assert backend.requests[0].instance == MODEL
    backend.served = (msgspec.structs.replace(backend.served[0], name="other:latest"),)
    client.chat("other:latest", HI)
    assert backend.requests[1].instance == "other:latest"


def test_the_version(web: httpx.Client, server: Served) -> None:
    assert web.get(f"{server.url}/api/version").json() == {"version": __version__}


# --- errors -------------------------------------------------------------------------------------------------


def test_errors_are_the_exception_of_the_client(client: ollama.Client, backend: FakeBackend) -> None:
    backend.script = [refused("context-exceeded", "the prompt has 9000 tokens", field="messages")]
    with pytest.raises(ollama.ResponseError, match="messages: the prompt has 9000 tokens") as caught:
        client.chat(MODEL, HI)
    assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="9000 tokens"):
        list(client.chat(MODEL, HI, stream=True))
    backend.script = [started(), Chunk(text="Hel"), refused("answer-lost", "rank 1 was killed")]
    with pytest.raises(ollama.ResponseError, match="rank 1 was killed"):
        list(client.chat(MODEL, HI, stream=True))


def test_what_ollama_has_and_muster_has_not_is_a_404_in_words(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="there is no POST /api/embed") as caught:
        client.embed(MODEL, "x")
    assert caught.value.status_code == 404
