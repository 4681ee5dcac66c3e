"""The sequences that generate together, on every rank in step.

Every rank makes the same calls of `Batch.run` in the same order and in the thread that loaded the model. Rank 0 alone
samples: the ids that it chose reach the others inside the group, so all agree whatever hardware they have::

    rank 0:  admission = batch.admission(…)   send Step(admit=(admission,))   batch.run(step) → tokens
    others:                                   receive the step                batch.run(step)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import KVCache, make_prompt_cache

from muster.errors import ProtocolError
from muster.model.guard import Choice
from muster.model.load import LoadedModel
from muster.model.prefix import PrefixCache
from muster.model.solo import SoloGenerator, batchable
from muster.model.stack import step_model
from muster.rank_protocol import Admission, Step

#: Prompts that are prefilled together; mlx-lm's default.
_PREFILL_SEQUENCES: Final = 8
#: Fewer prompt tokens of a sequence per step are not worth a pass.
_LEAST_CHUNK_TOKENS: Final = 32
#: A cache that can be cut anywhere serves every prefix once its answer has ended; before that, an own copy must save
#: so many tokens to be worth a pass of its own.
_WORTH_KEEPING_TOKENS: Final = 256
#: Warming up is about kernels: the shapes of one sequence and of two, a prompt and some tokens.
_WARM_PROMPT: Final = [0, 0, 0, 0]
_WARM_TOKENS: Final = 3


@dataclass(frozen=True, slots=True)
class BatchToken:
    """What one step gave a sequence. `last` is set where the batch dropped it: an end token, or its `max_tokens`."""

    sequence: int
    token: int
    logprobs: mx.array
    last: Literal["stop", "length"] | None


@dataclass(frozen=True, slots=True)
class BatchStep:
    """What one call of `Batch.run` brought.

    `prefilled` has sequences with how many of their prompt tokens are done, those from the prompt cache included;
    `failed` the sequences whose own sampling code raised, which rank 0 must remove.
    """

    tokens: tuple[BatchToken, ...]
    prefilled: tuple[tuple[int, int], ...]
    failed: tuple[tuple[int, Exception], ...]


@dataclass(slots=True)
class _Sequence:
    number: int
    uid: int
    max_tokens: int
    cached_tokens: int
    keeps: int  #: ends of segments at which the cache is still to be kept
    choice: Choice | None
    prefilling: bool = True
    told: bool = False  #: its first token was given out before mlx-lm gave it


class Batch:
    """This rank's caches and forward passes for all sequences.

    `group` is the formed `mx.distributed.Group`, `None` for one rank. The bounds are the workload's and equal on every
    rank; a model that mlx-lm cannot batch has a `max_sequences` of 1.

    Raises:
        RuntimeError: from MLX, in `run` and `warm_up`, when another rank is gone. The group is dead then.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        group: Any | None,
        *,
        max_sequences: int,
        prefill_chunk_tokens: int,
        prompt_cache_bytes: int,
    ) -> None:
        self._group = group if loaded.plan.world_size > 1 else None
        self._leads = loaded.rank == 0
        self._pipelined = loaded.plan.sharding == "pipeline"
        self._chunk_tokens = prefill_chunk_tokens
        # Everything in one stream: the exchange of ids keeps its place between the passes on every rank.
        self._stream = mx.default_stream(mx.default_device())
        caches: list[Any] = make_prompt_cache(loaded.model)
        self._cuts_anywhere = all(isinstance(cache, KVCache) for cache in caches)
        batches = batchable(loaded.model)
        self.max_sequences = max_sequences if batches else 1
        self._ends: frozenset[int] = frozenset(loaded.tokenizer.eos_token_ids)
        self._generator = self._make_generator(loaded, batches)
        held = [len(loaded.plan.layers_of(rank)) for rank in range(loaded.plan.world_size)]
        self.prefix = PrefixCache(prompt_cache_bytes, share=held[loaded.rank] / max(held))
        self._by_number: dict[int, _Sequence] = {}
        self._by_uid: dict[int, _Sequence] = {}
        self._admitted: dict[int, tuple[list[Any] | None, Choice]] = {}

    def _make_generator(self, loaded: LoadedModel, batches: bool) -> Any:
        model = step_model(loaded)
        ends = [[token] for token in sorted(self._ends)]
        if not batches:
            return SoloGenerator(model, stop_tokens=ends, prefill_step_size=self._chunk_tokens, stream=self._stream)
        return BatchGenerator(
            model,
            stop_tokens=ends,
            completion_batch_size=self.max_sequences,
            prefill_batch_size=min(_PREFILL_SEQUENCES, self.max_sequences),
            prefill_step_size=self._chunk_tokens,
            stream=self._stream,
        )

    def __len__(self) -> int:
        """Sequences that run or wait for their prompt's first chunk."""
        return len(self._by_number)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._by_number

    def admission(
        self, sequence: int, tokens: Sequence[int], *, keep: Sequence[int], max_tokens: int, choice: Choice
    ) -> Admission:
        """Rank 0: what the next step says of a new sequence. The next call of `run` must be that step's.

        Args:
            sequence: a number that no other sequence has.
            tokens: the whole prompt, at least one.
            keep: lengths of the prompt's beginnings that later requests may share.
            max_tokens: at least 1.
            choice: how its tokens are chosen.
        """
        cache, cached = self.prefix.fetch(tokens)
        self._admitted[sequence] = (cache, choice)
        ends = [cached]
        least = _WORTH_KEEPING_TOKENS if self._cuts_anywhere else 1
        ends += [end for end in sorted(set(keep)) if cached + least <= end < len(tokens)]
        ends = [end for before, end in zip([-least, *ends], ends, strict=False) if end - before >= least]
        segments = tuple(end - begin for begin, end in zip(ends, [*ends[1:], len(tokens)], strict=True))
        return Admission(
            sequence=sequence,
            tokens=tuple(tokens),
            max_tokens=max_tokens,
            cached_tokens=cached,
            segments=segments,
        )

    @property
    def steady(self) -> bool:
        """Whether every sequence generates, and none is still in its prompt."""
        return not any(one.prefilling for one in self._by_number.values())

    def run(self, step: Step) -> BatchStep:
        """Carry out a step's changes and its first forward pass; each further pass is a call with an empty step.

        It returns when the ids of the pass before are known; the new pass is computed meanwhile. Rank 0 waits for a
        sequence's first token and gives it out at once.

        Raises:
            ProtocolError: this rank's prompt cache differs from rank 0's.
        """
        if step.cache_entries is not None:
            self.prefix.keep(step.cache_entries)
        # Before the sequences that leave put theirs into the cache: rank 0 looked it up without them.
        caches = [self._cached(admission) for admission in step.admit]
        self._remove(step.remove)
        for admission, (cache, choice) in zip(step.admit, caches, strict=True):
            self._admit(admission, cache, choice)
        if not self._by_number:
            return BatchStep((), (), ())
        self._generator.prefill_step_size = self._chunk()
        choices = [one.choice for one in self._by_number.values() if one.choice is not None]
        prompts, responses = self._generator.next()
        begun = any(response.end_of_prompt for response in prompts)
        # Rank 0 is about to wait for a first token, and the others hear of the next pass only after that.
        self._agree(at_once=begun)
        prefilled = tuple(self._prefilled(response) for response in prompts)
        tokens = tuple(token for response in responses if (token := self._generated(response)) is not None)
        if self._leads and begun:
            tokens += self._first_tokens()
        failed = tuple((choice.sequence, choice.error) for choice in choices if choice.error is not None)
        return BatchStep(tokens, prefilled, failed)

    def warm_up(self) -> None:
        """Run a batch of one and of two, all ranks in step: compiles kernels, reads what a pipeline left unread."""
        for count in (1, min(2, self.max_sequences)):
            self._generator.insert_segments(
                [[list(_WARM_PROMPT)] for _ in range(count)],
                [_WARM_TOKENS] * count,
                [None] * count,
                [[] for _ in range(count)],
                [None] * count,
                [[] for _ in range(count)],
            )
            prompts, responses = self._generator.next()
            while prompts or responses:
                self._agree(at_once=True)
                prompts, responses = self._generator.next()
        self.settle()

    def settle(self) -> None:
        """Wait for the passes that are under way, so that no rank leaves another in the middle of one."""
        mx.synchronize(self._stream)

    def _agree(self, *, at_once: bool) -> None:
        """Replace the ids that this rank sampled by rank 0's, without waiting for them.

        mlx-lm has no hook between sampling and the next pass, hence its private `_next_tokens`. The exchange becomes a
        part of the next pass, or is submitted `at_once`; always so in a pipeline: only the first layers depend on the
        ids there, and the other ranks would exchange them at another place in the order.
        """
        batch = self._generator._generation_batch
        if self._group is None or not batch.uids:
            return
        # The ring sums fewer numbers than it has ranks in another way, which took 5 ms longer: one copy for each rank.
        shape = (len(batch.uids), self._group.size())
        sampled = batch._next_tokens.astype(mx.uint32)[:, None]
        mine = mx.broadcast_to(sampled, shape) if self._leads else mx.zeros(shape, mx.uint32)
        batch._next_tokens = mx.distributed.all_sum(mine, group=self._group)[:, 0]
        if at_once or self._pipelined:
            mx.async_eval(batch._next_tokens)

    def _chunk(self) -> int:
        """Prompt tokens per sequence in this step: all prompts together hold running answers up by one chunk."""
        prompts = sum(one.prefilling for one in self._by_number.values())
        if prompts < 2 or prompts == len(self._by_number):
            return self._chunk_tokens
        shared = self._chunk_tokens // min(prompts, _PREFILL_SEQUENCES)
        return min(self._chunk_tokens, max(_LEAST_CHUNK_TOKENS, shared))

    def _cached(self, admission: Admission) -> tuple[list[Any] | None, Choice | None]:
        """The cache that a new sequence begins with, and on rank 0 how its tokens are chosen."""
        if admission.sequence in self._admitted:
            return self._admitted.pop(admission.sequence)
        cache, cached = self.prefix.fetch(admission.tokens)
        if cached != admission.cached_tokens:
            raise ProtocolError(
                f"this rank has {cached} tokens of sequence {admission.sequence}'s prompt in its cache, "
                f"rank 0 has {admission.cached_tokens}",
                remedy="this is a bug of muster: please report it",
            )
        return cache, None

    def _admit(self, admission: Admission, cache: list[Any] | None, choice: Choice | None) -> None:
        tokens = admission.tokens
        begin = admission.cached_tokens
        segments: list[list[int]] = []
        for length in admission.segments or (len(tokens) - begin,):
            segments.append(list(tokens[begin : begin + length]))
            begin += length
        (uid,) = self._generator.insert_segments(
            [segments],
            [admission.max_tokens],
            [cache],
            [list(tokens[: admission.cached_tokens])],
            [choice.sampler if choice is not None else None],
            [choice.processors if choice is not None else []],
        )
        one = _Sequence(
            admission.sequence, uid, admission.max_tokens, admission.cached_tokens, len(segments) - 1, choice
        )
        self._by_number[admission.sequence] = self._by_uid[uid] = one

    def _remove(self, sequences: Sequence[int]) -> None:
        gone = [self._by_number[number] for number in sequences if number in self._by_number]
        if not gone:
            return
        # A prompt that was cancelled half-way may be asked again.
        caches = self._generator.remove([one.uid for one in gone], return_prompt_caches=True)
        for one in gone:
            self._forget(one)
            cache, tokens = caches[one.uid]
            if len(tokens) > one.cached_tokens:
                self.prefix.insert(tokens, cache)

    def _forget(self, one: _Sequence) -> None:
        del self._by_number[one.number], self._by_uid[one.uid]

    def _prefilled(self, response: Any) -> tuple[int, int]:
        one = self._by_uid[response.uid]
        one.prefilling = not response.end_of_prompt
        if response.end_of_segment and one.keeps:
            one.keeps -= 1
            cache, tokens = self._generator.extract_cache([one.uid])[one.uid]
            self.prefix.insert(tokens, cache, "user")
        return one.number, one.cached_tokens + response.progress[0]

    def _generated(self, response: Any) -> BatchToken | None:
        one = self._by_uid[response.uid]
        if response.finish_reason is not None:
            self._forget(one)
            self.prefix.insert(response.all_tokens, response.prompt_cache)
        if one.told:
            one.told = False
            return None
        return BatchToken(one.number, response.token, response.logprobs, response.finish_reason)

    def _first_tokens(self) -> tuple[BatchToken, ...]:
        """The first tokens of sequences whose prompts have just ended.

        mlx-lm gives a token out once the pass after it is submitted, and on a CPU that takes as long as the pass.
        """
        batch = self._generator._generation_batch
        begun = [
            (row, one)
            for row, uid in enumerate(batch.uids)
            if (one := self._by_uid[uid]).choice is not None and not one.prefilling and not batch._num_tokens[row]
        ]
        ids: list[int] = batch._next_tokens.tolist() if begun else []
        tokens: list[BatchToken] = []
        for row, one in begun:
            one.told = True
            last: Literal["stop", "length"] | None = "length" if one.max_tokens == 1 else None
            last = "stop" if ids[row] in self._ends else last
            tokens.append(BatchToken(one.number, ids[row], batch._next_logprobs[row], last))
        return tuple(tokens)
