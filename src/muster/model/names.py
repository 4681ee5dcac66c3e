"""Reads the name of a tensor in a checkpoint: which layer, which module, and what tensor sharding does to it."""

from __future__ import annotations

import re
from typing import Final, Literal

import msgspec

from muster.model.architectures import Architecture
from muster.model.headers import TensorInfo

Role = Literal["", "embedding", "head"]

_LAYER: Final = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_PARAMETERS: Final = frozenset(
    {"weight", "bias", "scales", "biases", "global_scale", "weight_packed", "weight_scale", "weight_scale_inv", "scale"}
)
#: Parameters that some checkpoints append to the name of a module with an underscore.
_SUFFIX: Final = re.compile(r"(.+_proj)_(blocks|scales|bias|weight_scale|weight_scale_2)$")
#: A scale each of many weights that are packed beside it: no parameters of the model.
_SCALES: Final = frozenset(
    {"scales", "biases", "weight_scale", "weight_scale_inv", "scale", "weight_scale_2", "global_scale"}
)
_EMBEDDINGS: Final = frozenset({"embed_tokens", "word_embeddings", "embedders", "wte", "tok_embeddings", "embed"})
_HEADS: Final = frozenset({"lm_head", "head", "output_layer"})

#: What a module is called in mlx-lm, by the names that checkpoints use before its `sanitize` has renamed and joined
#: them; any one that the architecture divides counts.
_ALIASES: Final[dict[str, tuple[str, ...]]] = {
    "w1": ("gate_proj",),
    "w2": ("down_proj",),
    "w3": ("up_proj",),
    "gate_up_proj": ("gate_proj",),
    "kv_b_proj": ("embed_q",),
    "q_proj": ("qkv_proj", "qkvg_proj"),
    "k_proj": ("qkv_proj", "qkvg_proj"),
    "v_proj": ("qkv_proj", "qkvg_proj"),
    "q_conv1d": ("conv",),
    "k_conv1d": ("conv",),
    "v_conv1d": ("conv",),
    "wq_b": ("q_b_proj",),
    "wo_a": ("o_a_proj",),
    "wo_b": ("o_b_proj",),
    "attn_sink": ("sinks",),
}
#: Parts of a layer that no architecture divides, although names in them are those of divided modules.
_WHOLE: Final = frozenset({"indexer", "compressor"})


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor. `leaf` is the name of its module, or its own where it belongs to none; `parameter` what it is there.

    `layer` is `None` outside of the layers.
    """

    name: str
    info: TensorInfo
    leaf: str
    parameter: str
    layer: int | None
    whole: bool
    role: Role

    def is_divided(self, architecture: Architecture) -> bool:
        """Whether tensor sharding gives each rank a part of it."""
        module = self._module(architecture)
        if module is None or self.whole or self.parameter == "global_scale":
            return False
        # A bias is added once, after the sum over the ranks.
        return not (self.parameter == "bias" and module in architecture.summed)

    def shared_size(self, architecture: Architecture) -> int | None:
        """The size along which mlx-lm divides it; `None` where it does not, or the checkpoint has it otherwise."""
        if self.leaf not in architecture.divided or not self.is_divided(architecture) or not self.info.shape:
            return None
        if "conv" in self.leaf:  # by channel, which follows from the heads
            return None
        if self.leaf in architecture.summed or self.parameter == "bias":
            return self.info.shape[-1]
        return self.info.shape[max(len(self.info.shape) - 2, 0)]

    def bytes(self, *, dequantises: bool) -> int:
        """Bytes in memory."""
        if dequantises and self.info.dtype.startswith("F8"):
            return 2 * self.info.bytes
        return self.info.bytes

    @property
    def is_scale(self) -> bool:
        """Whether it says how packed weights beside it are to be read."""
        return self.parameter in _SCALES

    def _module(self, architecture: Architecture) -> str | None:
        for name in (self.leaf, *_ALIASES.get(self.leaf, ())):
            if name in architecture.divided:
                return name
        return None


def read_name(name: str, info: TensorInfo, *, lone: bool = False) -> Tensor:
    """Take a tensor's name apart; `lone`: it belongs to a tower beside the language model, whatever its layers."""
    parts = name.split(".")
    parameter = parts[-1]
    leaf = parameter
    if parameter in _PARAMETERS:
        named = [part for part in parts[:-1] if not part.isdigit()]
        leaf = named[-1] if named else parameter
    elif (suffixed := _SUFFIX.match(parameter)) is not None:
        leaf, parameter = suffixed.group(1), suffixed.group(2)
    found = None if lone else _LAYER.search(name)
    layer = int(found.group(1)) if found is not None else None
    role: Role = ""
    if lone or (layer is None and (leaf in _EMBEDDINGS or "ngram_embeddings" in parts)):
        role = "embedding"
    elif layer is None and leaf in _HEADS:
        role = "head"
    whole = lone or not _WHOLE.isdisjoint(parts)
    return Tensor(name=name, info=info, leaf=leaf, parameter=parameter, layer=layer, whole=whole, role=role)
