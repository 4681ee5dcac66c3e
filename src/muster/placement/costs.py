"""What a rank takes of its node: by layers, or the same for every rank. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

import msgspec

from muster.needs import ModelNeeds
from muster.predict import PROCESS_BYTES, Sharding, layer_cache, outside_weights, rank_memory, workspace
from muster.spec import ModelWorkload

#: The context that is counted where nobody says one, in tokens.
DEFAULT_CONTEXT: Final = 8192
#: What is left free beside a prediction: the error that it may have, which grows with it, and at least this.
_HEADROOM_SHARE: Final = 20
_HEADROOM_BYTES: Final = 32 * 2**20


class RankCost(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank is predicted to take, in bytes; `prompts` are those that its prompt cache keeps."""

    total: int
    weights: int = 0
    cache: int = 0


def with_headroom(predicted_bytes: int) -> int:
    """What must be free for a rank that is predicted to take so much."""
    return predicted_bytes + max(_HEADROOM_BYTES, predicted_bytes // _HEADROOM_SHARE)


def context_of(workload: ModelWorkload, needs: ModelNeeds) -> int:
    """The tokens of one sequence that are counted."""
    if workload.context_tokens is not None:
        return workload.context_tokens
    return min(DEFAULT_CONTEXT, needs.context_tokens or DEFAULT_CONTEXT)


class StageCosts:
    """What a rank takes that runs some layers in a row, whole: a stage of a pipeline, or the only rank.

    Constant time after the first pass over the layers; agrees with `muster.predict.rank_memory`.
    """

    def __init__(self, needs: ModelNeeds, workload: ModelWorkload) -> None:
        self.layers = len(needs.layers)
        context = context_of(workload, needs)
        sequences = 1 if needs.solo else workload.concurrency
        kept = 1 if needs.solo else workload.max_batch
        self._needs = needs
        self._weights = _sums([layer.weights_bytes for layer in needs.layers])
        chunk = workload.prefill_chunk_tokens
        self._cache = _sums(
            [layer_cache(layer, context, sequences, prefill_chunk_tokens=chunk) for layer in needs.layers]
        )
        self._prompts = _sums([layer_cache(layer, context, kept) for layer in needs.layers])
        self._most_prompts = workload.prompt_cache_bytes
        self._outside = {
            (first, last): outside_weights(needs, first=first, last=last)
            for first in (False, True)
            for last in (False, True)
        }
        self._workspace = {
            leads: workspace(
                needs,
                "pipeline",
                2,
                leads=leads,
                sequences=sequences,
                prefill_chunk_tokens=chunk,
                context_tokens=context,
            )
            for leads in (False, True)
        }
        smallest = sorted(
            weights + cache
            for weights, cache in zip(_differences(self._weights), _differences(self._cache), strict=True)
        )
        self._smallest = _sums(smallest)
        self._most: dict[tuple[int, bool, bool], int] = {}

    def of(self, start: int, stop: int) -> RankCost:
        """The rank that runs layers `start` up to, not including, `stop`."""
        last = stop == self.layers
        weights = self._weights[stop] - self._weights[start] + self._outside[start == 0, last]
        cache = self._cache[stop] - self._cache[start]
        prompts = min(self._most_prompts, self._prompts[stop] - self._prompts[start])
        total = weights + cache + prompts + self._workspace[last] + PROCESS_BYTES
        return RankCost(total=total, weights=weights, cache=cache)

    @property
    def least_bytes(self) -> int:
        """Less than this is room for no layer at all."""
        return with_headroom(self._floor(first=False, last=False) + self._smallest[1])

    def fits(self, start: int, stop: int, free_bytes: int) -> bool:
        """Whether that rank, with headroom, finds room in so many bytes."""
        return with_headroom(self.of(start, stop).total) <= free_bytes

    def furthest(self, start: int, free_bytes: int, limit: int) -> int:
        """The highest stop, at most `limit`, up to which the layers from `start` on fit; `start` where none does."""
        low, high = start, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.fits(start, middle, free_bytes):
                low = middle
            else:
                high = middle - 1
        return low

    def earliest(self, stop: int, free_bytes: int, limit: int) -> int:
        """The lowest start, at least `limit`, from which the layers up to `stop` fit; `stop` where none does."""
        low, high = limit, stop
        while low < high:
            middle = (low + high) // 2
            if self.fits(middle, stop, free_bytes):
                high = middle
            else:
                low = middle + 1
        return low

    def most(self, free_bytes: int, *, first: bool = False, last: bool = False) -> int:
        """More layers than this fit nowhere in so many bytes, whichever they are.

        With `first` beside what comes before the layers, with `last` beside what comes after them.
        """
        key = (free_bytes, first, last)
        if key in self._most:
            return self._most[key]
        floor = self._floor(first=first, last=last)
        low, high = 0, self.layers
        while low < high:
            middle = (low + high + 1) // 2
            if with_headroom(floor + self._smallest[middle]) <= free_bytes:
                low = middle
            else:
                high = middle - 1
        self._most[key] = low
        return low

    def may_fit(self, free_bytes: Sequence[int]) -> bool:
        """Whether all layers may fit, with so many bytes for each rank, by rank; if not, they never do."""
        if len(free_bytes) == 1:
            return self.most(free_bytes[0], first=True, last=True) >= self.layers
        ends = self.most(free_bytes[0], last=True) + self.most(free_bytes[-1], first=True)
        return ends + sum(map(self.most, free_bytes[1:-1])) >= self.layers

    def may_fit_somehow(self, free_bytes: Sequence[int]) -> bool:
        """As `may_fit`, in any order of the ranks."""
        if len(free_bytes) == 1:
            return self.may_fit(free_bytes)
        inner = [self.most(free) for free in free_bytes]
        spare = sum(inner) - self.layers
        if spare < 0:
            return False
        firsts = [most - self.most(free, first=True) for most, free in zip(inner, free_bytes, strict=True)]
        lasts = [most - self.most(free, last=True) for most, free in zip(inner, free_bytes, strict=True)]
        # Of each only the two cheapest places can matter: they must be two ranks.
        places = range(len(inner))
        cheap = [sorted(places, key=costs.__getitem__)[:2] for costs in (firsts, lasts)]
        return any(firsts[one] + lasts[two] <= spare for one in cheap[0] for two in cheap[1] if one != two)

    def _floor(self, *, first: bool, last: bool) -> int:
        return self._workspace[last] + PROCESS_BYTES + self._outside[first, last]


def slice_cost(needs: ModelNeeds, workload: ModelWorkload, world_size: int) -> RankCost:
    """What every rank of a tensor sharding takes."""
    context = context_of(workload, needs)
    everything = range(len(needs.layers))
    sharding: Sharding = "tensor"
    kept = 1 if needs.solo else workload.max_batch
    prompts = sum(layer_cache(layer, context, kept, ranks=world_size) for layer in needs.layers)
    found = rank_memory(
        needs,
        sharding,
        world_size,
        everything,
        context_tokens=context,
        sequences=workload.concurrency,
        prefill_chunk_tokens=workload.prefill_chunk_tokens,
        prompt_cache_bytes=min(workload.prompt_cache_bytes, prompts),
    )
    return RankCost(total=found.total, weights=found.weights, cache=found.cache)


def _sums(values: list[int]) -> list[int]:
    return list(accumulate(values, initial=0))


def _differences(sums: list[int]) -> list[int]:
    return [after - before for before, after in pairwise(sums)]
