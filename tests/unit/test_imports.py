"""Top imports down, never up: the direction of imports of the design, read from the source."""

from __future__ import annotations

import subprocess
import sys

import pytest
from sources import foreign_imports, modules, own_imports, texts

#: The pure core: no clock, no socket, no file.
PURE = ("errors", "spec", "sampling", "events", "state", "fold", "fold_nodes", "lifecycle", "placement")
#: What of the standard library does no I/O.
PURE_LIBRARY = {
    "abc",
    "collections",
    "dataclasses",
    "enum",
    "functools",
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
    "events": 1,
    "state": 2,
    "fold_nodes": 3,
    "fold": 4,
    "placement": 3,
    "lifecycle": 5,
    "protocol": 4,
    "replies": 5,
    "rank_protocol": 6,
    "paths": 4,
    "filelock": 4,
    "trace_clock": 3,
    "trace": 4,
    "render_trace": 5,
    "schema": 10,
    "group": 6,
    "bus": 7,
    "eventlog": 7,
    "model": 7,
    "runner": 8,
    "worker": 9,
    "coordinator": 9,
    "local": 10,
    "api": 10,
    "demo": 11,
    "bench": 11,
    "cli": 12,
    "__main__": 13,
}

#: What may have MLX in its process: the ranks, and tools that are run by themselves.
MLX = {"mlx", "mlx_lm"}
MAY_IMPORT_MLX = ("runner", "model", "group.formation", "group.verify", "demo.train", "demo.regression", "bench")

MLX_VARIABLES = ("MLX_HOSTFILE", "MLX_RANK", "MLX_IBV", "MLX_JACCL", "MLX_RING", "JACCL_")


def within(name: str, parts: tuple[str, ...]) -> bool:
    return any(name == part or name.startswith(part + ".") for part in parts)


def part_of(name: str) -> str:
    return name.split(".")[0]


@pytest.mark.parametrize("name", PURE)
def test_the_core_is_pure(name: str) -> None:
    assert foreign_imports(name) <= PURE_LIBRARY | {"msgspec"}
    assert own_imports(name) <= set(PURE)


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
    others = [name for name in modules() if not within(name, ("group",))]
    found = [(name, text) for name in others for text in texts(name) if any(word in text for word in MLX_VARIABLES)]
    assert found == []


@pytest.mark.process
@pytest.mark.parametrize("module", ["muster.worker.service", "muster.coordinator.service", "muster.cli.app"])
def test_a_long_lived_process_has_no_mlx_in_memory(module: str) -> None:
    """Whatever is imported on the way: a worker without runners stays small."""
    program = f"import sys, {module}; sys.stdout.write(' '.join({{'mlx', 'mlx_lm', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == ""
