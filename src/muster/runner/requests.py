"""The requests that rank 0 has in hand: being prepared, waiting for a place, or with a sequence in the batch."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from muster.model.answer import Answer
from muster.model.request import PreparedRequest
from muster.protocol import Generate
from muster.replies import Done, Prefilled

#: Between two reports on the same prompt.
_PROGRESS_SECONDS: Final = 0.25


@dataclass(slots=True, eq=False)
class Request:
    """One generation asked for. `number` is the gateway's; `sequence` is its place in the batch, 0 until it has one."""

    number: int
    generate: Generate
    received: float = field(default_factory=time.perf_counter)
    prepared: PreparedRequest | None = None
    answer: Answer | None = None
    sequence: int = 0
    cached_tokens: int = 0
    first_seconds: float = 0.0
    _reported: float = 0.0

    def heard(self) -> None:
        """A token came."""
        if not self.first_seconds:
            self.first_seconds = time.perf_counter() - self.received

    def progress(self, done: int, *, chunk_tokens: int) -> Prefilled | None:
        """What to report of a prompt of which `done` tokens are computed: not too often, and nothing of short ones."""
        assert self.prepared is not None
        total = len(self.prepared.tokens)
        now = time.perf_counter()
        if total - self.cached_tokens <= chunk_tokens or now - self._reported < _PROGRESS_SECONDS:
            return None
        self._reported = now
        return Prefilled(done=done, total=total)

    def done(self, reason: str) -> Done:
        """The end of the answer."""
        answer = self.answer
        return Done(
            reason=reason,
            prompt_tokens=len(self.prepared.tokens) if self.prepared is not None else 0,
            completion_tokens=answer.completion_tokens if answer is not None else 0,
            seconds_to_first_token=self.first_seconds,
            seconds=time.perf_counter() - self.received,
            cached_tokens=self.cached_tokens,
            reasoning_tokens=answer.reasoning_tokens if answer is not None else 0,
            stop=answer.stop if answer is not None else None,
        )


class Requests:
    """All requests by where they are. A request is in one place at a time."""

    def __init__(self) -> None:
        self.preparing: dict[int, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}  #: by sequence

    def __len__(self) -> int:
        return len(self.preparing) + len(self.waiting) + len(self.running)

    def numbers(self) -> list[int]:
        """The requests in hand, by the gateway's numbers."""
        return [*self.preparing, *(request.number for request in [*self.waiting, *self.running.values()])]

    def drop(self, number: int) -> Request | None:
        """Take a request out, wherever it is."""
        if (request := self.preparing.pop(number, None)) is not None:
            return request
        for request in self.waiting:
            if request.number == number:
                self.waiting.remove(request)
                return request
        for request in self.running.values():
            if request.number == number:
                del self.running[request.sequence]
                return request
        return None

    def drop_all(self) -> list[Request]:
        """Take every request out."""
        everything = [*self.preparing.values(), *self.waiting, *self.running.values()]
        self.preparing.clear()
        self.waiting.clear()
        self.running.clear()
        return everything
