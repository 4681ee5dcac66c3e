"""`muster bench serve`: how fast models answer over HTTP, beside `mlx_lm.server`, each server started in turn."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import msgspec
import psutil
from loguru import logger

from muster.bench import muster_server, peer_server
from muster.bench.inprocess import Job, in_child
from muster.bench.machine import this_machine
from muster.bench.observer import BenchError
from muster.bench.peer_server import Running, environment
from muster.bench.report import Figure, Report, figure
from muster.bench.samples import PARTS, Contender, Metric, Part, Sample, figures, legend, rounds
from muster.bench.session import STREAMS, ClientCost, Effort, Session
from muster.bench.shapes import SMALL, TINY, Shape
from muster.bench.soak import Soak, roles_of, soak
from muster.errors import MusterError

Say = Callable[[str], None]

#: Which parts each contender takes part in; those beside the speeds are measured with the tiny model alone.
_SPEEDS: Final[tuple[Part, ...]] = ("throughput", "latency")
_TAKES_PART: Final[dict[Contender, tuple[Part, ...]]] = {
    "muster 1": (*_SPEEDS, "prefix"),
    "muster 2": (*_SPEEDS, "start", "idle"),
    "server 1": (*_SPEEDS, "prefix"),
    "server 2": (*_SPEEDS, "start", "idle"),
    "launched 2": ("throughput",),
    "in-process": ("throughput",),
}
_RANKS: Final[tuple[tuple[int, Contender], ...]] = ((1, "muster 1"), (2, "muster 2"))
_PEERS: Final[dict[Contender, Callable[[Path, Path], AbstractAsyncContextManager[Running]]]] = {
    "server 1": peer_server.one_rank,
    "server 2": peer_server.two_ranks,
    "launched 2": peer_server.launched,
}
#: It runs many times slower than the others.
_LAUNCHED_EFFORT = Effort(singles=1, waves=1)
#: So that the cache of finished prompts is full before the soak is compared with what was before it.
_SOAK_CACHE_BYTES = 16 * 2**20
#: While others are watched at work, before anything is started.
_WATCH_SECONDS = 1.0


class ServingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured."""

    parts: tuple[Part, ...] = PARTS
    rounds: int = 3
    shapes: tuple[Shape, ...] = (TINY, SMALL)
    effort: Effort = Effort()
    soak: Soak = Soak()


#: Shows that everything works; its figures mean little.
QUICK = ServingSettings(
    rounds=1,
    shapes=(TINY,),
    effort=Effort(singles=1, waves=1, idle_seconds=2.0, long_chats=1),
    soak=Soak(streams=30, seconds=5.0, warm_seconds=2.0),
)


async def measure(settings: ServingSettings, directory: Path, say: Say) -> Report:
    """Measure the parts.

    Args:
        settings: How much.
        directory: For the models, the cluster and the peers' files; the caller removes it.
        say: Told what is going on.

    Raises:
        BenchError: a model could not be made.
    """
    machine = this_machine()
    busy = await anyio.to_thread.run_sync(psutil.cpu_percent, _WATCH_SECONDS)
    bench = _Bench(settings, directory, say)
    await bench.run()
    others = f"Before the run other work took {busy:.0f} % of this machine; afterwards its load was {load()}."
    speeds = figures(bench.samples, settings.parts, settings.shapes)
    return Report(
        machine=machine,
        figures=(*speeds, *bench.soaked, *_cost(bench.cost)),
        rounds=tuple(rounds(bench.samples, settings.parts, settings.shapes)),
        notes=(others, legend(), *bench.notes),
    )


def load() -> str:
    """The load averages of 1, 5 and 15 minutes."""
    return " ".join(f"{one:.2f}" for one in os.getloadavg())


def _cost(cost: ClientCost) -> list[Figure]:
    """What the load client took of the machine, for each token; the same for every server."""
    if not cost.tokens:
        return []
    return [figure("load client: CPU for each token", "ms", 1000 * cost.cpu_seconds / cost.tokens)]


class _Bench:
    def __init__(self, settings: ServingSettings, directory: Path, say: Say) -> None:
        self.samples: list[Sample] = []
        self.soaked: list[Figure] = []
        self.notes: list[str] = []
        self.cost = ClientCost()
        self._settings = settings
        self._directory = directory
        self._say = say
        self._models: dict[str, Path] = {}

    async def run(self) -> None:
        """All parts."""
        for shape in self._settings.shapes:
            await self._make(shape)
        if set(self._settings.parts) - {"soak"}:
            for number in range(1, self._settings.rounds + 1):
                await self._round(number)
        if "soak" in self._settings.parts:
            async with self._tolerant("the soak"):
                await self._soak()

    async def _make(self, shape: Shape) -> None:
        self._say(f"making a model of {shape.what} parameters")
        model = self._directory / shape.name
        command = [sys.executable, "-m", "muster.bench.tiny_model", shape.name, str(model)]
        done = await anyio.run_process(command, check=False, env=environment())
        if done.returncode != 0:
            raise BenchError(f"the {shape.name} model could not be made:\n{done.stderr.decode(errors='replace')}")
        self._models[shape.name] = model
        self.notes.append(f"The model of {shape.what} has {int(done.stdout):,} parameters in fp32, cut by tensor.")

    # --- rounds -------------------------------------------------------------------------------------------

    async def _round(self, number: int) -> None:
        """Each server in turn. One that fails has no figure; the others go on."""
        self._say(f"round {number}: muster")
        async with self._tolerant("muster"), muster_server.cluster(self._directory / f"c{number}") as host:
            for shape in self._settings.shapes:
                for ranks, contender in _RANKS:
                    parts = self._parts(contender, shape)
                    if not parts:
                        continue
                    self._say(f"round {number}: muster, {ranks} ranks, {shape.what}")
                    async with (
                        self._tolerant(f"muster on {ranks}"),
                        muster_server.serving(host, self._models[shape.name], ranks) as served,
                    ):
                        await self._session(served.running, shape, contender, number, parts, host.settle)
        for shape in self._settings.shapes:
            for contender, start in _PEERS.items():
                parts = self._parts(contender, shape)
                if not parts:
                    continue
                self._say(f"round {number}: {contender}, {shape.what}")
                async with (
                    self._tolerant(contender),
                    start(self._models[shape.name], self._directory / "peers") as running,
                ):
                    await self._session(running, shape, contender, number, parts, None)
            if self._parts("in-process", shape):
                self._say(f"round {number}: mlx-lm in-process, {shape.what}")
                await self._in_process(shape, number)

    def _parts(self, contender: Contender, shape: Shape) -> list[Part]:
        allowed = _SPEEDS if shape != self._settings.shapes[0] else PARTS
        return [part for part in _TAKES_PART[contender] if part in self._settings.parts and part in allowed]

    async def _session(
        self,
        running: Running,
        shape: Shape,
        contender: Contender,
        number: int,
        parts: Sequence[Part],
        settle: Callable[[], Awaitable[None]] | None,
    ) -> None:
        effort = _LAUNCHED_EFFORT if contender == "launched 2" else self._settings.effort
        session = Session(running, shape, contender, number, self.cost)
        try:
            await session.run(parts, effort, settle)
        finally:
            self.samples += session.samples

    async def _in_process(self, shape: Shape, number: int) -> None:
        effort = self._settings.effort
        job = Job(
            model=str(self._models[shape.name]),
            streams=STREAMS,
            answer_tokens=shape.answer_tokens,
            singles=effort.singles,
            waves=effort.waves,
        )
        async with self._tolerant("mlx-lm in-process"):
            speeds = await in_child(job, environment())
            measured: dict[Metric, Sequence[float]] = {
                "stream": speeds.single_tokens_per_second,
                "first": speeds.first_seconds,
                "streams": speeds.batch_tokens_per_second,
            }
            self.samples += [
                Sample(contender="in-process", shape=shape.name, metric=metric, round=number, value=value)
                for metric, values in measured.items()
                for value in values
            ]

    @asynccontextmanager
    async def _tolerant(self, what: str) -> AsyncGenerator[None]:
        """An error of the body leaves figures open, and is told."""
        try:
            yield
        except MusterError as error:
            logger.warning("{}: {}", what, error)
            self.notes.append(f"{what}: {error.message}")

    # --- the soak -----------------------------------------------------------------------------------------

    async def _soak(self) -> None:
        settings = self._settings.soak
        self._say(f"{settings.streams} streams for {settings.seconds:g} s")
        model = self._models[self._settings.shapes[0].name]
        async with (
            muster_server.cluster(self._directory / "soak") as host,
            muster_server.serving(host, model, 2, prompt_cache_bytes=_SOAK_CACHE_BYTES) as served,
        ):
            await host.settle()
            roles = roles_of(host.roots, [rank.pid for rank in served.instance.ranks])
            self.soaked += await soak(served.running.target, roles, settings, host.open_requests)
