"""Streamed chat completions: the events in OpenAI's order, and as the official client reads them."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import openai
import pytest
from fake_backend import MODEL, FakeStream, answer, calling, done, refused, started
from openai_kit import asking, events, user
from pydantic import BaseModel
from serving import wait_until
from test_openai_chat import CALL, LOGPROBS, TIME, WEATHER

from muster.replies import Chunk, Prefilled
from muster.sampling import ToolCall

MESSAGES: Any = [user("Hi")]


def test_the_events_in_order() -> None:
    with asking(answer("Hel", "lo")) as kit:
        response = kit.chat(stream=True)
    chunks = events(response)
    assert response.text.endswith("data: [DONE]\n\n")
    first, *middle, last = [chunk["choices"][0] for chunk in chunks]
    assert first == {
        "index": 0,
        "delta": {"role": "assistant", "content": "", "refusal": None},
        "logprobs": None,
        "finish_reason": None,
    }
    assert [choice["delta"] for choice in middle] == [{"content": "Hel"}, {"content": "lo"}]
    assert last == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" and chunk["model"] == MODEL for chunk in chunks)
    assert all("usage" not in chunk for chunk in chunks)


def test_the_usage_comes_last_where_asked_for() -> None:
    script = [started(7, 5), Chunk(text="Hi"), done(cached_tokens=5, reasoning_tokens=1)]
    with asking(script) as kit:
        chunks = events(kit.chat(stream=True, stream_options={"include_usage": True}))
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 5},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }


def test_a_piece_without_anything_to_show_is_no_event() -> None:
    with asking([started(), Chunk(tokens=(5,)), Chunk(text="é", tokens=(6,)), done()]) as kit:
        chunks = events(kit.chat(stream=True))
    assert [chunk["choices"][0]["delta"] for chunk in chunks[1:-1]] == [{"content": "é"}]


def test_progress_of_a_long_prompt_is_a_comment() -> None:
    with asking([started(), Prefilled(done=512, total=2000), Chunk(text="Hi"), done()]) as kit:
        response = kit.chat(stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in _stream(kit.client)) == "Hi"
    assert ": prefill 512/2000\n\n" in response.text


def _stream(client: openai.OpenAI) -> list[Any]:
    return list(client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True))


@pytest.mark.parametrize("n", [1, 2])
def test_an_answer_that_is_begun_again_has_one_role(n: int) -> None:
    with asking([started(), started(), Chunk(text="Hi"), done()]) as kit:
        chunks = events(kit.chat(stream=True, n=n))
    roles = [chunk["choices"][0]["delta"].get("role") for chunk in chunks]
    assert (roles.count("assistant"), len(roles)) == (n, 3 * n)


def test_log_probabilities_come_with_their_pieces() -> None:
    script = [started(), Chunk(text="é", logprobs=LOGPROBS[:1]), Chunk(logprobs=LOGPROBS[1:]), done()]
    with asking(script) as kit:
        chunks = events(kit.chat(stream=True, logprobs=True, top_logprobs=1))
    choices = [chunk["choices"][0] for chunk in chunks[1:-1]]
    assert [choice["delta"] for choice in choices] == [{"content": "é"}, {"content": ""}]
    assert [choice["logprobs"]["content"][0]["token"] for choice in choices] == ["é", "!"]


def test_reasoning_before_the_answer_also_in_one_piece() -> None:
    with asking([started(), Chunk(reasoning="Hm"), Chunk(reasoning=".", text="Yes"), done()]) as kit:
        chunks = events(kit.chat(stream=True))
    assert [chunk["choices"][0]["delta"] for chunk in chunks[1:-1]] == [
        {"reasoning_content": "Hm"},
        {"content": "Yes", "reasoning_content": "."},
    ]


def test_several_answers_arrive_with_their_indices() -> None:
    with asking(lambda request: answer("a", str(request.sampling.seed))) as kit:
        chunks = events(kit.chat(stream=True, n=3, seed=1, stream_options={"include_usage": True}))
    usage = chunks.pop()["usage"]
    texts = ["", "", ""]
    ends = [0, 0, 0]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        ends[choice["index"]] += choice["finish_reason"] == "stop"
    assert texts == ["a1", "a2", "a3"]
    assert ends == [1, 1, 1]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (7, 6)


@pytest.mark.process
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_prints_each_event() -> None:
    with asking(answer("Hel", "lo")) as kit:
        body = f'{{"model":"{MODEL}","stream":true,"messages":[{{"role":"user","content":"Hi"}}]}}'
        command = ["curl", "-sSN", f"{kit.url}/v1/chat/completions", "-H", "content-type: application/json", "-d", body]
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    assert '"content":"Hel"' in output
    assert output.endswith("data: [DONE]\n\n")


# --- tools --------------------------------------------------------------------------------------------------


def test_calls_begin_with_their_names() -> None:
    second = ToolCall(id="call_2", name="time", arguments="{}")
    with asking(calling(CALL, second, text="I look.")) as kit:
        chunks = events(kit.chat(stream=True, tools=[WEATHER, TIME]))
    assert [chunk["choices"][0]["delta"] for chunk in chunks[1:]] == [
        {"content": "I look."},
        {
            "tool_calls": [
                {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city":"Ulm"}'}}]},
        {
            "tool_calls": [
                {"index": 1, "id": "call_2", "type": "function", "function": {"name": "time", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
        {},
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_one_call_at_a_time_where_asked_for() -> None:
    with asking(calling(CALL, ToolCall(id="call_2", name="time", arguments="{}"))) as kit:
        response = kit.chat(stream=True, tools=[WEATHER, TIME], parallel_tool_calls=False)
    assert "call_1" in response.text
    assert "call_2" not in response.text


class City(BaseModel):
    name: str


def test_the_clients_helper_follows_calls() -> None:
    call = ToolCall(id="call_1", name="City", arguments='{"name":"Ulm"}')
    with (
        asking(calling(call)) as kit,
        kit.client.chat.completions.stream(
            model=MODEL, messages=MESSAGES, tools=[openai.pydantic_function_tool(City)]
        ) as stream,
    ):
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert (calls[0].id, calls[0].function.parsed_arguments) == ("call_1", City(name="Ulm"))


def test_the_clients_helper_follows_structured_output() -> None:
    with (
        asking(answer('{"name":', '"Ulm"}')) as kit,
        kit.client.chat.completions.stream(model=MODEL, messages=MESSAGES, response_format=City) as stream,
    ):
        texts = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert texts == ["", '{"name":', '"Ulm"}']  # the first comes with the role, as from OpenAI
    assert final.choices[0].message.parsed == City(name="Ulm")


def test_a_forced_call_streams_its_arguments() -> None:
    with asking([started(), Chunk(reasoning="Hm."), *answer('{"city":', '"Ulm"}')[1:]]) as kit:
        chunks = events(kit.chat(stream=True, tools=[WEATHER], tool_choice="required"))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[1:-1]]
    assert deltas.pop(0) == {"reasoning_content": "Hm."}
    assert deltas[0]["tool_calls"][0]["function"] == {"name": "weather", "arguments": ""}
    assert "".join(delta["tool_calls"][0]["function"]["arguments"] for delta in deltas) == '{"city":"Ulm"}'
    assert {delta["tool_calls"][0]["index"] for delta in deltas} == {0}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


# --- what goes wrong ----------------------------------------------------------------------------------------


def test_an_error_before_the_beginning_is_a_status() -> None:
    with asking([refused("queue-full", "the queue is full")]) as kit, pytest.raises(openai.RateLimitError):
        _stream(kit.client)


def test_an_error_of_one_of_several_before_any_began_is_a_status() -> None:
    with asking([refused("queue-full", "the queue is full")]) as kit:
        assert kit.chat(stream=True, n=2).status_code == 429


@pytest.mark.parametrize("n", [1, 2])
def test_an_error_after_the_beginning_reaches_the_client_as_its_own(n: int) -> None:
    lost = refused("answer-lost", "rank 1 ended: killed by signal 9")
    with asking([started(), Chunk(text="Hel"), lost]) as kit:
        response = kit.chat(stream=True, n=n)
        texts: list[str] = []
        with pytest.raises(openai.APIError, match="rank 1 ended") as caught:
            texts.extend(
                chunk.choices[0].delta.content or ""
                for chunk in kit.client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, n=n)
            )
    assert "[DONE]" not in response.text
    assert caught.value.code == "answer_lost"


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_cancels_every_generation(n: int, streamed: bool) -> None:
    with asking(lambda _: [started(), Chunk(text="Hel")] if streamed else [started()]) as kit:
        body = {"model": MODEL, "messages": MESSAGES, "stream": streamed, "n": n}
        if streamed:
            with kit.http.stream("POST", "/v1/chat/completions", json=body) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(Exception, match="timed out"):
                kit.http.post("/v1/chat/completions", json=body, timeout=0.2)
        streams: list[FakeStream] = kit.backend.streams
        assert len(streams) == n
        wait_until(lambda: all(stream.cancelled for stream in streams), "the cancellation of all")
