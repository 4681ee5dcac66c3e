"""Which sizes of a model the ranks of a tensor sharding must share evenly: one rule, for plans and for placement."""

from __future__ import annotations

import math
from typing import Any, Final, cast

from muster.errors import ModelError
from muster.model.config import whole
from muster.model.files import ModelFiles
from muster.needs import SharedSize

#: Inner sizes of feed-forward layers, beside `intermediate_size`, as the architectures call them.
_INNER: Final = (
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "dense_intermediate_size",
    "expert_ffn_hidden_size",
    "ffn_hidden_size",
    "share_expert_dim",
)
#: Far above any group size of MLX's, which are powers of two up to 128.
_MOST_GROUP: Final = 2**20
#: Numbers of heads and groups beside the usual two.
_HEADS: Final = ("num_attention_groups", "linear_num_key_heads", "linear_num_value_heads", "o_groups")


def shared_sizes(files: ModelFiles, *, vocabulary: bool) -> tuple[SharedSize, ...]:
    """Every size that must divide by the ranks; hidden_size itself is never split by mlx-lm.

    `vocabulary`: whether the architecture shares out the head too.
    """
    text = files.text_config
    sizes: list[tuple[str, int | None]] = [("num_attention_heads", files.heads)]
    # Latent attention (DeepSeek) expands its heads from one shared latent: num_key_value_heads is not used.
    if whole(text, "kv_lora_rank") is None and whole(text, "num_attention_groups") is None:
        sizes.append(("num_key_value_heads", files.kv_heads))
    sizes += [(name, whole(text, name)) for name in _HEADS]
    if vocabulary:
        sizes.append(("vocab_size", files.vocabulary))
    inner = [("intermediate_size", files.intermediate), *((name, whole(text, name)) for name in _INNER)]
    return (
        *(SharedSize(name, size) for name, size in sizes if size is not None),
        *(SharedSize(name, size, grouped=True) for name, size in inner if size is not None),
        *(SharedSize(name, size, grouped=True, divides=False) for name, size in _attention_width(files)),
    )


def group_size(files: ModelFiles) -> int:
    """How many neighbouring weights share a scale, the least common multiple over all layers; 1 if not quantised."""
    quantisation = files.config.get("quantization") or files.text_config.get("quantization_config")
    if not isinstance(quantisation, dict):
        return 1
    entries = cast("dict[str, Any]", quantisation)
    if entries.get("quant_method") in ("mxfp4", "mxfp8"):
        return 32  # by the format's definition
    nested = (entry for entry in entries.values() if isinstance(entry, dict))
    sizes = [whole(cast("dict[str, Any]", entry), "group_size") or 1 for entry in (entries, *nested)]
    common = 1
    for size in sizes:
        common = math.lcm(common, size)
        if common > _MOST_GROUP:
            raise ModelError(
                f"config.json has quantisations whose group_size together is {common}, more than {_MOST_GROUP}",
                remedy="repair config.json",
            )
    return common


def _attention_width(files: ModelFiles) -> list[tuple[str, int]]:
    """The input of the attention's output projection, which a rank gets a slice of."""
    head_size = whole(files.text_config, "v_head_dim") or files.head_size
    if files.heads is None:
        return []
    if head_size is None:
        return [("hidden_size", files.hidden_size)] if files.hidden_size is not None else []
    return [(f"num_attention_heads {files.heads} x head size {head_size}", files.heads * head_size)]
