"""One generation under way, for whoever reads it at their own pace."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Self

from muster.coordinator.requests import Answerer, Request
from muster.replies import AnyPiece, Chunk, Done, Prefilled, Refused

#: Pieces that wait for a slow reader before they are merged.
_WAITING_PIECES = 64


class AnswerStream:
    """The pieces of one answer. Iterate it to the end, or cancel it; one reader at a time.

    Pieces that wait are merged, so that they take no more room than the answer itself.
    """

    def __init__(self, ask: Callable[[Answerer], Request], cancel: Callable[[Request], None]) -> None:
        self._pieces: deque[AnyPiece] = deque()
        self._arrived: asyncio.Future[None] | None = None
        self._ended = False
        self._cancel = cancel
        self._request = ask(self._put)

    def __aiter__(self) -> Self:
        """Itself."""
        return self

    async def __anext__(self) -> AnyPiece:
        """The next piece; raises `StopAsyncIteration` after the last, and after `cancel`."""
        while not self._pieces:
            if self._ended:
                raise StopAsyncIteration
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        piece = self._pieces.popleft()
        if not isinstance(piece, Chunk):
            return piece
        chunks = [piece]
        while self._pieces and isinstance(following := self._pieces[0], Chunk):
            chunks.append(following)
            self._pieces.popleft()
        return merged(chunks) if len(chunks) > 1 else piece

    def cancel(self) -> None:
        """Nobody reads on: the runner stops at its next step. Does nothing after the end."""
        self._pieces.clear()
        if not self._ended:
            self._ended = True
            self._cancel(self._request)
            self._wake()

    def _put(self, piece: AnyPiece) -> None:
        if isinstance(piece, Prefilled) and self._pieces and isinstance(self._pieces[-1], Prefilled):
            self._pieces.pop()
        self._pieces.append(piece)
        if isinstance(piece, Done | Refused):
            self._ended = True
        elif len(self._pieces) > _WAITING_PIECES:
            self._merge()
        self._wake()

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():  # done: its reader was cancelled
            self._arrived.set_result(None)
        self._arrived = None

    def _merge(self) -> None:
        chunks: list[Chunk] = []
        others: list[AnyPiece] = []
        for piece in self._pieces:
            if isinstance(piece, Chunk):
                chunks.append(piece)
            else:
                others.append(piece)
        self._pieces = deque((*others, merged(chunks)))


def merged(chunks: list[Chunk]) -> Chunk:
    """What several pieces of text add, as one."""
    return Chunk(
        text="".join(chunk.text for chunk in chunks),
        reasoning="".join(chunk.reasoning for chunk in chunks),
        tool_calls=tuple(call for chunk in chunks for call in chunk.tool_calls),
        tokens=tuple(token for chunk in chunks for token in chunk.tokens),
        logprobs=tuple(item for chunk in chunks for item in chunk.logprobs),
    )
