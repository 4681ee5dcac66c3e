"""Which sets of nodes JACCL can join by their cables, and where to look for them among many nodes. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import combinations
from typing import Final

from muster.placement.rings import EXACT_NODES, ring_subsets

#: Pairs of nodes that JACCL can join, the lower number first.
Wired = Collection[tuple[int, int]]

MESH: Final = 0
RING: Final = 1
APART: Final = 2

#: So much is looked through: the sum of 2 to the number of nodes, over all pockets.
_MOST_SUBSETS: Final = 2**11


def joined(nodes: Sequence[int], wired: Wired) -> int:
    """How JACCL could join these nodes: `MESH`, `RING` or `APART`. More than `EXACT_NODES` may turn out to be apart."""
    if len(set(nodes)) < len(nodes):
        return APART
    if len(nodes) > EXACT_NODES:
        beside = [sum(_is_wired(one, other, wired) for other in nodes) for one in nodes]
        return RING if min(beside) >= 2 else APART
    if all(_is_wired(one, other, wired) for one, other in combinations(nodes, 2)):
        return MESH
    return RING if ring_subsets(_levels(nodes, wired), 0, len(nodes)) else APART


def best_joined(sets: set[int], usable: Sequence[int], size: int, wired: Wired) -> set[int]:
    """Those of the sets, as bits of places in `usable`, that JACCL can join in a mesh, else in a ring; else all."""
    if not wired or size < 2:
        return sets
    level = _levels(usable, wired)
    meshed = {
        bits
        for bits in sets
        if all(
            level[a][b] == 0
            for a, b in combinations([position for position in range(len(usable)) if bits >> position & 1], 2)
        )
    }
    return meshed or (sets & ring_subsets(level, 0, size)) or sets


def pockets(ranked: Sequence[int], wired: Wired, size: int) -> Iterator[list[int]]:
    """Small groups of nodes that hang together by cables, each of at least `size`, around the best nodes first.

    Cables that join few nodes make one group of these. Of more, a group is a node with those that are the nearest by
    cable; a ring of more than `EXACT_NODES` ranks is then found only where that is all of its nodes.
    """
    beside: dict[int, list[int]] = {index: [] for index in ranked}
    for one, other in wired:
        if one in beside and other in beside:
            beside[one].append(other)
            beside[other].append(one)
    place = {index: position for position, index in enumerate(ranked)}
    seen: set[int] = set()
    left = _MOST_SUBSETS
    for seed in ranked:
        if seed in seen or not beside[seed]:
            continue
        group = [seed]
        for index in group:
            near = sorted(beside[index], key=lambda one: place[one])
            group += [one for one in near if one not in group][: max(size, EXACT_NODES) - len(group)]
        seen.update(group)
        if len(group) >= size:
            yield sorted(group)
            left -= 1 << min(len(group), EXACT_NODES)
            if left <= 0:
                return


def _levels(nodes: Sequence[int], wired: Wired) -> list[list[int]]:
    return [[0 if _is_wired(one, other, wired) else 1 for other in nodes] for one in nodes]


def _is_wired(one: int, other: int, wired: Wired) -> bool:
    return (min(one, other), max(one, other)) in wired
