"""The side channel of jaccl over the bus: ranks exchange bytes through the coordinator, within a deadline."""

from __future__ import annotations

from collections.abc import Callable

from muster.protocol import Gather
from muster.replies import Gathered, Refused
from muster.spec import Failure


class Gathering:
    """Exchanges that are under way. Pure but for its own memory: time comes in, in seconds."""

    def take(self, request: Gather, answer: Callable[[Gathered | Refused], None], now: float) -> None:
        """Take a rank's part; `answer` is called once, when all are in or the time is over."""
        del request, now
        answer(Refused(failure=Failure(kind="internal", message="the side channel over the bus is not there yet")))

    def expire(self, now: float) -> None:
        """Refuse what has waited for too long."""
        del now

    def next_due(self) -> float | None:
        """When something is due by itself; `None` for never."""
        return None
