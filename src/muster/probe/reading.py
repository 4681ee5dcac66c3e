"""What a parser answers when a text does not say what it was read for."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

#: As much of a text as a reason quotes.
_QUOTED_CHARACTERS = 120

T = TypeVar("T")


class Unread(msgspec.Struct, frozen=True):
    """Nothing could be found out, and why; what parsers and tools answer instead of raising."""

    reason: str


class Unknowns:
    """Collects why something is not known: `NodeFacts.unknown` in the making."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    def take(self, name: str, found: T | Unread, otherwise: T) -> T:
        """What was found, or `otherwise`, with the reason noted under `name`."""
        if isinstance(found, Unread):
            self.reasons[name] = found.reason
            return otherwise
        return found


def number(text: str) -> int | None:
    """A whole number that fits into 64 bits; `None` where the text is none."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def unlike(what: str, text: str) -> Unread:
    """The text of `what` is none that we know; quotes how it begins."""
    begins = " ".join(text.split())[:_QUOTED_CHARACTERS]
    return Unread(f"{what} printed nothing" if not begins else f"{what} printed what is not known here: {begins!r}")
