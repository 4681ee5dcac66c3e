"""Chat completions that are answered at once, and what of a request reaches the coordinator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import openai
import pytest
from fake_backend import MODEL, answer, calling, done, started
from openai_kit import asking, user
from pydantic import BaseModel

from muster.api.openai_bodies import DEFAULT_ANSWER_TOKENS
from muster.replies import Chunk
from muster.sampling import Alternative, Message, SamplingParams, TokenLogprob, Tool, ToolCall

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME: Any = {"type": "function", "function": {"name": "time"}}
CALL = ToolCall(id="call_1", name="weather", arguments='{"city":"Ulm"}')
LOGPROBS = (
    TokenLogprob(token=5, text="é", data="é".encode(), logprob=-0.5, top=(Alternative(6, "\ufffd", -1.5),)),
    TokenLogprob(token=7, text="!", data=b"!", logprob=-0.25, top=(Alternative(8, "?", -2.0),)),
)


def test_an_answer_with_its_usage() -> None:
    script = [started(9, 4), Chunk(text="Good"), Chunk(text=" day."), done(prompt_tokens=9, cached_tokens=4)]
    with asking(script) as kit:
        reply = kit.client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}])
    assert reply.object == "chat.completion"
    assert reply.id.startswith("chatcmpl-")
    assert reply.model == MODEL
    assert reply.system_fingerprint is not None
    (choice,) = reply.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content, choice.message.tool_calls) == ("assistant", "Good day.", None)
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (9, 2, 11)
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 4
    assert kit.asked.messages == (Message(role="user", content="Hi"),)


def test_absent_options_are_greedy_and_leave_room_for_a_long_answer() -> None:
    with asking() as kit:
        assert kit.chat().status_code == 200
    assert kit.asked.sampling == SamplingParams(max_tokens=DEFAULT_ANSWER_TOKENS)


def test_null_means_absent() -> None:
    names = ("temperature", "top_p", "n", "stop", "max_tokens", "seed", "logit_bias", "tools", "tool_choice", "user")
    more = ("stream", "stream_options", "response_format", "logprobs", "top_logprobs", "store", "audio", "metadata")
    with asking() as kit:
        assert kit.chat(**dict.fromkeys((*names, *more))).status_code == 200
    assert kit.asked.sampling == SamplingParams(max_tokens=DEFAULT_ANSWER_TOKENS)


def test_every_sampling_option_reaches_the_coordinator() -> None:
    with asking() as kit:
        kit.client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            temperature=0.7,
            top_p=0.9,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={"42": -100},
            seed=11,
            stop=["\n", "END"],
            max_completion_tokens=33,
            logprobs=True,
            top_logprobs=3,
            user="somebody",
            metadata={"project": "x"},
            service_tier="auto",
            store=False,
            modalities=["text"],
            extra_body={"top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1, "repetition_context_size": 64},
        )
    assert kit.asked.sampling == SamplingParams(
        max_tokens=33,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        seed=11,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        penalty_context_tokens=64,
        logit_bias={42: -100.0},
        stop=("\n", "END"),
        logprobs=True,
        top_logprobs=3,
    )


@pytest.mark.parametrize("limit", [0, 1])
def test_small_limits(limit: int) -> None:
    with asking(answer(*["x"] * limit, reason="length")) as kit:
        reply = kit.chat(max_tokens=limit).json()
    assert kit.asked.sampling.max_tokens == limit
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["choices"][0]["message"]["content"] == "x" * limit


def test_one_stop_string_and_top_k_switched_off_as_others_do() -> None:
    with asking() as kit:
        assert kit.chat(stop="END", top_k=-1).status_code == 200
    assert (kit.asked.sampling.stop, kit.asked.sampling.top_k) == (("END",), 0)


def test_several_answers_have_seeds_of_their_own_and_count_the_prompt_once() -> None:
    with asking(lambda request: answer(f"seed {request.sampling.seed}")) as kit:
        reply = kit.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], n=3, seed=5, temperature=1
        )
    assert [choice.message.content for choice in reply.choices] == ["seed 5", "seed 6", "seed 7"]
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (7, 3)


def test_the_largest_seed_does_not_overflow() -> None:
    with asking() as kit:
        assert kit.chat(n=2, seed=2**63 - 1).status_code == 200
    assert [request.sampling.seed for request in kit.backend.requests] == [2**63 - 1, 0]


def test_without_a_seed_every_answer_draws_its_own() -> None:
    with asking() as kit:
        assert kit.chat(n=2).status_code == 200
    assert [request.sampling.seed for request in kit.backend.requests] == [None, None]


def test_log_probabilities() -> None:
    with asking([started(), Chunk(text="é!", logprobs=LOGPROBS), done()]) as kit:
        reply = kit.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=1
        )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    first, second = logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("é", -0.5, [195, 169])
    assert (first.top_logprobs[0].token, first.top_logprobs[0].bytes) == ("\ufffd", None)
    assert (second.top_logprobs[0].token, second.top_logprobs[0].logprob) == ("?", -2.0)
    assert second.top_logprobs[0].bytes == [63]


def test_reasoning_is_apart_from_the_answer() -> None:
    script = [started(), Chunk(reasoning="Hm, "), Chunk(reasoning="yes."), Chunk(text="Yes."), done(reasoning_tokens=2)]
    with asking(script) as kit:
        reply = kit.chat().json()
    message = reply["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "Hm, yes.")
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2


@pytest.mark.parametrize("effort", ["low", "high"])
def test_effort_and_variables_reach_the_template(effort: str) -> None:
    with asking() as kit:
        assert kit.chat(reasoning_effort=effort, chat_template_kwargs={"enable_thinking": True}).status_code == 200
    assert kit.asked.template == {"reasoning_effort": effort, "enable_thinking": True}


def test_no_effort_switches_thinking_off() -> None:
    with asking() as kit:
        assert kit.chat(reasoning_effort="none").status_code == 200
    assert kit.asked.template == {"reasoning_effort": "none", "enable_thinking": False}


class City(BaseModel):
    name: str
    people: int


# --- messages -----------------------------------------------------------------------------------------------


def test_a_whole_conversation() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Ulm"}'}}
    with asking() as kit:
        response = kit.chat(
            messages=[
                {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
                {"role": "system", "content": "And kind."},
                {"role": "user", "content": "Weather?", "name": "Ann"},
                {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Ask."},
                {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
                user("Why?"),
            ]
        )
    assert response.status_code == 200
    assert kit.asked.messages == (
        Message(role="system", content="Be brief."),
        Message(role="system", content="And kind."),
        Message(role="user", content="Weather?", name="Ann"),
        Message(role="assistant", reasoning="Ask.", tool_calls=(CALL,)),
        Message(role="tool", content="sunny", tool_call_id="call_1", name="weather"),
        Message(role="assistant", content="No."),
        Message(role="user", content="Why?"),
    )


#: The forms in which people send a message of the official client back.
FORMS: list[Callable[[BaseModel], Any]] = [
    lambda message: message,
    lambda message: message.model_dump(),
    lambda message: message.model_dump(exclude_none=True),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("parsed", [False, True])
def test_an_answer_can_be_sent_back_as_it_came(form: Callable[[BaseModel], Any], parsed: bool) -> None:
    call = ToolCall(id="call_1", name="City", arguments='{"name":"Ulm","people":1}')
    with asking(calling(call, text="I look.")) as kit:
        completions = kit.client.chat.completions
        ask: Any = completions.parse if parsed else completions.create
        reply = ask(model=MODEL, messages=[user("Hi")], tools=[openai.pydantic_function_tool(City)])
        kit.backend.requests.clear()
        ask(model=MODEL, messages=[user("Hi"), form(reply.choices[0].message)])
    assert kit.asked.messages[1] == Message(role="assistant", content="I look.", tool_calls=(call,))


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the client's own
def test_a_parsed_answer_can_be_sent_back() -> None:
    with asking(answer('{"name":"Ulm","people":1}')) as kit:
        ask: Any = kit.client.chat.completions.parse
        reply = ask(model=MODEL, messages=[user("Hi")], response_format=City)
        kit.backend.requests.clear()
        ask(model=MODEL, messages=[user("Hi"), reply.choices[0].message])
    assert kit.asked.messages[1] == Message(role="assistant", content='{"name":"Ulm","people":1}')


# --- tools --------------------------------------------------------------------------------------------------


def test_several_calls_at_once() -> None:
    second = ToolCall(id="call_2", name="time", arguments="{}")
    with asking(calling(CALL, second)) as kit:
        reply = kit.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], tools=[WEATHER, TIME], tool_choice="auto"
        )
    assert kit.asked.tools == (
        Tool(name="weather", description="The weather of a city.", parameters=WEATHER["function"]["parameters"]),
        Tool(name="time"),
    )
    (choice,) = reply.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    calls: list[Any] = list(choice.message.tool_calls or [])
    assert [(call.id, call.function.name, call.function.arguments) for call in calls] == [
        ("call_1", "weather", '{"city":"Ulm"}'),
        ("call_2", "time", "{}"),
    ]


def test_one_call_at_a_time_where_asked_for() -> None:
    with asking(calling(CALL, ToolCall(id="call_2", name="time", arguments="{}"))) as kit:
        reply = kit.chat(tools=[WEATHER, TIME], parallel_tool_calls=False).json()
    assert [call["id"] for call in reply["choices"][0]["message"]["tool_calls"]] == ["call_1"]


def test_the_model_does_not_see_tools_that_it_must_not_call() -> None:
    with asking() as kit:
        assert kit.chat(tools=[WEATHER], tool_choice="none").status_code == 200
    assert kit.asked.tools == ()


def test_a_call_that_the_limit_cut() -> None:
    with asking([started(), Chunk(text='{"na'), done("length")]) as kit:
        reply = kit.chat(tools=[WEATHER], max_tokens=2).json()
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["choices"][0]["message"]["content"] == '{"na'


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        ([WEATHER, TIME], {"type": "function", "function": {"name": "weather"}}),
        ([WEATHER], "required"),
    ],
)
def test_a_forced_call_is_filled_in_by_its_schema(tools: list[Any], choice: object) -> None:
    with asking(answer('{"city":', '"Ulm"}')) as kit:
        reply = kit.chat(tools=tools, tool_choice=choice).json()
    assert [tool.name for tool in kit.asked.tools] == ["weather"]
    assert kit.asked.sampling.json_schema is not None
    assert msgspec.json.decode(kit.asked.sampling.json_schema) == WEATHER["function"]["parameters"]
    (chosen,) = reply["choices"]
    assert (chosen["finish_reason"], chosen["message"]["content"]) == ("tool_calls", None)
    (call,) = chosen["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city":"Ulm"}'}
    assert call["id"].startswith("call_")


def test_a_forced_call_in_the_models_own_syntax() -> None:
    with asking(calling(CALL)) as kit:
        reply = kit.chat(tools=[WEATHER], tool_choice="required").json()
    assert [call["id"] for call in reply["choices"][0]["message"]["tool_calls"]] == ["call_1"]


# --- structured output --------------------------------------------------------------------------------------


def test_an_answer_parsed_into_a_class() -> None:
    with asking(answer('{"name":"Ulm",', '"people":128928}')) as kit:
        reply = kit.client.chat.completions.parse(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], response_format=City
        )
    assert reply.choices[0].message.parsed == City(name="Ulm", people=128928)
    assert kit.asked.sampling.json_schema is not None
    schema = msgspec.json.decode(kit.asked.sampling.json_schema)
    assert schema["required"] == ["name", "people"]


def test_a_cut_answer_is_not_parsed() -> None:
    with asking(answer('{"name":', reason="length")) as kit, pytest.raises(openai.LengthFinishReasonError):
        kit.client.chat.completions.parse(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], response_format=City
        )


def test_calls_parsed_into_a_class() -> None:
    call = ToolCall(id="call_1", name="City", arguments='{"name":"Ulm","people":1}')
    with asking(calling(call)) as kit:
        reply = kit.client.chat.completions.parse(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], tools=[openai.pydantic_function_tool(City)]
        )
    calls = reply.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].function.parsed_arguments == City(name="Ulm", people=1)


def test_any_object_and_plain_text() -> None:
    with asking(answer("{}")) as kit:
        assert kit.chat(response_format={"type": "json_object"}).status_code == 200
        assert kit.chat(response_format={"type": "text"}).status_code == 200
    schemas = [request.sampling.json_schema for request in kit.backend.requests]
    assert schemas == ['{"type":"object"}', None]


def test_a_schema_and_tools_leave_the_choice_to_the_model() -> None:
    with asking(answer("{}")) as kit:
        assert kit.chat(response_format={"type": "json_object"}, tools=[WEATHER]).status_code == 200
    assert kit.asked.tools
    assert kit.asked.sampling.json_schema is not None
