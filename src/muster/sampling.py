"""What a generation request may ask for, and what it gets back."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length"]


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a chat."""

    role: Role
    content: str


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """One generated token and the text that it completes (often none: a character may span tokens).

    `finish` is set on the last piece: "stop" for an end-of-sequence token, "length" for a limit reached.
    """

    token: int
    text: str
    finish: FinishReason | None = None


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens. The defaults are greedy; a zero (or 1.0 for `top_p`) switches a filter off.

    Raises:
        ValueError: a value is out of range; the message names the field and the value.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None  #: `None` draws a fresh one; ignored by greedy sampling
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_context_tokens: int = 20  #: how many of the last tokens the three penalties look at

    def __post_init__(self) -> None:
        _within("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_p", self.top_p, 0.0, 1.0)
        _within("top_k", self.top_k, 0, 2**31 - 1)
        _within("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _within("seed", self.seed, 0, 2**63 - 1)
        _within("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _within("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _within("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        _within("penalty_context_tokens", self.penalty_context_tokens, 1, 2**31 - 1)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise ValueError(f"{name} is {value}; it must be between {low} and {high}")
