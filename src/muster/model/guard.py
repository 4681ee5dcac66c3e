"""How the tokens of one sequence are chosen, with its own errors kept away from its neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import mlx.core as mx

from muster.model.choose import Processor, Sampler

#: How MLX's messages begin when the group is broken (mlx/distributed/ring/ring.cpp, jaccl).
_GROUP_ERRORS: Final = ("[ring]", "[jaccl]")


class Choice:
    """The sampler and the logits processors of one sequence.

    A pass serves all sequences, and the other ranks run it too: what one sequence's own code raises must not end it.
    Such a sequence goes on with greedy tokens until it is removed, and `error` says why.
    """

    def __init__(self, sequence: int, sampler: Sampler | None, processors: Sequence[Processor]) -> None:
        self.sequence = sequence
        self.error: Exception | None = None
        #: `None` for the greedy one, which all sequences share.
        self.sampler: Sampler | None = self._guarded_sampler(sampler) if sampler is not None else None
        self.processors: list[Processor] = [self._guarded_processor(processor) for processor in processors]

    def _guarded_sampler(self, sampler: Sampler) -> Sampler:
        def sample(logprobs: mx.array) -> mx.array:
            if self.error is None:
                try:
                    return sampler(logprobs)
                except Exception as error:  # foreign code of one request: a grammar, a penalty
                    self._fail(error)
            return mx.argmax(logprobs, axis=-1)

        return sample

    def _guarded_processor(self, processor: Processor) -> Processor:
        def process(tokens: mx.array, logits: mx.array) -> mx.array:
            if self.error is None:
                try:
                    return processor(tokens, logits)
                except Exception as error:  # as above
                    self._fail(error)
            return logits

        return process

    def _fail(self, error: Exception) -> None:
        # A processor that evaluates something may be the first to meet a dead group: that ends the rank.
        if str(error).startswith(_GROUP_ERRORS):
            raise error
        self.error = error
