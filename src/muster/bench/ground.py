"""A cluster of its own that a benchmark may break as it likes, and what is left of it in the end."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import anyio.abc
import anyio.to_thread
import msgspec
import psutil

from muster.bench.launch import free_ports
from muster.bench.leftovers import Leftovers, left_after
from muster.bench.load import Target
from muster.bench.observer import BenchError, Observer, observing
from muster.errors import MusterError
from muster.local import LocalCluster
from muster.protocol import Drain, Generate, Resume
from muster.replies import Chunk, Done, Noted, Refused
from muster.sampling import SamplingParams
from muster.spec import InstanceId, NodeId

#: Warm runners on each node: enough for the ranks that a node has at a time.
_POOL = 2
DEMO_MODEL = Path(__file__).parents[1] / "demo" / "model"
#: The token that ends the demo model's answers; forbidden, they go on to their limit.
_END_TOKEN = 258
_ENDLESS_TOKENS = 1900
#: Pieces after which a request counts as decoding.
_PIECES = 3
_SECONDS = 60.0
#: Control, events, generation.
_PORTS = 3


class Ground:
    """A coordinator and workers on ports that stay the same, with an observer. `tasks` runs beside the block."""

    def __init__(self, cluster: LocalCluster, ports: range, pool: int) -> None:
        self.cluster = cluster
        self.ports = ports
        self.pool = pool
        self.tasks: anyio.abc.TaskGroup
        self.observer: Observer

    @property
    def http_port(self) -> int | None:
        """Of the HTTP API, where there is one."""
        return urlsplit(self.cluster.http).port

    def target(self, model: str) -> Target:
        """The HTTP API, for a model of this name."""
        port = self.http_port
        assert port is not None
        return Target(port=port, model=model)

    def pid(self, name: str) -> int:
        """The process of the coordinator or of a worker."""
        return self.cluster.members[name].process.pid

    def descendants(self) -> set[tuple[int, float]]:
        """All processes below the workers now, by pid and start time."""
        found: set[tuple[int, float]] = set()
        for name in self.cluster.members:
            if name != "coordinator":
                found |= below(self.pid(name))
        return found

    async def kill(self, name: str) -> None:
        """SIGKILL the coordinator or a worker, and wait for its end."""
        await anyio.to_thread.run_sync(self.cluster.kill, name)

    async def start_coordinator(self) -> None:
        """Start it on the same state and ports, and wait until it is up.

        Raises:
            UnreachableError: it did not come up.
        """
        await anyio.to_thread.run_sync(self.cluster.start_coordinator)

    async def start_workers(self, nodes: Sequence[str], options: Mapping[str, Sequence[str]] | None = None) -> None:
        """Start the workers of these nodes at once, each with its options, and wait until all have joined.

        Raises:
            UnreachableError: one did not come up.
        """

        def start() -> None:
            for node in nodes:
                self.cluster.start_worker(node, wait=False, options=(options or {}).get(node, ()))
            for node in nodes:
                self.cluster.wait_ready(node)

        await anyio.to_thread.run_sync(start)

    async def forgive(self) -> None:
        """Have no node that counts failures: rounds that break one on purpose would have it set aside.

        Only while there is no instance: what is drained is emptied.
        """
        for name, node in self.observer.state.nodes.items():
            if node.faults_ns:
                await self.observer.ask(Drain(node=name), Noted)
                await self.observer.ask(Resume(node=name), Noted)

    async def settle(self) -> None:
        """Wait until the pools are full: what happens next does not find them empty.

        Raises:
            BenchError: they are not, in time.
        """
        if self.pool:
            await self.observer.wait_warm(self.pool)

    async def all_serve(self) -> None:
        """Wait until every node is there, and not suspected.

        Raises:
            BenchError: one is not, in time.
        """
        await self.observer.wait_state(
            lambda state: all(node.lost is None and node.suspect is None for node in state.nodes.values()) or None,
            "a node waits to be back",
            deadline_seconds=_SECONDS,
        )

    async def decode(self, instance: InstanceId) -> Decoding:
        """A request that goes on for seconds, once its first tokens are there.

        Raises:
            BenchError: they did not come.
        """
        decoding = Decoding(self.observer, instance)
        self.tasks.start_soon(decoding.run)
        with anyio.move_on_after(_SECONDS):
            await decoding.begun.wait()
        if decoding.outcome is not None or not decoding.begun.is_set():
            raise BenchError(f"{instance} does not answer: {decoding.outcome}", remedy="Look at the load.")
        return decoding


class Decoding:
    """One long request. `outcome` is how it ended: "answer", or its error's kind; `None` until then."""

    def __init__(self, observer: Observer, instance: InstanceId) -> None:
        self.begun = anyio.Event()
        self.ended = anyio.Event()
        self.outcome: str | None = None
        self._observer = observer
        self._request = Generate(
            instance=instance,
            prompt="rank",
            sampling=SamplingParams(max_tokens=_ENDLESS_TOKENS, logit_bias={_END_TOKEN: -1000.0}),
        )

    async def run(self) -> None:
        """Ask, and read to the end."""
        pieces = 0
        try:
            async with self._observer.stream(self._request, timeout_seconds=_SECONDS) as replies:
                async for reply in replies:
                    match reply:
                        case Chunk():
                            pieces += 1
                        case Done():
                            self.outcome = "answer"
                        case Refused(failure=failure):
                            self.outcome = failure.kind
                        case _:
                            pass
                    if pieces >= _PIECES:
                        self.begun.set()
        except MusterError as error:
            self.outcome = error.kind
        self.outcome = self.outcome or "silence"
        self.begun.set()
        self.ended.set()

    async def end(self) -> str:
        """How it ended; a request that does not end is a "silence"."""
        with anyio.move_on_after(_SECONDS):
            await self.ended.wait()
        return self.outcome or "silence"


class Remains(msgspec.Struct):
    """What the clusters of one run left, together."""

    files: int = 0
    ports: int = 0
    processes: int = 0

    def add(self, left: Leftovers) -> None:
        """Count what another cluster left."""
        self.files += left.files
        self.ports += left.ports
        self.processes += left.processes


class GroundSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What kind of a cluster; clocks in seconds. `started` are the nodes that are up when the block begins."""

    nodes: tuple[str, ...] = ("a", "b")
    started: tuple[str, ...] | None = None
    heartbeat_seconds: float = 1.0
    lease_seconds: float = 5.0
    pool: int = _POOL
    http: bool = False
    max_ranks: int = 32


@asynccontextmanager
async def ground(directory: Path, settings: GroundSettings, remains: Remains) -> AsyncGenerator[Ground]:
    """A cluster, stopped in the end; what it left is added to `remains`.

    Raises:
        UnreachableError: a process did not come up.
    """
    first = free_ports(_PORTS)
    cluster = LocalCluster(
        directory,
        settings.nodes,
        port=first,
        http_port=0 if settings.http else None,
        coordinator_options=(
            *("--heartbeat", f"{settings.heartbeat_seconds:g}"),
            *("--lease", f"{settings.lease_seconds:g}"),
        ),
        node_options=("--pool", str(settings.pool), "--max-ranks", str(settings.max_ranks)),
        log_level="warning",
    )
    made = Ground(cluster, range(first, first + _PORTS), settings.pool)
    processes: set[tuple[int, float]] = set()
    trouble: MusterError | None = None
    http_port: int | None = None
    try:
        await made.start_coordinator()
        http_port = made.http_port
        async with observing(cluster.address) as made.observer, anyio.create_task_group() as made.tasks:
            try:
                await made.start_workers(settings.nodes if settings.started is None else settings.started)
                yield made
            except MusterError as error:
                trouble = error  # raised outside, or the task groups would wrap it
            processes = made.descendants()
            made.tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(cluster.stop)
    if trouble is not None:
        raise trouble
    seen = dict.fromkeys(processes, ()) | made.observer.processes
    ports = [*made.ports, *([] if http_port is None else [http_port])]
    homes = [directory / node for node in settings.nodes]
    remains.add(await anyio.to_thread.run_sync(left_after, seen, homes, ports))


def below(pid: int) -> set[tuple[int, float]]:
    """The processes below this one, by pid and start time."""
    found: set[tuple[int, float]] = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.add((process.pid, process.create_time()))
    return found


def send_signal(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def node_of(names: Sequence[str], number: int) -> NodeId:
    """The node whose turn it is in round `number`, counted from 1."""
    return NodeId(names[(number - 1) % len(names)])
