"""`muster bench memory`: predicted against real memory of every rank, for every family that this machine can run.

Models are random, and made on the spot; ranks are real processes in real ring groups on loopback, loaded and run by
what a runner loads and runs them by. Their memory is what MLX's allocator counts.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import anyio
import msgspec

from muster.bench.families import CONFIGS
from muster.bench.machine import this_machine
from muster.bench.memory_rank import Job, Taken
from muster.bench.observer import BenchError
from muster.bench.report import AtMost, Figure, Report, figure
from muster.group.ports import reserve
from muster.needs import ModelNeeds, against_pipeline, against_tensor
from muster.predict import Sharding, rank_cache, rank_weights, workspace

#: Cannot run here: a checkpoint of its own kind, and kernels that need Metal.
_LEFT_OUT: Final = frozenset({"prism_hadamard_qwen35", "muse_spark"})
FAMILIES: Final = tuple(sorted(CONFIGS.keys() - _LEFT_OUT))
_RANKS: Final = 2
_SECONDS: Final = 600.0
#: The bar: within 5 %, or 32 MB where that is more.
_SHARE: Final = 0.05
_BYTES: Final = 32e6


class MemorySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Which families."""

    families: tuple[str, ...] = FAMILIES


#: To see that it works.
QUICK: Final = MemorySettings(families=("qwen2", "deepseek_v3"))


async def measure(settings: MemorySettings, directory: Path, say: Callable[[str], None]) -> Report:
    """Make, run and compare them all, one after the other.

    Raises:
        BenchError: a process failed.
    """
    figures: list[Figure] = []
    processes: list[int] = []
    for number, family in enumerate(settings.families, start=1):
        say(f"{family}, {number} of {len(settings.families)}")
        model = directory / family
        made = await _run(Job(model_type=family, directory=str(model)))
        needs = made.needs
        assert needs is not None
        for sharding in _ways(needs):
            job = Job(model_type=family, directory=str(model), sharding="auto" if sharding == "none" else sharding)
            taken = await _run_ranks(job, 1 if sharding == "none" else _RANKS)
            processes += [one.process for one in taken]
            figures += [_compare(needs, job, one, rank, len(taken)) for rank, one in enumerate(taken)]
        shutil.rmtree(model)
    notes = (
        "Per rank: how far weights and caches in memory are from the prediction, in MB (bar: 5 % or 32 MB of it).",
        f"Beside MLX's memory a process took {max(processes, default=0) / 1e6:.0f} MB at most.",
    )
    return Report(machine=this_machine(), figures=tuple(figures), rounds=(), notes=notes)


def _ways(needs: ModelNeeds) -> list[Sharding]:
    ways: list[Sharding] = ["none"]
    if not against_tensor(needs, _RANKS):
        ways.append("tensor")
    if not against_pipeline(needs, _RANKS):
        ways.append("pipeline")
    return ways


def _compare(needs: ModelNeeds, job: Job, taken: Taken, rank: int, world_size: int) -> Figure:
    """Beside it stands what was predicted; where the peak is above the prediction, that is what counts."""
    sharding: Sharding = msgspec.convert(taken.sharding, Sharding)
    layers = range(*taken.layers)
    sequences = 1 if needs.solo else job.sequences
    tokens = job.prompt_tokens + job.answer_tokens
    weights = rank_weights(needs, sharding, world_size, layers)
    held = weights + rank_cache(needs, sharding, world_size, layers, tokens, sequences)
    peak = held + workspace(
        needs,
        sharding,
        world_size,
        leads=rank == 0,
        sequences=sequences,
        prefill_chunk_tokens=job.chunk_tokens,
        context_tokens=tokens,
    )
    off = max(abs(taken.weights - weights), abs(taken.held - held), taken.peak - peak)
    allowed = max(_SHARE * taken.held, _BYTES)
    return figure(
        f"{needs.model_type}, {taken.sharding}, rank {rank}: off by",
        "MB",
        off / 1e6,
        peer=taken.held / 1e6,
        peer_name="held",
        bar=AtMost(limit=allowed / 1e6, text=f"≤ {allowed / 1e6:.0f} MB"),
    )


async def _run_ranks(job: Job, world_size: int) -> list[Taken]:
    if world_size == 1:
        return [await _run(msgspec.structs.replace(job, world_size=1))]
    ports = reserve("127.0.0.1", world_size)
    hosts = tuple((f"127.0.0.1:{port}",) for port in ports.ports)
    taken: dict[int, Taken] = {}

    async def be(rank: int) -> None:
        taken[rank] = await _run(msgspec.structs.replace(job, rank=rank, world_size=world_size, hosts=hosts))

    try:
        async with anyio.create_task_group() as group:
            for rank in range(world_size):
                group.start_soon(be, rank)
    finally:
        ports.close()
    return [taken[rank] for rank in range(world_size)]


async def _run(job: Job) -> Taken:
    command = [sys.executable, "-m", "muster.bench.memory_rank", msgspec.json.encode(job).decode()]
    with anyio.fail_after(_SECONDS):
        done = await anyio.run_process(command, check=False, stderr=subprocess.PIPE)
    if done.returncode != 0:
        raise BenchError(f"{_named(job)} ended with {done.returncode}:\n{_tail(done.stderr.decode(errors='replace'))}")
    return msgspec.json.decode(done.stdout, type=Taken)


def _named(job: Job) -> str:
    return f"rank {job.rank} of {job.model_type}" if job.world_size else f"making {job.model_type}"


def _tail(text: str, lines: int = 6) -> str:
    found: Sequence[str] = text.splitlines()
    return "\n".join(found[-lines:])
