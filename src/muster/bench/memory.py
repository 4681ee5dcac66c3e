"""`muster bench memory`: predicted against real memory of every rank, for every family that mlx-lm can share out.

Models are random, and made on the spot: in float32, and quantised. Ranks are real processes in a real ring group on
loopback; they load and run what a runner loads and runs, by the same code. Their memory is what MLX's allocator
counts: after loading, between steps while many sequences fill the cache, and at its highest.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from muster.bench.families import CONFIGS
from muster.bench.machine import this_machine
from muster.bench.memory_crew import Crew
from muster.bench.memory_rank import Answer, Make, Run, Taken
from muster.bench.observer import BenchError
from muster.bench.report import AtMost, Figure, Report, Round, figure
from muster.needs import ModelNeeds, against_pipeline, against_tensor, on_cpu
from muster.predict import Sharding, rank_cache, rank_weights, workspace
from muster.spec import ShardingWish

FAMILIES: Final = tuple(sorted(CONFIGS))
_RANKS: Final = 2
#: Weights in float32, and quantised ones beside 16 bits.
_BITS: Final = (0, 4)
#: The bar: within 5 %, or 32 MB where that is more.
_SHARE: Final = 0.05
_BYTES: Final = 32e6
_MB: Final = 1e6
_SOLO_SEQUENCES: Final = 2
#: What is compared of each rank.
_WHAT: Final = ("weights", "weights and caches", "all at the highest")


class MemorySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Which families, and what a rank is given to do: so much that caches count beside weights.

    A chunk is longer than the windows of the families that have some. Quantised models get less to do: a CPU computes
    with 16 bits ten times slower than with 32, and caches grow by 256 tokens anyway.
    """

    families: tuple[str, ...] = FAMILIES
    sequences: int = 4
    prompt_tokens: int = 260
    answer_tokens: int = 4
    chunk_tokens: int = 144


#: To see that it works.
QUICK: Final = MemorySettings(families=("qwen2", "deepseek_v3"))


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one process is to do, and for which model."""

    needs: ModelNeeds
    bits: int
    rank: int
    run: Run

    @property
    def name(self) -> str:
        """As it stands in the report."""
        kind = f"{self.bits} bits" if self.bits else "float32"
        kind = "packed" if _is_packed(self.needs.model_type) else kind
        where = f", rank {self.rank}" if self.run.world_size > 1 else ""
        return f"{self.needs.model_type}, {kind}, {self.run.sharding if where else 'alone'}{where}"


class _Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One rank. Bytes of weights, of weights and caches, and of all at the highest: predicted, and taken."""

    name: str
    predicted: tuple[int, ...]
    taken: tuple[int, ...]
    process: int

    @property
    def off(self) -> tuple[int, ...]:
        """By how much more was predicted than was taken."""
        return tuple(one - other for one, other in zip(self.predicted, self.taken, strict=True))


async def measure(settings: MemorySettings, directory: Path, say: Callable[[str], None]) -> Report:
    """Make, run and compare them all, one after the other. What cannot be run is a figure that does not hold."""
    compared: list[_Compared] = []
    failures: list[tuple[str, str]] = []
    async with Crew(_RANKS, directory) as crew:
        for number, family in enumerate(settings.families, start=1):
            say(f"{family}, {number} of {len(settings.families)}")
            makes = [
                Make(model_type=family, directory=str(directory / f"{family}-{bits}"), bits=bits)
                for bits in (_BITS[:1] if _is_packed(family) else _BITS)
            ]
            try:
                made = await crew.do(makes)
            except BenchError as error:
                failures.append((family, str(error)))
                continue
            for parts in _trials(settings, list(zip(makes, made, strict=True))):
                try:
                    answers = await crew.do([part.run for part in parts])
                except BenchError as error:
                    failures.append((parts[0].name, str(error)))
                else:
                    compared += [_compare(part, one.taken) for part, one in zip(parts, answers, strict=True)]
            for make in makes:
                shutil.rmtree(make.directory)
    return _report(compared, failures)


def _is_packed(family: str) -> bool:
    """Whether its weights come in a form of its own."""
    return "quantization" in CONFIGS[family]


def _trials(settings: MemorySettings, models: Sequence[tuple[Make, Answer]]) -> list[list[_Part]]:
    """What the processes do at the same time: each model on one of them alone, then one model on all."""
    whole: list[_Part] = []
    shared: list[list[_Part]] = []
    for make, made in models:
        needs = made.needs
        assert needs is not None
        ways: list[tuple[ShardingWish, bool]] = [
            ("tensor", not against_tensor(needs, _RANKS)),
            ("pipeline", not against_pipeline(needs, _RANKS)),
        ]
        whole.append(_part(settings, make, needs, "auto", 0, 1))
        shared += [
            [_part(settings, make, needs, sharding, rank, _RANKS) for rank in range(_RANKS)]
            for sharding, possible in ways
            if possible
        ]
    return [whole, *shared]


def _part(
    settings: MemorySettings, make: Make, needs: ModelNeeds, sharding: ShardingWish, rank: int, world_size: int
) -> _Part:
    is_slow = bool(make.bits) or _is_packed(make.model_type)
    run = Run(
        directory=make.directory,
        sharding=sharding,
        world_size=world_size,
        # Where they run one by one, more of them show no more.
        sequences=_SOLO_SEQUENCES if needs.solo else settings.sequences // (2 if is_slow else 1),
        prompt_tokens=settings.prompt_tokens // (10 if is_slow else 1),
        answer_tokens=settings.answer_tokens,
        chunk_tokens=settings.chunk_tokens,
    )
    return _Part(needs=needs, bits=make.bits, rank=rank, run=run)


def _compare(part: _Part, taken: Taken | None) -> _Compared:
    assert taken is not None
    needs, run, layers = part.needs, part.run, range(*taken.layers)
    sharding = msgspec.convert(taken.sharding, Sharding)
    sequences = 1 if needs.solo else run.sequences
    tokens = run.prompt_tokens + run.answer_tokens
    weights = rank_weights(needs, sharding, run.world_size, layers)
    held = weights + rank_cache(
        needs,
        sharding,
        run.world_size,
        layers,
        tokens,
        sequences,
        prefill_chunk_tokens=run.chunk_tokens,
    )
    working = workspace(
        on_cpu(needs),
        sharding,
        run.world_size,
        leads=part.rank == 0,
        sequences=sequences,
        prefill_chunk_tokens=run.chunk_tokens,
        context_tokens=tokens,
    )
    return _Compared(
        name=part.name,
        predicted=(weights, held, held + working),
        taken=(taken.weights, taken.held, taken.peak),
        process=taken.process,
    )


def _report(compared: Sequence[_Compared], failures: Sequence[tuple[str, str]]) -> Report:
    figures = [_figure(one) for one in compared]
    figures += [Figure(name=name, unit="", muster=None, bar="runs", holds=False) for name, _ in failures]
    rounds = [
        Round(name=f"{one.name}: {what}", number=1, unit="MB", muster=predicted / _MB, peer=taken / _MB)
        for one in compared
        for what, predicted, taken in zip(_WHAT, one.predicted, one.taken, strict=True)
    ]
    worst = ", ".join(
        f"{max((abs(one.off[place]) for one in compared), default=0) / _MB:.2f} MB of {what}"
        for place, what in enumerate(_WHAT)
    )
    notes = (
        f"Per rank: how far {_WHAT[0]}, {_WHAT[1]}, or {_WHAT[2]} are from the prediction; beside it the last.",
        f"At most: {worst}.",
        f"Beside MLX's memory a process took {max((one.process for one in compared), default=0) / _MB:.0f} MB at most.",
        *(f"{name} failed: {reason}" for name, reason in failures),
    )
    return Report(machine=this_machine(), figures=tuple(figures), rounds=tuple(rounds), notes=notes)


def _figure(one: _Compared) -> Figure:
    """The worst of the three, and what the bar allows of what was taken."""
    allowed = [max(_SHARE * taken, _BYTES) for taken in one.taken]
    off, limit = max(zip(map(abs, one.off), allowed, strict=True), key=lambda pair: pair[0] / pair[1])
    return figure(
        f"{one.name}: off by",
        "MB",
        off / _MB,
        peer=one.taken[-1] / _MB,
        peer_name="taken at the highest",
        bar=AtMost(limit=limit / _MB, text=f"≤ {limit / _MB:.0f} MB"),
    )
