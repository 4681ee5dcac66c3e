"""What the endpoints of OpenAI's dialect have in common in their answers: errors, usage, log probabilities, names."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable

import msgspec

from muster import __version__
from muster.api.errors import ApiError
from muster.api.http import event
from muster.replies import Done
from muster.sampling import Alternative, FinishReason, TokenLogprob, ToolCall

encode = msgspec.json.Encoder().encode

#: Changes with the version of muster; the same seed may then give another answer.
FINGERPRINT = f"muster-{__version__}"
#: The end of every stream of chunks that was not broken off.
END = event(b"[DONE]")

#: OpenAI's `code` of our kinds, where clients know one.
_CODES = {
    "model-unknown": "model_not_found",
    "context-exceeded": "context_length_exceeded",
    "queue-full": "rate_limit_exceeded",
    "unauthorized": "invalid_api_key",
}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_SERVER = 500


def identity(kind: str) -> str:
    """A fresh id, such as "chatcmpl-…"."""
    return kind + secrets.token_hex(14)


def now_seconds() -> int:
    """The time of an answer, in seconds of the epoch."""
    return int(time.time())


# --- errors -------------------------------------------------------------------------------------------------


class ErrorDetail(msgspec.Struct, frozen=True):
    """`param` is the field of the body; `code` a short name that programs can compare."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """An answer that is an error."""

    error: ErrorDetail


def detail_of(error: ApiError) -> ErrorDetail:
    """The error in OpenAI's words."""
    kind = "server_error" if error.status >= _SERVER else _TYPES.get(error.status, "invalid_request_error")
    code = _CODES.get(error.kind) or error.kind.replace("-", "_")
    return ErrorDetail(error.message, kind, error.field, code)


class OpenAiDialect:
    """Carries out `muster.api.http.Dialect`."""

    def error_body(self, error: ApiError) -> bytes:
        """See `muster.api.http.Dialect`."""
        return encode(ErrorBody(detail_of(error)))

    def error_event(self, error: ApiError) -> bytes:
        """The error as an event; no `[DONE]` follows, since the answer is not done."""
        return event(self.error_body(error))


DIALECT = OpenAiDialect()


# --- usage --------------------------------------------------------------------------------------------------


class PromptDetails(msgspec.Struct, frozen=True):
    """Of the prompt's tokens, those that came from the prompt cache."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct, frozen=True):
    """Of the answer's tokens, those that were spent on reasoning."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request; a prompt counts once, however many answers it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


def usage_of(ends: Iterable[Done], answers: int = 1) -> Usage:
    """The usage of all answers; `answers` of them in a row belong to one prompt."""
    every = tuple(ends)
    heads = every[::answers]
    prompt = sum(done.prompt_tokens for done in heads)
    completion = sum(done.completion_tokens for done in every)
    return Usage(
        prompt,
        completion,
        prompt + completion,
        PromptDetails(sum(done.cached_tokens for done in heads)),
        CompletionDetails(sum(done.reasoning_tokens for done in every)),
    )


def finish_of(done: Done, called: bool) -> FinishReason:
    """Why the answer ended. `called`: it consists of calls, also where the model only filled in a forced one's."""
    if done.reason == "length":
        return "length"
    return "tool_calls" if called or done.reason == "tool_calls" else "stop"


# --- log probabilities --------------------------------------------------------------------------------------


class TopToken(msgspec.Struct, frozen=True):
    """A token that might have come. `bytes` is null where it is no whole characters."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None


class TokenDetail(msgspec.Struct, frozen=True):
    """A token that came, its bytes, and the likeliest in its place."""

    token: str
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: tuple[TopToken, ...]


class LogprobList(msgspec.Struct, frozen=True):
    """The tokens of an answer, or of a piece of it."""

    content: tuple[TokenDetail, ...]
    refusal: None = None


def token_details(logprobs: Iterable[TokenLogprob]) -> tuple[TokenDetail, ...]:
    """The tokens in OpenAI's words."""
    return tuple(
        TokenDetail(item.text, item.logprob, tuple(item.data), tuple(map(_alternative, item.top))) for item in logprobs
    )


def _alternative(item: Alternative) -> TopToken:
    whole = "\ufffd" not in item.text
    return TopToken(item.text, item.logprob, tuple(item.text.encode()) if whole else None)


# --- tool calls ---------------------------------------------------------------------------------------------


class MadeFunction(msgspec.Struct, frozen=True):
    """The function that is called, and its arguments as JSON text."""

    name: str
    arguments: str


class MadeCall(msgspec.Struct, frozen=True):
    """A call that the model makes."""

    id: str
    type: str
    function: MadeFunction


def made_call(call: ToolCall) -> MadeCall:
    """The call in OpenAI's words."""
    return MadeCall(call.id, "function", MadeFunction(call.name, call.arguments))
