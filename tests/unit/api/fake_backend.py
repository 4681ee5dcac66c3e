"""A scripted coordinator for the tests of the HTTP API: it answers what it is told to, and keeps what it was asked."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Self

import anyio
import anyio.lowlevel

from muster.api.backend import Readiness, ServedModel
from muster.coordinator.calls import ClientRequest
from muster.events import Envelope
from muster.protocol import Generate, ReadOutput
from muster.replies import AnyPiece, AnyReply, Chunk, Done, Refused, Started
from muster.sampling import ToolCall
from muster.spec import Failure, InstanceId
from muster.state import State

#: The model that a fresh `FakeBackend` serves.
MODEL = "tiny/model"


class FakeStream:
    """Gives its script, piece by piece; waits once the script is used up without an end, until `add`."""

    def __init__(self, pieces: Sequence[AnyPiece]) -> None:
        self.cancelled = False
        self.given = 0  #: pieces that were read
        self._pieces = deque(pieces)
        self._more = anyio.Event()
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AnyPiece:
        if self._ended or self.cancelled:
            raise StopAsyncIteration
        # As a real stream does now and then: others have their turn.
        await anyio.lowlevel.checkpoint()
        while not self._pieces:
            self._more = anyio.Event()
            await self._more.wait()
            if self.cancelled:
                raise StopAsyncIteration
        piece = self._pieces.popleft()
        self.given += 1
        self._ended = isinstance(piece, Done | Refused)
        return piece

    def cancel(self) -> None:
        if not self._ended:
            self.cancelled = True
            self._more.set()

    def add(self, *pieces: AnyPiece) -> None:
        """More of the script, for whoever waits."""
        self._pieces.extend(pieces)
        self._more.set()


Script = Callable[[Generate], Sequence[AnyPiece]]
Call = ClientRequest | ReadOutput


class FakeBackend:
    """Stands for `muster.api.backend.Backend`."""

    def __init__(self, script: Script | Sequence[AnyPiece] | None = None) -> None:
        self.script: Script | Sequence[AnyPiece] = answer("Hello", " there.") if script is None else script
        self.requests: list[Generate] = []
        self.streams: list[FakeStream] = []
        self.calls: list[Call] = []
        self.replies: Callable[[Call], AnyReply] | None = None
        self.served: tuple[ServedModel, ...] = (
            ServedModel(name=MODEL, instances=(InstanceId("model-1"),), ready=1, created_ns=1_700_000_000 * 10**9),
        )
        self.readiness: dict[str, Readiness] = {}
        self.now = State()
        self.envelopes: list[Envelope] = []
        self.followers = 0
        self._published = anyio.Event()

    def generate(self, request: Generate) -> FakeStream:
        self.requests.append(request)
        known = [model.name for model in self.served]
        if request.instance not in known:
            stream = FakeStream([refused("model-unknown", f"there is no model {request.instance!r}; served: {known}")])
        else:
            stream = FakeStream(self.script(request) if callable(self.script) else self.script)
        self.streams.append(stream)
        return stream

    def models(self) -> tuple[ServedModel, ...]:
        return self.served

    def state(self) -> State:
        return self.now

    async def call(self, request: Call) -> AnyReply:
        self.calls.append(request)
        assert self.replies is not None, f"no reply was scripted for {request}"
        return self.replies(request)

    def publish(self, *envelopes: Envelope) -> None:
        """Log events: followers get them."""
        self.envelopes.extend(envelopes)
        self._published.set()
        self._published = anyio.Event()

    async def follow(self, after: int) -> AsyncIterator[Envelope]:
        self.followers += 1
        try:
            while True:
                published = self._published
                for envelope in [envelope for envelope in self.envelopes if envelope.sequence > after]:
                    after = envelope.sequence
                    yield envelope
                await published.wait()
        finally:
            self.followers -= 1

    async def probe(self, model: str) -> Readiness:
        return self.readiness.get(model, Readiness(model=model, ready=True, seconds_since_token=0.5))


# --- scripts ------------------------------------------------------------------------------------------------


def started(prompt_tokens: int = 7, cached_tokens: int = 0) -> Started:
    return Started(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)


def done(
    reason: str = "stop",
    completion_tokens: int = 2,
    *,
    prompt_tokens: int = 7,
    cached_tokens: int = 0,
    reasoning_tokens: int = 0,
    stop: str | None = None,
) -> Done:
    return Done(
        reason=reason,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        seconds_to_first_token=0.25,
        seconds=1.5,
        cached_tokens=cached_tokens,
        reasoning_tokens=reasoning_tokens,
        stop=stop,
    )


def answer(*texts: str, reason: str = "stop", stop: str | None = None) -> list[AnyPiece]:
    """An answer of these pieces of text, a token each."""
    chunks = [Chunk(text=text, tokens=(number,)) for number, text in enumerate(texts)]
    return [started(), *chunks, done(reason, len(texts), stop=stop)]


def calling(*calls: ToolCall, text: str = "") -> list[AnyPiece]:
    """An answer that calls tools."""
    chunks = [Chunk(text=text)] if text else []
    return [started(), *chunks, *(Chunk(tool_calls=(call,)) for call in calls), done("tool_calls", 9)]


def refused(kind: str, message: str, *, field: str = "") -> Refused:
    return Refused(failure=Failure(kind=kind, message=message, field=field))
