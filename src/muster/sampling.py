"""What a generation request may ask for, and what it gets back."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

Role = Literal["system", "user", "assistant", "tool"]
#: "stop": an end token or a stop string; "length": a limit; "tool_calls": it ended by calling tools.
FinishReason = Literal["stop", "length", "tool_calls"]

#: Most alternatives of a token that a request may ask for.
MAX_TOP_LOGPROBS = 20
#: Most stop strings of one request, and characters of each.
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that the model made. `arguments` is JSON text of an object; `id` names the call in later turns."""

    id: str
    name: str
    arguments: str


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call; `parameters` is the JSON Schema of its arguments."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a chat.

    An assistant's turn may carry its `reasoning` and `tool_calls`; a tool's turn answers the call `tool_call_id`.
    """

    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


class Alternative(msgspec.Struct, frozen=True):
    """A token that might have come, its text alone, and its log probability in nats."""

    token: int
    text: str
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A chosen token, its log probability in nats, and the likeliest alternatives, best first.

    `text` is the token decoded alone; `data` its bytes, since a character may span tokens.
    """

    token: int
    text: str
    data: bytes
    logprob: float
    top: tuple[Alternative, ...] = ()


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens. The defaults are greedy; a zero (or 1.0 for `top_p`) switches a filter off.

    `max_tokens` of 0 only counts the prompt. `json_schema` is JSON text of a schema that the answer must follow.

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
    logit_bias: dict[int, float] = {}  #: added to the logits of these tokens
    stop: tuple[str, ...] = ()  #: the answer ends before the first of them
    logprobs: bool = False  #: report each token's log probability
    top_logprobs: int = 0  #: and so many alternatives; needs `logprobs`
    json_schema: str | None = None

    def __post_init__(self) -> None:
        _within("max_tokens", self.max_tokens, 0, 2**31 - 1)
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
        for token, bias in self.logit_bias.items():
            _within(f"logit_bias[{token}]", bias, -1000.0, 1000.0)
        if len(self.stop) > MAX_STOPS:
            raise ValueError(f"stop has {len(self.stop)} strings; it may have {MAX_STOPS}")
        for index, text in enumerate(self.stop):
            if len(text) > MAX_STOP_CHARACTERS:
                raise ValueError(f"stop[{index}] has {len(text)} characters; it may have {MAX_STOP_CHARACTERS}")
        if "" in self.stop:
            raise ValueError("stop has an empty string; every answer would end at once")
        _within("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs is {self.top_logprobs}, but logprobs is off; switch it on")


def _within(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise ValueError(f"{name} is {value}; it must be between {low} and {high}")
