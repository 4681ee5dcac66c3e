"""The part of the model that a rank runs in a step: rank 0 all of it, the others the stack without the head."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from muster.model.load import LoadedModel


def step_model(loaded: LoadedModel) -> Any:
    """What this rank calls as `model(tokens [batch, length], cache=…)`.

    Rank 0 gets logits `[batch, length, vocabulary]`. Another rank gets `[batch, length, 1]` of no meaning, unless the
    head itself is shared out: it takes part in every exchange, and the head's weights stay unread.
    """
    if loaded.rank == 0 or not hasattr(loaded.model, "model") or _head_is_shared(loaded.model):
        return loaded.model
    return _Stack(loaded.model)


class _Stack:
    """A model without its head, as far as mlx-lm's generators look at it."""

    def __init__(self, model: Any) -> None:
        self._model = model
        inner: Any = model.model
        # Beside a vision tower the language model is one further in. Source: muse_spark.py of mlx-lm.
        self._stack: Any = inner if callable(inner) else inner.language_model
        self.layers = model.layers

    def make_cache(self) -> list[Any]:
        """Empty caches of one sequence."""
        return make_prompt_cache(self._model)

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        return self._stack(inputs, cache=cache)[..., :1]


def _head_is_shared(model: Any) -> bool:
    """Whether mlx-lm sharded a module outside the stack, so that all ranks must run it."""
    return any(
        "Sharded" in type(module).__name__ and not name.startswith("model.") for name, module in model.named_modules()
    )
