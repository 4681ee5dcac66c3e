"""Models made on the spot: `python -m muster.bench.tiny_model SHAPE DIRECTORY`. Random weights, fp32, llama.

Whatever they are asked, they answer in small letters and never end by themselves: every answer has the length that
was asked for, each token is one character, and servers with different detokenizers send the same number of pieces.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from muster.bench.shapes import SHAPES, Shape
from muster.errors import RequestError

_SPECIAL_TOKENS: Final = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>")
_END_ID: Final = 256 + _SPECIAL_TOKENS.index("<|end|>")
_PAD_ID: Final = 256 + _SPECIAL_TOKENS.index("<|pad|>")
_VOCABULARY: Final = 264
#: One letter per byte, in the order of their ids.
_ALPHABET: Final = sorted(pre_tokenizers.ByteLevel.alphabet())
#: The ids of the letters "a" to "z", which is what answers are made of.
_LETTERS: Final = range(_ALPHABET.index("a"), _ALPHABET.index("z") + 1)
#: Longest chat, in tokens, that any of the measurements has.
_CONTEXT_TOKENS: Final = 8192
_SEED: Final = 11
_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def config_of(shape: Shape) -> dict[str, Any]:
    """The model's `config.json`; heads and sizes divide by 1, 2 and 4 ranks."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": shape.hidden_size // 8,
        "vocab_size": _VOCABULARY,
        "max_position_embeddings": _CONTEXT_TOKENS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "eos_token_id": _END_ID,
        "pad_token_id": _PAD_ID,
        "torch_dtype": "float32",
    }


def make(shape: Shape, directory: Path) -> int:
    """Write the model's directory; answers how many parameters it has."""
    directory.mkdir(parents=True, exist_ok=True)
    config = config_of(shape)
    mx.random.seed(_SEED)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    weights = dict(cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters())))
    # Rows of zeros give logits of zero, which the best of 26 random ones beats: only letters are ever chosen.
    ids = mx.arange(_VOCABULARY)[:, None]
    is_letter = (ids >= _LETTERS.start) & (ids < _LETTERS.stop)
    head = mx.random.normal((_VOCABULARY, shape.hidden_size))
    weights["lm_head.weight"] = mx.where(is_letter, head, 0.0)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    _write_json(directory / "config.json", config)
    write_tokenizer(directory)
    return sum(weight.size for weight in weights.values())


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer of bytes and a few special tokens, with its chat template."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(_ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(  # pyright: ignore[reportAttributeAccessIssue]
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in _SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "model_max_length": _CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    _write_json(directory / "tokenizer_config.json", settings)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(arguments: Sequence[str]) -> None:
    """Make the model; writes the number of its parameters to standard output.

    Raises:
        RequestError: there is no such shape.
    """
    name, directory = arguments
    if name not in SHAPES:
        raise RequestError(f"there is no shape {name!r}", remedy=f"Use one of: {', '.join(SHAPES)}.")
    mx.set_default_device(mx.cpu)
    sys.stdout.write(f"{make(SHAPES[name], Path(directory))}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
