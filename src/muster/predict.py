"""How much memory a rank of a model will take, from what the model needs. Pure.

Checked against mlx-lm itself for every architecture that it can shard (`tests/mlx/test_predict.py`, and
`muster bench memory` with real ranks).
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from muster.needs import LayerNeeds, ModelNeeds

Sharding = Literal["none", "pipeline", "tensor"]

#: A runner beside MLX's memory: Python, mlx-lm, a tokenizer. It took up to 136 MB on Linux with mlx 0.32.4
#: (`muster bench memory`); a tokenizer with a large vocabulary takes more.
PROCESS_BYTES: Final = 160 * 10**6
#: A cache grows by so many tokens. Source: `KVCache.step` of mlx-lm.
CACHE_STEP_TOKENS: Final = 256
#: Prompts that are prefilled together at most; `muster.model.batch` says the same to mlx-lm.
PREFILL_SEQUENCES: Final = 8
#: Copies of a row of logits that exist at once: as computed, in float32 as log probabilities, and while sampling.
_LOGITS_BYTES: Final = 2 + 4 + 4

#: Values of a quantised cache that share a scale and a bias. Source: `kv_group_size` of mlx-lm's generate.
_KV_GROUP: Final = 64
_VALUE_BITS: Final = 16


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank takes, in bytes."""

    weights: int
    cache: int
    workspace: int
    prompts: int = 0  #: finished prompts that are kept for later ones
    process: int = PROCESS_BYTES

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.cache + self.workspace + self.prompts + self.process


def rank_memory(
    needs: ModelNeeds,
    sharding: Sharding,
    world_size: int,
    layers: range,
    *,
    context_tokens: int,
    sequences: int,
    prefill_chunk_tokens: int,
    prompt_cache_bytes: int = 0,
) -> RankMemory:
    """What the rank takes that runs `layers`, a range of layer numbers; all of them unless it is a pipeline.

    `sequences` of `context_tokens` each are in the cache at once. The rank with the last layers of a pipeline is
    rank 0, and is taken to compute the logits. `prompt_cache_bytes` is counted whole: a rank that holds fewer layers
    than another keeps less.
    """
    if needs.solo:
        sequences = 1
    cache = rank_cache(
        needs, sharding, world_size, layers, context_tokens, sequences, prefill_chunk_tokens=prefill_chunk_tokens
    )
    computing = workspace(
        needs,
        sharding,
        world_size,
        leads=layers.stop == len(needs.layers),
        sequences=sequences,
        prefill_chunk_tokens=prefill_chunk_tokens,
        context_tokens=context_tokens,
    )
    # While weights are read there is no cache yet.
    return RankMemory(
        weights=rank_weights(needs, sharding, world_size, layers),
        cache=cache,
        workspace=max(computing, loading(needs, sharding) - cache),
        prompts=prompt_cache_bytes,
    )


def rank_weights(needs: ModelNeeds, sharding: Sharding, world_size: int, layers: range) -> int:
    """Bytes of weights that the rank keeps.

    A pipeline's ranks read the embedding only where the tokens come in, and the head only where they are chosen:
    mlx-lm's weights are lazy, and the other ranks never touch them. A tied embedding is read at both ends.
    """
    if sharding == "tensor":
        held = needs.layers[layers.start : layers.stop]
        whole = sum(layer.weights_bytes for layer in held) + needs.outside_bytes
        divided = sum(layer.tensor_bytes for layer in held) + needs.outside_tensor_bytes
        return whole - divided + -(-divided // world_size)
    held_bytes = sum(layer.weights_bytes for layer in needs.layers[layers.start : layers.stop])
    return held_bytes + outside_weights(needs, first=layers.start == 0, last=layers.stop == len(needs.layers))


def outside_weights(needs: ModelNeeds, *, first: bool, last: bool) -> int:
    """Weights outside of the layers that a pipeline's rank keeps; `first`, `last`: whether it runs that layer."""
    rest = needs.outside_bytes - needs.embedding_bytes - needs.head_bytes
    embedding = needs.embedding_bytes if first or (last and needs.tied) else 0
    return rest + embedding + (needs.head_bytes if last else 0)


def rank_cache(
    needs: ModelNeeds,
    sharding: Sharding,
    world_size: int,
    layers: range,
    context_tokens: int,
    sequences: int,
    *,
    prefill_chunk_tokens: int = 1,
) -> int:
    """Bytes of keys, values and states of `sequences` that have reached `context_tokens` each, in chunks of so many."""
    ranks = world_size if sharding == "tensor" else 1
    held = needs.layers[layers.start : layers.stop]
    return sum(
        layer_cache(layer, context_tokens, sequences, ranks=ranks, prefill_chunk_tokens=prefill_chunk_tokens)
        for layer in held
    )


def layer_cache(
    layer: LayerNeeds, context_tokens: int, sequences: int, *, ranks: int = 1, prefill_chunk_tokens: int = 1
) -> int:
    """Bytes that one layer's cache of `sequences` takes on one of `ranks` ranks of a tensor sharding.

    While a prompt is read, a window is longer by a chunk: each token of it looks back at a whole window.
    """
    tokens = -(-context_tokens // CACHE_STEP_TOKENS) * CACHE_STEP_TOKENS
    if layer.window:
        tokens = min(tokens, layer.window + prefill_chunk_tokens - 1)
    shared = layer.kv_token_bytes * tokens + layer.state_bytes
    if layer.kv_divides:
        shared = -(-shared // ranks)
    return (shared + layer.kv_whole_bytes * tokens) * sequences


def quantised_token_bytes(needs: ModelNeeds, bits: int) -> int | None:
    """Bytes of one token in mlx-lm's quantised caches, with values of 16 bits before; `None` where there are none.

    Ranks keep their caches whole: a `QuantizedKVCache` has no `merge`, so that mlx-lm cannot batch it. Layers with a
    window stay whole there too.
    """
    head_size = needs.hidden_size // needs.heads if needs.heads else 0
    plain = [layer for layer in needs.layers if layer.kv_token_bytes and not layer.window]
    if not plain or needs.bits > _VALUE_BITS or head_size % _KV_GROUP or not all(layer.kv_divides for layer in plain):
        return None
    values = sum(layer.kv_token_bytes for layer in plain) * 8 // _VALUE_BITS
    rest = needs.kv_token_bytes - sum(layer.kv_token_bytes for layer in plain)
    return rest + values * bits // 8 + values // _KV_GROUP * 2 * _VALUE_BITS // 8


def layer_weights(needs: ModelNeeds) -> tuple[int, ...]:
    """Bytes of each layer, whole: what a split of a pipeline shares out."""
    return tuple(layer.weights_bytes for layer in needs.layers)


def workspace(
    needs: ModelNeeds,
    sharding: Sharding,
    world_size: int,
    *,
    leads: bool,
    sequences: int,
    prefill_chunk_tokens: int,
    context_tokens: int,
) -> int:
    """Bytes beside weights and cache while the rank works, at their highest; an estimate from above.

    That is one chunk of each prompt that is prefilled together, its scores against that sequence's context, and the
    logits where tokens are chosen.
    """
    ranks = world_size if sharding == "tensor" else 1
    sequences = 1 if needs.solo else sequences
    chunk = min(prefill_chunk_tokens, context_tokens)
    together = min(sequences, PREFILL_SEQUENCES)
    activations = together * chunk * -(-needs.token_bytes // ranks)
    scores = together * chunk * context_tokens * -(-needs.score_bytes // ranks)
    logits = sequences * needs.vocabulary * _LOGITS_BYTES if leads or sharding == "tensor" else 0
    return activations + scores + logits


def loading(needs: ModelNeeds, sharding: Sharding) -> int:
    """Bytes beside the weights while they are read: a tensor sharding reads each layer whole before it is divided."""
    return max(layer_weights(needs), default=0) if sharding == "tensor" else 0
