"""Which files of a model a rank needs. Pure, apart from reading what is there already."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final

from muster.model.files import INDEX_NAME, WEIGHTS_GLOB
from muster.model.hub import ALLOW_PATTERNS

#: The tokenizer's own code, where it may run.
_CODE_PATTERN: Final = "*.py"
_LAYER: Final = re.compile(r"^(.*?(?:layers|h|blocks))\.(\d+)\.")
#: Experts that are stored one by one: mlx-lm stacks them when it sees those of the first layer.
_LOOSE_EXPERT: Final = re.compile(r"\.experts\.\d+\.")


def is_weights(name: str) -> bool:
    """Whether mlx-lm would read weights from a file of this name."""
    return fnmatchcase(name, WEIGHTS_GLOB)


def is_plain(name: str) -> bool:
    """Whether this names a file in a directory itself, wherever the name comes from: it leads nowhere else."""
    return bool(name) and not name.startswith(".") and name.isprintable() and "/" not in name and "\\" not in name


def is_offered(name: str, *, code: bool = False) -> bool:
    """Whether a file of this name is part of a model, in its directory itself; `code` takes in the tokenizer's own."""
    if not is_plain(name):
        return False
    patterns = (*ALLOW_PATTERNS, _CODE_PATTERN) if code else ALLOW_PATTERNS
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def small_files(names: Iterable[str], *, code: bool = False) -> tuple[str, ...]:
    """The files without weights, the index first."""
    chosen = (name for name in names if is_offered(name, code=code) and not is_weights(name))
    return tuple(sorted(chosen, key=lambda name: (name != INDEX_NAME, name)))


def shard_files(
    indexed: Mapping[str, str], weights: Collection[str], layers: range | None, total: int
) -> frozenset[str]:
    """The weight files that hold `layers` of `total`, and everything outside of layers.

    Args:
        indexed: tensor to file, as the index has it; empty where there is no index.
        weights: all weight files of the model.
        layers: what the rank runs; `None` for slices of all.
        total: the model's layers.

    A tensor counts to a layer only if its stack has as many layers as the model: an image encoder has others. Without
    an index, or with experts that are stored one by one, all files are needed.
    """
    everything = frozenset(weights)
    if layers is None or not indexed or any(_LOOSE_EXPERT.search(name) for name in indexed):
        return everything
    numbers: dict[str, set[int]] = {}
    for name in indexed:
        if match := _LAYER.match(name):
            numbers.setdefault(match.group(1), set()).add(int(match.group(2)))
    every = set(range(total))
    stacks = {stack for stack, found in numbers.items() if found >= every}

    def needed(name: str) -> bool:
        match = _LAYER.match(name)
        return match is None or match.group(1) not in stacks or int(match.group(2)) in layers

    return frozenset(file for name, file in indexed.items() if needed(name)) & everything


def owners(needed: Sequence[Collection[str]]) -> dict[str, int]:
    """Of every file that a rank needs the lowest rank that does: it downloads it for all. `needed` is by rank."""
    found: dict[str, int] = {}
    for rank, names in enumerate(needed):
        for name in names:
            found.setdefault(name, rank)
    return found
