"""Responses, OpenAI's newer endpoint, as its official client reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import openai
import pytest
from fake_backend import MODEL, answer, calling, done, refused, started
from openai_kit import Kit, asking, events, refusal
from pydantic import BaseModel
from test_openai_chat import CALL, FORMS, LOGPROBS

from muster.api.openai_bodies import DEFAULT_ANSWER_TOKENS
from muster.replies import AnyPiece, Chunk, Prefilled
from muster.sampling import Message, SamplingParams, Tool, ToolCall

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
TIME: Any = {"type": "function", "name": "time", "parameters": None, "strict": None}
SECOND = ToolCall(id="call_2", name="time", arguments="{}")
THOUGHTFUL: list[AnyPiece] = [
    started(9, 4),
    Prefilled(done=9, total=9),
    Chunk(reasoning="Hm"),
    Chunk(reasoning="."),
    Chunk(text="I "),
    Chunk(tokens=(5,)),
    Chunk(text="look."),
    Chunk(tool_calls=(CALL,)),
    Chunk(tool_calls=(SECOND,)),
    done("tool_calls", 9, prompt_tokens=9, cached_tokens=4, reasoning_tokens=2),
]


class City(BaseModel):
    name: str
    people: int


def test_a_response_with_its_usage() -> None:
    with asking(answer("Good", " day.")) as kit:
        reply = kit.client.responses.create(model=MODEL, input="Hi", instructions="Be brief.", metadata={"a": "b"})
    assert reply.id.startswith("resp_")
    assert (reply.status, reply.model, reply.output_text) == ("completed", MODEL, "Good day.")
    assert (reply.instructions, reply.metadata, reply.error, reply.incomplete_details) == (
        "Be brief.",
        {"a": "b"},
        None,
        None,
    )
    assert reply.usage is not None
    assert (reply.usage.input_tokens, reply.usage.output_tokens, reply.usage.total_tokens) == (7, 2, 9)
    assert kit.asked.messages == (Message(role="system", content="Be brief."), Message(role="user", content="Hi"))
    assert kit.asked.sampling == SamplingParams(max_tokens=DEFAULT_ANSWER_TOKENS)


def test_the_answer_says_that_nothing_was_stored() -> None:
    with asking() as kit:
        assert kit.respond().json()["store"] is False
        assert kit.respond(store=False).json()["store"] is False


def test_every_option_reaches_the_coordinator() -> None:
    with asking([started(), Chunk(text="é!", logprobs=LOGPROBS), done()]) as kit:
        reply = kit.client.responses.create(
            model=MODEL,
            input="Hi",
            max_output_tokens=33,
            temperature=0.7,
            top_p=0.9,
            top_logprobs=1,
            include=["message.output_text.logprobs", "reasoning.encrypted_content"],
            reasoning={"effort": "high", "summary": "auto"},
            parallel_tool_calls=True,
            truncation="disabled",
            service_tier="auto",
            store=False,
            user="somebody",
            prompt_cache_key="k",
            text={"format": {"type": "text"}, "verbosity": "medium"},
        )
    assert kit.asked.sampling == SamplingParams(
        max_tokens=33, temperature=0.7, top_p=0.9, logprobs=True, top_logprobs=1
    )
    assert kit.asked.template == {"reasoning_effort": "high"}
    assert (reply.temperature, reply.top_p, reply.max_output_tokens) == (0.7, 0.9, 33)
    message: Any = reply.output[0]
    assert [entry.token for entry in message.content[0].logprobs] == ["é", "!"]


def test_reasoning_text_and_calls_are_items() -> None:
    with asking(THOUGHTFUL) as kit:
        reply = kit.client.responses.create(model=MODEL, input="Hi", tools=[WEATHER, TIME])
    output: list[Any] = list(reply.output)
    assert [item.type for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert output[0].content[0].text == "Hm."
    assert output[1].content[0].text == "I look."
    assert [(item.call_id, item.name, item.arguments) for item in output[2:]] == [
        ("call_1", "weather", '{"city":"Ulm"}'),
        ("call_2", "time", "{}"),
    ]
    assert reply.usage is not None
    assert reply.usage.input_tokens_details.cached_tokens == 4
    assert reply.usage.output_tokens_details.reasoning_tokens == 2
    assert kit.asked.tools == (Tool(name="weather", parameters=PARAMETERS), Tool(name="time"))
    assert [tool.type for tool in reply.tools] == ["function", "function"]


def test_a_response_that_the_limit_cut() -> None:
    with asking(answer("x", reason="length")) as kit:
        reply = kit.client.responses.create(model=MODEL, input="Hi", max_output_tokens=1)
    assert reply.status == "incomplete"
    assert reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"
    message: Any = reply.output[0]
    assert message.status == "incomplete"


def test_one_call_at_a_time_where_asked_for() -> None:
    with asking(THOUGHTFUL) as kit:
        whole = kit.respond(tools=[WEATHER, TIME], parallel_tool_calls=False).json()
        streamed = events(kit.respond(tools=[WEATHER, TIME], parallel_tool_calls=False, stream=True))
    for response in (whole, streamed[-1]["response"]):
        assert [item["name"] for item in response["output"] if item["type"] == "function_call"] == ["weather"]
        assert response["parallel_tool_calls"] is False


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_forced_call_is_filled_in_by_its_schema(choice: object) -> None:
    with asking(answer('{"city":', '"Ulm"}')) as kit:
        whole = kit.respond(tools=[WEATHER], tool_choice=choice).json()
        streamed = events(kit.respond(tools=[WEATHER], tool_choice=choice, stream=True))
    for request in kit.backend.requests:
        assert msgspec.json.decode(request.sampling.json_schema or "") == PARAMETERS
    for response in (whole, streamed[-1]["response"]):
        (item,) = response["output"]
        assert (item["type"], item["name"], item["arguments"]) == ("function_call", "weather", '{"city":"Ulm"}')
        assert response["tool_choice"] == choice
    deltas = [event["delta"] for event in streamed if event["type"] == "response.function_call_arguments.delta"]
    assert deltas == ['{"city":', '"Ulm"}']


def test_a_call_of_any_tool() -> None:
    with asking(answer('{"name":"time","argu', 'ments":{"zone": 1}}')) as kit:
        whole = kit.respond(tools=[WEATHER, TIME], tool_choice="required").json()
        streamed = events(kit.respond(tools=[WEATHER, TIME], tool_choice="required", stream=True))
    for response in (whole, streamed[-1]["response"]):
        (item,) = response["output"]
        assert (item["type"], item["name"], item["arguments"]) == ("function_call", "time", '{"zone": 1}')


def test_an_answer_parsed_into_a_class() -> None:
    with asking(answer('{"name":"Ulm","people":1}')) as kit:
        reply = kit.client.responses.parse(model=MODEL, input="Hi", text_format=City)
    assert reply.output_parsed == City(name="Ulm", people=1)
    assert msgspec.json.decode(kit.asked.sampling.json_schema or "")["required"] == ["name", "people"]


def test_calls_parsed_into_a_class() -> None:
    call = ToolCall(id="call_1", name="City", arguments='{"name":"Ulm","people":1}')
    tool: Any = openai.pydantic_function_tool(City)["function"]
    with asking(calling(call)) as kit:
        tools: Any = [{"type": "function", **tool}]
        reply = kit.client.responses.parse(model=MODEL, input="Hi", tools=tools)
    item: Any = reply.output[0]
    assert item.parsed_arguments == {"name": "Ulm", "people": 1}


def test_any_object() -> None:
    with asking(answer("{}")) as kit:
        assert kit.respond(text={"format": {"type": "json_object"}}).status_code == 200
    assert kit.asked.sampling.json_schema == '{"type":"object"}'


# --- the input ----------------------------------------------------------------------------------------------


def test_a_whole_conversation() -> None:
    with asking() as kit:
        response = kit.respond(
            input=[
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "input_text", "text": "What"}, {"type": "text", "text": "?"}]},
                {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
                {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city":"Ulm"}'},
                {"type": "function_call", "call_id": "call_2", "name": "time", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
                {
                    "type": "function_call_output",
                    "call_id": "call_2",
                    "output": [{"type": "input_text", "text": "noon"}],
                },
                {
                    "type": "reasoning",
                    "id": "rs_2",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "A"}],
                },
                {"role": "assistant", "content": "Sunny"},
                {"role": "assistant", "content": "at noon."},
                {"role": "user", "content": "Thanks"},
            ]
        )
    assert response.status_code == 200, response.text
    assert kit.asked.messages == (
        Message(role="system", content="Be brief."),
        Message(role="user", content="What?"),
        Message(role="assistant", reasoning="Hm.", content="I look.", tool_calls=(CALL, SECOND)),
        Message(role="tool", content="sunny", tool_call_id="call_1", name="weather"),
        Message(role="tool", content="noon", tool_call_id="call_2", name="time"),
        Message(role="assistant", reasoning="A", content="Sunny"),
        Message(role="assistant", content="at noon."),
        Message(role="user", content="Thanks"),
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("parsed", [False, True])
def test_the_output_can_be_sent_back_as_it_came(form: Callable[[BaseModel], Any], parsed: bool) -> None:
    with asking(THOUGHTFUL) as kit:
        ask: Any = kit.client.responses.parse if parsed else kit.client.responses.create
        first = ask(model=MODEL, input="Hi", tools=[WEATHER, TIME])
        kit.backend.requests.clear()
        items: list[Any] = [{"role": "user", "content": "Hi"}, *map(form, first.output)]
        items += [{"type": "function_call_output", "call_id": "call_1", "output": "sunny"}]
        kit.client.responses.create(model=MODEL, input=items, tools=[WEATHER, TIME])
    assert kit.asked.messages == (
        Message(role="user", content="Hi"),
        Message(role="assistant", reasoning="Hm.", content="I look.", tool_calls=(CALL, SECOND)),
        Message(role="tool", content="sunny", tool_call_id="call_1", name="weather"),
    )


# --- the stream ---------------------------------------------------------------------------------------------


def test_the_events_in_order() -> None:
    with asking(THOUGHTFUL) as kit:
        response = kit.respond(stream=True, tools=[WEATHER, TIME])
        typed = list(kit.client.responses.create(model=MODEL, input="Hi", stream=True))
    names = [line.removeprefix("event: ") for line in response.text.splitlines() if line.startswith("event: ")]
    found = events(response)
    assert names == [event["type"] for event in found] == [event.type for event in typed]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert ": prefill 9/9" in response.text
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert found[0]["response"]["status"] == found[1]["response"]["status"] == "in_progress"
    items = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert found[-1]["response"]["output"] == items
    assert found[-1]["response"]["status"] == "completed"
    assert found[-1]["response"]["usage"]["total_tokens"] == 18
    indices = [event["output_index"] for event in found if event["type"] == "response.output_item.added"]
    assert indices == [0, 1, 2, 3]


def test_the_stream_and_the_whole_answer_say_the_same() -> None:
    with asking(THOUGHTFUL) as kit:
        whole = kit.respond(tools=[WEATHER, TIME]).json()
        streamed = events(kit.respond(stream=True, tools=[WEATHER, TIME]))[-1]["response"]

    def without_ids(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_ids(item) for key, item in value.items() if key not in ("id", "created_at")}
        return [without_ids(item) for item in value] if isinstance(value, list) else value

    assert without_ids(whole) == without_ids(streamed)


def test_the_clients_helper_follows_everything() -> None:
    with (
        asking(THOUGHTFUL) as kit,
        kit.client.responses.stream(model=MODEL, input="Hi", tools=[WEATHER, TIME]) as stream,
    ):
        texts = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert texts == ["I ", "I look."]
    assert final.output_text == "I look."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]


def test_the_clients_helper_parses_structured_output() -> None:
    with (
        asking(answer('{"name":"Ulm",', '"people":1}')) as kit,
        kit.client.responses.stream(model=MODEL, input="Hi", text_format=City) as stream,
    ):
        final = stream.get_final_response()
    assert final.output_parsed == City(name="Ulm", people=1)


def test_log_probabilities_in_the_stream() -> None:
    one, two = LOGPROBS[:1], LOGPROBS[1:]
    script = [
        started(),
        Chunk(reasoning="Hm", logprobs=two),
        Chunk(logprobs=two),
        Chunk(text="é", logprobs=one),
        Chunk(logprobs=two),
        done(),
    ]
    with asking(script) as kit:
        whole: Any = kit.client.responses.create(model=MODEL, input="Hi", top_logprobs=1).output[1]
        found = events(kit.respond(stream=True, top_logprobs=1))
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    tokens = [entry["token"] for event in deltas for entry in event["logprobs"]]
    (end,) = [event for event in found if event["type"] == "response.output_text.done"]
    assert [event["delta"] for event in deltas] == ["é", ""]
    assert tokens == ["!", "!", "é", "!"] == [entry["token"] for entry in end["logprobs"]]
    assert tokens == [entry.token for entry in whole.content[0].logprobs]
    assert [event["item"]["type"] for event in found if event["type"] == "response.output_item.done"] == [
        "reasoning",
        "message",
    ]


def test_a_stream_that_the_limit_cut() -> None:
    with asking(answer("x", reason="length")) as kit:
        found = events(kit.respond(stream=True))
    assert found[-1]["type"] == "response.incomplete"
    assert found[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert found[-1]["response"]["output"][0]["status"] == "incomplete"


def test_nothing_at_all() -> None:
    with asking(answer(reason="length")) as kit:
        assert kit.respond(max_output_tokens=0).json()["output"] == []
        assert events(kit.respond(max_output_tokens=0, stream=True))[-1]["response"]["output"] == []


def test_an_answer_that_is_begun_again_is_created_once() -> None:
    with asking([started(), *answer("Hi")]) as kit:
        kinds = [event["type"] for event in events(kit.respond(stream=True))]
    assert kinds.count("response.created") == 1


def test_an_error_after_the_beginning_reaches_the_client_as_its_own() -> None:
    with asking([started(), Chunk(text="Hel"), refused("answer-lost", "rank 1 ended")]) as kit:
        found = events(kit.respond(stream=True))
        with pytest.raises(openai.APIError, match="rank 1 ended") as caught:
            list(kit.client.responses.create(model=MODEL, input="Hi", stream=True))
        with (
            kit.client.responses.stream(model=MODEL, input="Hi") as stream,
            pytest.raises(openai.APIError, match="rank 1 ended"),
        ):
            stream.until_done()
    assert caught.value.code == "answer_lost"
    failed, error = found[-2:]
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"]["message"] == "rank 1 ended"
    assert (error["type"], error["message"], error["code"]) == ("error", "rank 1 ended", "answer_lost")
    assert [event["sequence_number"] for event in found] == list(range(len(found)))


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kit() -> Any:
    with asking() as kit:
        yield kit


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"store": True}, "store", "not kept"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "whole conversation"),
        ({"conversation": "conv_1"}, "conversation", "whole conversation"),
        ({"background": True}, "background", "whole conversation"),
        ({"truncation": "auto"}, "truncation", "dropped"),
        ({"prompt": {"id": "p"}}, "prompt", "stored prompts"),
        ({"max_tool_calls": 3}, "max_tool_calls", "server runs"),
        ({"service_tier": "priority"}, "service_tier", "alike"),
        ({"include": ["file_search_call.results"]}, "include[0]", "file_search"),
        ({"text": {"verbosity": "high"}}, "text.verbosity", "template"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type", "yaml"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "sums it up"),
        ({"reasoning": {"effort": "heroic"}}, "reasoning.effort", "heroic"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "one mode"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", ""),
        ({"tools": [WEATHER, WEATHER]}, "tools[1]", "'weather'"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [TIME], "tool_choice": {"type": "function", "name": "weather"}}, "tool_choice", "'weather'"),
        (
            {"tools": [TIME], "tool_choice": "required", "text": {"format": {"type": "json_object"}}},
            "text.format",
            "both",
        ),
        ({"max_output_tokens": -1}, "max_output_tokens", "-1"),
        ({"temperature": 101}, "temperature", "101"),
        ({"seed": 1}, "seed", "known"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "stream: true"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options", "padding"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options", "endpoint"),
        ({"input": []}, "input", "empty"),
        ({"input": None}, "input", ""),
        ({"input": [{"content": "Hi"}]}, "input[0].role", "missing"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing"),
        ({"input": [{"role": "robot", "content": "Hi"}]}, "input[0].role", "robot"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", "whole conversation"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type", "web_search_call"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id", "missing"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]},
            "input[0].arguments",
            "JSON",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output", "missing"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x", "detail": "auto"}]}]},
            "input[0].content[0]",
            "text only",
        ),
        (
            {"input": [{"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "xxx"}]},
            "input[0].encrypted_content",
            "encrypted",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_request_is_refused_by_the_name_of_its_field(
    kit: Kit, fields: dict[str, object], field: str, words: str
) -> None:
    named, message = refusal(kit.respond(**fields))
    assert named.startswith(field), message
    assert words in message
    assert kit.backend.requests == []


@pytest.mark.parametrize(
    ("own", "theirs"), [("json_schema", "text.format"), ("template", "reasoning.effort"), ("messages", "input")]
)
def test_what_the_runner_refuses_has_the_dialects_name(own: str, theirs: str) -> None:
    with asking([refused("request-invalid", "no", field=own)]) as kit:
        assert refusal(kit.respond())[0] == theirs
        assert refusal(kit.respond(stream=True))[0] == theirs
