"""Top imports down, never up: the direction of imports of the design, read from the source."""

from __future__ import annotations

import subprocess
import sys

import pytest
from sources import foreign_imports, modules, own_imports, texts

#: The pure core: no clock, no socket, no file.
PURE = (
    "errors",
    "spec",
    "sampling",
    "facts",
    "needs",
    "predict",
    "links",
    "layout",
    "known",
    "device_matrix",
    "lead",
    "rdma",
    "events",
    "state",
    "fold",
    "fold_nodes",
    "lifecycle",
    "placement",
    "stranded",
)
#: What of the standard library does no I/O.
PURE_LIBRARY = {
    "abc",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "heapq",
    "itertools",
    "math",
    "operator",
    "re",
    "types",
    "typing",
}

#: Each part of the package and its height; a module imports only its own part and lower ones.
HEIGHTS = {
    "": 0,
    "errors": 0,
    "spec": 0,
    "sampling": 0,
    "facts": 1,
    "needs": 1,
    "predict": 2,
    "links": 2,
    "layout": 2,
    "known": 3,
    "events": 3,
    "peer_protocol": 3,
    "state": 4,
    "fold_nodes": 5,
    "fold": 6,
    "device_matrix": 3,
    "lead": 4,
    "rdma": 4,
    "stranded": 5,
    "placement": 5,
    "lifecycle": 7,
    "protocol": 6,
    "replies": 7,
    "rank_protocol": 8,
    "paths": 6,
    "filelock": 6,
    "trace_clock": 5,
    "trace": 6,
    "render_trace": 7,
    "schema": 12,
    "probe": 7,
    "group": 8,
    "bus": 9,
    "eventlog": 9,
    "model": 9,
    "fetch": 10,
    "testing": 10,
    "runner": 11,
    "worker": 12,
    "coordinator": 12,
    "doctor": 12,
    "local": 13,
    "api": 13,
    "demo": 14,
    "bench": 14,
    "cli": 15,
    "__main__": 16,
}

#: What may have MLX in its process: the ranks, and tools that are run by themselves.
MLX = {"mlx", "mlx_lm"}
MAY_IMPORT_MLX = (
    "runner",
    "model",
    "group.formation",
    "group.verify",
    "testing",
    "demo.train",
    "demo.regression",
    "bench",
)

MLX_VARIABLES = ("MLX_HOSTFILE", "MLX_RANK", "MLX_IBV", "MLX_JACCL", "MLX_RING", "JACCL_")


def part_of(name: str) -> str:
    return name.split(".")[0]


def within(name: str, parts: tuple[str, ...]) -> bool:
    return any(name == part or name.startswith(part + ".") for part in parts)


@pytest.mark.parametrize("name", [name for name in modules() if within(name, PURE)])
def test_the_core_is_pure(name: str) -> None:
    assert foreign_imports(name) <= PURE_LIBRARY | {"msgspec"}
    assert [own for own in own_imports(name) if not within(own, PURE)] == []


def test_every_part_has_a_height() -> None:
    parts = {part_of(name) for name in modules()}
    assert parts <= set(HEIGHTS), "give the new part its place in HEIGHTS, as the design has it"


def climbing() -> list[str]:
    """The imports that go up, as "module imports module"."""
    return [
        f"{name} imports {other}"
        for name in modules()
        for other in sorted(own_imports(name))
        if part_of(other) != part_of(name) and HEIGHTS[part_of(other)] >= HEIGHTS[part_of(name)]
    ]


def test_imports_go_down() -> None:
    assert climbing() == []


def test_the_two_long_lived_processes_do_not_import_each_other() -> None:
    parts = {name: {part_of(other) for other in own_imports(name)} for name in modules()}
    assert not [name for name in parts if part_of(name) == "worker" and "coordinator" in parts[name]]
    assert not [name for name in parts if part_of(name) == "coordinator" and parts[name] & {"worker", "runner"}]


def test_only_ranks_import_mlx() -> None:
    assert [name for name in modules() if foreign_imports(name) & MLX and not within(name, MAY_IMPORT_MLX)] == []


def test_only_the_group_knows_mlx_environment() -> None:
    others = [name for name in modules() if not within(name, ("group", "testing"))]  # a stand-in reads as MLX does
    found = [(name, text) for name in others for text in texts(name) if any(word in text for word in MLX_VARIABLES)]
    assert found == []


@pytest.mark.process
@pytest.mark.parametrize("module", ["muster.worker.service", "muster.coordinator.service", "muster.cli.app"])
def test_a_long_lived_process_has_no_mlx_in_memory(module: str) -> None:
    """Whatever is imported on the way: a worker without runners stays small."""
    program = f"import sys, {module}; sys.stdout.write(' '.join({{'mlx', 'mlx_lm', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == ""
