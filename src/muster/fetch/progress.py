"""How far a transfer is and how fast, told now and then."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

#: Between two tellings.
_PAUSE_SECONDS: Final = 0.25
#: The rate is that of so many last seconds.
_RATE_SECONDS: Final = 5.0


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """`done` of `total` bytes are here, `rate` come per second; `note` says from where, or what is waited for."""

    done: int
    total: int
    rate: float = 0.0
    note: str = ""


class Brought(msgspec.Struct, frozen=True, kw_only=True):
    """What one source gave: "hub" or "node NAME"."""

    source: str
    files: int
    bytes: int
    seconds: float


Tell = Callable[[Moved], None]


class Meter:
    """Counts the bytes of the files that one source gives. `note` is told with them."""

    def __init__(self, tell: Tell, note: str, total: int) -> None:
        self.moved = 0  #: bytes that came over the network
        self._tell = tell
        self._note = note
        self._total = total
        self._done = 0
        self._told = float("-inf")
        self._seen: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def have(self, count: int) -> None:
        """So many bytes were here already; negative where they are of no use."""
        self._done += count
        self._say()

    def add(self, count: int) -> None:
        """So many bytes came."""
        self._done += count
        self.moved += count
        self._say()

    def wait(self, note: str) -> None:
        """Nothing comes now, for this reason."""
        self._tell(Moved(done=max(self._done, 0), total=self._total, note=note))

    def _say(self) -> None:
        now = time.monotonic()
        if now - self._told < _PAUSE_SECONDS and self._done < self._total:
            return
        self._told = now
        self._seen.append((now, self.moved))
        while len(self._seen) > 2 and now - self._seen[0][0] > _RATE_SECONDS:
            self._seen.popleft()
        since, before = self._seen[0]
        rate = (self.moved - before) / (now - since) if now > since else 0.0
        self._tell(Moved(done=max(self._done, 0), total=self._total, rate=rate, note=self._note))
