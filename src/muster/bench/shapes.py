"""What is asked of every server alike: the models' sizes, and prompts that no cache has seen. Pure."""

from __future__ import annotations

import random
from typing import Final

import msgspec


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is made on the spot, `what` of parameters, and how long its answers are."""

    name: str
    what: str
    hidden_size: int
    intermediate_size: int
    layers: int
    answer_tokens: int


#: About 1 M parameters: what a server adds to the model is everything.
TINY: Final = Shape(name="tiny", what="1 M", hidden_size=128, intermediate_size=384, layers=4, answer_tokens=128)
#: Takes 5 to 10 ms a token on one core.
SMALL: Final = Shape(name="small", what="7 M", hidden_size=320, intermediate_size=1024, layers=5, answer_tokens=64)
SHAPES: Final = {shape.name: shape for shape in (TINY, SMALL)}

_WORDS: Final = ("when", "the", "rank", "waits", "for", "a", "token", "that", "another", "has", "sent", "long", "ago")


def prompt(number: int, words: int = 10) -> str:
    """The `number`-th prompt: the same for every server, and different from all others from its first word on."""
    chosen = random.Random(number).choices(_WORDS, k=words)
    return f"{number:05} {' '.join(chosen)}"
