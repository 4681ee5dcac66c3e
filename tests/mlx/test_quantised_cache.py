"""What `muster model` says of quantised caches is what mlx-lm's take, and they cannot be batched."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from lazy_models import build, config_of, files_of
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from muster.model.needs import needs_of
from muster.predict import quantised_token_bytes

pytestmark = pytest.mark.mlx


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_a_quantised_cache_takes_what_is_said(model_type: str, bits: int) -> None:
    config = config_of(model_type)
    model = build(config)
    caches: list[Any] = make_prompt_cache(model)
    for tokens in (255, 1):
        model(mx.zeros((1, tokens), mx.int32), cache=caches)
    needs = needs_of(files_of(model, config))
    real = 0
    for layer, cache in zip(needs.layers, caches, strict=True):
        if layer.window:
            real += layer.kv_token_bytes
        else:
            quantised = cache.to_quantized(group_size=64, bits=bits)
            real += sum(array.nbytes for array in (*quantised.keys, *quantised.values)) // 256
    assert quantised_token_bytes(needs, bits) == real


def test_mlx_lm_cannot_batch_quantised_caches() -> None:
    """Where it can, ranks could have them: see `quantised_token_bytes`."""
    assert not hasattr(QuantizedKVCache, "merge")
