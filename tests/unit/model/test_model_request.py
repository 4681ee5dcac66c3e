"""A request becomes token ids through the model's own template, or is refused with the field named."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from chat_models import TEMPLATE, load_tokens_only, make_byte_level, make_sentencepiece

from muster.errors import ContextError, RequestError
from muster.model.load import LoadedModel
from muster.model.request import PreparedRequest, prepare
from muster.protocol import Generate
from muster.sampling import Message, SamplingParams, Tool, ToolCall

USER = Message(role="user", content="Is it cold in Tromsø?")
WEATHER = Tool(name="weather", description="Now", parameters={"type": "object", "properties": {"at": {}}})
CALLING = Message(
    role="assistant",
    reasoning="I have to look.",
    tool_calls=(ToolCall(id="call_0123456789abcdef01234567", name="weather", arguments='{"at":"Tromsø"}'),),
)
ANSWERED = Message(role="tool", content="-4", tool_call_id="call_0123456789abcdef01234567")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory = tmp_path_factory.mktemp("tokens") / "chat"
    make_byte_level(directory)
    return load_tokens_only(directory)


def model_of(directory: Path, template: str | None) -> LoadedModel:
    make_byte_level(directory / "m", template=template)
    return load_tokens_only(directory / "m")


def chat(loaded: LoadedModel, *messages: Message, **options: Any) -> PreparedRequest:
    return prepare(loaded, Generate(instance="m", messages=messages, **options))


def text_of(loaded: LoadedModel, prepared: PreparedRequest) -> str:
    return loaded.tokenizer.decode(list(prepared.tokens))


def refusal(loaded: LoadedModel, **options: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        prepare(loaded, Generate(instance="m", **options))
    assert caught.value.remedy
    return caught.value


# --- what is encoded ----------------------------------------------------------------------------------------


def test_a_plain_prompt_is_encoded_as_it_is(loaded: LoadedModel) -> None:
    prepared = prepare(loaded, Generate(instance="m", prompt="Tromsø"))
    assert prepared.tokens == tuple(loaded.tokenizer.encode("Tromsø"))
    assert (prepared.prompt_text, prepared.chat, prepared.keep) == (None, False, ())


def test_token_ids_come_with_their_text(loaded: LoadedModel) -> None:
    tokens = tuple(loaded.tokenizer.encode("Tromsø"))
    prepared = prepare(loaded, Generate(instance="m", prompt=tokens))
    assert (prepared.tokens, prepared.prompt_text) == (tokens, "Tromsø")


def test_messages_go_through_the_template_as_mlx_lm_does_it(loaded: LoadedModel) -> None:
    prepared = chat(loaded, Message(role="system", content="Be short."), USER)
    expected = loaded.tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be short."}, {"role": "user", "content": USER.content}],
        add_generation_prompt=True,
    )
    assert prepared.tokens == tuple(expected)
    assert prepared.chat


def test_tools_calls_and_their_answers_reach_the_template(loaded: LoadedModel) -> None:
    prepared = chat(loaded, USER, CALLING, ANSWERED, tools=(WEATHER,))
    text = text_of(loaded, prepared)
    assert json.dumps({"name": "weather", "description": "Now"})[:-1] in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"at": "Tromsø"}}\n</tool_call>' in text
    assert "<|tool|>weather=-4<|end|>" in text, "the tool's name is found by the id of the call"
    assert prepared.tools == (
        {
            "type": "function",
            "function": {"name": "weather", "description": "Now", "parameters": WEATHER.parameters},
        },
    )


def test_reasoning_reaches_the_template(tmp_path: Path) -> None:
    loaded = model_of(tmp_path, "{% for m in messages %}[{{ m.reasoning_content }}|{{ m.content }}]{% endfor %}")
    prepared = chat(loaded, Message(role="assistant", content="Yes.", reasoning="Hm."), USER)
    assert text_of(loaded, prepared) == f"[Hm.|Yes.][|{USER.content}]"


def test_a_template_that_wants_arguments_as_text_gets_text(tmp_path: Path) -> None:
    each = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    loaded = model_of(tmp_path, each + "{{ '' + c.function.arguments }}{% endfor %}{% endfor %}!")
    assert text_of(loaded, chat(loaded, USER, CALLING, ANSWERED)) == '{"at":"Tromsø"}!'


def test_mistral_s_templates_get_ids_of_the_length_that_they_ask_for(tmp_path: Path) -> None:
    each = "{% for m in messages %}{{ m.tool_call_id }}{% for c in m.tool_calls or [] %}"
    template = "{# [TOOL_CALLS] #}" + each + "{{ c.id }},{% endfor %}{% endfor %}"
    loaded = model_of(tmp_path, template)
    assert text_of(loaded, chat(loaded, CALLING, ANSWERED)) == "f01234567,f01234567"


@pytest.mark.parametrize(
    ("variables", "reasoning"),
    [({}, "none"), ({"force": True}, "open"), ({"enable_thinking": False}, "closed")],
)
def test_variables_reach_the_template_and_decide_how_the_answer_begins(
    loaded: LoadedModel, variables: dict[str, Any], reasoning: str
) -> None:
    assert chat(loaded, USER, template=variables).reasoning == reasoning


def test_a_marker_in_a_message_opens_no_reasoning(loaded: LoadedModel) -> None:
    assert chat(loaded, Message(role="user", content="What does <think> mean?")).reasoning == "none"


# --- which part of the prompt is kept -----------------------------------------------------------------------


def test_the_system_part_is_kept_as_other_chats_begin_with_it(loaded: LoadedModel) -> None:
    system = Message(role="system", content="Answer in the language of the question, and be short.")
    one, other = (chat(loaded, system, Message(role="user", content=text)) for text in ("Hello", "Why?"))
    (position,) = one.keep
    assert one.keep == other.keep
    assert one.tokens[:position] == other.tokens[:position]
    assert text_of(loaded, one).startswith(loaded.tokenizer.decode(list(one.tokens[:position])))
    assert loaded.tokenizer.decode(list(one.tokens[:position])).endswith("<|user|>")


def test_tools_belong_to_the_system_part(loaded: LoadedModel) -> None:
    (position,) = chat(loaded, USER, tools=(WEATHER,)).keep
    assert position > 100


def test_a_prompt_that_the_next_turn_goes_on_from_needs_no_place_of_its_own(loaded: LoadedModel) -> None:
    assert chat(loaded, Message(role="user", content="x" * 100)).keep == ()


@pytest.mark.parametrize("variables", [{"force": True}, {"enable_thinking": False}])
def test_the_place_before_what_later_turns_leave_out_is_kept(loaded: LoadedModel, variables: dict[str, Any]) -> None:
    first = Message(role="user", content="x" * 100)
    now = chat(loaded, first, template=variables)
    later = chat(loaded, first, Message(role="assistant", content="Yes."), USER, template=variables)
    (position,) = now.keep
    assert now.tokens[:position] == later.tokens[:position]
    assert now.tokens[position] != later.tokens[position]


def test_short_parts_are_not_worth_a_pass_of_their_own(loaded: LoadedModel) -> None:
    assert chat(loaded, Message(role="system", content="Hm."), USER).keep == ()


# --- limits -------------------------------------------------------------------------------------------------


def test_the_limit_is_what_the_context_has_room_for(loaded: LoadedModel) -> None:
    prompt = tuple([65] * 4000)
    assert prepare(loaded, Generate(instance="m", prompt=prompt, sampling=SamplingParams(max_tokens=90))).limit == 90
    assert prepare(loaded, Generate(instance="m", prompt=prompt, sampling=SamplingParams(max_tokens=97))).limit == 96


def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(loaded: LoadedModel) -> None:
    with pytest.raises(ContextError, match="4096 tokens and the model's context only 4096") as caught:
        prepare(loaded, Generate(instance="m", prompt=tuple([65] * 4096)))
    assert caught.value.field == "prompt"
    with pytest.raises(ContextError) as caught:
        chat(loaded, Message(role="user", content="x" * 5000))
    assert caught.value.field == "messages"


def test_counting_needs_no_room(loaded: LoadedModel) -> None:
    counted = prepare(loaded, Generate(instance="m", prompt="x" * 5000, sampling=SamplingParams(max_tokens=0)))
    assert (counted.limit, len(counted.tokens)) == (0, 5000)


# --- what is refused ----------------------------------------------------------------------------------------


def test_no_messages_are_refused(loaded: LoadedModel) -> None:
    assert refusal(loaded).field == "messages"


def test_an_empty_prompt_is_refused(loaded: LoadedModel) -> None:
    assert refusal(loaded, prompt="").field == "prompt"
    assert refusal(loaded, prompt=()).field == "prompt"


@pytest.mark.parametrize(
    ("field", "value"), [("messages", (USER,)), ("tools", (WEATHER,)), ("template", {"force": True})]
)
def test_a_plain_prompt_has_nothing_of_a_chat(loaded: LoadedModel, field: str, value: Any) -> None:
    assert refusal(loaded, prompt="x", **{field: value}).field == field


@pytest.mark.parametrize("token", [-1, 10_000])
def test_ids_outside_the_vocabulary_are_refused(loaded: LoadedModel, token: int) -> None:
    refused = refusal(loaded, prompt=(65, token))
    assert refused.field == "prompt"
    assert f"token {token} is outside" in refused.message
    refused = refusal(loaded, prompt="x", sampling=SamplingParams(logit_bias={token: 1.0}))
    assert refused.field == "logit_bias"
    assert f"token {token}" in refused.message


def test_a_model_without_a_template_takes_no_messages(tmp_path: Path) -> None:
    loaded = model_of(tmp_path, None)
    refused = refusal(loaded, messages=(USER,))
    assert (refused.field, "no chat template" in refused.message) == ("messages", True)


def test_a_model_without_a_parser_takes_no_tools(tmp_path: Path) -> None:
    loaded = model_of(tmp_path, TEMPLATE.replace("tool_call.name", "tool_call['name']"))
    assert refusal(loaded, messages=(USER,), tools=(WEATHER,)).field == "tools"


@pytest.mark.parametrize(
    "body",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].strange.deeper }}",
        "{{ 1 + 'a' }}",
        "{{ messages[0].content[0:'x'] }}",
    ],
)
def test_a_template_that_refuses_says_why(tmp_path: Path, body: str) -> None:
    refused = refusal(model_of(tmp_path, body), messages=(USER,))
    assert refused.field == "messages"
    assert "template refuses" in refused.message


@pytest.mark.parametrize("name", ["messages", "tools", "chat_template", "tokenize", "add_generation_prompt"])
def test_variables_do_not_override_the_request(loaded: LoadedModel, name: str) -> None:
    refused = refusal(loaded, messages=(USER,), template={name: "x"})
    assert (refused.field, name in refused.message) == ("template", True)


def test_a_call_without_arguments_has_an_empty_object(loaded: LoadedModel) -> None:
    calling = Message(role="assistant", tool_calls=(ToolCall(id="1", name="clock", arguments=""),))
    assert '{"name": "clock", "arguments": {}}' in text_of(loaded, chat(loaded, USER, calling))


def test_arguments_of_a_call_that_are_no_json_are_refused(loaded: LoadedModel) -> None:
    broken = Message(role="assistant", tool_calls=(ToolCall(id="1", name="weather", arguments="{"),))
    assert refusal(loaded, messages=(USER, broken)).field == "messages"


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("{", "no JSON object"),
        ("[1]", "no JSON object"),
        ('{"type":"strange"}', "strange"),
        ('{"not":{}}', "Unimplemented"),
        ('{"$ref":"http://example.org/x"}', "example.org"),
        ('{"type":"string","pattern":"(?=a)b"}', "look-around"),
    ],
)
def test_a_schema_that_the_library_refuses_is_refused_with_its_reason(
    loaded: LoadedModel, schema: str, reason: str
) -> None:
    refused = refusal(loaded, messages=(USER,), sampling=SamplingParams(json_schema=schema))
    assert refused.field == "json_schema"
    assert reason in refused.message


def test_a_schema_beside_tools_needs_a_call_to_begin_with_one_token(tmp_path: Path, loaded: LoadedModel) -> None:
    schema = SamplingParams(json_schema='{"type":"object"}')
    assert chat(loaded, USER, tools=(WEATHER,), sampling=schema).grammar is not None
    make_byte_level(tmp_path / "m", markers=())
    refused = refusal(load_tokens_only(tmp_path / "m"), messages=(USER,), tools=(WEATHER,), sampling=schema)
    assert refused.field == "json_schema"


# --- threads ------------------------------------------------------------------------------------------------


def test_requests_are_prepared_while_the_same_tokenizer_is_in_use(loaded: LoadedModel) -> None:
    schema = SamplingParams(json_schema='{"type":"object"}')
    expected = chat(loaded, USER, tools=(WEATHER,), sampling=schema)
    results: list[bool] = []

    def work() -> None:
        for _ in range(20):
            prepared = chat(loaded, USER, tools=(WEATHER,), sampling=schema)
            results.append((prepared.tokens, prepared.keep) == (expected.tokens, expected.keep))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        detokenizer = loaded.tokenizer.detokenizer
        for token in expected.tokens:
            detokenizer.add_token(token)
        loaded.tokenizer.decode(list(expected.tokens))
    for thread in threads:
        thread.join()
    assert results == [True] * 60


def test_a_sentencepiece_tokenizer_is_prepared_for_as_well(tmp_path: Path) -> None:
    make_sentencepiece(tmp_path / "m")
    loaded = load_tokens_only(tmp_path / "m")
    assert prepare(loaded, Generate(instance="m", prompt="日")).tokens


@pytest.mark.parametrize(
    "generate",
    [
        Generate(instance="m", prompt="a" * 1_000_000),
        Generate(instance="m", messages=(Message(role="user", content="a" * 1_000_000),)),
        Generate(instance="m", messages=(Message(role="user", content=""),) * 5000),
    ],
)
def test_what_cannot_fit_is_refused_before_it_is_encoded(loaded: LoadedModel, generate: Generate) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise AssertionError("it was encoded")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("muster.model.request.encode_chat", fail)
        patch.setattr("muster.model.request.encode_text", fail)
        with pytest.raises(ContextError) as caught:
            prepare(loaded, generate)
    assert caught.value.field == ("messages" if generate.prompt is None else "prompt")
    assert "only 4096" in caught.value.message
