"""What ranks want of nodes: the same for each, or the layers of a pipeline. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from muster.placement.costs import StageCosts, with_headroom
from muster.placement.split import fits, split_layers


class Demand(Protocol):
    """What ranks want of nodes."""

    ranks: int
    wanted: int  #: units that all ranks hold together
    least_bytes: int  #: what the smallest rank takes, with headroom

    def units(self, free_bytes: int) -> int:
        """At most so many units fit into so many bytes."""
        ...

    def may_fit(self, free_bytes: Sequence[int]) -> bool:
        """Whether it may fit with these bytes, by rank. Cheap: what cannot be need not be split."""
        ...

    def may_fit_somehow(self, free_bytes: Sequence[int]) -> bool:
        """As `may_fit`, in any order of the ranks."""
        ...

    def split(self, free_bytes: Sequence[int], speeds: Sequence[float]) -> tuple[int, ...] | None:
        """Layers per rank with these bytes, by rank; `None` where they do not fit."""
        ...


class Equal:
    """Every rank takes the same; `layers` is how many each runs, empty where there are none."""

    def __init__(self, ranks: int, needed_bytes: int, layers: tuple[int, ...] = ()) -> None:
        self.ranks = ranks
        self.wanted = ranks
        self.least_bytes = needed_bytes
        self._layers = layers

    def units(self, free_bytes: int) -> int:
        """One rank, or none."""
        return 1 if free_bytes >= self.least_bytes else 0

    def may_fit(self, free_bytes: Sequence[int]) -> bool:
        """Whether each has room."""
        return all(free >= self.least_bytes for free in free_bytes)

    def may_fit_somehow(self, free_bytes: Sequence[int]) -> bool:
        """The same."""
        return self.may_fit(free_bytes)

    def split(self, free_bytes: Sequence[int], speeds: Sequence[float]) -> tuple[int, ...] | None:
        """What was given, if each has room."""
        del speeds
        return None if any(free < self.least_bytes for free in free_bytes) else self._layers


class Stages:
    """A pipeline; `fixed` is the split that somebody asked for."""

    def __init__(self, ranks: int, costs: StageCosts, fixed: tuple[int, ...] = ()) -> None:
        self.ranks = ranks
        self.wanted = costs.layers
        self.least_bytes = costs.least_bytes
        self.costs = costs
        self.fixed = fixed

    def units(self, free_bytes: int) -> int:
        """Layers."""
        return self.costs.most(free_bytes)

    def share_bytes(self, layers: int) -> int:
        """What a node must have free for so many layers, where they are the middle ones."""
        start = max(0, (self.costs.layers - layers) // 2)
        return with_headroom(self.costs.of(start, start + layers).total)

    def may_fit(self, free_bytes: Sequence[int]) -> bool:
        """By what the ends take beside their layers."""
        return self.costs.may_fit(free_bytes)

    def may_fit_somehow(self, free_bytes: Sequence[int]) -> bool:
        """The same, with any two ranks at the ends."""
        return self.costs.may_fit_somehow(free_bytes)

    def split(self, free_bytes: Sequence[int], speeds: Sequence[float]) -> tuple[int, ...] | None:
        """By memory and speed, or as it was asked for."""
        if self.fixed:
            return self.fixed if fits(self.costs, self.fixed, free_bytes) else None
        return split_layers(self.costs, free_bytes, speeds)
