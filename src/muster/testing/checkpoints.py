"""Checkpoints made from others, byte by byte: no mlx and no safetensors package is needed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

_LAYER: Final = re.compile(r"\.layers\.(\d+)\.")


def split_checkpoint(source: Path, target: Path, layers_per_file: int = 1) -> list[str]:
    """Write the model in `source`, of one weight file, to `target` with an index and several of them.

    The first file has what is outside of layers, each further one so many layers. Answers the files' names in order.
    """
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and file.name != "model.safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    content = (source / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    data = memoryview(content)[8 + length :]
    parts: dict[int, dict[str, Any]] = {}
    for name, tensor in header.items():
        match = _LAYER.search(name)
        parts.setdefault(1 + int(match.group(1)) // layers_per_file if match else 0, {})[name] = tensor
    names = [f"model-{number + 1:05}-of-{len(parts):05}.safetensors" for number in range(len(parts))]
    weight_map: dict[str, str] = {}
    for name, (_, tensors) in zip(names, sorted(parts.items()), strict=True):
        body = bytearray()
        placed: dict[str, Any] = {"__metadata__": metadata}
        for tensor_name, tensor in tensors.items():
            begin, end = tensor["data_offsets"]
            placed[tensor_name] = tensor | {"data_offsets": [len(body), len(body) + end - begin]}
            body += data[begin:end]
            weight_map[tensor_name] = name
        encoded = json.dumps(placed).encode()
        (target / name).write_bytes(len(encoded).to_bytes(8, "little") + encoded + body)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return names
