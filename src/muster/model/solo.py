"""One sequence at a time, for models that mlx-lm cannot batch; used like its `BatchGenerator`."""

from __future__ import annotations

import copy
import inspect
import sys
from collections import deque
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx_lm.generate import GenerationBatch, PromptProcessingBatch, StopSequences
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler


def batchable(model: Any) -> bool:
    """Whether mlx-lm gives a sequence of this model the same tokens in a batch as alone.

    Not where a layer's cache cannot be merged; nor where the layers carry a state from token to token and the
    architecture does not look at each sequence's length: the padding of a shorter prompt would flow into its state,
    and the answer would be wrong without an error (mamba, rwkv7, recurrent_gemma, jamba in mlx-lm 0.32.2).
    """
    caches = [inner for cache in make_prompt_cache(model) for inner in _flat(cache)]
    if not all(hasattr(cache, "merge") for cache in caches):
        return False
    if not any(isinstance(cache, ArraysCache) for cache in caches):
        return True
    # An architecture may be another one with other names for its weights (qwen3_5_moe).
    lineage = {one.__module__ for one in type(model).__mro__ if one.__module__.startswith("mlx_lm.models.")}
    return any(".lengths" in inspect.getsource(sys.modules[module]) for module in lineage)


def _flat(cache: Any) -> list[Any]:
    """The caches inside a list of caches."""
    if not isinstance(cache, CacheList):
        return [cache]
    return [inner for part in cast("tuple[Any, ...]", cache.caches) for inner in _flat(part)]


class _OneSequence(GenerationBatch):
    """mlx-lm's generating batch of one, on that sequence's own caches."""

    def extract_cache(self, idx: int) -> list[Any]:
        del idx
        return list(self.prompt_cache)


@dataclass(slots=True)
class _Pending:
    uid: int
    segments: list[list[int]]
    max_tokens: int
    cache: list[Any]
    tokens: list[int]
    sampler: Any
    processors: tuple[Any, ...]
    total: int
    done: int = 0


class SoloGenerator:
    """Generates for the first sequence until it ends; the others wait in order."""

    def __init__(self, model: Any, *, stop_tokens: list[list[int]], prefill_step_size: int, stream: mx.Stream) -> None:
        self.model = model
        self.prefill_step_size = prefill_step_size
        self._stream = stream
        self._stops = StopSequences(stop_tokens or None)
        self._pending: deque[_Pending] = deque()
        self._uids = 0
        # The same name as in `BatchGenerator`: `Batch` agrees on the next ids of both in one place.
        self._generation_batch: GenerationBatch = GenerationBatch.empty(model, greedy_sampler)

    def insert_segments(
        self,
        segments: list[list[list[int]]],
        max_tokens: list[int],
        caches: list[list[Any] | None],
        all_tokens: list[list[int]],
        samplers: list[Any],
        logits_processors: list[list[Any]],
    ) -> list[int]:
        """Append sequences; answers their numbers."""
        first = self._uids
        for index, parts in enumerate(segments):
            parts = [list(part) for part in parts if part]
            if len(parts[-1]) > 1:
                parts[-1:] = [parts[-1][:-1], parts[-1][-1:]]
            self._pending.append(
                _Pending(
                    uid=self._uids,
                    segments=parts,
                    max_tokens=max_tokens[index],
                    cache=caches[index] or make_prompt_cache(self.model),
                    tokens=all_tokens[index],
                    sampler=samplers[index] or greedy_sampler,
                    processors=tuple(logits_processors[index]),
                    total=sum(map(len, parts)),
                )
            )
            self._uids += 1
        return list(range(first, self._uids))

    def extract_cache(self, uids: list[int]) -> dict[int, tuple[list[Any], list[int]]]:
        """Copies of the caches of sequences that go on."""
        found = {one.uid: (copy.deepcopy(one.cache), one.tokens) for one in self._pending if one.uid in uids}
        if self._generation_batch.uids and self._generation_batch.uids[0] in uids:
            batch = self._generation_batch
            found[batch.uids[0]] = (copy.deepcopy(batch.prompt_cache), batch.tokens[0])
        return found

    def remove(self, uids: list[int], return_prompt_caches: bool = False) -> dict[int, tuple[list[Any], list[int]]]:
        """Forget sequences; answers their caches where wanted."""
        caches = self.extract_cache(uids) if return_prompt_caches else {}
        self._pending = deque(one for one in self._pending if one.uid not in uids)
        if self._generation_batch.uids and self._generation_batch.uids[0] in uids:
            self._generation_batch.filter([])
        return caches

    def next(self) -> tuple[list[PromptProcessingBatch.Response], list[GenerationBatch.Response]]:
        """One token of the sequence that generates, or one chunk of the next prompt."""
        with mx.stream(self._stream):
            if self._generation_batch.uids:
                return [], self._generation_batch.next()
            return ([self._prefill(self._pending[0])], []) if self._pending else ([], [])

    def _prefill(self, one: _Pending) -> PromptProcessingBatch.Response:
        segment = one.segments[0]
        if len(one.segments) == 1 and len(segment) == 1:
            self._begin(self._pending.popleft())
            return PromptProcessingBatch.Response(one.uid, (one.total, one.total), True, True)
        chunk, one.segments[0] = segment[: self.prefill_step_size], segment[self.prefill_step_size :]
        if not one.segments[0]:
            one.segments.pop(0)
        self.model(mx.array([chunk]), cache=one.cache)
        mx.eval([entry.state for entry in one.cache])
        mx.clear_cache()
        one.tokens += chunk
        one.done += len(chunk)
        return PromptProcessingBatch.Response(one.uid, (one.done, one.total), len(chunk) == len(segment), False)

    def _begin(self, one: _Pending) -> None:
        self._generation_batch = _OneSequence(
            self.model,
            [one.uid],
            mx.array(one.segments[0]),
            one.cache,
            [one.tokens],
            [one.sampler],
            greedy_sampler,
            [list(one.processors)],
            [self._stops],
            [one.max_tokens],
        )
