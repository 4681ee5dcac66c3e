"""Where something begins to hold, by halving. Pure."""

from __future__ import annotations

from collections.abc import Callable


def lowest(high: int, holds: Callable[[int], bool]) -> int:
    """The lowest number below `high`, from 0, from which on it holds; `high` where it never does."""
    low = 0
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
