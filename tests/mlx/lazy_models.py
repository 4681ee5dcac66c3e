"""Models of every architecture that mlx-lm can share out, built from their configs alone: lazy arrays, no memory."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from muster.bench.families import CONFIGS, config_of
from muster.model.files import ModelFiles, describe
from muster.model.headers import TensorInfo

__all__ = ["CONFIGS", "Stand", "arrays", "build", "config_of", "files_of", "nbytes"]

_DTYPES = {mx.float32: "F32", mx.bfloat16: "BF16", mx.float16: "F16", mx.uint32: "U32", mx.uint8: "U8", mx.int32: "I32"}


class Stand:
    """What sharding asks of a group. No collective operation works on it."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def build(config: dict[str, Any], *, dtype: mx.Dtype = mx.bfloat16, bits: int = 0) -> Any:
    """The whole model, lazily; `bits` quantises what mlx-lm would. One that is packed by its maker stays as it is."""
    model_class, args_class = _get_classes(copy.deepcopy(config))
    model: Any = model_class(args_class.from_dict(copy.deepcopy(config)))
    packed = "quantization" in CONFIGS.get(config["model_type"], {})
    model.set_dtype(mx.float16 if packed else dtype)
    if packed:
        return model
    if bits:
        config["quantization"] = {"group_size": 32, "bits": bits}
        nn.quantize(model, group_size=32, bits=bits, class_predicate=_quantised)
    return model


def _quantised(name: str, module: nn.Module) -> bool:
    weight: Any = module.get("weight")
    return hasattr(module, "to_quantized") and weight is not None and weight.shape[-1] % 128 == 0


def files_of(model: Any, config: dict[str, Any]) -> ModelFiles:
    """What its checkpoint would say of itself."""
    return describe("m", config, {name: _info(array) for name, array in arrays(model)})


def arrays(model: Any) -> Iterable[tuple[str, mx.array]]:
    """All parameters by name."""
    flat: Any = tree_flatten(model.parameters())
    return flat


def nbytes(model: Any) -> int:
    """Bytes of all parameters."""
    return sum(array.nbytes for _, array in arrays(model))


def _info(array: mx.array) -> TensorInfo:
    return TensorInfo(_DTYPES[array.dtype], tuple(array.shape), "model.safetensors", array.nbytes)
