"""How a rank tells its worker that it moves: a busy rank that falls silent is stuck."""

from __future__ import annotations

import sys
import time
from typing import Final

from muster.rank_protocol import StepFrame
from muster.runner.counter import StepCounter
from muster.runner.frames import Channel

#: Between two frames of a busy rank, at least.
_PERIOD_SECONDS: Final = 1.0


def note_memory(counter: StepCounter | None) -> None:
    """Note for the worker what MLX has allocated, cache included: on a GPU the process's resident size lacks it.

    That takes a microsecond.
    """
    mx = sys.modules.get("mlx.core")
    if counter is not None and mx is not None:
        counter.allocated_bytes = mx.get_active_memory() + mx.get_cache_memory()


class Pulse:
    """Sends a `StepFrame` when the rank becomes busy or idle, and at most one a second in between.

    With each, what MLX has allocated is noted. Every step is counted in `counter` when it begins: a rank that stands
    still can tell nothing any more.
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
            note_memory(self._counter)
            self._channel.send(StepFrame(step=step, active=max(1, active)))

    def idle(self, step: int) -> None:
        """The rank has nothing to do after `step`."""
        if self._busy:
            self._busy = False
            note_memory(self._counter)
            self._channel.send(StepFrame(step=step, active=0))
