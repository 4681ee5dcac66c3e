"""How a rank tells its worker that it moves: a busy rank that falls silent is stuck."""

from __future__ import annotations

import time
from typing import Final

from muster.rank_protocol import StepFrame
from muster.runner.counter import StepCounter
from muster.runner.frames import Channel

#: Between two frames of a busy rank, at least.
_PERIOD_SECONDS: Final = 1.0


class Pulse:
    """Sends a `StepFrame` when the rank becomes busy or idle, and at most one a second in between.

    Every step is counted in `counter` when it begins: a rank that stands still can tell nothing any more.
    """

    def __init__(self, channel: Channel, counter: StepCounter | None = None) -> None:
        self._channel = channel
        self._counter = counter
        self._busy = False
        self._told = 0.0

    def busy(self, step: int, active: int) -> None:
        """The rank is about to carry out `step`, with so many sequences."""
        if self._counter is not None:
            self._counter.step = step
        now = time.monotonic()
        if not self._busy or now - self._told >= _PERIOD_SECONDS:
            self._busy, self._told = True, now
            self._channel.send(StepFrame(step=step, active=max(1, active)))

    def idle(self, step: int) -> None:
        """The rank has nothing to do after `step`."""
        if self._busy:
            self._busy = False
            self._channel.send(StepFrame(step=step, active=0))
