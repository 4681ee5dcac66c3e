"""A response as it comes: the events that the official client follows, in its order."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import get_args

import msgspec

from muster.api.errors import ApiError
from muster.api.http import progress_comment
from muster.api.openai_answers import Indexed
from muster.api.openai_responses_bodies import Plan
from muster.api.openai_responses_shape import (
    CallItem,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseFailure,
    ResponseReply,
    ended,
    message_item,
    reasoning_item,
)
from muster.api.openai_shape import DIALECT, ErrorDetail, TokenDetail, detail_of, encode, identity, token_details
from muster.replies import Chunk, Done, Prefilled, Started
from muster.sampling import TokenLogprob, ToolCall

# --- events -------------------------------------------------------------------------------------------------


class Created(msgspec.Struct, frozen=True, tag="response.created", tag_field="type"):
    """The request was taken."""

    sequence_number: int
    response: ResponseReply


class InProgress(msgspec.Struct, frozen=True, tag="response.in_progress", tag_field="type"):
    """The answer is being made."""

    sequence_number: int
    response: ResponseReply


class Completed(msgspec.Struct, frozen=True, tag="response.completed", tag_field="type"):
    """The end of a whole answer."""

    sequence_number: int
    response: ResponseReply


class IncompleteEnd(msgspec.Struct, frozen=True, tag="response.incomplete", tag_field="type"):
    """The end of an answer that the limit cut."""

    sequence_number: int
    response: ResponseReply


class Failed(msgspec.Struct, frozen=True, tag="response.failed", tag_field="type"):
    """The answer broke off; an `error` event follows."""

    sequence_number: int
    response: ResponseReply


class Error(msgspec.Struct, frozen=True, kw_only=True, tag="error", tag_field="type"):
    """Why the stream ends. `error` says it once more: the official client raises what it finds there."""

    sequence_number: int
    code: str | None
    message: str
    param: str | None
    error: ErrorDetail


class ItemAdded(msgspec.Struct, frozen=True, tag="response.output_item.added", tag_field="type"):
    """An item begins."""

    sequence_number: int
    output_index: int
    item: OutputItem


class ItemDone(msgspec.Struct, frozen=True, tag="response.output_item.done", tag_field="type"):
    """An item is whole."""

    sequence_number: int
    output_index: int
    item: OutputItem


class PartAdded(msgspec.Struct, frozen=True, tag="response.content_part.added", tag_field="type"):
    """A part of an item begins."""

    sequence_number: int
    output_index: int
    item_id: str
    part: OutputText | ReasoningText
    content_index: int = 0


class PartDone(msgspec.Struct, frozen=True, tag="response.content_part.done", tag_field="type"):
    """A part of an item is whole."""

    sequence_number: int
    output_index: int
    item_id: str
    part: OutputText | ReasoningText
    content_index: int = 0


class TextDelta(msgspec.Struct, frozen=True, tag="response.output_text.delta", tag_field="type"):
    """More text."""

    sequence_number: int
    output_index: int
    item_id: str
    delta: str
    logprobs: tuple[TokenDetail, ...] = ()
    content_index: int = 0


class TextDone(msgspec.Struct, frozen=True, tag="response.output_text.done", tag_field="type"):
    """The whole text."""

    sequence_number: int
    output_index: int
    item_id: str
    text: str
    logprobs: tuple[TokenDetail, ...] = ()
    content_index: int = 0


class ReasoningDelta(msgspec.Struct, frozen=True, tag="response.reasoning_text.delta", tag_field="type"):
    """More reasoning."""

    sequence_number: int
    output_index: int
    item_id: str
    delta: str
    content_index: int = 0


class ReasoningDone(msgspec.Struct, frozen=True, tag="response.reasoning_text.done", tag_field="type"):
    """The whole reasoning."""

    sequence_number: int
    output_index: int
    item_id: str
    text: str
    content_index: int = 0


class ArgumentsDelta(msgspec.Struct, frozen=True, tag="response.function_call_arguments.delta", tag_field="type"):
    """More of a call's arguments."""

    sequence_number: int
    output_index: int
    item_id: str
    delta: str


class ArgumentsDone(msgspec.Struct, frozen=True, tag="response.function_call_arguments.done", tag_field="type"):
    """A call's whole arguments."""

    sequence_number: int
    output_index: int
    item_id: str
    name: str
    arguments: str


ResponseEvent = (
    Created
    | InProgress
    | Completed
    | IncompleteEnd
    | Failed
    | Error
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
)


_HEADS = {kind: b"event: %s\ndata: " % str(kind.__struct_config__.tag).encode() for kind in get_args(ResponseEvent)}


def _frame(item: ResponseEvent) -> bytes:
    return _HEADS[type(item)] + encode(item) + b"\n\n"


# --- the stream ---------------------------------------------------------------------------------------------


class ResponseWriter:
    """Turns the pieces of one answer into events; as a `muster.api.http.Dialect`, also the error that ends them."""

    def __init__(self, response: ResponseReply, plan: Plan) -> None:
        self._response = response
        self._forced = plan.forced
        self._most_calls = plan.most_calls
        self._sequence = 0
        self._items: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._texts: list[str] = []  #: of the open item
        self._logprobs: list[TokenDetail] = []
        self._early: list[TokenDetail] = []  #: of tokens before the text, reasoning too; they come with its first piece
        self._calls = 0

    def begin(self) -> bytes:
        """The first events."""
        return _frame(Created(self._number(), self._response)) + _frame(InProgress(self._number(), self._response))

    def chunk(self, chunk: Chunk) -> bytes:
        """What is new; nothing where the piece has nothing to show yet."""
        events = b""
        if chunk.reasoning:
            events += self._reasoning(chunk.reasoning)
        if chunk.text and self._forced is not None and (isinstance(self._open, CallItem) or not self._calls):
            events += self._arguments(self._forced, chunk.text)
        elif chunk.text or (chunk.logprobs and not chunk.reasoning and isinstance(self._open, MessageItem)):
            events += self._text(chunk.text, chunk.logprobs)
        elif chunk.logprobs:
            self._early += token_details(chunk.logprobs)
        for call in chunk.tool_calls:
            events += self._call(call)
        return events

    def end(self, done: Done) -> bytes:
        """The last events."""
        events = self._close("incomplete" if done.reason == "length" else "completed")
        response = ended(self._response, tuple(self._items), done)
        kind = IncompleteEnd if response.status == "incomplete" else Completed
        return events + _frame(kind(self._number(), response))

    def error_body(self, error: ApiError) -> bytes:
        """See `muster.api.http.Dialect`."""
        return DIALECT.error_body(error)

    def error_event(self, error: ApiError) -> bytes:
        """The failed response, and the error as the official client raises it."""
        failure = ResponseFailure("server_error", error.message)
        response = msgspec.structs.replace(self._response, status="failed", error=failure, output=tuple(self._items))
        detail = detail_of(error)
        failed = _frame(Failed(self._number(), response))
        return failed + _frame(
            Error(
                sequence_number=self._number(),
                code=detail.code,
                message=detail.message,
                param=detail.param,
                error=detail,
            )
        )

    def _number(self) -> int:
        self._sequence += 1
        return self._sequence - 1

    def _reasoning(self, text: str) -> bytes:
        events = b""
        if not isinstance(self._open, ReasoningItem):
            item = ReasoningItem(id=identity("rs_"), status="in_progress")
            events = self._begin(item, ReasoningText(""))
        self._texts.append(text)
        assert self._open is not None
        return events + _frame(ReasoningDelta(self._number(), len(self._items), self._open.id, text))

    def _text(self, text: str, found: tuple[TokenLogprob, ...]) -> bytes:
        events = b""
        if not isinstance(self._open, MessageItem):
            item = MessageItem(id=identity("msg_"), status="in_progress")
            events = self._begin(item, OutputText(""))
        self._texts.append(text)
        logprobs = (*self._early, *token_details(found)) if found else ()
        if logprobs:
            self._logprobs += logprobs
            self._early.clear()
        assert self._open is not None
        return events + _frame(TextDelta(self._number(), len(self._items), self._open.id, text, logprobs))

    def _arguments(self, name: str, text: str) -> bytes:
        events = b""
        if not isinstance(self._open, CallItem):
            events = self._begin_call(identity("call_"), name)
        return events + self._more_arguments(text)

    def _call(self, call: ToolCall) -> bytes:
        if self._calls == self._most_calls:
            return b""
        return self._begin_call(call.id, call.name) + self._more_arguments(call.arguments) + self._close("completed")

    def _begin_call(self, call: str, name: str) -> bytes:
        self._calls += 1
        return self._begin(CallItem(id=identity("fc_"), status="in_progress", call_id=call, name=name), None)

    def _more_arguments(self, text: str) -> bytes:
        assert self._open is not None
        self._texts.append(text)
        return _frame(ArgumentsDelta(self._number(), len(self._items), self._open.id, text))

    def _begin(self, item: OutputItem, part: OutputText | ReasoningText | None) -> bytes:
        events = self._close("completed")
        self._open = item
        events += _frame(ItemAdded(self._number(), len(self._items), item))
        if part is not None:
            events += _frame(PartAdded(self._number(), len(self._items), item.id, part))
        return events

    def _close(self, status: str) -> bytes:
        """The events that end the open item, if there is one."""
        item, index, number = self._open, len(self._items), self._number
        if item is None:
            return b""
        text = "".join(self._texts)
        match item:
            case MessageItem():
                logprobs = tuple(self._logprobs)
                item = message_item(item.id, status, text, logprobs)
                events = _frame(TextDone(number(), index, item.id, text, logprobs))
                events += _frame(PartDone(number(), index, item.id, item.content[0]))
            case ReasoningItem():
                item = reasoning_item(item.id, status, text)
                events = _frame(ReasoningDone(number(), index, item.id, text))
                events += _frame(PartDone(number(), index, item.id, item.content[0]))
            case CallItem():
                item = msgspec.structs.replace(item, status=status, arguments=text)
                events = _frame(ArgumentsDone(number(), index, item.id, item.name, text))
        events += _frame(ItemDone(number(), index, item))
        self._items.append(item)
        self._open = None
        self._texts, self._logprobs = [], []
        return events


async def events(writer: ResponseWriter, answers: AsyncIterator[Indexed]) -> AsyncGenerator[bytes]:
    """Every event of a streamed response."""
    async for _, piece in answers:
        match piece:
            case Chunk():
                data = writer.chunk(piece)
            case Started():
                data = writer.begin()
            case Prefilled():
                data = progress_comment(piece.done, piece.total)
            case Done():
                data = writer.end(piece)
        if data:
            yield data
