"""In which order a ring goes through nodes: the worst link as good as can be, then the sum of all. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

import msgspec

from muster.links import Link
from muster.placement.searching import lowest

#: Up to so many nodes every order is considered; beyond, good ones.
EXACT_NODES: Final = 8
#: The message that a link's cost is counted for, in bytes: the activations of a few tokens.
_MESSAGE_BYTES: Final = 64 * 1024
#: The cost of a link that was not measured, in ns: more than any that was.
_UNKNOWN_NS: Final = 10**12
#: Orders of large rings are mended in so many rounds at most.
_ROUNDS: Final = 64
#: Comparisons that building the order of a large ring may take.
_COMPARISONS: Final = 3_000


class Worth(msgspec.Struct, frozen=True, order=True):
    """How bad a link is: the lower the better. By rate first, then by round trip.

    `rate` is minus Mbit/s, 0 where it was not measured; `rtt_us` as measured; `cost_ns` is what a message takes.
    """

    rate: float
    rtt_us: float
    cost_ns: int


#: A link that nobody measured: anything that was is better.
UNKNOWN: Final = Worth(0.0, float("inf"), _UNKNOWN_NS)
#: No link at all: for one rank.
NONE: Final = Worth(float("-inf"), 0.0, 0)
_INSIDE: Final = Worth(float("-inf"), 0.0, 1)

#: How bad the link between two nodes is, by their numbers; `None` where there is none.
WorthOf = Callable[[int, int], Worth | None]


def worth(link: Link | None) -> Worth:
    """How bad a link is. Within a machine is as good as it gets."""
    if link is None:
        return UNKNOWN
    if link.kind == "loopback":
        return _INSIDE
    if not link.mbps:
        return UNKNOWN
    rtt_us = link.rtt_us if link.rtt_us is not None else 0.0
    return Worth(-link.mbps, rtt_us, round(rtt_us * 1000 + _MESSAGE_BYTES * 8000 / link.mbps))


def ring_links(order: Sequence[int]) -> list[tuple[int, int]]:
    """The pairs that are linked in a ring of this order; a ring of two has one."""
    if len(order) < 2:
        return []
    return [(order[-1], order[0]), *pairwise(order)][len(order) == 2 :]


def judge(order: Sequence[int], of: WorthOf) -> tuple[Worth, int] | None:
    """The worst link of the ring and the sum of its costs; `None` where a link is missing."""
    found = [of(one, other) for one, other in ring_links(order)]
    present = [link for link in found if link is not None]
    if len(present) < len(found):
        return None
    return max(present, default=NONE), sum(link.cost_ns for link in present)


def best_ring(nodes: Sequence[int], of: WorthOf) -> tuple[int, ...] | None:
    """The best order of these nodes, beginning with the first of them; `None` where they form no ring.

    Exact for up to `EXACT_NODES`; of several that are equally good, the one that keeps nearest to the order given.
    """
    if len(nodes) <= 2:
        order = tuple(nodes)
        return order if judge(order, of) is not None else None
    if len(nodes) <= EXACT_NODES:
        return _exact(nodes, of)
    return _mended(_chained(nodes, of), of)


# --- exact ------------------------------------------------------------------------------------------------------


def _exact(nodes: Sequence[int], of: WorthOf) -> tuple[int, ...] | None:
    count = len(nodes)
    table = [[None if a == b else of(nodes[a], nodes[b]) for b in range(count)] for a in range(count)]
    levels = sorted({link for row in table for link in row if link is not None})
    number = {link: position for position, link in enumerate(levels)}
    level = [[len(levels) if link is None else number[link] for link in row] for row in table]
    # The best worst link with which there is a ring.
    worst = lowest(len(levels), lambda most: _has_ring(level, most))
    if worst == len(levels):
        return None
    costs = [[link.cost_ns if link is not None and number[link] <= worst else None for link in row] for row in table]
    return tuple(nodes[index] for index in _cheapest(costs))


def _has_ring(level: list[list[int]], most: int) -> bool:
    """Whether a ring exists over links of this level or better, from paths from node 0 by what they have passed."""
    count = len(level)
    beside = [sum(1 << b for b in range(count) if b != a and level[a][b] <= most) for a in range(count)]
    if any(bits.bit_count() < 2 for bits in beside):
        return False
    ends = {1: 1}  #: passed → the nodes that such a path may end at
    for _ in range(count - 1):
        longer: dict[int, int] = {}
        for passed, last in ends.items():
            for node in range(1, count):
                bit = 1 << node
                if not passed & bit and beside[node] & last:
                    longer[passed | bit] = longer.get(passed | bit, 0) | bit
        ends = longer
    return any(last & beside[0] for last in ends.values())


def _cheapest(costs: list[list[int | None]]) -> list[int]:
    """The cheapest ring; there is one. The first in the order of the numbers, where several are as cheap."""
    count = len(costs)
    everything = (1 << count) - 1
    rest: dict[tuple[int, int], int] = {}  #: from (passed, last): what the way back to node 0 costs at least
    far = 1 << 62

    def cheapest_from(passed: int, last: int) -> int:
        if passed == everything:
            back = costs[last][0]
            return far if back is None else back
        found = rest.get((passed, last))
        if found is None:
            found = far
            for node in range(1, count):
                step = costs[last][node]
                if step is not None and not passed >> node & 1:
                    found = min(found, step + cheapest_from(passed | 1 << node, node))
            rest[passed, last] = found
        return found

    order, passed = [0], 1
    while passed != everything:
        last = order[-1]
        left = cheapest_from(passed, last)
        for node in range(1, count):
            step = costs[last][node]
            if step is None or passed >> node & 1:
                continue
            if step + cheapest_from(passed | 1 << node, node) == left:
                order.append(node)
                passed |= 1 << node
                break
    return order


def ring_subsets(level: Sequence[Sequence[int]], most: int, size: int) -> set[int]:
    """The sets of so many nodes, as bits, that form a ring over links of this level or better."""
    count = len(level)
    if size < 2:
        return {1 << node for node in range(count)} if size == 1 else set()
    beside = [sum(1 << b for b in range(count) if b != a and level[a][b] <= most) for a in range(count)]
    if size == 2:
        return {1 << a | 1 << b for a in range(count) for b in range(a) if beside[a] >> b & 1}
    found: set[int] = set()
    for start in range(count - size + 1):  # the lowest node of the set; paths go on from it
        ends = {1 << start: 1 << start}
        for _ in range(size - 1):
            longer: dict[int, int] = {}
            for passed, last in ends.items():
                for node in range(start + 1, count):
                    bit = 1 << node
                    if not passed & bit and beside[node] & last:
                        longer[passed | bit] = longer.get(passed | bit, 0) | bit
            ends = longer
        found.update(passed for passed, last in ends.items() if last & beside[start])
    return found


# --- large ------------------------------------------------------------------------------------------------------


def _chained(nodes: Sequence[int], of: WorthOf) -> list[int]:
    """From the first node on, always to the best of the next few that are left."""
    order, left = [nodes[0]], list(nodes[1:])
    window = max(2, _COMPARISONS // len(nodes))
    while left:
        last = order[-1]
        position = min(range(min(window, len(left))), key=lambda index: (_or_worst(of(last, left[index])), index))
        order.append(left.pop(position))
    return order


def _or_worst(link: Worth | None) -> Worth:
    return link if link is not None else Worth(1.0, float("inf"), 2 * _UNKNOWN_NS)


def _mended(order: list[int], of: WorthOf) -> tuple[int, ...] | None:
    """Turn parts of the ring round as long as that takes its worst link out for two better ones."""
    count = len(order)
    budget = 4 * _COMPARISONS
    for _ in range(_ROUNDS):
        budget -= count
        if budget <= 0:
            break
        links = [_or_worst(of(order[index], order[(index + 1) % count])) for index in range(count)]
        worst = max(range(count), key=lambda index: links[index])
        best: tuple[Worth, int] | None = None
        for other in range(count):
            if abs(other - worst) in (0, 1, count - 1):
                continue
            budget -= 2
            low, high = sorted((worst, other))
            new = max(_or_worst(of(order[low], order[high])), _or_worst(of(order[low + 1], order[(high + 1) % count])))
            if new < links[worst] and (best is None or (new, other) < best):
                best = (new, other)
        if best is None:
            break
        low, high = sorted((worst, best[1]))
        order[low + 1 : high + 1] = reversed(order[low + 1 : high + 1])
    start = order.index(min(order))
    order = order[start:] + order[:start]
    return tuple(order) if judge(order, of) is not None else None
