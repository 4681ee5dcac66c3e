"""Reading a generation: its beginning, its pieces, or all of it at once."""

from __future__ import annotations

from typing import Self

import msgspec

from muster.api.backend import Stream
from muster.api.errors import ApiError, of_failure
from muster.replies import Chunk, Done, Prefilled, Refused, Started
from muster.sampling import TokenLogprob, ToolCall


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer."""

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    started: Started
    done: Done


async def first(stream: Stream) -> Started:
    """Wait until the request was taken, so that a refusal becomes a status and not an event of a stream.

    Raises:
        ApiError: the request was refused.
    """
    try:
        async for piece in stream:
            match piece:
                case Started():
                    return piece
                case Refused(failure=failure):
                    raise of_failure(failure)
                case _:
                    continue
        raise _unfinished()
    except BaseException:
        stream.cancel()
        raise


class Rest:
    """The pieces of a stream after `first`, the last one a `Done`; as an async iterator.

    Raises:
        ApiError: the generation broke off.
    """

    def __init__(self, stream: Stream) -> None:
        self._next = stream.__anext__
        self._ended = False

    def __aiter__(self) -> Self:
        """Itself."""
        return self

    async def __anext__(self) -> Prefilled | Chunk | Done:
        """The next piece."""
        while not self._ended:
            try:
                piece = await self._next()
            except StopAsyncIteration:
                raise _unfinished() from None
            match piece:
                case Chunk() | Prefilled():
                    return piece
                case Done():
                    self._ended = True
                    _check(piece)
                    return piece
                case Refused(failure=failure):
                    raise of_failure(failure)
                case Started():
                    continue
        raise StopAsyncIteration


def rest(stream: Stream) -> Rest:
    """The pieces after `first`. An `EventStream` that is given the stream cancels it."""
    return Rest(stream)


async def gather(stream: Stream) -> Collected:
    """The whole answer. Cancelling the caller cancels the stream.

    Raises:
        ApiError: the request was refused, or the generation broke off.
    """
    started: Started | None = None
    chunks: list[Chunk] = []
    try:
        async for piece in stream:
            match piece:
                case Chunk():
                    chunks.append(piece)
                case Started():
                    started = piece
                case Done():
                    _check(piece)
                    return _collect(started, chunks, piece)
                case Refused(failure=failure):
                    raise of_failure(failure)
                case Prefilled():
                    continue
        raise _unfinished()
    finally:
        stream.cancel()


def _collect(started: Started | None, chunks: list[Chunk], done: Done) -> Collected:
    return Collected(
        text="".join(chunk.text for chunk in chunks),
        reasoning="".join(chunk.reasoning for chunk in chunks),
        tool_calls=tuple(call for chunk in chunks for call in chunk.tool_calls),
        tokens=tuple(token for chunk in chunks for token in chunk.tokens),
        logprobs=tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
        started=started or Started(prompt_tokens=done.prompt_tokens, cached_tokens=done.cached_tokens),
        done=done,
    )


def _check(done: Done) -> None:
    if done.reason == "cancelled":
        raise ApiError("cancelled", "the generation was cancelled before its end")


def _unfinished() -> ApiError:
    return ApiError("answer-lost", "the generation ended without saying why")
