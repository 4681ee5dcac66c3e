"""Writes tiny checkpoints by hand, byte by byte: no mlx, no safetensors package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 260,
    "max_position_embeddings": 128,
}


def write_weights(file: Path, tensors: dict[str, tuple[int, ...]], *, fill: int = 1) -> None:
    """Float32 tensors of these shapes, every byte `fill`."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    position = 0
    for name, shape in tensors.items():
        size = 4
        for dimension in shape:
            size *= dimension
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    write_raw(file, json.dumps(header).encode(), bytes([fill]) * position)


def write_raw(file: Path, header: bytes, data: bytes) -> None:
    """A file with this header, true or not, and this data."""
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)


def write_model(directory: Path, **changes: Any) -> Path:
    """A whole model of four layers with one tensor each; `changes` replace entries of its config."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    (directory / "tokenizer.json").write_text("{}")
    write_weights(directory / "model.safetensors", {f"model.layers.{layer}.w": (2, 3) for layer in range(4)})
    return directory
