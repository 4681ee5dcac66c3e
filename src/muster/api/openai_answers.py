"""Several generations of one request at a time: begun together, read in the order in which their pieces come."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Self

import anyio
import msgspec

from muster.api.backend import Backend, Stream
from muster.api.errors import ApiError, of_failure
from muster.api.gather import Collected, Rest, first, gather
from muster.protocol import Generate
from muster.replies import AnyPiece, Chunk, Done, Prefilled, Refused, Started

#: A piece, and the index of its answer.
Indexed = tuple[int, Started | Prefilled | Chunk | Done]


def variants(request: Generate, count: int) -> tuple[Generate, ...]:
    """The same request so many times; with a seed, each has one of its own."""
    seed = request.sampling.seed
    if count == 1 or seed is None:
        return (request,) * count
    replace = msgspec.structs.replace
    return tuple(
        replace(request, sampling=replace(request.sampling, seed=(seed + index) % 2**63)) for index in range(count)
    )


async def gather_all(backend: Backend, requests: Iterable[Generate]) -> list[Collected]:
    """The whole answers, in the order of their requests.

    Raises:
        ApiError: one of them was refused or broke off; the others are cancelled.
    """
    streams = [backend.generate(request) for request in requests]
    if len(streams) == 1:
        return [await gather(streams[0])]
    collected: dict[int, Collected] = {}
    errors: list[ApiError] = []

    async def read(index: int, stream: Stream) -> None:
        try:
            collected[index] = await gather(stream)
        except ApiError as error:
            errors.append(error)
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for index, stream in enumerate(streams):
            group.start_soon(read, index, stream)
    if errors:
        raise errors[0]
    return [collected[index] for index in range(len(streams))]


async def begin_all(backend: Backend, requests: Iterable[Generate]) -> Answers:
    """Wait until one of them was taken.

    Raises:
        ApiError: before any was taken, one was refused; the others are cancelled.
    """
    streams = tuple(backend.generate(request) for request in requests)
    if len(streams) == 1:
        return Answers(streams, ((0, await first(streams[0])),))
    answers = Answers(streams)
    try:
        answers.put_back(await anext(answers))
    except BaseException:
        answers.close()
        raise
    return answers


class Answers:
    """The pieces of several answers as they come, each with the index of its answer; an async iterator.

    Each answer begins with one `Started`, also where an instance failed and another began it again. Whoever reads
    no further cancels the `streams`.

    Raises:
        ApiError: one of the generations was refused or broke off.
    """

    def __init__(self, streams: tuple[Stream, ...], ready: Iterable[Indexed] = ()) -> None:
        self.streams = streams
        self._ready = deque(ready)
        self._begun: set[int] = set()
        self._only = Rest(streams[0]) if len(streams) == 1 else None
        # Plain tasks and no task group: they live from one call to the next. Each waits for one piece, and ends
        # when its stream does.
        self._waiting: dict[asyncio.Task[AnyPiece | None], int] = {}
        if self._only is None:
            for index in range(len(streams)):
                self._read(index)

    def __aiter__(self) -> Self:
        """Itself."""
        return self

    async def __anext__(self) -> Indexed:
        """The next piece."""
        if self._only is not None and not self._ready:
            return 0, await anext(self._only)
        while not self._ready:
            if not self._waiting:
                raise StopAsyncIteration
            done, _ = await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=self._waiting.__getitem__):
                self._take(self._waiting.pop(task), task.result())
        return self._ready.popleft()

    def put_back(self, piece: Indexed) -> None:
        """Give this piece next."""
        self._ready.appendleft(piece)

    def close(self) -> None:
        """Nobody reads on."""
        for stream in self.streams:
            stream.cancel()

    def _read(self, index: int) -> None:
        self._waiting[asyncio.ensure_future(_next(self.streams[index]))] = index

    def _take(self, index: int, piece: AnyPiece | None) -> None:
        match piece:
            case None:
                raise ApiError("answer-lost", "the generation ended without saying why")
            case Refused(failure=failure):
                raise of_failure(failure)
            case Done(reason="cancelled"):
                raise ApiError("cancelled", "the generation was cancelled before its end")
            case Done():
                self._ready.append((index, piece))
            case _:
                if not isinstance(piece, Started) or index not in self._begun:
                    self._ready.append((index, piece))
                    self._begun.add(index)
                self._read(index)


async def _next(stream: Stream) -> AnyPiece | None:
    return await anext(stream, None)
