"""What cannot be done is refused with the field and the reason, and reaches the official client as its own errors."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from fake_backend import MODEL, refused
from openai_kit import Kit, asking, refusal, user
from test_openai_chat import TIME

from muster.api.bodies import MAX_BODY_BYTES

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
FILE = {"type": "file", "file": {"file_id": "file-1"}}
CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{"}}

#: Fields, the one that the error must name, and words of its message.
BAD_CHATS: list[tuple[dict[str, object], str, str]] = [
    ({"messages": []}, "messages", "empty"),
    ({"messages": "Hi"}, "messages", "array"),
    ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role", "robot"),
    ({"messages": [{"role": "function", "content": "Hi", "name": "f"}]}, "messages[0].role", "function"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role", "missing"),
    ({"messages": [user("Hi"), {"role": "user"}]}, "messages[1].content", "missing"),
    ({"messages": [user(None)]}, "messages[0].content", "missing"),
    ({"messages": [user(5)]}, "messages[0].content", ""),
    ({"messages": [user([{"type": "text", "text": "See"}, IMAGE])]}, "messages[0].content[1]", "text only"),
    ({"messages": [user([AUDIO])]}, "messages[0].content[0]", "text only"),
    ({"messages": [user([FILE])]}, "messages[0].content[0]", "text only"),
    ({"messages": [user([{"type": "hologram"}])]}, "messages[0].content[0].type", "hologram"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "missing"),
    ({"messages": [user("Hi") | {"tool_call_id": "c"}]}, "messages[0].tool_call_id", "role tool"),
    ({"messages": [user("Hi") | {"tool_calls": [CALL]}]}, "messages[0].tool_calls[0].function.arguments", "JSON"),
    (
        {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]},
        "messages[0].function_call",
        "tool_calls",
    ),
    ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio", "text only"),
    ({"messages": [user("Hi") | {"mood": "good"}]}, "messages[0].mood", "known"),
    ({"model": 7}, "model", "str"),
    ({"temperature": "hot"}, "temperature", "float"),
    ({"temperature": -1}, "temperature", "-1"),
    ({"top_p": 1.5}, "top_p", "1.5"),
    ({"max_tokens": -1}, "max_tokens", "-1"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "-1"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "one of them"),
    ({"max_tokens": 1.5}, "max_tokens", "int"),
    ({"n": 0}, "n", "1"),
    ({"n": 17}, "n", "16"),
    ({"stop": [""]}, "stop", "empty"),
    ({"stop": ["x"] * 17}, "stop", "16"),
    ({"logit_bias": {"the": 1}}, "logit_bias", "'the'"),
    ({"logit_bias": {"5": "much"}}, "logit_bias", "float"),
    ({"logit_bias": {"5": 1e9}}, "logit_bias", "1000"),
    ({"top_logprobs": 3}, "top_logprobs", "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    ({"seed": -4}, "seed", "-4"),
    ({"repetition_context_size": 0}, "repetition_context_size", "0"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "padding",
    ),
    ({"temprature": 1}, "temprature", "known"),
    ({"reasoning_effort": "heroic"}, "reasoning_effort", "heroic"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "yaml"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "missing",
    ),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0]", ""),
    ({"tools": [TIME, TIME]}, "tools[1]", "'time'"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    (
        {"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
        "tool_choice",
        "'weather'",
    ),
    ({"tools": [TIME], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", ""),
    (
        {"tools": [TIME], "tool_choice": "required", "response_format": {"type": "json_object"}},
        "response_format",
        "both",
    ),
    ({"store": True}, "store", "not kept"),
    ({"service_tier": "flex"}, "service_tier", "alike"),
    ({"modalities": ["text", "audio"]}, "modalities", "text only"),
    ({"audio": {"voice": "x", "format": "wav"}}, "audio", "text only"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction", "draft"),
    ({"web_search_options": {}}, "web_search_options", "tool of your own"),
    ({"moderation": {"model": "x"}}, "moderation", "moderation"),
    ({"functions": [{"name": "f"}]}, "functions", "tools"),
    ({"function_call": "auto"}, "function_call", "tool_choice"),
    ({"verbosity": "low"}, "verbosity", "template"),
    ({"prompt_cache_retention": "24h"}, "prompt_cache_retention", "instance"),
    ({"prompt_cache_options": {"mode": "explicit"}}, "prompt_cache_options", "by themselves"),
]


@pytest.mark.parametrize(("fields", "field", "words"), BAD_CHATS, ids=lambda value: str(value)[:50])
def test_a_bad_chat_is_refused_by_the_name_of_its_field(
    kit: Kit, fields: dict[str, object], field: str, words: str
) -> None:
    named, message = refusal(kit.chat(**fields))
    assert named.startswith(field), message
    assert words in message
    assert kit.backend.requests == []


@pytest.fixture(scope="module")
def kit() -> Any:
    with asking() as kit:
        yield kit


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
def test_bodies_that_are_no_requests(kit: Kit, path: str) -> None:
    for body, words in (
        (b"", "empty"),
        (b"{", "not JSON"),
        (b"hello", "not JSON"),
        (b"\xff\xfe", "JSON"),
        (b"[]", "object"),
        (b"null", "object"),
        (b'{"model":"tiny/model"}', "missing"),
        (b'{"prompt":"x","input":"x","messages":[]}', ""),
    ):
        _, message = refusal(kit.post(f"/v1/{path}", body))
        assert words in message, (body, message)


def test_ten_megabytes_are_too_much(kit: Kit) -> None:
    content = "x" * MAX_BODY_BYTES
    _, message = refusal(kit.chat(messages=[user(content)]), 413)
    assert str(MAX_BODY_BYTES) in message
    with pytest.raises(openai.APIStatusError) as caught:
        kit.client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": content}])
    assert caught.value.status_code == 413


def test_what_the_client_leaves_neutral_is_accepted(kit: Kit) -> None:
    kit.backend.requests.clear()
    response = kit.chat(
        store=False,
        service_tier="default",
        modalities=["text"],
        verbosity="medium",
        prompt_cache_retention="in_memory",
        prompt_cache_key="k",
        safety_identifier="s",
        function_call="none",
        functions=[],
        web_search_options=None,
        parallel_tool_calls=True,
        tool_choice="auto",
        stream=False,
    )
    assert response.status_code == 200, response.text
    kit.backend.requests.clear()


#: Kinds of failure, and the official client's error for each.
KINDS: list[tuple[str, int, type[openai.APIStatusError], str]] = [
    ("request-invalid", 400, openai.BadRequestError, "request_invalid"),
    ("context-exceeded", 400, openai.BadRequestError, "context_length_exceeded"),
    ("model-unknown", 404, openai.NotFoundError, "model_not_found"),
    ("queue-full", 429, openai.RateLimitError, "rate_limit_exceeded"),
    ("answer-lost", 502, openai.InternalServerError, "answer_lost"),
    ("model-unavailable", 503, openai.InternalServerError, "model_unavailable"),
    ("instance-deleted", 503, openai.InternalServerError, "instance_deleted"),
    ("wait-exceeded", 504, openai.InternalServerError, "wait_exceeded"),
]


@pytest.mark.parametrize(("kind", "status", "error", "code"), KINDS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_is_the_clients_own_error(
    kind: str, status: int, error: type[openai.APIStatusError], code: str, stream: bool
) -> None:
    with asking([refused(kind, "It cannot be.", field="messages")]) as kit:
        for ask in (
            lambda: kit.client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "Hi"}], stream=stream
            ),
            lambda: kit.client.completions.create(model=MODEL, prompt="Hi", stream=stream),
            lambda: kit.client.responses.create(model=MODEL, input="Hi", stream=stream),
        ):
            with pytest.raises(error, match="It cannot be") as caught:
                ask()
            assert (caught.value.status_code, caught.value.code) == (status, code)
            assert caught.value.param is not None
        assert (caught.value.response.headers.get("retry-after") is not None) == (
            status in (429,) or code == "model_unavailable"
        )


def test_an_unknown_model_names_those_that_exist(kit: Kit) -> None:
    with pytest.raises(openai.NotFoundError, match=MODEL):
        kit.client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "Hi"}])
    kit.backend.requests.clear()


@pytest.mark.parametrize(
    ("own", "fields", "theirs"),
    [
        ("json_schema", {"response_format": {"type": "json_object"}}, "response_format"),
        ("json_schema", {"tools": [TIME], "tool_choice": "required"}, "tool_choice"),
        ("template", {"reasoning_effort": "low"}, "reasoning_effort"),
        ("template", {"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        ("messages", {}, "messages"),
    ],
)
def test_what_the_runner_refuses_has_the_dialects_name(own: str, fields: dict[str, object], theirs: str) -> None:
    with asking([refused("request-invalid", "no", field=own)]) as kit:
        assert refusal(kit.chat(**fields))[0] == theirs
        assert refusal(kit.chat(stream=True, **fields))[0] == theirs


def test_the_wrong_method_and_the_wrong_path_answer_in_shape(kit: Kit) -> None:
    response: httpx.Response = kit.http.get("/v1/chat/completions")
    assert response.status_code == 405
    assert response.json()["error"]
