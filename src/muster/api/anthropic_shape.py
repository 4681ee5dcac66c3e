"""What Anthropic's dialect answers: messages, the events of a stream, errors."""

from __future__ import annotations

import secrets
from typing import Any, Literal

import msgspec

from muster.api.errors import ApiError
from muster.api.gather import Collected
from muster.api.http import event, progress_comment
from muster.replies import Chunk, Done, Prefilled, Started
from muster.sampling import ToolCall

encode = msgspec.json.Encoder().encode

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


# --- errors -------------------------------------------------------------------------------------------------


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong."""

    type: str
    message: str


class ErrorReply(msgspec.Struct, frozen=True, tag="error"):
    """The body of every answer that is not 200, and the last event of a stream that breaks off."""

    error: ErrorDetail


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicDialect:
    """Carries out `muster.api.http.Dialect`."""

    def error_body(self, error: ApiError) -> bytes:
        """See `muster.api.http.Dialect`. The field is named in the message: the dialect has no place for it."""
        other = "invalid_request_error" if error.status < 500 else "api_error"
        text = error.message
        if error.field is not None and error.field not in text:
            text = f"{error.field}: {text}"
        return encode(ErrorReply(ErrorDetail(_TYPES.get(error.status, other), text)))

    def error_event(self, error: ApiError) -> bytes:
        """An `error` event."""
        return event(self.error_body(error), "error")


DIALECT = AnthropicDialect()


# --- messages -----------------------------------------------------------------------------------------------


class OutputDetails(msgspec.Struct, frozen=True):
    """Of the answer's tokens, those that were spent on reasoning."""

    thinking_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens. Those of the prompt are `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    output_tokens_details: OutputDetails | None = None


class Text(msgspec.Struct, frozen=True, tag="text"):
    """Text of an answer."""

    text: str


class Thinking(msgspec.Struct, frozen=True, tag="thinking"):
    """Reasoning of an answer. The signature is empty: nothing here checks it."""

    thinking: str
    signature: str = ""


class ToolUse(msgspec.Struct, frozen=True, tag="tool_use"):
    """A call that the model asks for."""

    id: str
    name: str
    input: Any


Content = Text | Thinking | ToolUse


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag="message"):
    """A whole answer; in `message_start` one that has only begun."""

    id: str
    model: str
    role: Literal["assistant"] = "assistant"
    content: tuple[Content, ...] = ()
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: Usage


class TokenCount(msgspec.Struct, frozen=True):
    """How long a prompt is."""

    input_tokens: int


def identity() -> str:
    """A fresh id of a message."""
    return f"msg_{secrets.token_hex(12)}"


def reply_of(collected: Collected, model: str) -> Reply:
    """A whole answer."""
    content: list[Content] = []
    if collected.reasoning:
        content.append(Thinking(collected.reasoning))
    if collected.text:
        content.append(Text(collected.text))
    content += [ToolUse(call.id, call.name, _arguments(call)) for call in collected.tool_calls]
    done = collected.done
    return Reply(
        id=identity(),
        model=model,
        content=tuple(content),
        stop_reason=stop_reason(done),
        stop_sequence=done.stop,
        usage=_usage(done),
    )


def stop_reason(done: Done) -> StopReason:
    """Why the answer ended, in Anthropic's words."""
    match done.reason:
        case "length":
            return "max_tokens"
        case "tool_calls":
            return "tool_use"
        case _:
            return "end_turn" if done.stop is None else "stop_sequence"


def _arguments(call: ToolCall) -> msgspec.Raw:
    return msgspec.Raw(call.arguments.encode() or b"{}")


def _usage(done: Done) -> Usage:
    return Usage(
        input_tokens=done.prompt_tokens - done.cached_tokens,
        cache_read_input_tokens=done.cached_tokens,
        output_tokens=done.completion_tokens,
        output_tokens_details=OutputDetails(done.reasoning_tokens) if done.reasoning_tokens else None,
    )


# --- events -------------------------------------------------------------------------------------------------


class TextDelta(msgspec.Struct, frozen=True, tag="text_delta"):
    """More text of a block."""

    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag="thinking_delta"):
    """More reasoning of a block."""

    thinking: str


class InputDelta(msgspec.Struct, frozen=True, tag="input_json_delta"):
    """More of a call's arguments, as JSON text."""

    partial_json: str


class StopDelta(msgspec.Struct, frozen=True):
    """How a message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageStart(msgspec.Struct, frozen=True, tag="message_start"):
    """The first event."""

    message: Reply


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Nothing new."""


class BlockStart(msgspec.Struct, frozen=True, tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: Content


class BlockDelta(msgspec.Struct, frozen=True, tag="content_block_delta"):
    """A block goes on."""

    index: int
    delta: TextDelta | ThinkingDelta | InputDelta


class BlockStop(msgspec.Struct, frozen=True, tag="content_block_stop"):
    """A block is whole."""

    index: int


class MessageDelta(msgspec.Struct, frozen=True, tag="message_delta"):
    """The message ends."""

    delta: StopDelta
    usage: Usage


class MessageStop(msgspec.Struct, frozen=True, tag="message_stop"):
    """The last event."""


StreamEvent = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | ErrorReply


def written(what: StreamEvent) -> bytes:
    """The event as bytes."""
    return event(encode(what), str(type(what).__struct_config__.tag))


class EventWriter:
    """Turns the pieces of one answer into events."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._index = -1
        self._open: type[Text | Thinking] | None = None

    def start(self, started: Started) -> bytes:
        """The first events."""
        usage = Usage(
            input_tokens=started.prompt_tokens - started.cached_tokens,
            cache_read_input_tokens=started.cached_tokens,
            output_tokens=0,
        )
        return written(MessageStart(Reply(id=identity(), model=self._model, usage=usage))) + written(Ping())

    def piece(self, piece: Prefilled | Chunk | Done) -> bytes:
        """The events of a piece; b"" for one that says nothing."""
        match piece:
            case Chunk():
                return self._chunk(piece)
            case Prefilled():
                return progress_comment(piece.done, piece.total)
            case Done():
                end = MessageDelta(StopDelta(stop_reason(piece), piece.stop), _usage(piece))
                return self._close() + written(end) + written(MessageStop())

    def _chunk(self, chunk: Chunk) -> bytes:
        data = b""
        if chunk.reasoning:
            data += self._within(Thinking) + written(BlockDelta(self._index, ThinkingDelta(chunk.reasoning)))
        if chunk.text:
            data += self._within(Text) + written(BlockDelta(self._index, TextDelta(chunk.text)))
        for call in chunk.tool_calls:
            data += self._close()
            self._index += 1
            data += written(BlockStart(self._index, ToolUse(call.id, call.name, {})))
            data += written(BlockDelta(self._index, InputDelta(call.arguments or "{}")))
            data += written(BlockStop(self._index))
        return data

    def _within(self, kind: type[Text | Thinking]) -> bytes:
        """Begin a block of this kind, where the last one is another."""
        if self._open is kind:
            return b""
        data = self._close()
        self._open = kind
        self._index += 1
        return data + written(BlockStart(self._index, kind("")))

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return written(BlockStop(self._index))
