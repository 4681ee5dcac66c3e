"""Which layers keep a window only is what mlx-lm's caches say, with what a config leaves out as mlx-lm takes it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
import pytest
from lazy_models import build, files_of
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from muster.errors import ModelError
from muster.model.needs import needs_of
from muster.needs import ModelNeeds
from muster.predict import rank_cache

pytestmark = pytest.mark.mlx

BASE: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 12,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
KINDS = (["sliding_attention"] * 2 + ["full_attention"]) * 4
WINDOW = {"sliding_window": 128}
ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
ROPES = {"rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE}}
MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}
GEMMA3N = (
    BASE
    | WINDOW
    | {
        "model_type": "gemma3n_text",
        "layer_types": KINDS,
        "num_kv_shared_layers": 6,
        "vocab_size_per_layer_input": 512,
        "rope_local_base_freq": 10000.0,
        "final_logit_softcapping": 30.0,
        "activation_sparsity_pattern": [0.0] * 12,
        "hidden_size_per_layer_input": 64,
        "altup_num_inputs": 2,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 16,
    }
)
GEMMA4 = BASE | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 512}
STEP = {
    "num_attention_groups": 2,
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "share_expert_dim": 128,
    "moe_layers_enum": "1,2,3",
}
EXAONE = BASE | {"rope_scaling": None}
MIMO = {
    "hybrid_layer_pattern": [0, 1, 1, 1] * 3,
    "moe_layer_freq": [0] * 12,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "sliding_window_size": 128,
    "n_shared_experts": None,
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "n_group": 1,
    "topk_group": 1,
    "layernorm_epsilon": 1e-6,
    "swa_rope_theta": 10000.0,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 1,
    "v_head_dim": 32,
    "swa_head_dim": 64,
    "swa_v_head_dim": 32,
    "partial_rotary_factor": 1.0,
}
RECURRENT = {
    "attention_bias": False,
    "conv1d_width": 4,
    "logits_soft_cap": 30.0,
    "attention_window_size": 128,
    "block_types": ["recurrent", "recurrent", "attention"],
    "num_key_value_heads": 1,
}

#: By what is tried: the model type, the config.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("afmoe", BASE | MOE | WINDOW | {"layer_types": KINDS, "num_dense_layers": 1}),
    "baichuan_m1": (
        "baichuan_m1",
        BASE | WINDOW | {"conv_window": 2, "sliding_window_layers": [1, 3, 4], "tie_word_embeddings": False},
    ),
    "cohere2": ("cohere2", BASE | WINDOW),
    "cohere2, kinds that it does not read": ("cohere2", BASE | WINDOW | {"layer_types": KINDS}),
    "cohere2, a window of its own": ("cohere2", BASE),
    "exaone4, letters": ("exaone4", EXAONE | WINDOW | {"sliding_window_pattern": "LLLG"}),
    "exaone4, none": ("exaone4", EXAONE | {"sliding_window": None, "sliding_window_pattern": None}),
    "exaone_moe": ("exaone_moe", BASE | MOE | WINDOW | {"layer_types": KINDS, "is_moe_layer": [False] * 12}),
    "gear": ("gear", BASE | {"layer_types": [*KINDS[:9], "conv_mixer", "conv_mixer", "full_attention"]}),
    "gemma3": ("gemma3", {"vocab_size": 512, "text_config": BASE | WINDOW | {"model_type": "gemma3_text"}}),
    "gemma3_text": ("gemma3_text", BASE),
    "gemma3_text, pattern": ("gemma3_text", BASE | WINDOW | {"sliding_window_pattern": 4}),
    "gemma3n": ("gemma3n", {"text_config": GEMMA3N}),
    "gemma4": ("gemma4", {"vocab_size": 512, "text_config": GEMMA4 | WINDOW | {"model_type": "gemma4_text"}}),
    "gemma4_text": ("gemma4_text", GEMMA4),
    "gemma4_text, shared": ("gemma4_text", GEMMA4 | {"num_kv_shared_layers": 6, "layer_types": KINDS}),
    "gemma4_text, keys that are values": (
        "gemma4_text",
        GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "layer_types": KINDS},
    ),
    "gpt_oss": ("gpt_oss", BASE | MOE),
    "laguna": ("laguna", BASE | MOE | WINDOW | {"layer_types": KINDS}),
    "laguna, no kinds": ("laguna", BASE | MOE),
    "llama": ("llama", BASE | WINDOW | {"layer_types": KINDS}),
    "mellum": ("mellum", BASE | MOE | WINDOW | ROPES | {"layer_types": KINDS}),
    "mimo_v2_flash": ("mimo_v2_flash", BASE | MOE | MIMO),
    "ministral3": (
        "ministral3",
        BASE
        | WINDOW
        | {
            "layer_types": KINDS,
            "rope_parameters": ROPE | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 4096},
        },
    ),
    "mistral3": (
        "mistral3",
        {"text_config": BASE | WINDOW | {"model_type": "llama", "layer_types": KINDS}},
    ),
    "muse_glimmer": ("muse_glimmer", BASE | WINDOW),
    "olmo3": ("olmo3", BASE | WINDOW),
    "plamo3": ("plamo3", BASE),
    "plamo3, a window": ("plamo3", BASE | {"window_size": 100}),
    "recurrent_gemma": ("recurrent_gemma", BASE | RECURRENT),
    "spark2_5": ("spark2_5", BASE | WINDOW | ROPES),
    "step3p5": ("step3p5", BASE | MOE | STEP),
}
#: Keep their windows beside others (`tests/mlx/test_predict.py`), or need Metal.
ELSEWHERE = {"iquestloopcoder", "muse_spark", "cache"}


def whole(needs: ModelNeeds) -> range:
    return range(len(needs.layers))


def test_every_architecture_with_windows_is_tried() -> None:
    directory = Path(next(iter(mlx_lm.models.__path__)))
    rotating = {
        file.stem
        for file in directory.glob("*.py")
        if any(
            isinstance(call, ast.Call) and ast.unparse(call.func) == "RotatingKVCache"
            for call in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        )
    }
    assert rotating - ELSEWHERE <= {name for name, _ in CASES.values()}


@pytest.mark.parametrize("case", CASES)
def test_windows_are_those_of_mlx_lms_caches(case: str) -> None:
    model_type, config = CASES[case]
    config = config | {"model_type": model_type}
    model = build(config)
    caches = make_prompt_cache(model)
    expected = [window_of(cache) for cache in caches]
    needs = needs_of(files_of(model, config))
    attends = [layer.kv_token_bytes > 0 for layer in needs.layers]
    assert [layer.window for layer in needs.layers][: len(expected)] == expected
    assert not any(attends[len(expected) :])


@pytest.mark.parametrize("case", CASES)
def test_caches_with_windows_are_predicted(case: str) -> None:
    model_type, config = CASES[case]
    config = config | {"model_type": model_type}
    model = build(config)
    caches = make_prompt_cache(model)
    for tokens in (1792, 1):  # both kinds grow by 256 then
        model(mx.zeros((1, tokens), mx.int32), cache=caches)
    real = sum(array.nbytes for cache in caches for array in kept(cache))
    needs = needs_of(files_of(model, config))
    assert rank_cache(needs, "none", 1, whole(needs), 2048, 1) == pytest.approx(real, rel=0.01)


def window_of(cache: Any) -> int:
    """The window of a layer's cache, 0 where it keeps all tokens or none."""
    parts = getattr(cache, "caches", (cache,))
    return next((part.max_size for part in parts if isinstance(part, RotatingKVCache)), 0)


def kept(cache: Any) -> list[mx.array]:
    """The arrays of a cache."""
    if hasattr(cache, "caches"):
        return [array for part in cache.caches for array in kept(part)]
    if isinstance(cache, RotatingKVCache):
        return [array for array in (cache.keys, cache.values) if array is not None]
    return [
        array
        for value in vars(cache).values()
        for array in (value if isinstance(value, list) else [value])
        if isinstance(array, mx.array) and array.size > 1
    ]


def test_a_pattern_of_other_letters_is_named() -> None:
    config = CASES["exaone4, letters"][1] | {"model_type": "exaone4"}
    files = files_of(build(config), config | {"sliding_window_pattern": "LLXG"})
    with pytest.raises(ModelError, match="sliding_window_pattern 'LLXG', expected the letters L and G"):
        needs_of(files)
