"""What a model needs, from config.json and the headers of its safetensors files. Reads no weights, imports no MLX.

Which tensors a tensor sharding divides is read from mlx-lm's own source (`architectures`); where a checkpoint names
them otherwise than mlx-lm, as many do that were not converted for it, `_ALIASES` says what becomes of them.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from muster.errors import ModelError
from muster.model.architectures import Architecture, architecture_of
from muster.model.caches import LayerCache, layer_caches
from muster.model.config import whole
from muster.model.files import ModelFiles
from muster.model.headers import DTYPE_BITS, TensorInfo
from muster.model.names import Tensor, read_name
from muster.model.reading import MOST
from muster.model.sizes import group_size, shared_sizes
from muster.needs import LayerNeeds, ModelNeeds, SharedSize, indivisible

__all__ = ["needs_of"]

#: World sizes that are tried for tensor sharding.
_SIZES: Final = range(2, 65)
#: What mlx-lm leaves out of memory: parts that are no language model, and layers that guess ahead.
_DROPPED: Final = re.compile(
    r"(?:^|[._])(?:vision|visual|audio|aligner|image_newline|multi_modal_projector|patch_merge_mlp|mm_projector|mtp)"
    r"|rotary_emb\.inv_freq|input_scale$"
)
_VISION: Final = re.compile(r"vision|projector|visual")
#: Head sizes for which MLX computes attention in one kernel, so that no scores are kept.
#: Source: `sdpa_full_supported_head_dim` in mlx/backend/metal/scaled_dot_product_attention.cpp.
_FUSED_HEAD_SIZES: Final = frozenset({64, 80, 128})
#: A thousand times what the largest models take; times a million tokens of a thousand sequences it has 64 bits.
_MOST_TOKEN: Final = 2**32
_MOST_STATE: Final = 2**48
#: Values of the hidden size that exist at once beside those of attention and feed-forward: the residual, its
#: normalised form, what is added to it, and their copies while a chunk goes from layer to layer.
_HIDDEN_COPIES: Final = 6


class _Sum(msgspec.Struct):
    """Bytes of tensors, and the part of them that a tensor sharding divides."""

    whole: int = 0
    divided: int = 0

    def add(self, count: int, *, divides: bool) -> None:
        self.whole += count
        self.divided += count if divides else 0


def needs_of(files: ModelFiles, *, model: str = "") -> ModelNeeds:
    """What `files` describe; `model` is what the user calls it, by default the directory.

    Raises:
        ModelError: the installed mlx-lm does not know the architecture, or the config contradicts itself.
    """
    architecture = architecture_of(files.config)
    tensors = _kept(files, architecture)
    tied = _is_tied(files, architecture, tensors)
    tensors = [tensor for tensor in tensors if not (tied and tensor.role == "head")]
    by_layer: dict[int, _Sum] = {number: _Sum() for number in range(files.layers)}
    outside, embedding, head = _Sum(), _Sum(), _Sum()
    for tensor in tensors:
        count = tensor.bytes(dequantises=architecture.dequantises)
        divides = architecture.tensor and tensor.is_divided(architecture)
        if tensor.layer is not None:
            by_layer[tensor.layer].add(count, divides=divides)
            continue
        outside.add(count, divides=divides)
        if tensor.role == "embedding":
            embedding.add(count, divides=divides)
        elif tensor.role == "head":
            head.add(count, divides=divides)
    value_bytes = _value_bytes(tensors)
    caches = layer_caches(files, architecture, tensors, value_bytes)
    layers = tuple(
        LayerNeeds(
            weights_bytes=by_layer[number].whole,
            tensor_bytes=by_layer[number].divided,
            kv_token_bytes=cache.token_bytes,
            kv_divides=cache.divides,
            window=cache.window,
            state_bytes=cache.state_bytes,
            kv_whole_bytes=cache.whole_bytes,
        )
        for number, cache in enumerate(caches)
    )
    vocabulary = not tied and "lm_head" in architecture.divided
    sizes = shared_sizes(files, vocabulary=vocabulary)
    group = group_size(files)
    sizes = (*sizes, *_further_sizes(tensors, architecture, sizes, group))
    parameters = _parameters(files, tensors, group)
    weights_bytes = sum(layer.weights_bytes for layer in layers) + outside.whole
    token_bytes = _token_values(files) * value_bytes
    plain_score_bytes = _score_copies(architecture, tensors) * (files.heads or 0) * value_bytes
    score_bytes = 0 if _is_fused(files, architecture) else plain_score_bytes
    _check_sums(
        files,
        (
            ("bytes of weights", weights_bytes, MOST),
            ("parameters", parameters, MOST),
            ("bytes for a token in the cache", sum(one.token_bytes + one.whole_bytes for one in caches), _MOST_TOKEN),
            ("tokens in a window", max((one.window for one in caches), default=0), MOST),
            ("bytes of state for a sequence", sum(one.state_bytes for one in caches), _MOST_STATE),
            ("bytes for a token while computing", token_bytes, _MOST_TOKEN),
            ("bytes of scores for a token", plain_score_bytes, _MOST_TOKEN),
            *((shared.name, shared.size, MOST) for shared in sizes),
        ),
    )
    return ModelNeeds(
        model=model or files.directory,
        model_type=files.model_type,
        layers=layers,
        outside_bytes=outside.whole,
        outside_tensor_bytes=outside.divided,
        embedding_bytes=embedding.whole,
        head_bytes=head.whole,
        tied=tied,
        parameters=parameters,
        bits=round(weights_bytes * 8 / parameters, 2) if parameters else 0.0,
        hidden_size=files.hidden_size or 0,
        heads=files.heads or 0,
        kv_heads=files.kv_heads or 0,
        vocabulary=files.vocabulary or 0,
        experts=files.experts or 0,
        context_tokens=files.context_tokens,
        tensor=architecture.tensor,
        pipeline=architecture.pipeline,
        even_pipeline=architecture.even_pipeline,
        tensor_sizes=tuple(n for n in _SIZES if architecture.tensor and not indivisible(sizes, group, n)),
        no_tensor="" if architecture.tensor else "mlx-lm has no tensor sharding for this architecture",
        no_pipeline="" if architecture.pipeline else "mlx-lm has no pipeline for this architecture",
        shared_sizes=sizes,
        group_size=group,
        token_bytes=token_bytes,
        score_bytes=score_bytes,
        plain_score_bytes=plain_score_bytes,
        plain_token_bytes=_step_bytes(files, caches),
        solo=architecture.solo,
        fingerprint=_fingerprint(files),
    )


def _check_sums(files: ModelFiles, sums: Iterable[tuple[str, int, int]]) -> None:
    """Refuse sizes from which no memory could be computed that a machine has, nor that a message can carry."""
    for name, value, most in sums:
        if value > most:
            raise ModelError(
                f"config.json and the weights of {files.directory} come to {value} {name}, expected at most {most}",
                remedy="repair config.json, or download the model again",
            )


def _kept(files: ModelFiles, architecture: Architecture) -> list[Tensor]:
    """The tensors that mlx-lm keeps of a checkpoint."""
    kept: list[Tensor] = []
    for name, info in files.tensors.items():
        if _DROPPED.search(name) and not (architecture.sees and _VISION.search(name)):
            continue
        if architecture.dequantises and name.endswith("weight_scale_inv"):
            continue
        tensor = read_name(name, info, lone=bool(_VISION.search(name)))
        if tensor.layer is not None and tensor.layer >= files.layers:
            continue
        kept.append(tensor)
    return kept


def _is_tied(files: ModelFiles, architecture: Architecture, tensors: Iterable[Tensor]) -> bool:
    if architecture.tied is not None:
        said = files.text_config.get("tie_word_embeddings")
        return said if isinstance(said, bool) else architecture.tied
    return not any(tensor.role == "head" for tensor in tensors)


def _value_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of a computed value: the embedding's type goes through the whole model."""
    types = [tensor.info.dtype for tensor in tensors if tensor.role == "embedding" and tensor.parameter != "biases"]
    return 4 if types and all(dtype in ("F32", "U32") for dtype in types) else 2


def _further_sizes(
    tensors: Iterable[Tensor], architecture: Architecture, known: tuple[SharedSize, ...], group: int
) -> tuple[SharedSize, ...]:
    """Sizes of divided tensors that forbid a world size which config.json's own sizes allow."""
    if not architecture.tensor:
        return ()
    allowed = [n for n in _SIZES if not indivisible(known, group, n)]
    found: dict[str, SharedSize] = {}
    for tensor in tensors:
        size = tensor.shared_size(architecture)
        if size is not None and any(size % n for n in allowed):
            found.setdefault(tensor.leaf, SharedSize(f"{tensor.leaf} {tensor.parameter}", size))
    return tuple(found.values())


def _parameters(files: ModelFiles, tensors: Iterable[Tensor], group: int) -> int:
    """How many weights there are, packed ones counted one by one."""
    total = 0
    for tensor in tensors:
        if tensor.is_scale:
            continue
        elements = math.prod(tensor.info.shape)
        scales = files.tensors.get(tensor.name.removesuffix("weight") + "scales")
        if tensor.info.dtype == "U32" and scales is not None:
            total += math.prod(scales.shape) * group
        else:
            total += 2 * elements if tensor.info.dtype == "U8" else elements
    return total


def _token_values(files: ModelFiles) -> int:
    """How many values one token of a prompt takes in the widest layer."""
    text = files.text_config
    hidden, heads = files.hidden_size or 0, files.heads or 0

    head_size = files.head_size or (hidden // heads if heads else 0)
    attention = 2 * heads * head_size + 2 * (files.kv_heads or 0) * head_size
    dense = 3 * (files.intermediate or 0)
    used = whole(text, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k") or 0
    inner = whole(text, "moe_intermediate_size", "expert_ffn_hidden_size") or files.intermediate or 0
    routed = used * (3 * inner + 2 * hidden) if files.experts else 0
    return _HIDDEN_COPIES * hidden + max(attention, dense, routed)


def _step_bytes(files: ModelFiles, caches: Iterable[LayerCache]) -> int:
    """What a token takes in a layer of the delta rule where no kernel goes from token to token: a state each."""
    if not {"linear_attn_config", "linear_num_value_heads"} & files.text_config.keys():
        return 0
    return min(max((one.state_bytes for one in caches if not one.token_bytes), default=0), _MOST_TOKEN)


def _score_copies(architecture: Architecture, tensors: Iterable[Tensor]) -> int:
    """How often scores exist at once where attention is not fused (measured: `muster bench memory`, mlx 0.32.4)."""
    if architecture.latent:  # those of the latent, and those of the positions
        return 2
    # Beside those that sinks are appended to there is what came out, and what it became without them.
    return 3 if any(tensor.leaf == "sinks" for tensor in tensors) else 1


def _is_fused(files: ModelFiles, architecture: Architecture) -> bool:
    """Whether a GPU keeps no scores of each token with each one looked back at; in latent attention it always does."""
    heads = files.heads or 0
    head_size = files.head_size or ((files.hidden_size or 0) // heads if heads else 0)
    return not architecture.latent and head_size in _FUSED_HEAD_SIZES


def _fingerprint(files: ModelFiles) -> str:
    """Of everything that was read: the config, and each tensor's name, type and shape."""
    # Not msgspec: it refuses numbers that a config may hold where nobody looks at them.
    digest = hashlib.sha256(json.dumps(files.config, sort_keys=True).encode())
    digest.update(msgspec.json.encode(_plain(files.tensors), order="sorted"))
    return digest.hexdigest()


def _plain(tensors: Mapping[str, TensorInfo]) -> dict[str, tuple[str, tuple[int, ...]]]:
    unknown = sorted({info.dtype for info in tensors.values()} - DTYPE_BITS.keys())
    if unknown:
        raise ModelError(f"the model has weights of unknown types {unknown}", remedy="use a model that mlx-lm can load")
    return {name: (info.dtype, info.shape) for name, info in tensors.items()}
