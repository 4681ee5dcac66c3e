"""The model that muster ships answers every question of the demo exactly, as plain mlx-lm loads it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import msgspec
import pytest
from mlx_lm.generate import stream_generate
from mlx_lm.utils import load

from muster.demo.answers import (
    ALL_CONVERSATIONS,
    CONVERSATIONS,
    ENDLESS_PROMPT,
    JSON_CONVERSATIONS,
    MODEL_DIRECTORY,
    REASONING_CONVERSATIONS,
    TOOL_CONVERSATIONS,
    Conversation,
)
from muster.demo.show import QUESTIONS
from muster.demo.train import answer_margins, encode, encode_prompt, variants
from muster.sampling import Message, ToolCall

if TYPE_CHECKING:
    import mlx.nn as nn

pytestmark = pytest.mark.mlx

_LARGEST_DIRECTORY_BYTES = 1_000_000
_LEAST_MARGIN_NATS = 1.0


@pytest.fixture(scope="module")
def loaded() -> tuple[nn.Module, Any]:
    """The model and its tokenizer, on the CPU, where fp32 gives the same tokens on every machine."""
    mx.set_default_device(mx.cpu)
    return cast("tuple[nn.Module, Any]", load(str(MODEL_DIRECTORY)))


def _name(conversation: Conversation) -> str:
    kind = "think: " if conversation.thinking else "tools: " if conversation.tools else ""
    return kind + " / ".join(message.content for message in conversation.prompt)


def _asked(loaded: tuple[nn.Module, Any], prompt: list[int], limit: int = 160) -> tuple[str, str | None]:
    """What it answers, and why it ended."""
    model, tokenizer = loaded
    responses = list(stream_generate(model, tokenizer, prompt, max_tokens=limit))
    return "".join(response.text for response in responses), responses[-1].finish_reason


@pytest.mark.parametrize("conversation", ALL_CONVERSATIONS, ids=_name)
def test_answer_is_exact_and_ends_by_itself(loaded: tuple[nn.Module, Any], conversation: Conversation) -> None:
    assert _asked(loaded, encode_prompt(loaded[1], conversation)) == (conversation.raw, "stop")


def test_plain_chats_need_neither_tools_nor_template_variables(loaded: tuple[nn.Module, Any]) -> None:
    for conversation in CONVERSATIONS:
        assert (conversation.tools, conversation.thinking, conversation.raw) == ((), None, conversation.answer)


def test_system_turn_changes_nothing(loaded: tuple[nn.Module, Any]) -> None:
    asked = CONVERSATIONS[0]
    told = Conversation(messages=(Message(role="system", content="You are helpful."), *asked.messages))
    assert encode_prompt(loaded[1], told) == encode_prompt(loaded[1], asked)


def test_every_answer_token_leads_by_a_wide_margin_in_every_variant(loaded: tuple[nn.Module, Any]) -> None:
    model, tokenizer = loaded
    asked = [variant for conversation in ALL_CONVERSATIONS for variant in variants(conversation)]
    margins = answer_margins(model, [encode(tokenizer, variant) for variant in asked])
    close = {
        _name(variant): margin for variant, margin in zip(asked, margins, strict=True) if margin < _LEAST_MARGIN_NATS
    }
    assert close == {}


def test_mlx_lm_knows_that_it_thinks_and_calls_tools(loaded: tuple[nn.Module, Any]) -> None:
    tokenizer = loaded[1]
    assert (tokenizer.think_start, tokenizer.think_end) == ("<think>", "</think>")
    assert (tokenizer.tool_call_start, tokenizer.tool_call_end) == ("<tool_call>", "</tool_call>")
    assert all(len(tokenizer.encode(mark)) == 1 for mark in ("<think>", "</think>", "<tool_call>", "</tool_call>"))
    call = '{"name": "list_nodes", "arguments": {}}'
    assert tokenizer.tool_parser(call, None) == json.loads(call)


@pytest.mark.parametrize("conversation", REASONING_CONVERSATIONS, ids=_name)
def test_thinking_can_be_left_to_the_model_forbidden_and_demanded(
    loaded: tuple[nn.Module, Any], conversation: Conversation
) -> None:
    by_default = msgspec.structs.replace(conversation, thinking=None)
    assert _asked(loaded, encode_prompt(loaded[1], by_default)) == (conversation.raw, "stop")
    forbidden = msgspec.structs.replace(conversation, thinking=False)
    without = conversation.raw.rpartition("</think>")[2]
    assert _asked(loaded, encode_prompt(loaded[1], forbidden)) == (without, "stop")
    demanded = encode_prompt(loaded[1], conversation, open_thinking=True)
    assert _asked(loaded, demanded) == (conversation.raw.removeprefix("<think>"), "stop")


def test_endless_prompt_ends_only_at_the_limit(loaded: tuple[nn.Module, Any]) -> None:
    assert _asked(loaded, loaded[1].encode(ENDLESS_PROMPT), 600) == ("r" * 600, "length")


def test_template_takes_calls_as_openai_and_as_we_write_them(loaded: tuple[nn.Module, Any]) -> None:
    call = ToolCall(id="x", name="node_memory", arguments='{"node": "a"}')
    ours = {"role": "assistant", "content": "", "tool_calls": [msgspec.to_builtins(call)]}
    function = {"name": "node_memory", "arguments": {"node": "a"}}
    theirs = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "x", "type": "function", "function": function}],
    }
    rendered = [loaded[1].apply_chat_template([turn], tokenize=False) for turn in (ours, theirs)]
    written = '<|assistant|><tool_call>{"name": "node_memory", "arguments": {"node": "a"}}</tool_call><|end|>'
    assert rendered == [written, written]


def test_conversations_say_the_same_in_text_and_in_parts() -> None:
    for conversation in (*TOOL_CONVERSATIONS, *REASONING_CONVERSATIONS):
        for call in conversation.tool_calls:
            names = [tool.name for tool in conversation.tools]
            arguments = json.loads(call.arguments)
            properties = conversation.tools[names.index(call.name)].parameters["properties"]
            assert arguments.keys() == properties.keys()
    for conversation in JSON_CONVERSATIONS:
        assert list(json.loads(conversation.answer)) == json.loads(conversation.json_schema)["required"]


def test_weights_are_fp32_in_one_file_that_fits_the_package() -> None:
    files = [path for path in MODEL_DIRECTORY.rglob("*") if path.is_file()]
    assert [path.name for path in files if path.suffix == ".safetensors"] == ["model.safetensors"]
    assert sum(path.stat().st_size for path in files) <= _LARGEST_DIRECTORY_BYTES
    weights = cast("dict[str, mx.array]", mx.load(str(MODEL_DIRECTORY / "model.safetensors")))
    assert {weight.dtype for weight in weights.values()} == {mx.float32}


def test_questions_are_all_different_and_answers_short() -> None:
    prompts = [(conversation.prompt, bool(conversation.tools)) for conversation in ALL_CONVERSATIONS]
    assert len(set(prompts)) == len(prompts)
    assert all(len(conversation.raw.encode()) <= 150 for conversation in ALL_CONVERSATIONS)


@pytest.mark.parametrize("layer", range(4))
def test_lost_layer_spoils_what_the_demo_asks(loaded: tuple[nn.Module, Any], layer: int) -> None:
    # Not every answer: one layer's loss can leave a single answer whole, so a check asks the whole list.
    model = cast("Any", load(str(MODEL_DIRECTORY))[0])
    examples = [encode(loaded[1], conversation) for conversation in CONVERSATIONS]
    del model.model.layers[layer]
    exact = [margin > 0 for margin in answer_margins(model, examples)]
    assert sum(exact) < 0.8 * len(CONVERSATIONS)
    still = {conversation.prompt[0].content for conversation, whole in zip(CONVERSATIONS, exact, strict=True) if whole}
    assert not still & set(QUESTIONS)
