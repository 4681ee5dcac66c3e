"""What stands in for mlx-lm's fused Metal kernels where there is no Metal, so that the models that use them run.

The same shapes and types come out, and about the same values; no more is promised than memory depends on.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import mlx.core as mx


def put_in(model_module: ModuleType) -> None:
    """Put them in the place of the kernels that a module of mlx-lm's models has imported; the others it leaves."""
    if mx.metal.is_available():
        return
    for kernel in (
        expert_routing,
        norm_add_norm,
        post_expert_norm_combine,
        pre_norm,
        qk_norm,
        qk_norm_rope,
        rms_norm_sigmoid_gate,
    ):
        found = getattr(model_module, kernel.__name__, None)
        if getattr(found, "__module__", "").startswith("mlx_lm.kernels."):
            setattr(model_module, kernel.__name__, kernel)


def expert_routing(
    logits: mx.array,
    expert_bias: mx.array,
    *,
    top_k: int,
    multiplier: float,
    score_eps: float,
    route_scale: float,
) -> list[mx.array]:
    """The experts with the highest scores, and their weights."""
    scores = mx.sigmoid(logits * multiplier)
    chosen = mx.argpartition(-(scores + expert_bias), kth=top_k - 1, axis=-1)[..., :top_k].astype(mx.uint32)
    weights = mx.take_along_axis(scores, chosen, axis=-1)
    total = weights.sum(axis=-1, keepdims=True) + score_eps
    return [chosen, (weights / total * route_scale).astype(mx.float32)]


def norm_add_norm(
    branch: mx.array,
    stream: mx.array,
    *,
    alpha: mx.array,
    beta: mx.array,
    post_weight: mx.array | None,
    post_eps: float,
    next_norm: Any,
) -> tuple[mx.array, mx.array | None]:
    """The stream with the normed branch added, and that normed for the next one."""
    scaled = branch if post_weight is None else branch * post_weight
    stream = (alpha * stream + beta * mx.fast.rms_norm(scaled, None, post_eps)).astype(mx.float32)
    return stream, None if next_norm is None else pre_norm(stream, next_norm, dtype=branch.dtype)


def pre_norm(stream: mx.array, norm: Any, *, dtype: mx.Dtype) -> mx.array:
    """The stream, normed."""
    return mx.fast.rms_norm(stream, norm.weight.astype(mx.float32), norm.eps).astype(dtype)


def post_expert_norm_combine(experts: mx.array, weights: mx.array, *, norm_weight: mx.array, eps: float) -> mx.array:
    """The experts' outputs, normed and summed by their weights."""
    normed = mx.fast.rms_norm(experts * norm_weight, None, eps)
    return (normed * weights[..., None]).sum(axis=-2).astype(experts.dtype)


def qk_norm(
    qkvg: mx.array, *, n_heads: int, n_kv_heads: int, head_dim: int, eps: float, query_scale: float
) -> list[mx.array]:
    """Queries and keys by head, normed."""
    heads = qkvg[..., : (n_heads + n_kv_heads) * head_dim].reshape(*qkvg.shape[:-1], n_heads + n_kv_heads, head_dim)
    queries, keys = mx.split(mx.fast.rms_norm(heads, None, eps), [n_heads], axis=-2)
    return [queries * query_scale, keys]


def qk_norm_rope(
    qkvg: mx.array,
    *,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    eps: float,
    query_scale: float,
    rope_base: float,
    offset: int | mx.array,
) -> list[mx.array]:
    """Queries and keys by head, normed and rotated."""
    normed = qk_norm(qkvg, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim, eps=eps, query_scale=query_scale)
    return [
        mx.fast.rope(
            heads.swapaxes(1, 2), head_dim, traditional=True, base=rope_base, scale=1.0, offset=offset
        ).swapaxes(1, 2)
        for heads in normed
    ]


def rms_norm_sigmoid_gate(x: mx.array, gate: mx.array, *, eps: float) -> mx.array:
    """Each head's attention, normed and gated; the heads side by side."""
    batch, _, length, _ = x.shape
    normed = mx.fast.rms_norm(x, None, eps).swapaxes(1, 2).reshape(batch, length, -1)
    return (normed * mx.sigmoid(gate)).astype(x.dtype)
