"""A small config of every architecture that mlx-lm can share out, by tensors or as a pipeline."""

from __future__ import annotations

import copy
from typing import Any

_BASE: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 128,
    "q_lora_rank": 192,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "attention_bias": False,
    "rope_scaling": None,
}
_KINDS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
_DEEPSEEK = _BASE | _MOE | _LATENT | {"num_key_value_heads": 8}
_INDEXED = _DEEPSEEK | {"index_head_dim": 64, "index_n_heads": 4, "index_topk": 64}
_LINEAR = {
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "shared_expert_intermediate_size": 256,
    "partial_rotary_factor": 0.5,
}
_LONGCAT = {
    **{key: _BASE[key] for key in ("hidden_size", "vocab_size", "max_position_embeddings", "num_attention_heads")},
    **_LATENT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "ffn_hidden_size": 1024,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 256,
    "n_routed_experts": 8,
    "zero_expert_num": 4,
    "num_layers": 3,
    "routed_scaling_factor": 1.0,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
#: Kinds of its layers, and the modules of each kind that are packed.
_PACKED: dict[str, tuple[str, ...]] = {
    "linear_attn": ("in_proj_qkv", "in_proj_z", "out_proj"),
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


def _packed(layers: int) -> list[dict[str, Any]]:
    """The manifest of a Hadamard pack of a model whose layers take turns, beginning with a linear one."""
    attention = ("linear_attn", "self_attn")
    paths = ["model.embed_tokens", "lm_head"]
    paths += [
        f"model.layers.{number}.{part}.{module}"
        for number in range(layers)
        for part in (attention[number % 2], "mlp")
        for module in _PACKED[part]
    ]
    return [
        {
            "path": path,
            "embedding": path.endswith("embed_tokens"),
            "dtype": "float16",
            # What it rotates at once; the width of this one is smaller than the smallest block.
            "block": 0 if path.endswith("out_proj") else 512,
        }
        for path in paths
    ]


_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "mscale_all_dim": 0.7}
_ROPE = {"rope_theta": 10000.0, "rope_type": "default"}

#: By model type; sizes that divide by 2 and by 4.
CONFIGS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _DEEPSEEK
    | {
        "head_dim": 64,
        "layer_group_size": 2,
        "group_norm_size": 1,
        "num_hidden_layers": 8,
        "num_nextn_predict_layers": 0,
    },
    "deepseek_v2": _DEEPSEEK | {"topk_method": "gready", "n_group": None, "topk_group": None, "rope_scaling": _YARN},
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _INDEXED,
    "deepseek_v41": {
        **_BASE,
        **_MOE,
        "head_dim": 64,
        "q_lora_rank": 192,
        "qk_rope_head_dim": 32,
        "o_groups": 4,
        "o_lora_rank": 64,
        "sliding_window": 128,
        "compress_ratios": [0, 4, 4, 4],
        "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1],
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 16,
    },
    "exaone_moe": _BASE
    | _MOE
    | {"sliding_window": 128, "layer_types": _KINDS, "is_moe_layer": [False, True, True, True]},
    "glm4_moe": _BASE
    | _MOE
    | {"use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5, "rope_scaling": None},
    "glm4_moe_lite": _DEEPSEEK,
    "glm_moe_dsa": _INDEXED | {"rope_parameters": _ROPE},
    "gpt_oss": _BASE
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 512, "sliding_window": 128},
    "iquestloopcoder": _BASE,
    "kimi_k25": {"text_config": _DEEPSEEK},
    "kimi_k3": {
        "text_config": _BASE
        | _MOE
        | _LATENT
        | {
            "num_experts_per_token": 2,
            "q_lora_rank": None,
            "linear_attn_config": {
                "num_heads": 8,
                "head_dim": 64,
                "short_conv_kernel_size": 4,
                "kda_layers": [1, 2, 3],
                "full_attn_layers": [4],
            },
        }
    },
    "llama": _BASE | {"sliding_window": 128, "layer_types": _KINDS},
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": _LONGCAT | {"ngram_vocab_size_ratio": 2},
    "minimax": _BASE
    | {
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "shared_intermediate_size": 0,
        "rotary_dim": 32,
        "intermediate_size": 256,
    },
    "minimax_m3_vl": {
        "text_config": _BASE
        | {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "dense_intermediate_size": 1024,
            "shared_intermediate_size": 256,
            "intermediate_size": 256,
            "moe_layer_freq": [0, 1, 1, 1],
            "sparse_attention_config": {
                "sparse_num_index_heads": 4,
                "sparse_index_dim": 32,
                "sparse_block_size": 32,
                "sparse_topk_blocks": 4,
                "sparse_local_block": 1,
                "sparse_attention_freq": [0, 1, 1, 1],
            },
        }
    },
    "ministral3": _BASE
    | {
        "sliding_window": 128,
        "layer_types": _KINDS,
        "tie_word_embeddings": True,
        "rope_parameters": _ROPE | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 4096},
    },
    "mistral4": _DEEPSEEK
    | {"rope_parameters": _ROPE | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 4096}},
    "muse_spark": {
        "audio_config": {},
        "text_config": _BASE
        | {
            "post_norm_eps": 1e-5,
            "rope_parameters": _ROPE,
            "layer_rope_theta": [10000.0, 10000.0, 10000.0, 0],
            "layer_types": _KINDS,
            "sliding_window": 128,
            "final_logit_softcapping": 30.0,
            "output_multiplier": 1.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "moe_hidden_size": 256,
            "moe_intermediate_size": 256,
        },
    },
    "prism_hadamard_qwen35": {
        "text_config": _BASE | _LINEAR,
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": _packed(4),
    },
    "qwen2": _BASE | {"tie_word_embeddings": True},
    "qwen3": _BASE,
    "qwen3_5": {"text_config": _BASE | _LINEAR},
    "qwen3_5_moe": {"text_config": _BASE | _MOE | _LINEAR},
    "qwen3_moe": _BASE | _MOE,
    "qwen3_next": _BASE | _MOE | _LINEAR,
    "solar_open": _BASE
    | _MOE
    | {"use_qk_norm": False, "attention_bias": False, "partial_rotary_factor": 0.5, "rope_scaling": None},
    "step3p5": _BASE
    | {
        "num_attention_groups": 4,
        "moe_num_experts": 8,
        "moe_top_k": 2,
        "moe_intermediate_size": 256,
        "share_expert_dim": 256,
        "moe_layers_enum": "1,2,3",
        "sliding_window": 128,
        "layer_types": _KINDS,
    },
}


def config_of(model_type: str, **changes: Any) -> dict[str, Any]:
    """A config of that type; `changes` go to where its sizes are."""
    config: dict[str, Any] = copy.deepcopy(CONFIGS[model_type]) | {"model_type": model_type}
    sizes: dict[str, Any] = config.get("text_config", config)
    sizes.update(changes)
    if "audio_config" in config:  # transformers checks that one fits the other
        config["audio_config"]["out_hidden_size"] = sizes["hidden_size"]
    return config
