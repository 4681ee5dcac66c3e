"""How the next token is chosen: mlx-lm's samplers and logits processors, with draws of the request's own.

Everything here runs on rank 0, in the thread that runs the batch.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Final

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from muster.sampling import SamplingParams

#: From log probabilities `[1, vocabulary]` to a token id `[1]`.
Sampler = Callable[[mx.array], mx.array]
#: From the tokens so far `[length]` and logits `[1, vocabulary]` to the logits to go on with.
Processor = Callable[[mx.array, mx.array], mx.array]

#: Odd, so that (seed + step * stride) mod 2**64 repeats only after 2**64 steps.
_SEED_STRIDE: Final = 0x9E3779B97F4A7C15
#: A nucleus that holds nothing but the likeliest token; mlx-lm takes 0 for "off".
_SMALLEST_TOP_P: Final = 1e-6


def make_draw(params: SamplingParams) -> Sampler | None:
    """The sampler of one sequence, or `None` where it is the greedy one that a batch shares."""
    return None if params.temperature == 0 else SeededSampler(params)


class SeededSampler:
    """Draws that depend on the request's own seed and step alone, whatever else is in the batch.

    A draw is part of a lazy graph, but its key is not: seeding fixes the key when the graph is built.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._seed = params.seed if params.seed is not None else secrets.randbits(63)
        self._step = 0
        self._choose: Sampler | None = None

    def __call__(self, logprobs: mx.array) -> mx.array:
        """One token id `[1]` from log probabilities `[1, vocabulary]`; each call is one step."""
        if self._choose is None:
            self._choose = self._make(logprobs.shape[-1])
        mx.random.seed((self._seed + self._step * _SEED_STRIDE) % 2**64)
        self._step += 1
        return self._choose(logprobs)

    def _make(self, vocabulary: int) -> Sampler:
        params = self._params
        return make_sampler(
            temp=params.temperature,
            top_p=max(params.top_p, _SMALLEST_TOP_P),
            min_p=params.min_p,
            # mlx-lm refuses a top_k that keeps everything.
            top_k=params.top_k if params.top_k < vocabulary else 0,
        )


def make_processors(params: SamplingParams) -> list[Processor]:
    """mlx-lm's processors for the biases and penalties that the request sets; often none."""
    return make_logits_processors(
        logit_bias=params.logit_bias or None,
        repetition_penalty=params.repetition_penalty if params.repetition_penalty != 1.0 else None,
        repetition_context_size=params.penalty_context_tokens,
        presence_penalty=params.presence_penalty,
        presence_context_size=params.penalty_context_tokens,
        frequency_penalty=params.frequency_penalty,
        frequency_context_size=params.penalty_context_tokens,
    )
