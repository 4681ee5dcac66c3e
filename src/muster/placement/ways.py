"""The ways in which a workload may be shared out: how many ranks, and how a model is sharded over them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from muster.needs import ModelNeeds, against_pipeline, against_tensor, even_split
from muster.placement.choose import Arrangement
from muster.placement.costs import RankCost, StageCosts, slice_cost, with_headroom
from muster.placement.demands import Demand, Equal, Stages
from muster.placement.layouts import LayoutSharding
from muster.placement.words import MODEL_RANK_BYTES, RANK_BYTES
from muster.spec import InstanceSpec, ModelWorkload

#: More ranks are not tried.
MOST_RANKS = 1024


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One way: so many ranks, sharded so, and what they want of nodes."""

    ranks: int
    sharding: LayoutSharding
    demand: Demand
    needed_bytes: int  #: what the smallest rank must find free


class Ways:
    """All ways for one wish, and what their ranks take.

    Where `model` is not known, that is what the wish says, or an estimate from `weights_bytes`, or nothing.
    """

    def __init__(self, model: ModelNeeds | None, wish: InstanceSpec, weights_bytes: int | None = None) -> None:
        self.model = model if isinstance(wish.workload, ModelWorkload) else None
        self.wish = wish
        self._weights_bytes = weights_bytes
        self.stages: StageCosts | None = None
        if self.model is not None and isinstance(wish.workload, ModelWorkload) and self.model.layers:
            self.stages = StageCosts(self.model, wish.workload)

    def of(self, ranks: int) -> Iterator[Way]:
        """The ways for so many ranks, the best first; none where the model cannot be sharded so."""
        given = self.wish.memory_bytes
        if self.model is None or self.stages is None or not isinstance(self.wish.workload, ModelWorkload):
            needed = given or 0
            if self._weights_bytes is not None:
                needed = rank_memory_bytes(msgspec.structs.replace(self.wish, ranks=ranks), self._weights_bytes)
            sharding: LayoutSharding = "pipeline" if self.wish.split and ranks > 1 else ""
            split = self.wish.split if sharding else ()
            yield Way(ranks=ranks, sharding=sharding, demand=Equal(ranks, needed, split), needed_bytes=needed)
            return
        layers = len(self.model.layers)
        for sharding in self.shardings(ranks):
            if sharding == "pipeline" and given is None:
                even = even_split(layers, ranks) if self.model.even_pipeline else ()
                stages = Stages(ranks, self.stages, self.wish.split or even)
                yield Way(ranks=ranks, sharding=sharding, demand=stages, needed_bytes=stages.least_bytes)
                continue
            split = (layers,) * ranks
            if sharding == "pipeline":
                split = self.wish.split or even_split(layers, ranks)
            needed = with_headroom(self._whole(sharding, ranks).total) if given is None else given
            yield Way(ranks=ranks, sharding=sharding, demand=Equal(ranks, needed, split), needed_bytes=needed)

    def shardings(self, ranks: int) -> tuple[LayoutSharding, ...]:
        """How the model can be sharded over so many ranks, the best first."""
        if ranks == 1:
            return ("none",)
        faults = self.faults(ranks)
        wished = self.wish.workload.sharding if isinstance(self.wish.workload, ModelWorkload) else "auto"
        if wished == "auto" and not self.wish.split:
            return tuple(one for one in ("tensor", "pipeline") if not faults[one])
        one = "tensor" if wished == "tensor" else "pipeline"
        return () if faults[one] else (one,)

    def faults(self, ranks: int) -> dict[str, str]:
        """Why the model can not be sharded over so many ranks, by way; an empty text where it can."""
        assert self.model is not None
        return {
            "tensor": against_tensor(self.model, ranks),
            "pipeline": against_pipeline(self.model, ranks, self.wish.split or None),
        }

    def costs(self, way: Way, found: Arrangement) -> list[RankCost]:
        """What each rank is predicted to take, by rank."""
        if self.stages is None or way.sharding == "":
            return [RankCost(total=way.needed_bytes)] * way.ranks
        if way.sharding == "pipeline":
            costs: list[RankCost] = []
            stop = self.stages.layers
            for layers in found.split:
                costs.append(self.stages.of(stop - layers, stop))
                stop -= layers
        else:
            costs = [self._whole(way.sharding, way.ranks)] * way.ranks
        if self.wish.memory_bytes is not None:
            return [msgspec.structs.replace(cost, total=self.wish.memory_bytes) for cost in costs]
        return costs

    def _whole(self, sharding: LayoutSharding, ranks: int) -> RankCost:
        assert self.model is not None and self.stages is not None and isinstance(self.wish.workload, ModelWorkload)
        if sharding == "tensor":
            return slice_cost(self.model, self.wish.workload, ranks)
        return self.stages.of(0, self.stages.layers)


def rank_memory_bytes(spec: InstanceSpec, weights_bytes: int) -> int:
    """Bytes that each rank of `spec` needs when the model's weights take `weights_bytes` in all.

    For models that nobody knows more of: every rank gets an equal part and a tenth more.
    """
    if spec.memory_bytes is not None:
        return spec.memory_bytes
    if isinstance(spec.workload, ModelWorkload):
        return MODEL_RANK_BYTES + int(weights_bytes * 1.1) // spec.ranks
    return RANK_BYTES
