"""How many layers each rank of a pipeline runs: by memory, and by measured speed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from muster.needs import even_split
from muster.placement.costs import StageCosts
from muster.placement.searching import lowest

#: Speeds count as equal up to this factor: measurements of one machine differ by 15 % from run to run.
_SAME_SPEED: Final = 1.3


def speed_classes(speeds: Sequence[float | None]) -> list[float]:
    """The speeds, those that are about equal made equal; all 1 where one of them is not known."""
    known = [speed for speed in speeds if speed is not None and speed > 0]
    if len(known) < len(speeds):
        return [1.0] * len(speeds)
    classes: dict[float, float] = {}
    head = 0.0
    for speed in sorted(set(known), reverse=True):
        if speed * _SAME_SPEED < head or not head:
            head = speed
        classes[speed] = head
    return [classes[speed] for speed in known]


def split_layers(costs: StageCosts, free_bytes: Sequence[int], speeds: Sequence[float]) -> tuple[int, ...] | None:
    """Layers per rank, rank 0 (which runs the last ones) first; `None` where they do not fit.

    Every rank runs at least one layer, and none more than fit into its bytes. Among such splits, the slowest stage
    (layers / speed) is as fast as can be, and the others are as even as that allows; equal ranks that have room get
    what `even_split` gives them.
    """
    count, layers = len(free_bytes), costs.layers
    if not 1 <= count <= layers:
        return None
    if len(set(speeds)) == 1:
        even = even_split(layers, count)
        if fits(costs, even, free_bytes):
            return even
    scale = max(speeds)
    relative = [speed / scale for speed in speeds]
    times = sorted({number / speed for speed in set(relative) for number in range(1, layers + 1)})
    # The shortest time of a stage with which all layers find a place.
    shortest = lowest(len(times), lambda number: _reaches(costs, free_bytes, _most(relative, times[number])))
    if shortest == len(times):
        return None
    return _within(costs, free_bytes, relative, _most(relative, times[shortest]))


def fits(costs: StageCosts, split: Sequence[int], free_bytes: Sequence[int]) -> bool:
    """Whether every rank of this split finds room."""
    start = 0
    for layers, free in zip(reversed(split), reversed(free_bytes), strict=True):
        if not costs.fits(start, start + layers, free):
            return False
        start += layers
    return True


def _most(speeds: Sequence[float], time: float) -> list[int]:
    """How many layers each rank may run to be done in this time."""
    return [int(time * speed * (1 + 1e-12)) for speed in speeds]


def _reaches(costs: StageCosts, free_bytes: Sequence[int], most: Sequence[int]) -> bool:
    """Whether the last layer is reached where every rank, from the first layer on, takes all that it can."""
    start = 0
    for rank in reversed(range(len(most))):
        limit = min(start + most[rank], costs.layers - rank)
        stop = costs.furthest(start, free_bytes[rank], limit)
        if stop == start:
            return False
        start = stop
    return start == costs.layers


def _within(
    costs: StageCosts, free_bytes: Sequence[int], speeds: Sequence[float], most: Sequence[int]
) -> tuple[int, ...]:
    """The split nearest to the speeds, of those that fit; there is one."""
    layers, count = costs.layers, len(most)
    needed = [layers] * count  #: entry r: where the ranks from r - 1 down must begin at the latest
    for rank in range(count - 1):
        stop = needed[rank]
        limit = max(0, stop - most[rank])
        needed[rank + 1] = min(costs.earliest(stop, free_bytes[rank], limit), layers - rank - 1)
    split = [0] * count
    start = 0
    for rank in reversed(range(count)):
        ideal = start + int((layers - start) * speeds[rank] / sum(speeds[: rank + 1]) + 1e-9)
        furthest = costs.furthest(start, free_bytes[rank], min(start + most[rank], layers - rank))
        stop = min(max(ideal, needed[rank], start + 1), furthest)
        split[rank], start = stop - start, stop
    return tuple(split)
