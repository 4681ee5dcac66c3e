"""Generation in step over all ranks: every rank runs a `Decoder`, rank 0 alone runs a `Generation`.

Rank 0 hands out `Prefill` and `Advance` steps and every rank, itself included, applies them to its decoder in
the same order. The sampled ids of rank 0 are the only ones, so the ranks agree whatever hardware they have::

    rank 0:  logits = decoder.prefill(tokens);  piece = generation.advance(logits);  logits = decoder.step(piece.token)
    others:           decoder.prefill(tokens);                                                decoder.step(token)

A batching decoder keeps this division: rank 0 decides what to insert, advance by which ids, and remove.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, Final

import mlx.core as mx
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from muster.model.load import LoadedModel
from muster.model.params import FinishReason, Piece, SamplingParams
from muster.model.prompt import check_prompt

#: Called with (prompt tokens done, prompt tokens in all).
PrefillProgress = Callable[[int, int], None]

#: Prompt tokens per forward pass: mlx-lm's own default, a compromise of speed and the memory of one pass.
PREFILL_CHUNK_TOKENS: Final = 2048

#: Steps after which freed buffers go back to the system; mlx-lm does the same.
_CLEAR_CACHE_STEPS: Final = 256

_SEED_STRIDE: Final = (
    0x9E3779B97F4A7C15  #: odd, so that (seed + step * stride) mod 2**64 repeats only after 2**64 steps
)


class Decoder:
    """This rank's cache for one sequence. Every rank makes the same calls, in the same order, in the same thread.

    Every forward pass is evaluated before the next one is built: in a pipeline, sends and receives of two passes
    in one graph have no order between them, and the results are wrong.

    Raises:
        RuntimeError: from MLX, in `prefill` and `step`, when another rank is gone. The group is dead then.
    """

    def __init__(self, loaded: LoadedModel, *, prefill_chunk_tokens: int = PREFILL_CHUNK_TOKENS) -> None:
        if prefill_chunk_tokens < 1:
            raise ValueError(f"prefill_chunk_tokens is {prefill_chunk_tokens}; it must be at least 1")
        self._model = loaded.model
        self._gives_logits = loaded.plan.sharding != "pipeline" or loaded.rank == 0
        self._chunk_tokens = prefill_chunk_tokens
        self._cache: list[Any] = make_prompt_cache(loaded.model)
        self._steps = 0
        self._position = 0

    @property
    def position(self) -> int:
        """Tokens in the cache."""
        return self._position

    def prefill(self, tokens: Sequence[int], on_progress: PrefillProgress | None = None) -> mx.array:
        """Run all `tokens` (at least one) through the model, chunk by chunk.

        Returns:
            The logits after the last token, `[1, vocabulary]`. Only rank 0 may use them: on the other ranks of a
            pipeline it is an array of another meaning.
        """
        if not tokens:
            raise ValueError("prefill needs at least one token")
        done = 0
        while len(tokens) - done > 1:
            chunk = tokens[done : min(done + self._chunk_tokens, len(tokens) - 1)]
            with mx.stream(generation_stream):
                self._model(mx.array([list(chunk)]), cache=self._cache)
                mx.eval([entry.state for entry in self._cache])
            mx.clear_cache()
            done += len(chunk)
            self._position += len(chunk)
            if on_progress is not None:
                on_progress(done, len(tokens))
        logits = self._forward(tokens[-1])
        if on_progress is not None:
            on_progress(len(tokens), len(tokens))
        return logits

    def step(self, token: int) -> mx.array:
        """Run one more `token`, the one that rank 0 chose, through the model. Returns as `prefill` does."""
        self._steps += 1
        if self._steps % _CLEAR_CACHE_STEPS == 0:
            mx.clear_cache()
        return self._forward(token)

    def _forward(self, token: int) -> mx.array:
        inputs = mx.array([[token]])
        with mx.stream(generation_stream):
            if self._gives_logits:
                output = self._model(inputs, cache=self._cache)[:, -1, :]
            else:
                # The stack without the head: it takes part in every exchange, and the head's weights stay unread.
                output = self._model.model(inputs, cache=self._cache)
            mx.eval(output, [entry.state for entry in self._cache])
        self._position += 1
        return output


class Sampler:
    """Chooses token ids from logits. Its draws depend on its own seed and step alone, never on other sequences."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], vocabulary: int | None) -> None:
        # mlx-lm refuses a top_k that keeps everything.
        keeps_all = vocabulary is not None and params.top_k >= vocabulary
        self._choose = make_sampler(
            temp=params.temperature,
            top_p=params.top_p,
            min_p=params.min_p,
            top_k=0 if keeps_all else params.top_k,
        )
        self._processors = make_logits_processors(
            repetition_penalty=params.repetition_penalty if params.repetition_penalty != 1.0 else None,
            repetition_context_size=params.penalty_context_tokens,
            presence_penalty=params.presence_penalty,
            presence_context_size=params.penalty_context_tokens,
            frequency_penalty=params.frequency_penalty,
            frequency_context_size=params.penalty_context_tokens,
        )
        self._draws = params.temperature > 0
        self._seed = params.seed if params.seed is not None else secrets.randbits(63)
        self._history = list(prompt)
        self._context_tokens = params.penalty_context_tokens
        self._step = 0

    def sample(self, logits: mx.array) -> int:
        """The next token id, from logits `[1, vocabulary]`."""
        with mx.stream(generation_stream):
            if self._processors:
                history = mx.array(self._history[-self._context_tokens :])
                for processor in self._processors:
                    logits = processor(history, logits)
            if self._draws:
                mx.random.seed((self._seed + self._step * _SEED_STRIDE) % 2**64)
            chosen: Any = self._choose(logits - mx.logsumexp(logits, axis=-1, keepdims=True)).item()
        token = int(chosen)
        self._step += 1
        self._history.append(token)
        return token


class Generation:
    """Rank 0's side of one request: turns logits into pieces of text until it is finished.

    Raises:
        RequestError: the prompt does not fit the model; raised before any rank runs a step.
    """

    def __init__(self, loaded: LoadedModel, prompt: Sequence[int], params: SamplingParams) -> None:
        check_prompt(loaded, prompt)
        self._sampler = Sampler(params, prompt, loaded.vocabulary)
        self._detokenizer = loaded.tokenizer.detokenizer
        self._end_tokens = frozenset(loaded.tokenizer.eos_token_ids)
        room = params.max_tokens if loaded.context_tokens is None else loaded.context_tokens - len(prompt)
        self._limit = min(params.max_tokens, room)
        self._count = 0
        self._finish: FinishReason | None = None

    @property
    def generated_tokens(self) -> int:
        """Tokens chosen so far, the end token included."""
        return self._count

    @property
    def finish(self) -> FinishReason | None:
        """Why the generation is over; `None` while it goes on."""
        return self._finish

    def advance(self, logits: mx.array) -> Piece:
        """Choose the next token. The piece of an end token carries no text of its own, only what was held back."""
        assert self._finish is None, "the generation is finished"
        token = self._sampler.sample(logits)
        self._count += 1
        if token in self._end_tokens:
            self._finish = "stop"
        else:
            self._detokenizer.add_token(token)
            if self._count >= self._limit:
                self._finish = "length"
        if self._finish is not None:
            self._detokenizer.finalize()
        return Piece(token=token, text=self._detokenizer.last_segment, finish=self._finish)


def warm_up(loaded: LoadedModel) -> None:
    """One prefill and one step on every rank at once: compiles kernels and reads what a pipeline left unread."""
    decoder = Decoder(loaded)
    decoder.prefill([0, 0])
    decoder.step(0)
    mx.clear_cache()
