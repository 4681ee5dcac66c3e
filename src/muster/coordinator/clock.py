"""The time that the events carry: a wall clock that does not jump while the process lives."""

from __future__ import annotations

import time


class Clock:
    """Starts at the wall clock, or at `not_before_ns` if that is later, and then only counts."""

    def __init__(self, not_before_ns: int = 0) -> None:
        self._start_ns = max(time.time_ns(), not_before_ns)
        self._origin_ns = time.monotonic_ns()

    def now_ns(self) -> int:
        """Nanoseconds since 1970, never going back."""
        return self._start_ns + time.monotonic_ns() - self._origin_ns


def lease_clock() -> float:
    """Seconds on a clock that never jumps and, where the system has one, goes on while the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
