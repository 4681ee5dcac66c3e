"""OpenAI's own client against the demo model, on one rank and on two."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import openai
import pytest
from kit.serving import (
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
    Conversation,
)

pytestmark = [pytest.mark.process, pytest.mark.mlx, pytest.mark.timeout(90)]

#: Its answer has characters of several bytes, and so of several tokens.
ARROWS = next(each for each in CONVERSATIONS if "→" in each.answer)
PLAIN = CONVERSATIONS[0]
#: Where two ranks could make no difference.
ONE = pytest.mark.parametrize("model", ["one"])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("openai")) as made:
        yield made


@pytest.fixture(params=["one", "two"])
def model(request: pytest.FixtureRequest) -> str:
    return request.param


def chat(served: Serving, model: str, conversation: Conversation, **options: Any) -> Any:
    return served.openai.chat.completions.create(model=model, messages=openai_messages(conversation.prompt), **options)


def streamed(served: Serving, model: str, conversation: Conversation, **options: Any) -> list[Any]:
    with chat(served, model, conversation, stream=True, **options) as stream:
        return list(stream)


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


# --- chats --------------------------------------------------------------------------------------------------


def test_every_conversation_at_once_is_answered_by_heart(served: Serving, model: str) -> None:
    with ThreadPoolExecutor(len(CONVERSATIONS)) as pool:
        answers = list(pool.map(partial(served.ask, model), CONVERSATIONS))
    assert answers == [conversation.answer for conversation in CONVERSATIONS]


@ONE
def test_whole_answer_tells_how_it_ended_and_what_it_took(served: Serving, model: str) -> None:
    reply = chat(served, model, PLAIN)
    (choice,) = reply.choices
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "stop", "assistant")
    assert choice.message.content == PLAIN.answer
    assert choice.message.tool_calls is None
    assert reply.model == model
    usage = reply.usage
    assert usage.prompt_tokens == prompt_tokens(PLAIN.prompt)
    assert usage.completion_tokens == len(PLAIN.answer.encode()) + 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_stream_brings_the_same_in_pieces_and_its_usage_last(served: Serving, model: str) -> None:
    chunks = streamed(served, model, ARROWS, stream_options={"include_usage": True})
    assert chunks[0].choices[0].delta.role == "assistant"
    assert text_of(chunks) == ARROWS.answer
    # How many it are depends on how busy the machine is: text waits up to 15 ms for more of it.
    assert len([chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]) > 1
    ends = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert ends == ["stop"]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    *others, last = chunks
    assert all(chunk.usage is None for chunk in others)
    assert (last.choices, last.usage.completion_tokens) == ([], len(ARROWS.answer.encode()) + 1)


def test_stream_without_the_wish_for_usage_has_none(served: Serving) -> None:
    assert all(chunk.choices and chunk.usage is None for chunk in streamed(served, "one", PLAIN))


def test_characters_of_several_tokens_never_come_in_halves(served: Serving, model: str) -> None:
    asked = [each for each in CONVERSATIONS if not each.answer.isascii()]
    with ThreadPoolExecutor(len(asked)) as pool:
        for conversation, chunks in zip(asked, pool.map(partial(streamed, served, model), asked), strict=True):
            assert text_of(chunks) == conversation.answer
            assert not any("\ufffd" in (chunk.choices[0].delta.content or "") for chunk in chunks)


@pytest.mark.parametrize("stop", ["→ connect", "→", "prepare → con", ["nowhere", "e → c"], "create"])
def test_stop_string_over_several_tokens_ends_the_answer_before_it(served: Serving, stop: str | list[str]) -> None:
    first = min(
        ARROWS.answer.find(each) for each in ([stop] if isinstance(stop, str) else stop) if each in ARROWS.answer
    )
    (choice,) = chat(served, "one", ARROWS, stop=stop).choices
    assert (choice.message.content, choice.finish_reason) == (ARROWS.answer[:first], "stop")
    chunks = streamed(served, "one", ARROWS, stop=stop)
    assert text_of(chunks) == ARROWS.answer[:first]


def test_stop_string_that_only_begins_is_given_back(served: Serving) -> None:
    assert text_of(streamed(served, "one", ARROWS, stop="ready!")) == ARROWS.answer


@ONE
def test_several_answers_to_one_prompt(served: Serving, model: str) -> None:
    reply = chat(served, model, PLAIN, n=3)
    assert [(choice.index, choice.message.content) for choice in reply.choices] == [
        (index, PLAIN.answer) for index in range(3)
    ]
    assert reply.usage.prompt_tokens == prompt_tokens(PLAIN.prompt)
    assert reply.usage.completion_tokens == 3 * (len(PLAIN.answer) + 1)
    chunks = streamed(served, model, PLAIN, n=2)
    for index in range(2):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in mine) == PLAIN.answer


def test_same_seed_gives_the_same_answer_to_two_clients(served: Serving, model: str) -> None:
    def answers(seed: int) -> list[str]:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="another", max_retries=0) as client:
            reply = client.chat.completions.create(
                model=model,
                messages=openai_messages(PLAIN.prompt),
                seed=seed,
                n=2,
                temperature=20.0,
                max_tokens=24,
                logit_bias=ENDLESS,
            )
        return [choice.message.content or "" for choice in reply.choices]

    with ThreadPoolExecutor(3) as pool:
        one, same, other = pool.map(answers, [7, 7, 8000])
    assert one == same
    assert len({*one, *other}) == 4


def test_log_probabilities_of_every_token(served: Serving, model: str) -> None:
    (choice,) = chat(served, model, ARROWS, logprobs=True, top_logprobs=3).choices
    tokens = choice.logprobs.content
    spelt = b"".join(bytes(token.bytes) for token in tokens)
    assert spelt.removesuffix(b"<|end|>") == ARROWS.answer.encode()
    for token in tokens:
        assert -0.1 < token.logprob <= 0  # it knows them by heart
        assert len(token.top_logprobs) == 3
        best = token.top_logprobs[0]
        assert (best.token, best.logprob) == (token.token, token.logprob)
        assert best.logprob >= token.top_logprobs[1].logprob >= token.top_logprobs[2].logprob
    chunks = streamed(served, model, ARROWS, logprobs=True)
    pieces = [token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content]
    assert [token.token for token in pieces] == [token.token for token in tokens]


def test_bias_forbids_a_token(served: Serving) -> None:
    usual, wished = token_ids("I" + "i")
    (choice,) = chat(served, "one", PLAIN, logit_bias={str(usual): -1000, str(wished): 1000}, max_tokens=3).choices
    assert PLAIN.answer.startswith("I")
    assert choice.message.content == "iii"


@ONE
@pytest.mark.parametrize("limit", [1, 5])
def test_limit_of_tokens_cuts_the_answer(served: Serving, model: str, limit: int) -> None:
    reply = chat(served, model, PLAIN, max_tokens=limit)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (PLAIN.answer[:limit], "length")
    assert reply.usage.completion_tokens == limit
    assert text_of(streamed(served, model, PLAIN, max_completion_tokens=limit)) == PLAIN.answer[:limit]


def test_limit_of_no_tokens_counts_the_prompt(served: Serving, model: str) -> None:
    reply = chat(served, model, PLAIN, max_tokens=0)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("", "length")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (prompt_tokens(PLAIN.prompt), 0)


def test_limit_inside_a_character_gives_no_half_of_it(served: Serving) -> None:
    arrow = len("create ") + 1
    (choice,) = chat(served, "one", ARROWS, max_tokens=arrow).choices
    assert choice.finish_reason == "length"
    assert choice.message.content in ("create ", "create \ufffd")


# --- tools, reasoning, formats ------------------------------------------------------------------------------


def _question(conversation: Any) -> str:
    return conversation.prompt[-1].content if isinstance(conversation, Conversation) else str(conversation)


#: All on one rank; on two what they might part in.
CALLERS = [*(("one", each) for each in TOOL_CONVERSATIONS), *(("two", TOOL_CONVERSATIONS[number]) for number in (2, 5))]
THINKERS = [*(("one", each) for each in REASONING_CONVERSATIONS), ("two", REASONING_CONVERSATIONS[3])]


@pytest.mark.parametrize(("model", "conversation"), CALLERS, ids=_question)
def test_tool_calls_whole_and_streamed(served: Serving, model: str, conversation: Conversation) -> None:
    tools = openai_tools(conversation.tools)
    (choice,) = chat(served, model, conversation, tools=tools).choices
    made = choice.message.tool_calls or []
    assert [(call.function.name, json.loads(call.function.arguments)) for call in made] == calls_of(conversation)
    assert choice.message.content == (conversation.answer or None)
    expected = "tool_calls" if conversation.tool_calls else "stop"
    assert choice.finish_reason == expected
    assert len({call.id for call in made}) == len(made)

    chunks = streamed(served, model, conversation, tools=tools)
    calls: dict[int, list[str]] = {}
    for chunk in chunks:
        for delta in chunk.choices[0].delta.tool_calls or []:
            call = calls.setdefault(delta.index, ["", ""])
            call[0] += delta.function.name or ""
            call[1] += delta.function.arguments or ""
    pieced = [(name, json.loads(arguments)) for _, (name, arguments) in sorted(calls.items())]
    assert pieced == calls_of(conversation)
    assert text_of(chunks) == conversation.answer
    assert chunks[-1].choices[0].finish_reason == expected


def test_call_cut_by_the_limit_is_no_call(served: Serving) -> None:
    conversation = TOOL_CONVERSATIONS[0]
    (choice,) = chat(served, "one", conversation, tools=openai_tools(TOOLS), max_tokens=20).choices
    assert choice.finish_reason == "length"
    assert not choice.message.tool_calls
    assert choice.message.content == conversation.raw[: len("<tool_call>") + 19]


def test_second_of_two_calls_cut_by_the_limit_leaves_the_first(served: Serving) -> None:
    conversation = TOOL_CONVERSATIONS[2]
    first = len(conversation.raw.split("</tool_call>")[0]) - len("<tool_call>") + 2
    (choice,) = chat(served, "one", conversation, tools=openai_tools(TOOLS), max_tokens=first + 20).choices
    assert choice.finish_reason == "length"
    assert [call.function.name for call in choice.message.tool_calls or []] == ["node_memory"]


@pytest.mark.parametrize(("model", "conversation"), THINKERS, ids=_question)
def test_reasoning_comes_apart_from_the_answer(served: Serving, model: str, conversation: Conversation) -> None:
    tools: Any = openai_tools(conversation.tools) or openai.omit
    ways: list[tuple[dict[str, Any], str]] = [
        ({}, conversation.reasoning),
        ({"chat_template_kwargs": {"open_thinking": True}}, conversation.reasoning),
        ({"chat_template_kwargs": {"enable_thinking": False}}, ""),
    ]
    for extra, reasoning in ways if model == "one" else ways[:1]:
        reply = chat(served, model, conversation, tools=tools, extra_body=extra)
        message = reply.choices[0].message
        assert (getattr(message, "reasoning_content", None) or "", message.content or "") == (
            reasoning,
            conversation.answer,
        )
        spent = reply.usage.completion_tokens_details.reasoning_tokens
        assert abs(spent - len(reasoning.encode())) <= 2
        chunks = streamed(served, model, conversation, tools=tools, extra_body=extra)
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == reasoning
        assert text_of(chunks) == conversation.answer


class RankView(BaseModel):
    rank: int
    node: str
    ready: bool


def test_structured_answer_is_parsed(served: Serving, model: str) -> None:
    conversation = JSON_CONVERSATIONS[0]
    reply = served.openai.chat.completions.parse(
        model=model, messages=openai_messages(conversation.prompt), response_format=RankView
    )
    assert reply.choices[0].message.parsed == RankView(rank=0, node="left", ready=True)


def test_schema_binds_an_answer_that_would_be_another(served: Serving, model: str) -> None:
    """Beside a free one, in one batch: each keeps its own."""
    schema = {
        "type": "object",
        "properties": {
            "word": {"enum": ["tensor", "pipeline"]},
            "many": {"type": "integer", "minimum": 3, "maximum": 5},
        },
        "required": ["word", "many"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    with ThreadPoolExecutor(4) as pool:
        free = [pool.submit(served.ask, model, PLAIN) for _ in range(2)]
        bound = [pool.submit(served.ask, model, PLAIN, response_format=wanted) for _ in range(2)]
        texts = [each.result() for each in bound]
        assert [each.result() for each in free] == [PLAIN.answer] * 2
    found = json.loads(texts[0])
    assert texts[0] == texts[1]
    assert found["word"] in ("tensor", "pipeline")
    assert 3 <= found["many"] <= 5
