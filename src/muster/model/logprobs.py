"""Log probabilities of tokens, as clients see them.

They are the model's own, in nats, before biases, penalties, grammars and temperature: what OpenAI's API reports since
2024. `BatchGenerator` reports them after processors, so a sequence that has any keeps the logits from before.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import mlx.core as mx

from muster.model.choose import Processor
from muster.model.tokens import TokenTexts
from muster.sampling import Alternative, TokenLogprob

#: Stands for minus infinity, which JSON has no number for; OpenAI's API does the same.
_LOWEST: Final = -9999.0


class RawLogits:
    """A processor, the first of a sequence, that remembers the logits as they come from the model."""

    def __init__(self) -> None:
        self._rows: deque[mx.array] = deque()

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """The same logits; a second reference to them, since later processors may write into theirs."""
        self._rows.append(mx.array(logits))
        return logits

    def next(self) -> mx.array:
        """The log probabilities `[vocabulary]` of the next token that was not asked about yet."""
        logits = self._rows.popleft()[0].astype(mx.float32)
        return logits - mx.logsumexp(logits)


def with_raw(processors: list[Processor]) -> tuple[list[Processor], RawLogits | None]:
    """The processors with a `RawLogits` in front, where there are any."""
    if not processors:
        return processors, None
    raw = RawLogits()
    return [raw, *processors], raw


def token_logprob(token: int, row: mx.array, top: int, texts: TokenTexts) -> TokenLogprob:
    """What clients learn of a token that was chosen.

    Args:
        token: its id.
        row: log probabilities `[vocabulary]` that it was chosen from.
        top: how many alternatives to name.
        texts: of the model's tokenizer.
    """
    row = row.reshape(-1)
    top = min(top, row.size)
    picked = mx.array([token])
    if top > 0:
        best = mx.argpartition(-row, kth=top - 1)[:top]
        picked = mx.concatenate([picked, best.astype(picked.dtype)])
    values = row[picked].astype(mx.float32)
    mx.eval(picked, values)
    ids: Any = picked.tolist()
    logprobs: Any = values.tolist()
    pairs = [(int(number), max(float(value), _LOWEST)) for number, value in zip(ids, logprobs, strict=True)]
    data, text = texts.of(token)
    ranked = sorted(pairs[1:], key=lambda pair: -pair[1])
    return TokenLogprob(
        token=token,
        text=text,
        data=data,
        logprob=pairs[0][1],
        top=tuple(Alternative(number, texts.of(number)[1], value) for number, value in ranked),
    )
