"""What Ollama's dialect answers: lines of a stream, whole answers, lists of models, errors."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from muster.api.errors import ApiError
from muster.replies import Chunk, Done
from muster.sampling import Alternative, TokenLogprob, ToolCall

encode = msgspec.json.Encoder().encode


class ErrorReply(msgspec.Struct, frozen=True):
    """The body of every answer that is not 200, and the last line of a stream that breaks off."""

    error: str


class OllamaDialect:
    """Carries out `muster.api.http.Dialect`."""

    def error_body(self, error: ApiError) -> bytes:
        """See `muster.api.http.Dialect`. The field is named in the message: the dialect has no place for it."""
        text = error.message
        if error.field is not None and error.field not in text:
            text = f"{error.field}: {text}"
        return encode(ErrorReply(text))

    def error_event(self, error: ApiError) -> bytes:
        """The same as a line."""
        return self.error_body(error) + b"\n"


DIALECT = OllamaDialect()


# --- answers ------------------------------------------------------------------------------------------------


class CalledFunction(msgspec.Struct, frozen=True):
    """The function of a call, and its place among the calls."""

    index: int
    name: str
    arguments: Any


class Call(msgspec.Struct, frozen=True):
    """A call that the model asks for."""

    id: str
    function: CalledFunction


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the assistant says; in a stream, a part of it."""

    role: str
    content: str
    thinking: str | None = None
    tool_calls: tuple[Call, ...] | None = None


class Likely(msgspec.Struct, frozen=True):
    """A token that might have come."""

    token: str
    logprob: float


class Logprob(msgspec.Struct, frozen=True):
    """A token of the answer and the likeliest alternatives; `bytes` are those of the token alone."""

    token: str
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: tuple[Likely, ...]


class Ended(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a last line has: why the answer ended, tokens, and durations in ns."""

    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class ChatReply(Ended, frozen=True, kw_only=True, omit_defaults=True):
    """An answer of `/api/chat`, or a line of its stream."""

    model: str
    created_at: str
    message: AnswerMessage
    done: bool
    logprobs: tuple[Logprob, ...] | None = None


class GenerateReply(Ended, frozen=True, kw_only=True, omit_defaults=True):
    """An answer of `/api/generate`, or a line of its stream."""

    model: str
    created_at: str
    response: str
    done: bool
    thinking: str | None = None
    logprobs: tuple[Logprob, ...] | None = None


Kind = Literal["chat", "generate"]


def now_text() -> str:
    """The time, as Ollama writes it."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class Replies:
    """Makes the answers to one request, of one endpoint's kind."""

    def __init__(self, kind: Kind, model: str) -> None:
        self._kind: Kind = kind
        self._model = model
        self._calls = 0

    def part(self, chunk: Chunk) -> ChatReply | GenerateReply | None:
        """A line for a piece of the answer; `None` for one that says nothing."""
        if not (chunk.text or chunk.reasoning or chunk.tool_calls or chunk.logprobs):
            return None
        return self._reply(chunk, {"done": False})

    def end(self, done: Done, whole: Chunk | None = None) -> ChatReply | GenerateReply:
        """The last line of a stream, or with all its text the whole answer."""
        first, total = round(done.seconds_to_first_token * 1e9), round(done.seconds * 1e9)
        return self._reply(
            whole or Chunk(),
            {
                "done": True,
                "done_reason": "length" if done.reason == "length" else "stop",
                "total_duration": total,
                "load_duration": 0,
                "prompt_eval_count": done.prompt_tokens,
                "prompt_eval_duration": first,
                "eval_count": done.completion_tokens,
                "eval_duration": max(0, total - first),
            },
        )

    def loaded(self) -> ChatReply | GenerateReply:
        """The answer to a request without a prompt."""
        return self._reply(Chunk(), {"done": True, "done_reason": "load"})

    def _reply(self, chunk: Chunk, more: dict[str, Any]) -> ChatReply | GenerateReply:
        logprobs = tuple(map(_logprob, chunk.logprobs)) or None
        created = now_text()
        if self._kind == "generate":
            return GenerateReply(
                model=self._model,
                created_at=created,
                response=chunk.text,
                thinking=chunk.reasoning or None,
                logprobs=logprobs,
                **more,
            )
        calls = tuple(self._call(call) for call in chunk.tool_calls) or None
        message = AnswerMessage(
            role="assistant", content=chunk.text, thinking=chunk.reasoning or None, tool_calls=calls
        )
        return ChatReply(model=self._model, created_at=created, message=message, logprobs=logprobs, **more)

    def _call(self, call: ToolCall) -> Call:
        index, self._calls = self._calls, self._calls + 1
        return Call(call.id, CalledFunction(index, call.name, msgspec.Raw(call.arguments.encode() or b"{}")))


def _logprob(token: TokenLogprob) -> Logprob:
    return Logprob(token.text, token.logprob, tuple(token.data), tuple(map(_likely, token.top)))


def _likely(token: Alternative) -> Likely:
    return Likely(token.text, token.logprob)


# --- models -------------------------------------------------------------------------------------------------


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """What the files of a model are. Only its form is known here."""

    parent_model: str = ""
    format: str = "safetensors"
    family: str = ""
    families: tuple[str, ...] = ()
    parameter_size: str = ""
    quantization_level: str = ""


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """A model in `/api/tags` and `/api/ps`; `size` is that of the loaded weights in bytes, 0 before it is loaded."""

    name: str
    model: str
    modified_at: str
    size: int
    size_vram: int
    digest: str = ""
    details: Details = Details()


class ModelList(msgspec.Struct, frozen=True):
    """Models."""

    models: tuple[Listed, ...]


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """A model in `/api/show`."""

    modified_at: str
    capabilities: tuple[str, ...]
    details: Details = Details()
    model_info: dict[str, Any] = {}
    modelfile: str = ""
    template: str = ""
    parameters: str = ""
    license: str = ""


class Version(msgspec.Struct, frozen=True):
    """Muster's version."""

    version: str
