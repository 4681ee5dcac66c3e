"""How much each layer of a model keeps of a sequence, as mlx-lm's caches do. Pure.

Most of it is in the shapes of the weights: a layer caches what its key and value projections give. What they do not
show (windows, states, a latent that is or is not expanded) is in the config, or in the architecture's source.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, cast

import msgspec

from muster.errors import ModelError
from muster.model.architectures import Architecture
from muster.model.config import whole
from muster.model.files import ModelFiles
from muster.model.names import Tensor
from muster.model.reading import MOST, shown
from muster.model.windows import is_shared, window_tokens

#: Projections whose rows are cached whole as they come out, keys and values of all heads.
_KEYS: Final = "k_proj"
_VALUES: Final = "v_proj"
#: States are kept in float32 whatever the model's type. Source: `gated_delta_update`, `recurrent_gla` of mlx-lm.
_STATE_BYTES: Final = 4
#: Convolutions whose last inputs a layer keeps, and how many values of state beside them for each channel.
#: Source: recurrent_gemma.py, gear.py of mlx-lm.
_CONVOLUTIONS: Final = {"conv_1d": 1, "key_conv": 0, "value_conv": 0}


class LayerCache(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that one layer keeps of a sequence; the fields are those of `muster.needs.LayerNeeds`."""

    token_bytes: int = 0
    divides: bool = True
    window: int = 0
    state_bytes: int = 0
    whole_bytes: int = 0


def layer_caches(
    files: ModelFiles, architecture: Architecture, tensors: Iterable[Tensor], value_bytes: int
) -> tuple[LayerCache, ...]:
    """What each layer keeps; `value_bytes` is the size of one computed value."""
    text = _with_lists(files.text_config)
    by_layer: list[list[Tensor]] = [[] for _ in range(files.layers)]
    for tensor in tensors:
        if tensor.layer is not None:
            by_layer[tensor.layer].append(tensor)
    return tuple(
        _layer_cache(files, text, architecture, number, one, value_bytes) for number, one in enumerate(by_layer)
    )


def _with_lists(text: dict[str, Any]) -> dict[str, Any]:
    """The config with the lists that every layer looks into made fit for it.

    Raises:
        ModelError: one is no list of whole numbers.
    """
    if "compress_ratios" not in text:
        return text
    sources = {name: frozenset(_numbers(text, name)) for name in ("kv_source_layer_ids", "index_source_layer_ids")}
    return text | sources | {"compress_ratios": _numbers(text, "compress_ratios")}


def _numbers(text: dict[str, Any], name: str) -> list[int]:
    values: Any = text.get(name) or []
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value <= MOST for value in values):  # pyright: ignore[reportUnknownVariableType]
        raise ModelError(
            f"config.json has {name} {shown(values)}, expected a list of whole numbers", remedy="repair config.json"
        )
    return cast("list[int]", values)


def _layer_cache(
    files: ModelFiles,
    text: dict[str, Any],
    architecture: Architecture,
    number: int,
    tensors: list[Tensor],
    value_bytes: int,
) -> LayerCache:
    if "compress_ratios" in text:
        return _compressed(text, number, value_bytes)
    if (rank := whole(text, "kv_lora_rank")) is not None and _count(tensors, "kv_a_proj_with_mqa"):
        return _latent(files, text, architecture, tensors, rank, value_bytes)
    if (state := _state(text, tensors, value_bytes)) is not None:
        return LayerCache(state_bytes=state)
    if is_shared(text, architecture.windows, number, files.layers):
        return LayerCache()
    values = _rows(tensors, _KEYS) + (_rows(tensors, _VALUES) or _rows(tensors, _KEYS))
    if values == 0 and files.heads and files.hidden_size:  # joined with the queries, in one of many ways
        values = 2 * (files.kv_heads or files.heads) * (files.head_size or files.hidden_size // files.heads)
    # Source: the default in iquestloopcoder.py of mlx-lm.
    loop = (whole(text, "loop_window_size") or 64) if architecture.name == "iquestloopcoder" else None
    rotates = architecture.rotating and loop is None
    return LayerCache(
        token_bytes=values * value_bytes,
        window=window_tokens(text, architecture.name, architecture.windows, number) if rotates else 0,
        # A second pass over the layers, with a window of its own. Source: iquestloopcoder.py of mlx-lm.
        state_bytes=values * value_bytes * (loop or 0),
        whole_bytes=_rows(tensors, "index_k_proj") * value_bytes,
    )


def _latent(
    files: ModelFiles,
    text: dict[str, Any],
    architecture: Architecture,
    tensors: list[Tensor],
    rank: int,
    value_bytes: int,
) -> LayerCache:
    """Latent attention: the latent and the rotated part, one for all heads; or expanded to all heads (DeepSeek-V2)."""
    rotated = whole(text, "qk_rope_head_dim") or 0
    if not architecture.latent:
        head = (whole(text, "qk_nope_head_dim") or 0) + rotated + (whole(text, "v_head_dim") or 0)
        return LayerCache(token_bytes=(files.heads or 0) * head * value_bytes)
    values = (rank + rotated) * _count(tensors, "kv_a_proj_with_mqa")
    # The indexer's keys go into a cache of their own, whose values are zeros of the same size.
    values += 2 * _rows(tensors, "wk")
    return LayerCache(token_bytes=values * value_bytes, divides=False)


def _compressed(text: dict[str, Any], number: int, value_bytes: int) -> LayerCache:
    """A window of whole tokens, and where the layer makes them, latents and index keys of groups of tokens.

    Source: `LayerCache` in deepseek_v41.py of mlx-lm.
    """
    head = whole(text, "head_dim") or 512
    window = whole(text, "sliding_window") or 128
    ratios: list[int] = text["compress_ratios"]
    ratio = ratios[number] if number < len(ratios) else 0
    token = 0
    if ratio and number in text["kv_source_layer_ids"]:
        index = whole(text, "index_head_dim") or 128
        keys = head + (index if number in text["index_source_layer_ids"] else 0)
        token = -(-keys * value_bytes // ratio)
    return LayerCache(token_bytes=token, divides=False, state_bytes=window * head * value_bytes)


def _state(text: dict[str, Any], tensors: list[Tensor], value_bytes: int) -> int | None:
    """Bytes of the state of a recurrent layer, `None` if the layer is no such one."""
    if any(one.leaf in _CONVOLUTIONS for one in tensors):
        return _convolved(tensors, value_bytes)
    if _count(tensors, "A_log") == 0 and _count(tensors, "g_norm") == 0 and _count(tensors, "dt_bias") == 0:
        return None
    linear = text.get("linear_attn_config")
    if isinstance(linear, dict):  # Kimi
        config: dict[str, Any] = {str(key): value for key, value in linear.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        heads, size = whole(config, "num_heads") or 0, whole(config, "head_dim") or 0
        kernel = whole(config, "short_conv_kernel_size") or 4
        return 3 * heads * size * (kernel - 1) * value_bytes + heads * size * size * _STATE_BYTES
    value_heads = whole(text, "linear_num_value_heads")
    if value_heads is not None:  # Qwen3-Next and Qwen3.5
        key_heads, key_size = whole(text, "linear_num_key_heads") or 0, whole(text, "linear_key_head_dim") or 0
        value_size = whole(text, "linear_value_head_dim") or 0
        kernel = whole(text, "linear_conv_kernel_dim") or 4
        width = 2 * key_heads * key_size + value_heads * value_size
        return width * (kernel - 1) * value_bytes + value_heads * key_size * value_size * _STATE_BYTES
    if _count(tensors, "g_norm"):  # Bailing's linear attention: a square per head
        heads, size = whole(text, "num_attention_heads") or 0, whole(text, "head_dim") or 0
        return heads * size * size * _STATE_BYTES
    return _mamba(text, tensors, value_bytes)


def _convolved(tensors: list[Tensor], value_bytes: int) -> int:
    """What a layer keeps that convolves instead of looking back: so many values for each channel."""
    return value_bytes * sum(
        one.info.shape[0] * (max(one.info.shape[1:], default=1) - 1 + _CONVOLUTIONS[one.leaf])
        for one in tensors
        if one.leaf in _CONVOLUTIONS and one.parameter == "weight" and one.info.shape
    )


def _mamba(text: dict[str, Any], tensors: list[Tensor], value_bytes: int) -> int:
    """A convolution's last inputs, and a state of so many values for each channel."""
    convolutions = [
        one.info.shape for one in tensors if one.leaf == "conv1d" and one.parameter == "weight" and one.info.shape
    ]
    channels = max((shape[0] for shape in convolutions), default=0)
    kernel = max((max(shape[1:], default=1) for shape in convolutions), default=1)
    size = whole(text, "state_size", "ssm_state_size", "mamba_d_state", "d_state", "mamba_state_size") or 16
    return channels * ((kernel - 1) * value_bytes + size * _STATE_BYTES)


def _rows(tensors: list[Tensor], leaf: str) -> int:
    """Rows of the weights of that module: the values that it gives for a token."""
    return sum(
        one.info.shape[0] for one in tensors if one.leaf == leaf and one.parameter == "weight" and one.info.shape
    )


def _count(tensors: list[Tensor], leaf: str) -> int:
    return sum(one.leaf == leaf and not one.is_scale and one.parameter != "bias" for one in tensors)
