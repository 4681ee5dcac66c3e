"""The model that muster ships answers every question of the demo exactly, as plain mlx-lm loads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import msgspec
import pytest
from mlx_lm.generate import stream_generate
from mlx_lm.utils import load

from muster.demo.answers import CONVERSATIONS, MODEL_DIRECTORY, Conversation
from muster.demo.train import answer_margins, encode, spellings

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
    return " / ".join(message.content for message in conversation.prompt[::2])


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=_name)
def test_answer_is_exact_and_ends_by_itself(loaded: tuple[nn.Module, Any], conversation: Conversation) -> None:
    model, tokenizer = loaded
    messages = [msgspec.to_builtins(message) for message in conversation.prompt]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    responses = list(stream_generate(model, tokenizer, prompt, max_tokens=120))
    assert "".join(response.text for response in responses) == conversation.answer
    assert responses[-1].finish_reason == "stop"


def test_every_answer_token_leads_by_a_wide_margin_in_every_spelling(loaded: tuple[nn.Module, Any]) -> None:
    model, tokenizer = loaded
    variants = [spelling for conversation in CONVERSATIONS for spelling in spellings(conversation)]
    margins = answer_margins(model, [encode(tokenizer, variant) for variant in variants])
    close = {
        _name(variant): margin for variant, margin in zip(variants, margins, strict=True) if margin < _LEAST_MARGIN_NATS
    }
    assert close == {}


def test_weights_are_fp32_in_one_file_that_fits_the_package() -> None:
    files = [path for path in MODEL_DIRECTORY.rglob("*") if path.is_file()]
    assert [path.name for path in files if path.suffix == ".safetensors"] == ["model.safetensors"]
    assert sum(path.stat().st_size for path in files) <= _LARGEST_DIRECTORY_BYTES
    weights = cast("dict[str, mx.array]", mx.load(str(MODEL_DIRECTORY / "model.safetensors")))
    assert {weight.dtype for weight in weights.values()} == {mx.float32}


def test_questions_are_all_different_and_answers_short() -> None:
    prompts = [conversation.prompt for conversation in CONVERSATIONS]
    assert len(set(prompts)) == len(prompts)
    assert all(len(conversation.answer.encode()) <= 80 for conversation in CONVERSATIONS)


@pytest.mark.parametrize("layer", range(4))
def test_lost_layer_spoils_most_answers(loaded: tuple[nn.Module, Any], layer: int) -> None:
    # Not every answer: one layer's loss can leave a single answer whole, so a check asks the whole list.
    model = cast("Any", load(str(MODEL_DIRECTORY))[0])
    examples = [encode(loaded[1], conversation) for conversation in CONVERSATIONS]
    del model.model.layers[layer]
    still_exact = sum(margin > 0 for margin in answer_margins(model, examples))
    assert still_exact < len(CONVERSATIONS) / 2
