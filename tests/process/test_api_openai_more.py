"""OpenAI's own client: its older and its newest endpoint, its list of models, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from kit.serving import (
    CONTEXT_TOKENS,
    ENDLESS,
    Serving,
    calls_of,
    openai_messages,
    openai_tools,
    prompt_tokens,
    serving,
    token_ids,
)
from pydantic import BaseModel

from muster.demo.answers import (
    CONVERSATIONS,
    JSON_CONVERSATIONS,
    REASONING_CONVERSATIONS,
    TOOL_CONVERSATIONS,
    TOOLS,
)

pytestmark = [pytest.mark.process, pytest.mark.mlx, pytest.mark.timeout(90)]

PLAIN = CONVERSATIONS[0]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("openai"), (("one", 1),)) as made:
        yield made


class RankView(BaseModel):
    rank: int
    node: str
    ready: bool


# --- completions, responses, models -------------------------------------------------------------------------

RAW = f"<|user|>{PLAIN.prompt[0].content}<|end|><|assistant|>"


def test_plain_completion_goes_on_with_text_and_withtoken_ids(served: Serving) -> None:
    create = served.openai.completions.create
    assert create(model="one", prompt=RAW, max_tokens=100).choices[0].text == PLAIN.answer
    assert create(model="one", prompt=RAW).choices[0].text == PLAIN.answer[:16]
    echoed = create(model="one", prompt=RAW, max_tokens=100, echo=True).choices[0]
    assert (echoed.text, echoed.finish_reason) == (RAW + PLAIN.answer, "stop")
    ids = [256, *token_ids(PLAIN.prompt[0].content), 258, 257]
    assert create(model="one", prompt=ids, max_tokens=100).choices[0].text == PLAIN.answer
    pair = create(model="one", prompt=[RAW, RAW + PLAIN.answer[:3]], max_tokens=100)
    assert [choice.text for choice in pair.choices] == [PLAIN.answer, PLAIN.answer[3:]]
    with create(model="one", prompt=RAW, max_tokens=100, stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == PLAIN.answer


def test_space_that_a_completion_begins_with_is_kept(served: Serving) -> None:
    before, space, after = PLAIN.answer.partition(" ")
    reply = served.openai.completions.create(model="one", prompt=RAW + before, max_tokens=100, echo=True)
    assert reply.choices[0].text == RAW + before + space + after


def test_responses(served: Serving) -> None:
    question = PLAIN.prompt[0].content
    reply = served.openai.responses.create(model="one", input=question)
    assert (reply.output_text, reply.status) == (PLAIN.answer, "completed")
    assert reply.usage is not None
    assert reply.usage.input_tokens == prompt_tokens(PLAIN.prompt)
    with served.openai.responses.create(model="one", input=question, stream=True) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == PLAIN.answer
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == PLAIN.answer
    cut = served.openai.responses.create(model="one", input=question, max_output_tokens=3)
    assert (cut.output_text, cut.status) == (PLAIN.answer[:3], "incomplete")


def test_responses_call_tools_and_think(served: Serving) -> None:
    conversation = TOOL_CONVERSATIONS[2]
    tools: Any = [{"type": "function", "strict": False, **each["function"]} for each in openai_tools(TOOLS)]
    question = conversation.prompt[0].content
    reply = served.openai.responses.create(model="one", input=question, tools=tools)
    calls = [item for item in reply.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == calls_of(conversation)
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": output}
        for call, output in zip(calls, ("64 GB", "32 GB"), strict=True)
    ]
    turns: Any = [{"role": "user", "content": question}, *reply.output, *results]
    final = served.openai.responses.create(model="one", input=turns, tools=tools)
    assert final.output_text == TOOL_CONVERSATIONS[3].answer
    thought = served.openai.responses.create(model="one", input=REASONING_CONVERSATIONS[0].prompt[0].content)
    assert thought.output_text == REASONING_CONVERSATIONS[0].answer
    assert "reasoning" in [item.type for item in thought.output]


def test_responses_parse_what_follows_a_schema(served: Serving) -> None:
    reply = served.openai.responses.parse(
        model="one", input=JSON_CONVERSATIONS[0].prompt[0].content, text_format=RankView
    )
    assert reply.output_parsed == RankView(rank=0, node="left", ready=True)


def test_models_are_listed_by_the_names_that_requests_use(served: Serving) -> None:
    assert [each.id for each in served.openai.models.list()] == ["one"]


# --- what is refused ----------------------------------------------------------------------------------------


def test_unknown_model_is_not_found_and_the_error_names_those_there_are(served: Serving) -> None:
    for stream in (False, True):
        with pytest.raises(openai.NotFoundError, match="one") as caught:
            served.ask("nobody", PLAIN, stream=stream)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            "messages[0].content",
        ),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"extra_body": {"nonsense": 1}}, "nonsense"),
        ({"store": True}, "store"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
            "response_format",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_the_name_of_the_field(
    served: Serving, change: dict[str, Any], field: str
) -> None:
    body: dict[str, Any] = {"messages": openai_messages(PLAIN.prompt), **change}
    with pytest.raises(openai.BadRequestError) as caught:
        served.openai.chat.completions.create(model="one", **body)
    assert (caught.value.param or "").startswith(field), caught.value
    assert caught.value.type == "invalid_request_error"


def test_body_that_is_no_json_is_refused(served: Serving) -> None:
    for body in (b"{", b"[]", b"", b"\xff"):
        reply = served.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert reply.status_code == 400, body
        assert reply.json()["error"]["type"] == "invalid_request_error"


def test_too_long_a_body_is_refused_unread(served: Serving) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        served.openai.completions.create(model="one", prompt="x" * 10_600_000)
    assert caught.value.status_code == 413


def test_more_than_the_context_is_refused_and_the_rest_of_it_bounds_the_answer(served: Serving) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        served.openai.completions.create(model="one", prompt="x" * CONTEXT_TOKENS)
    assert caught.value.code == "context_length_exceeded"
    assert str(CONTEXT_TOKENS) in caught.value.message
    reply = served.openai.completions.create(
        model="one", prompt="x" * (CONTEXT_TOKENS - 4), max_tokens=100, logit_bias=ENDLESS
    )
    assert (reply.choices[0].finish_reason, reply.usage and reply.usage.completion_tokens) == ("length", 4)
