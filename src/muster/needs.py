"""What a model needs: the vocabulary, and which ways of sharding it allows. Pure.

`muster.model.needs` reads it off config.json and the headers; `muster.predict` says what memory follows from it.
"""

from __future__ import annotations

import msgspec


class LayerNeeds(msgspec.Struct, frozen=True):
    """One layer of a model. Bytes are of the whole layer, before any sharding.

    `tensor_bytes` is the part of `weights_bytes` that tensor sharding divides; the rest is whole on every rank.
    `kv_token_bytes` is the cache of one token of one sequence, all heads; it divides by the ranks of a tensor
    sharding where `kv_divides`. `window` is how many tokens are kept at most, 0 for all. `state_bytes` is what a
    sequence takes whatever its length (recurrent layers); it divides as the cache does. `kv_whole_bytes` is a part
    of the cache of one token that every rank of a tensor sharding keeps whole, beside `kv_token_bytes`.
    """

    weights_bytes: int
    tensor_bytes: int = 0
    kv_token_bytes: int = 0
    kv_divides: bool = True
    window: int = 0
    state_bytes: int = 0
    kv_whole_bytes: int = 0


class SharedSize(msgspec.Struct, frozen=True):
    """A size that the ranks of a tensor sharding share evenly; `name` is how config.json calls it.

    `grouped`: the part of each rank must be a multiple of the quantisation's group size as well. Where `divides` is
    false it is only this that counts: what divides is named by another size.
    """

    name: str
    size: int
    grouped: bool = False
    divides: bool = True


class ModelNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """What a model is and takes, from config.json and the headers of its safetensors files alone.

    `outside_bytes` are the weights outside of the layers (embedding, head, norms), `outside_tensor_bytes` the part
    that tensor sharding divides. `embedding_bytes` and `head_bytes` are the parts of it that only the first and only
    the last layer's rank of a pipeline needs; where the head is `tied` to the embedding, both need the embedding.
    `tensor_sizes` are the world sizes from 2 to 64 at which every size divides. `tensor` and `pipeline`: whether the
    installed mlx-lm can shard the architecture so; with `even_pipeline` only in its own, even way. Where one is
    impossible, `no_tensor` and `no_pipeline` say why, in words that follow "tensor sharding is impossible: ".

    `token_bytes` is what one token of a prompt takes in the widest layer while it is computed, and `score_bytes` what
    one such token takes for each token that it looks back at, where MLX has no fused attention for the model; both
    for all heads of one rank that runs alone. `plain_score_bytes` is the latter on a CPU, which has no fused attention
    for any model, and `plain_token_bytes` what a token takes there beside `token_bytes`. `solo`: mlx-lm cannot batch
    it, so that sequences run one by one.
    """

    model: str
    model_type: str
    layers: tuple[LayerNeeds, ...]
    outside_bytes: int
    outside_tensor_bytes: int = 0
    parameters: int = 0
    bits: float = 16.0  #: bits of a weight, on average
    hidden_size: int = 0
    heads: int = 0
    kv_heads: int = 0
    vocabulary: int = 0
    experts: int = 0
    context_tokens: int | None = None
    tensor: bool = False
    pipeline: bool = False
    tensor_sizes: tuple[int, ...] = ()
    no_tensor: str = ""
    no_pipeline: str = ""
    fingerprint: str = ""  #: changes when config.json or a header does
    commit: str = ""  #: of a hub's model, where it is known
    embedding_bytes: int = 0
    head_bytes: int = 0
    tied: bool = False
    even_pipeline: bool = False
    shared_sizes: tuple[SharedSize, ...] = ()
    group_size: int = 1  #: neighbouring weights that share a scale; 1 where nothing is quantised
    token_bytes: int = 0
    score_bytes: int = 0
    plain_score_bytes: int = 0
    plain_token_bytes: int = 0
    solo: bool = False

    @property
    def weights_bytes(self) -> int:
        """All weights."""
        return self.outside_bytes + sum(layer.weights_bytes for layer in self.layers)

    @property
    def kv_token_bytes(self) -> int:
        """The cache of one token of one sequence in all layers, as long as no window has filled."""
        return sum(layer.kv_token_bytes + layer.kv_whole_bytes for layer in self.layers)


def on_cpu(needs: ModelNeeds) -> ModelNeeds:
    """The same where a rank computes on a CPU, for which MLX has no fused attention and mlx-lm no kernels."""
    return msgspec.structs.replace(
        needs,
        score_bytes=max(needs.score_bytes, needs.plain_score_bytes),
        token_bytes=needs.token_bytes + needs.plain_token_bytes,
    )


def indivisible(sizes: tuple[SharedSize, ...], group_size: int, world_size: int) -> str:
    """Every size that does not divide by `world_size`, with its value; empty where all do."""
    reasons = [
        f"{shared.name} is {shared.size}, which does not divide by {world_size} ranks"
        for shared in sizes
        if shared.divides and shared.size % world_size
    ]
    if not reasons and group_size > 1:
        reasons = [
            f"{shared.name} is {shared.size}, whose {shared.size // world_size} on each rank is no multiple of the "
            f"quantisation's group_size {group_size}"
            for shared in sizes
            if shared.grouped and (shared.size // world_size) % group_size
        ]
    return ", ".join(reasons)


def split_fault(layers: int, world_size: int, split: tuple[int, ...] | None, *, even_only: bool = False) -> str:
    """Why a pipeline of `world_size` ranks cannot hold so many layers, or not by this split; empty if it can.

    `split` is layers per rank, rank 0 first; rank 0 holds the last ones.
    """
    if layers < world_size:
        return f"num_hidden_layers is {layers}, fewer than {world_size} ranks"
    if even_only and layers % world_size:
        return (
            f"mlx-lm splits this architecture itself, evenly, and num_hidden_layers {layers} does not divide by "
            f"{world_size} ranks"
        )
    if split is None:
        return ""
    if len(split) != world_size or min(split) < 1 or sum(split) != layers:
        return (
            f"the split {list(split)} must have {world_size} entries above 0 that add up to num_hidden_layers {layers}"
        )
    if even_only and len(set(split)) > 1:
        return f"the split {list(split)} is not even, and mlx-lm has no other for this architecture"
    return ""


def against_tensor(needs: ModelNeeds, world_size: int) -> str:
    """Why the model cannot be sharded by tensors over `world_size` ranks, naming each size; empty if it can."""
    if not needs.tensor:
        return needs.no_tensor or "mlx-lm has no tensor sharding for this architecture"
    return indivisible(needs.shared_sizes, needs.group_size, world_size)


def against_pipeline(needs: ModelNeeds, world_size: int, split: tuple[int, ...] | None = None) -> str:
    """Why the model cannot run as a pipeline of `world_size` ranks, or not by this split; empty if it can."""
    if not needs.pipeline:
        return needs.no_pipeline or "mlx-lm has no pipeline for this architecture"
    return split_fault(len(needs.layers), world_size, split, even_only=needs.even_pipeline)


def even_split(layers: int, world_size: int) -> tuple[int, ...]:
    """Layers per rank, as even as can be; the low ranks take one more."""
    base, extra = divmod(layers, world_size)
    return tuple(base + (1 if rank < extra else 0) for rank in range(world_size))


def layers_of(split: tuple[int, ...], rank: int) -> range:
    """The layers that `rank` of a pipeline runs: rank 0 the last ones."""
    start = sum(split[rank + 1 :])
    return range(start, start + split[rank])
