"""Measures again how fast the node's memory is: one sample from a busy moment must not count for ever."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import anyio

#: After the worker's start, whose own sample was taken beside much else; and between two samples from then on.
_FIRST_SECONDS: Final = 300.0
_AGAIN_SECONDS: Final = 3600.0
#: Who asks has asked for the links as well, and those go first.
_LINKS_SECONDS: Final = 2.0


class SpeedMeter:
    """Measures when it is asked to, and now and then while the node has nothing to do.

    `measure` answers GB/s, or `None` where it cannot; `tell` hears of each sample, and keeps the best.
    """

    def __init__(
        self,
        measure: Callable[[], Awaitable[float | None]],
        idle: Callable[[], bool],
        tell: Callable[[float], None],
    ) -> None:
        self._measure = measure
        self._idle = idle
        self._tell = tell
        self._round: int | None = None
        self._asked = anyio.Event()

    def hear(self, round: int) -> None:
        """Take the coordinator's measuring round: where it grew, measure again."""
        if self._round is not None and round > self._round:
            self._asked.set()
        self._round = round

    async def run(self) -> None:
        """Measure until cancelled."""
        patience = _FIRST_SECONDS
        while True:
            with anyio.move_on_after(patience):
                await self._asked.wait()
            asked, self._asked = self._asked.is_set(), anyio.Event()
            if asked:
                await anyio.sleep(_LINKS_SECONDS)
            if asked or self._idle():
                found = await self._measure()
                if found is not None:
                    self._tell(found)
            patience = _AGAIN_SECONDS
