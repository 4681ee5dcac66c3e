"""What a model needs: the vocabulary. Pure; `muster.model.needs` reads it off config.json and the headers."""

from __future__ import annotations

import msgspec


class LayerNeeds(msgspec.Struct, frozen=True):
    """One layer of a model. Bytes are of the whole layer, before any sharding.

    `tensor_bytes` is the part of `weights_bytes` that tensor sharding divides; the rest is whole on every rank.
    `kv_token_bytes` is the cache of one token of one sequence, all heads; it divides by the ranks of a tensor
    sharding where `kv_divides`. `window` is how many tokens are kept at most, 0 for all. `state_bytes` is what a
    sequence takes whatever its length (recurrent layers); it divides as the cache does.
    """

    weights_bytes: int
    tensor_bytes: int = 0
    kv_token_bytes: int = 0
    kv_divides: bool = True
    window: int = 0
    state_bytes: int = 0


class ModelNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """What a model is and takes, from config.json and the headers of its safetensors files alone.

    `outside_bytes` are the weights outside of the layers (embedding, head, norms), `outside_tensor_bytes` the part
    that tensor sharding divides. `tensor_sizes` are the world sizes from 2 to 64 at which every size divides. `tensor`
    and `pipeline`: whether the installed mlx-lm can shard the architecture so. Where one is impossible, `no_tensor` and
    `no_pipeline` say why, in words that follow "tensor sharding is impossible: ".
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

    @property
    def weights_bytes(self) -> int:
        """All weights."""
        return self.outside_bytes + sum(layer.weights_bytes for layer in self.layers)
