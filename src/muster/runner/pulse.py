"""How a rank tells its worker that it moves: a busy rank that falls silent is stuck."""

from __future__ import annotations

import time
from typing import Final

from muster.rank_protocol import StepFrame
from muster.runner.frames import Channel

#: Between two frames of a busy rank, at least.
_PERIOD_SECONDS: Final = 1.0


class Pulse:
    """Sends a `StepFrame` when the rank becomes busy or idle, and at most one a second in between."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._busy = False
        self._told = 0.0

    def busy(self, step: int, active: int) -> None:
        """The rank is about to carry out `step`, with so many sequences."""
        now = time.monotonic()
        if not self._busy or now - self._told >= _PERIOD_SECONDS:
            self._busy, self._told = True, now
            self._channel.send(StepFrame(step=step, active=max(1, active)))

    def idle(self, step: int) -> None:
        """The rank has nothing to do after `step`."""
        if self._busy:
            self._busy = False
            self._channel.send(StepFrame(step=step, active=0))
