"""Small random-weight checkpoints in mlx-lm's layout, made for a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import _get_classes
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 260
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "head_dim": 8,
    "eos_token_id": 256,
}
QWEN2 = BASE | {"model_type": "qwen2", "tie_word_embeddings": True}
LLAMA = BASE | {"model_type": "llama", "tie_word_embeddings": False}
QWEN3_MOE = BASE | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "tie_word_embeddings": False,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


def make_model(directory: Path, config: dict[str, Any], *, files: int = 1, quantised: bool = False) -> Path:
    """Write a model of `config` with fp32 weights into `directory`, over so many weight files."""
    directory.mkdir(parents=True)
    config = dict(config)
    mx.random.seed(3)
    model_class, args_class = _get_classes(config)
    model: Any = model_class(args_class.from_dict(config))
    # Larger than the usual initial weights, so that the best token wins by far more than rounding.
    model.update(tree_map(_doubled, model.parameters()))
    if quantised:
        config["quantization"] = {"group_size": 32, "bits": 8}
        nn.quantize(model, group_size=32, bits=8)
    weights: Any = sorted(tree_flatten(model.parameters()))
    index: dict[str, str] = {}
    for number in range(files):
        name = "model.safetensors" if files == 1 else f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = dict(weights[number::files])
        mx.save_safetensors(str(directory / name), part)
        index.update(dict.fromkeys(part, name))
    if files > 1:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (directory / "config.json").write_text(json.dumps(config))
    make_tokenizer(directory)
    return directory


def _doubled(weight: mx.array) -> mx.array:
    return weight * 2.0


def make_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer: ids 0 to 255 are bytes, 256 is the end token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
