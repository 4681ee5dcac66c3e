"""What is predicted of a rank's memory is what mlx-lm allocates, for every architecture that it can share out."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from lazy_models import CONFIGS, Stand, build, config_of, files_of, nbytes
from mlx_lm.models.cache import make_prompt_cache

from muster.bench.plain_kernels import put_in
from muster.errors import ModelError
from muster.model.architectures import architecture_of, known_architectures
from muster.model.files import describe
from muster.model.headers import TensorInfo
from muster.model.needs import needs_of
from muster.model.plan import supports
from muster.model.solo import batchable
from muster.needs import ModelNeeds, even_split, indivisible, layers_of
from muster.predict import outside_weights, rank_cache, rank_weights

pytestmark = pytest.mark.mlx

#: Ends the process when it is imported without a package of its own.
UNIMPORTABLE = {"olmo"}

TYPES = sorted(CONFIGS)
#: The sizes of models that people run, where rounding and rare cases show.
REAL: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "layer_types": None,
        "sliding_window": None,
    },
    "deepseek_v3": {
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 3,
        "vocab_size": 129280,
    },
    "qwen3_moe": {
        "hidden_size": 4096,
        "num_hidden_layers": 94,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_experts": 128,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
    },
}


def whole(needs: ModelNeeds) -> range:
    return range(len(needs.layers))


def test_every_architecture_that_can_be_shared_out_is_tried() -> None:
    found = {name: architecture_of({"model_type": name}) for name in known_architectures()}
    assert {name for name, one in found.items() if one.tensor or one.pipeline} == CONFIGS.keys()


def test_the_source_says_of_other_architectures_what_their_classes_say() -> None:
    others = [name for name in known_architectures() if name not in CONFIGS]
    for name in set(others[::5]) - UNIMPORTABLE:
        model = importlib.import_module(f"mlx_lm.models.{name}").Model
        assert not hasattr(model, "shard"), name


@pytest.mark.parametrize("model_type", TYPES)
def test_source_and_built_model_agree_on_what_is_supported(model_type: str) -> None:
    config = config_of(model_type)
    model = build(config)
    needs, found = needs_of(files_of(model, config)), supports(files_of(model, config))
    assert (needs.tensor, needs.pipeline) == (found.tensor, found.pipeline)
    assert ("vocab_size" in {size.name for size in needs.shared_sizes}) == found.vocabulary
    assert needs.solo == (not batchable(model))


def test_no_tensor_sharding_where_mlx_would_put_plain_layers_in_the_place_of_own_ones() -> None:
    """A Hadamard pack inherits `shard` from an architecture of plain layers: without the rotation tokens were wrong."""
    config = config_of("prism_hadamard_qwen35")
    files = files_of(build(config), config)
    assert hasattr(importlib.import_module("mlx_lm.models.prism_hadamard_qwen35").Model, "shard")
    assert not needs_of(files).tensor
    assert not supports(files).tensor
    assert supports(files).pipeline


@pytest.mark.parametrize("model_type", TYPES)
def test_weights_of_every_rank_are_predicted_to_the_byte(model_type: str) -> None:
    check_weights(config_of(model_type), 4)


@pytest.mark.parametrize("model_type", ["deepseek_v2", "gpt_oss", "qwen2"])
def test_weights_that_are_not_quantised_are_predicted_as_well(model_type: str) -> None:
    check_weights(config_of(model_type), 0)


@pytest.mark.parametrize("model_type", REAL)
def test_weights_of_large_models_are_predicted_to_the_byte(model_type: str) -> None:
    check_weights(config_of(model_type, **REAL[model_type]), 4)


def check_weights(config: dict[str, Any], bits: int) -> None:
    model = build(config, bits=bits)
    needs = needs_of(files_of(model, config))
    assert needs.weights_bytes == nbytes(model) == rank_weights(needs, "none", 1, whole(needs))
    for size in (2, 4) if needs.tensor else ():
        assert size in needs.tensor_sizes
        model = build(config, bits=bits)
        model.shard(Stand(size - 1, size))
        assert rank_weights(needs, "tensor", size, whole(needs)) == nbytes(model), size
    if needs.pipeline:
        ranks = 2 if needs.even_pipeline else 3
        for rank in range(ranks):
            check_pipeline(config, bits, needs, rank, ranks)


def check_pipeline(config: dict[str, Any], bits: int, needs: ModelNeeds, rank: int, size: int) -> None:
    """Compare with the model after it dropped other ranks' layers; embedding and head stay, but unread."""
    split = even_split(len(needs.layers), size)
    layers = layers_of(split, rank)
    model: Any = build(config, bits=bits)
    if needs.even_pipeline:
        model.model.pipeline(Stand(rank, size))
    else:
        try:
            model.model.pipeline(Stand(rank, size), list(split))
        except ValueError:  # bailing_hybrid: each rank needs a layer of the other kind
            return
    unread = outside_weights(needs, first=True, last=True) - outside_weights(
        needs, first=layers.start == 0, last=layers.stop == len(needs.layers)
    )
    assert rank_weights(needs, "pipeline", size, layers) == nbytes(model) - unread


@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_caches_are_predicted_from_shapes(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 511 tokens and one more, lazily; 512 is where caches are as large as they say."""
    monkeypatch.setattr(mx.distributed, "all_sum", summed)
    monkeypatch.setattr(mx.distributed, "all_gather", gathered)
    for ranks in (1, 2):
        config = config_of(model_type)
        model = build(config, bits=4)
        put_in(sys.modules[type(model).__module__])
        needs = needs_of(files_of(model, config))
        if ranks > 1:
            if not needs.tensor:
                break
            model.shard(Stand(0, ranks))
        caches = make_prompt_cache(model)
        for tokens in (511, 1):
            model(mx.zeros((1, tokens), mx.int32), cache=caches)
        real = sum(array.nbytes for cache in caches for array in kept(cache))
        predicted = rank_cache(needs, "tensor" if ranks > 1 else "none", ranks, whole(needs), 512, 1)
        # Some keep rows of an open group, or the last few token ids, beside.
        assert predicted == pytest.approx(real, rel=0.002), ranks


def summed(array: mx.array, **_: Any) -> mx.array:
    """What a sum over the ranks would have the shape of."""
    return array


def gathered(array: mx.array, **_: Any) -> mx.array:
    """What the parts of two ranks would have the shape of."""
    return mx.concatenate([array, array])


def kept(cache: Any) -> list[mx.array]:
    """The arrays of a cache, whatever its kind."""
    if hasattr(cache, "caches"):
        return [array for part in cache.caches for array in kept(part)]
    return [
        array
        for value in vars(cache).values()
        for array in (value if isinstance(value, list) else [value])
        if isinstance(array, mx.array) and array.size > 1
    ]


def published(tensors: dict[str, TensorInfo], config: dict[str, Any]) -> dict[str, TensorInfo]:
    """The same weights as their makers publish them: experts one by one, latent heads in one projection, and parts
    that mlx-lm leaves out.
    """
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        if ".switch_mlp." in name:
            experts, *shape = info.shape
            for expert in range(experts):
                part = TensorInfo(info.dtype, tuple(shape), info.file, info.bytes // experts)
                found[name.replace(".switch_mlp.", f".experts.{expert}.")] = part
        elif ".embed_q." in name:
            other = tensors[name.replace("embed_q", "unembed_out")]
            rows = (info.bytes + other.bytes) // 2 // config["kv_lora_rank"]
            joined = TensorInfo(info.dtype, (rows, config["kv_lora_rank"]), info.file, info.bytes + other.bytes)
            found[name.replace("embed_q", "kv_b_proj")] = joined
        elif ".unembed_out." not in name:
            found[name] = info
    for left_out in ("model.layers.4.mlp.gate.weight", "mtp.fc.weight", "model.visual.blocks.0.attn.qkv.weight"):
        found[left_out] = TensorInfo("BF16", (64, 64), "model.safetensors", 8192)
    found["model.layers.0.self_attn.rotary_emb.inv_freq"] = TensorInfo("F32", (32,), "model.safetensors", 128)
    return found


def in_fp8(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Projections in eight bits, with a scale for each block."""
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        if name.endswith("_proj.weight"):
            found[name] = TensorInfo("F8_E4M3", info.shape, info.file, info.bytes // 2)
            found[f"{name}_scale_inv"] = TensorInfo("F32", (1, 1), info.file, 4)
        else:
            found[name] = info
    return found


@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3_moe", "glm4_moe"])
def test_a_checkpoint_as_published_needs_what_its_conversion_needs(model_type: str) -> None:
    config = config_of(model_type)
    converted = files_of(build(config), config)
    tensors = published(converted.tensors, config)
    if model_type == "deepseek_v3":
        tensors = in_fp8(tensors)
    needs, expected = needs_of(describe("m", config, tensors)), needs_of(converted)
    assert needs.layers == expected.layers
    assert (needs.outside_bytes, needs.head_bytes) == (expected.outside_bytes, expected.head_bytes)
    assert (needs.parameters, needs.tensor_sizes) == (expected.parameters, expected.tensor_sizes)
    assert needs.fingerprint != expected.fingerprint


def test_a_head_beside_a_tied_embedding_is_left_out() -> None:
    config = config_of("qwen2")
    files = files_of(build(config), config)
    head = {"lm_head.weight": files.tensors["model.embed_tokens.weight"]}
    needs = needs_of(describe("m", config, files.tensors | head))
    assert msgspec.structs.replace(needs, fingerprint="") == msgspec.structs.replace(needs_of(files), fingerprint="")
    assert needs.tied
    assert needs.head_bytes == 0


@pytest.mark.parametrize("model_type", TYPES)
def test_a_size_that_mlx_lm_refuses_is_not_offered(model_type: str) -> None:
    """Five ranks divide none of the sizes: either mlx-lm says so, or the pieces would be of unequal size."""
    config = config_of(model_type)
    needs = needs_of(files_of(build(config), config))
    assert not {3, 5, 6, 7, 16} & set(needs.tensor_sizes)
    if needs.tensor:
        assert "which does not divide by 3 ranks" in indivisible(needs.shared_sizes, needs.group_size, 3)


def test_an_unknown_architecture_is_named() -> None:
    with pytest.raises(ModelError, match="no model type 'hal9000'"):
        architecture_of({"model_type": "hal9000"})
