"""`muster bench formation`: how fast groups come up, beside `mlx.launch`, and what they cost while they are idle."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
import msgspec
import psutil
from loguru import logger

from muster.bench.launch import launch_seconds, launcher
from muster.bench.leftovers import collisions, files_in, left_by
from muster.bench.machine import this_machine
from muster.bench.observer import BenchError, Observer, Trial, observing
from muster.bench.report import (
    AtLeast,
    AtMost,
    Bar,
    Figure,
    Report,
    Round,
    ShareOfPeer,
    figure,
    median_or_none,
)
from muster.bench.steps import steps_of
from muster.errors import MusterError
from muster.local import LocalCluster
from muster.spec import GroupWorkload, InstanceSpec, ModelWorkload, Workload

#: What a dial before the neighbour listens costs in MLX; no round may take so long.
RETRY_SECONDS = 1.0
_NODES = ("a", "b")
#: Warm runners on each node: enough for the 2 ranks that a node has of 4.
_POOL = 2
_READY_SECONDS = 60.0
_BURST_SECONDS = 180.0
#: Until a group that became ready has come to rest, before its idling is measured.
_SETTLE_SECONDS = 0.5
_DEMO_MODEL = Path(__file__).parents[1] / "demo" / "model"
_MEGABYTE = 1e6

Say = Callable[[str], None]


class FormationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured. `worst_rounds` counts all rounds of 2 ranks, those beside the peer among them."""

    rounds: int = 15
    worst_rounds: int = 50
    burst_instances: int = 20
    idle_seconds: float = 10.0


#: Shows that everything works, in less than a minute; its figures mean little.
QUICK = FormationSettings(rounds=1, worst_rounds=2, burst_instances=3, idle_seconds=2.0)


class Formation(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of group that is formed beside the peer; its median may be a `divisor`-th of the peer's."""

    ranks: int
    divisor: float

    @property
    def name(self) -> str:
        """As rounds and figures call it."""
        return f"create to ready, {self.ranks} ranks"

    @property
    def peer_name(self) -> str:
        """The peer's command."""
        return f"mlx.launch --backend ring -n {self.ranks}"


TWO = Formation(ranks=2, divisor=10)
FOUR = Formation(ranks=4, divisor=6)


async def measure(settings: FormationSettings, directory: Path, say: Say) -> Report:
    """Measure everything on a cluster of its own.

    Args:
        settings: How much.
        directory: For the cluster and the peer; the caller removes it.
        say: Told what is going on.

    Raises:
        BenchError: an instance did not go away, a pool did not become warm, or the idle pair did not come up.
        UnreachableError: the cluster did not start.
    """
    machine = this_machine()
    cluster = LocalCluster(
        directory / "cluster", _NODES, node_options=("--pool", str(_POOL), "--max-ranks", "64"), log_level="warning"
    )
    say("starting a coordinator and two workers")
    try:
        await anyio.to_thread.run_sync(cluster.start)
        async with observing(cluster.address) as observer:
            bench = _Bench(settings, observer, directory, say)
            figures = await bench.run()
        return Report(machine=machine, figures=tuple(figures), rounds=tuple(bench.rounds))
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(cluster.stop)


class _Bench:
    def __init__(self, settings: FormationSettings, observer: Observer, directory: Path, say: Say) -> None:
        self.rounds: list[Round] = []
        self._settings = settings
        self._observer = observer
        self._directory = directory
        self._say = say
        self._launcher = launcher()

    async def run(self) -> list[Figure]:
        """All parts, each from a warm pool."""
        await self._rounds()
        memory = await self._memory()
        idle = await self._idle()
        burst = await self._burst()
        return [*formation_figures(self.rounds, self._settings.rounds), *burst, *idle, *memory]

    # --- forming ------------------------------------------------------------------------------------------

    async def _rounds(self) -> None:
        count = self._settings.rounds
        for number in range(1, count + 1):
            for formation in (TWO, FOUR):
                self._say(f"round {number} of {count}: {formation.ranks} ranks")
                await self._round(formation, number, peer=True)
        for number in range(count + 1, self._settings.worst_rounds + 1):
            self._say(f"round {number} of {self._settings.worst_rounds}: 2 ranks, for the worst of them")
            await self._round(TWO, number, peer=False)

    async def _round(self, formation: Formation, number: int, *, peer: bool) -> None:
        """Create, wait until ready, delete; then the peer, on a machine that is as quiet again."""
        await self._observer.wait_warm(_POOL)
        trial: Trial | None = None
        try:
            trial = await self._observer.bring_up(_group(formation.ranks), deadline_seconds=_READY_SECONDS)
        except BenchError as error:
            logger.warning("round {} of {}: {}", number, formation.name, error)
        await self._observer.delete_all()
        peer_seconds: float | None = None
        if peer and self._launcher is not None:
            await self._observer.wait_warm(_POOL)
            peer_seconds = await launch_seconds(self._launcher, formation.ranks, self._directory / "launch")
        self.rounds.append(
            Round(
                name=formation.name,
                number=number,
                unit="s",
                muster=None if trial is None else trial.seconds,
                peer=peer_seconds,
                steps={} if trial is None else steps_of(trial),
            )
        )

    # --- many at once ---------------------------------------------------------------------------------------

    async def _burst(self) -> list[Figure]:
        """Create many at the same moment, and look at what is left of them after their deletion."""
        count = self._settings.burst_instances
        self._say(f"{count} instances of 2 ranks at once")
        await self._observer.wait_warm(_POOL)
        homes = [self._directory / "cluster" / node for node in _NODES]
        files = files_in(homes)
        trials: list[Trial] = []

        async def one() -> None:
            try:
                trials.append(await self._observer.bring_up(_group(2), deadline_seconds=_BURST_SECONDS))
            except MusterError as error:
                logger.warning("one of {} at once: {}", count, error)

        began = time.monotonic()
        async with anyio.create_task_group() as group:
            for _ in range(count):
                group.start_soon(one)
        seconds = time.monotonic() - began
        instances = [trial.instance for trial in trials]
        await self._observer.delete_all()
        left = left_by(instances, files, homes)
        name = f"{count} instances of 2 ranks at once"
        nothing = AtMost(limit=0, text="0 left after deletion")
        return [
            figure(f"{name}: ready", "", len(trials), bar=AtLeast(limit=count, text="all ready")),
            figure(f"{name}: until all are ready", "s", seconds if len(trials) == count else None),
            figure(f"{name}: collisions", "", collisions(instances), bar=AtMost(limit=0, text="no collision")),
            figure(f"{name}: files", "", left.files, bar=nothing),
            figure(f"{name}: ports", "", left.ports, bar=nothing),
            figure(f"{name}: processes", "", left.processes, bar=nothing),
        ]

    # --- idling -------------------------------------------------------------------------------------------

    async def _idle(self) -> list[Figure]:
        """CPU of each rank of a ready model and of a bare group at the same time, and the growth of the log."""
        seconds = self._settings.idle_seconds
        workloads: dict[str, Workload] = {
            "model": ModelWorkload(model=str(_DEMO_MODEL)),
            "group": GroupWorkload(),
        }
        await self._observer.wait_warm(_POOL)
        self._say(f"a model and a bare group, idle for {seconds:g} s")
        trials = {
            name: await self._observer.bring_up(
                InstanceSpec(workload=workload, ranks=2), deadline_seconds=_READY_SECONDS
            )
            for name, workload in workloads.items()
        }
        await self._observer.wait_warm(_POOL)
        await anyio.sleep(_SETTLE_SECONDS)
        before = await self._observer.snapshot()
        sequence = self._observer.state.sequence
        began = time.monotonic()
        used = {name: [_cpu_seconds(rank.pid) for rank in trial.instance.ranks] for name, trial in trials.items()}
        await anyio.sleep(seconds)
        elapsed = time.monotonic() - began
        busiest = {
            name: max(
                _cpu_seconds(rank.pid) - earlier for rank, earlier in zip(trial.instance.ranks, used[name], strict=True)
            )
            for name, trial in trials.items()
        }
        after = await self._observer.snapshot()
        events = self._observer.state.sequence - sequence
        await self._observer.delete_all()
        at_rest = AtMost(limit=0.3, text="≤ 0.3 % CPU per rank over 10 s")
        still = AtMost(limit=0, text="log does not grow")
        return [
            *(
                figure(f"idle {name}, 2 ranks: CPU of the busiest rank", "%", 100 * cpu / elapsed, bar=at_rest)
                for name, cpu in busiest.items()
            ),
            figure("idle: events logged", "", events, bar=still),
            figure("idle: growth of the log", "bytes", after.log_bytes - before.log_bytes, bar=still),
        ]

    # --- memory -------------------------------------------------------------------------------------------

    async def _memory(self) -> list[Figure]:
        """Resident memory; of the workers and warm runners, the larger."""
        beats = await self._observer.wait_warm(_POOL)
        snapshot = await self._observer.snapshot()
        worker = max(beat.memory_used_bytes for beat in beats) / _MEGABYTE
        runner = max(beat.warm_memory_bytes for beat in beats) / _MEGABYTE
        light: Bar = AtMost(limit=80, text="≤ 80 MB")
        return [
            figure("resident memory: warm runner", "MB", runner),
            figure("resident memory: coordinator", "MB", snapshot.memory_bytes / _MEGABYTE),
            figure("resident memory: worker without its runners", "MB", worker, bar=light),
        ]


def formation_figures(rounds: Sequence[Round], beside_peer: int) -> list[Figure]:
    """The figures of the rounds: medians of the first `beside_peer`, and the worst of all with 2 ranks."""
    figures: list[Figure] = []
    peers: dict[int, float | None] = {}
    for formation in (TWO, FOUR):
        own = [one for one in rounds if one.name == formation.name and one.number <= beside_peer]
        peers[formation.ranks] = median_or_none([one.peer for one in own])
        figures.append(
            figure(
                f"{formation.name}, median of {len(own)}",
                "s",
                median_or_none([one.muster for one in own]),
                peer=peers[formation.ranks],
                peer_name=formation.peer_name,
                bar=ShareOfPeer(divisor=formation.divisor),
            )
        )
    two = [one.muster for one in rounds if one.name == TWO.name and one.muster is not None]
    figures.append(
        figure(
            f"{TWO.name}, worst of {len(two)}",
            "s",
            max(two, default=None),
            peer=peers[2],
            peer_name=f"{TWO.peer_name}, median",
            bar=ShareOfPeer(divisor=6),
        )
    )
    late = sum(one.muster is None or one.muster >= RETRY_SECONDS for one in rounds)
    figures.append(
        figure("rounds of 1 s or more, or failed", "", late, bar=AtMost(limit=0, text="never MLX's one-second retry"))
    )
    return figures


def _group(ranks: int) -> InstanceSpec:
    return InstanceSpec(workload=GroupWorkload(), ranks=ranks)


def _cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system
