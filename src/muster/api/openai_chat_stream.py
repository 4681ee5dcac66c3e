"""A chat completion as it comes: what its events carry, and how they are made of the pieces of the answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable

import msgspec

from muster.api.http import event, progress_comment
from muster.api.openai_answers import Indexed
from muster.api.openai_shape import (
    END,
    FINGERPRINT,
    LogprobList,
    Usage,
    encode,
    finish_of,
    identity,
    now_seconds,
    token_details,
    usage_of,
)
from muster.protocol import Generate
from muster.replies import Chunk, Done, Prefilled, Started
from muster.sampling import ToolCall


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to ask the backend, and how to read what it answers."""

    requests: tuple[Generate, ...]
    forced: str | None  #: the function whose arguments the text is
    any_call: bool  #: the text stands for a call of any tool
    most_calls: int | None
    names: dict[str, str]  #: of fields in errors, where the dialect has its own
    include_usage: bool


class FunctionDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """The name of a function, or more of its arguments."""

    name: str | None = None
    arguments: str | None = None


class CallDelta(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The beginning of a call, or more of it."""

    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionDelta


class Delta(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What is new in an answer."""

    role: str | None = None
    content: str | None = None
    refusal: msgspec.UnsetType | None = msgspec.UNSET
    reasoning_content: str | None = None
    tool_calls: tuple[CallDelta, ...] | None = None


class ChoiceDelta(msgspec.Struct, frozen=True):
    """What is new in the answer `index`."""

    index: int
    delta: Delta
    logprobs: LogprobList | None = None
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a streamed chat completion."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str = FINGERPRINT
    choices: tuple[ChoiceDelta, ...]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class Frames:
    """The events of one streamed chat completion.

    Everything but the choice is the same in each: it is encoded once.
    """

    def __init__(self, model: str, include_usage: bool) -> None:
        chunk = ChatChunk(
            id=identity("chatcmpl-"),
            created=now_seconds(),
            model=model,
            choices=(),
            usage=None if include_usage else msgspec.UNSET,
        )
        self._chunk = chunk
        before, after = encode(chunk).rsplit(b'"choices":[', 1)
        self._head = b"data: " + before + b'"choices":['
        self._tail = after + b"\n\n"

    def delta(self, choice: ChoiceDelta) -> bytes:
        """One event."""
        return self._head + encode(choice) + self._tail

    def usage(self, usage: Usage) -> bytes:
        """The event with the usage, which has no choice."""
        return event(encode(msgspec.structs.replace(self._chunk, usage=usage)))


class Choice:
    """How far one streamed answer is."""

    def __init__(self, index: int, plan: Plan, frames: Frames) -> None:
        self._index = index
        self._forced = plan.forced
        self._most_calls = plan.most_calls
        self._frames = frames
        self._filling = False  #: text goes into the arguments of the forced call
        self.calls = 0

    def begin(self) -> bytes:
        """The first event, with the role."""
        return self._event(Delta(role="assistant", content="", refusal=None))

    def chunk(self, chunk: Chunk) -> bytes:
        """What is new; nothing where the piece has nothing to show yet."""
        logprobs = LogprobList(token_details(chunk.logprobs)) if chunk.logprobs else None
        if self._forced is not None and chunk.text and (self._filling or self.calls == 0):
            return self._filled(self._forced, chunk, logprobs)
        text, reasoning = chunk.text, chunk.reasoning
        if chunk.tool_calls:
            shown = self._shown(text, reasoning, logprobs) if text or reasoning or logprobs else b""
            return shown + self._calls(chunk.tool_calls)
        if text or reasoning or logprobs is not None:
            return self._shown(text, reasoning, logprobs)
        return b""

    def end(self, done: Done) -> bytes:
        """The last event, with the reason."""
        choice = ChoiceDelta(self._index, Delta(), None, finish_of(done, self.calls > 0))
        return self._frames.delta(choice)

    def _shown(self, text: str, reasoning: str, logprobs: LogprobList | None) -> bytes:
        delta = Delta(content=text or None, reasoning_content=reasoning) if reasoning else Delta(content=text)
        return self._event(delta, logprobs)

    def _event(self, delta: Delta, logprobs: LogprobList | None = None) -> bytes:
        return self._frames.delta(ChoiceDelta(self._index, delta, logprobs))

    def _calls(self, calls: Iterable[ToolCall]) -> bytes:
        events: list[bytes] = []
        for call in calls:
            if self.calls == self._most_calls:
                break
            events += (self._named(call.id, call.name), self._arguments(call.arguments, None))
        return b"".join(events)

    def _filled(self, name: str, chunk: Chunk, logprobs: LogprobList | None) -> bytes:
        shown = self._shown("", chunk.reasoning, None) if chunk.reasoning else b""
        head = b"" if self._filling else self._named(identity("call_"), name)
        self._filling = True
        return shown + head + self._arguments(chunk.text, logprobs)

    def _named(self, call: str, name: str) -> bytes:
        self.calls += 1
        function = FunctionDelta(name, "")
        return self._event(
            Delta(tool_calls=(CallDelta(index=self.calls - 1, id=call, type="function", function=function),))
        )

    def _arguments(self, text: str, logprobs: LogprobList | None) -> bytes:
        function = FunctionDelta(arguments=text)
        return self._event(Delta(tool_calls=(CallDelta(index=self.calls - 1, function=function),)), logprobs)


async def events(model: str, plan: Plan, answers: AsyncIterator[Indexed]) -> AsyncGenerator[bytes]:
    """Every event of a streamed chat completion, to `[DONE]`."""
    frames = Frames(model, plan.include_usage)
    choices = [Choice(index, plan, frames) for index in range(len(plan.requests))]
    ends: dict[int, Done] = {}
    async for index, piece in answers:
        match piece:
            case Chunk():
                data = choices[index].chunk(piece)
            case Started():
                data = choices[index].begin()
            case Prefilled():
                data = progress_comment(piece.done, piece.total)
            case Done():
                ends[index] = piece
                data = choices[index].end(piece)
        if data:
            yield data
    last = END
    if plan.include_usage:
        last = frames.usage(usage_of((ends[index] for index in sorted(ends)), len(ends))) + last
    yield last
