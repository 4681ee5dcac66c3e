"""The demo model's conversations as token ids, and what mlx-lm's own `stream_generate` answers to them."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from mlx_lm import load, stream_generate

from muster.demo.answers import CONVERSATIONS, MODEL_DIRECTORY

DEMO = MODEL_DIRECTORY


class Known(msgspec.Struct, frozen=True):
    """A prompt and its greedy answer, the end token included."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@cache
def known_answers() -> tuple[Known, ...]:
    """One for every plain conversation of the demo."""
    model, tokenizer = load(str(DEMO))[:2]
    found: list[Known] = []
    for conversation in CONVERSATIONS:
        turns = [{"role": message.role, "content": message.content} for message in conversation.prompt]
        prompt: Any = tokenizer.apply_chat_template(turns, add_generation_prompt=True)
        answers: list[Any] = list(stream_generate(model, tokenizer, prompt, max_tokens=160))
        found.append(Known(tuple(prompt), tuple(answer.token for answer in answers)))
    return tuple(found)
