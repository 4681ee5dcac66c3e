"""Waiting with a deadline, for what no event tells."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

#: Generous: two cores, shared with other tests.
DEADLINE_SECONDS = 30.0

T = TypeVar("T")


def until(answer: Callable[[], T | None], what: str, seconds: float = DEADLINE_SECONDS) -> T:
    """Poll something that gives no event of its own; for the kernel's facts only."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = answer()
        if found:
            return found
        time.sleep(0.002)
    raise AssertionError(f"not within {seconds:g} s: {what}")
