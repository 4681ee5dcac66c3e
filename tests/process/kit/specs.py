"""Instances and models to create, and what their failures must tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import muster.demo
from muster.spec import Failure, GroupWorkload, InstanceSpec, ModelWorkload, NodeId, ScriptWorkload, Workload

DEMO_MODEL = Path(muster.demo.__file__).parent / "model"


def group(ranks: int = 2, nodes: tuple[str, ...] = ("a", "b"), **options: Any) -> InstanceSpec:
    """A bare group."""
    return spec_of(GroupWorkload(), ranks, nodes, **options)


def script(
    directory: Path, text: str, ranks: int = 2, *arguments: str, run_seconds: float | None = None, **options: Any
) -> InstanceSpec:
    """A script with this text, written into `directory`."""
    path = directory / f"script-{len(list(directory.glob('script-*')))}.py"
    path.write_text(text)
    workload = ScriptWorkload(path=str(path), arguments=arguments, run_seconds=run_seconds)
    return spec_of(workload, ranks, ("a", "b")[:ranks], **options)


def model(path: Path | str, ranks: int = 2, sharding: Any = "auto", **options: Any) -> InstanceSpec:
    """A model."""
    return spec_of(ModelWorkload(model=str(path), sharding=sharding), ranks, ("a", "b")[:ranks], **options)


def spec_of(workload: Workload, ranks: int, nodes: tuple[str, ...], **options: Any) -> InstanceSpec:
    """Any workload, over these nodes in order."""
    return InstanceSpec(workload=workload, ranks=ranks, nodes=tuple(NodeId(node) for node in nodes), **options)


def assert_blames(failure: Failure, *, kind: str, rank: int, node: str, phase: str) -> None:
    """A failure names all that a person needs."""
    told = (failure.kind, failure.rank, failure.node, failure.phase.value)
    assert told == (kind, rank, node, phase), failure.sentence()
    assert failure.message, failure
    assert failure.remedy, failure


# --- models -------------------------------------------------------------------------------------------------


def stretched_model(directory: Path, layers: int) -> Path:
    """The demo's model with so many layers, all copies of its first, so that loading it takes a while."""
    directory.mkdir(parents=True)
    for file in DEMO_MODEL.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (directory / file.name).write_bytes(file.read_bytes())
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    content = (DEMO_MODEL / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8 : 8 + length])
    data = content[8 + length :]
    tensors: dict[str, Any] = {}
    body = bytearray()
    for name, tensor in header.items():
        if name == "__metadata__" or (".layers." in name and ".layers.0." not in name):
            continue
        begin, end = tensor["data_offsets"]
        for number in range(layers if ".layers.0." in name else 1):
            offsets = [len(body), len(body) + end - begin]
            tensors[name.replace(".layers.0.", f".layers.{number}.")] = tensor | {"data_offsets": offsets}
            body += data[begin:end]
    encoded = json.dumps({"__metadata__": {"format": "mlx"}} | tensors).encode()
    (directory / "model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded + body)
    return directory
