"""`muster bench soak`: minutes of creating, using, killing and deleting, while clients ask without pause."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import secrets
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
import msgspec
import psutil

from muster.bench.churn_clients import ask_by_control, ask_by_http, ask_once
from muster.bench.churn_figures import Churned, Moment, Outage, Outcomes, Vitals, churn_figures
from muster.bench.ground import DEMO_MODEL, Ground, GroundSettings, Remains, ground
from muster.bench.machine import this_machine
from muster.bench.observer import BenchError
from muster.bench.recovery_figures import left_figures
from muster.bench.report import Report
from muster.bus import ControlClient, RefusedError
from muster.errors import MusterError, UnreachableError
from muster.protocol import Create, Delete, Resume
from muster.replies import Accepted, Created, Noted
from muster.spec import (
    GroupWorkload,
    InstanceId,
    InstanceSpec,
    ModelWorkload,
    NodeId,
    RestartOnFailure,
    ScriptWorkload,
    Workload,
)
from muster.state import Aside, Broken, Finished, Instance, Running, State

_NODES = ("a", "b", "c")
_MODEL = "soak"
_READY_SECONDS = 90.0
_CALL_SECONDS = 5.0
_LOOK_SECONDS = 5.0
_SCRIPT = "import mlx.core as mx\nprint('rank', mx.distributed.init().rank(), flush=True)\n"
#: Between two kills of a rank of the model that is asked, of a worker, and of the coordinator.
_RANK_SECONDS, _WORKER_SECONDS, _COORDINATOR_SECONDS = 20.0, 150.0, 150.0
#: Of the six kinds of a cycle, those of which a rank is killed, and the one that is deleted while it comes up.
_BROKEN, _EARLY = (2, 3), 5
#: How long a killed worker or coordinator stays away.
_AWAY_SECONDS = 0.3

Say = Callable[[str], None]
T = TypeVar("T")


class ChurnSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How long, with how many clients. `seed` chooses the ranks that are killed."""

    seconds: float = 900.0
    http_clients: int = 3
    control_clients: int = 2
    seed: int | None = None


async def run_churn(settings: ChurnSettings, directory: Path, say: Say) -> Report:
    """Run it on a cluster of its own.

    Args:
        settings: How much.
        directory: For the cluster; the caller removes it.
        say: Told what is going on.

    Raises:
        BenchError: the model that is asked did not come up at first.
        UnreachableError: the cluster did not start, or does not start again.
    """
    machine = this_machine()
    seed = secrets.randbits(32) if settings.seed is None else settings.seed
    remains = Remains()
    script = directory / "hello.py"
    script.write_text(_SCRIPT)
    say("starting a coordinator and three workers")
    own = GroundSettings(nodes=_NODES, pool=1, http=True, max_ranks=64)
    async with ground(directory / "cluster", own, remains) as made:
        churn = _Churn(made, settings, script, random.Random(seed), say)
        await churn.run()
    found = churn.found
    lines = [*found.stuck, *(f"a request was lost: {one}" for one in found.outcomes.lost)]
    return Report(
        machine=machine,
        figures=(*churn_figures(found), *left_figures(remains.files, remains.ports, remains.processes)),
        rounds=(),
        notes=(f"{settings.seconds:g} s of churn by the seed {seed}.", *lines[:20]),
    )


def times_of(seconds: float, every_seconds: float, phase: float) -> list[float]:
    """When something is done in a run: evenly, at least once, and never close to its end.

    The first and the last third of the run then see processes of the same ages, and can be compared.
    """
    count = max(1, round(seconds / every_seconds))
    return [(number + phase) * seconds / count for number in range(count)]


def settled(instance: Instance | None, attempt: int = 1) -> str | None:
    """What has become of an instance: "ready" in this attempt or a later one, "over" or "gone"; `None` while open."""
    match instance:
        case None:
            return "gone"
        case Instance(status=Running(), attempt=number) if number >= attempt:
            return "ready"
        case Instance(status=Finished() | Broken(retry_at_ns=None)):
            return "over"
        case _:
            return None


class _Churn:
    def __init__(self, own: Ground, settings: ChurnSettings, script: Path, chance: random.Random, say: Say) -> None:
        self.found = Churned(seconds=settings.seconds, outcomes=Outcomes())
        self._own = own
        self._observer = own.observer
        self._settings = settings
        self._script = script
        self._chance = chance
        self._say = say
        self._outages: list[Outage] = []
        self._began = time.monotonic()

    async def run(self) -> None:
        """Bring the model up, churn, and see that it still answers."""
        restart = RestartOnFailure(maximum=100_000, backoff_max_seconds=0.5)
        workload = ModelWorkload(model=str(DEMO_MODEL), served_name=_MODEL)
        spec = InstanceSpec(workload=workload, ranks=2, restart=restart)
        asked = (await self._observer.bring_up(spec, deadline_seconds=_READY_SECONDS)).instance.id
        self._began = time.monotonic()
        numbers = itertools.count()
        async with anyio.create_task_group() as group:
            async with anyio.create_task_group() as busy:
                for _ in range(self._settings.http_clients):
                    target = self._own.target(_MODEL)
                    ready = partial(self._ready_seconds, asked)
                    outcomes, outages = self.found.outcomes, self._outages
                    busy.start_soon(ask_by_http, target, outcomes, outages, numbers, self._goes_on, ready)
                for _ in range(self._settings.control_clients):
                    address = self._own.cluster.address
                    busy.start_soon(
                        ask_by_control, address, _MODEL, self.found.outcomes, self._outages, numbers, self._goes_on
                    )
                busy.start_soon(self._churn)
                busy.start_soon(self._kill, asked)
                group.start_soon(self._operate)
                group.start_soon(self._look)
            await self._converge(asked)
            group.cancel_scope.cancel()

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _ready_seconds(self, instance: InstanceId) -> float:
        """For how long the model has been ready, 0 while it is not."""
        asked = self._observer.state.instances.get(instance)
        if asked is None or not isinstance(asked.status, Running):
            return 0.0
        return time.time() - asked.since_ns / 1e9

    def _goes_on(self) -> bool:
        return self._seconds < self._settings.seconds

    async def _converge(self, asked: InstanceId) -> None:
        """Nothing is broken any more: the model answers, and everything can be deleted."""
        self._say("everything heals")
        try:
            await self._own.all_serve()
            await self._settle(asked)
            async with ControlClient(self._own.cluster.address) as client:
                error = await ask_once(client, _MODEL, "What is a rank?")
            self.found.answers_in_the_end = error is None
            if error is not None:
                self.found.stuck.append(f"the model does not answer in the end: {error}")
            await self._observer.delete_all(deadline_seconds=_READY_SECONDS)
        except MusterError as error:
            self.found.stuck.append(f"in the end: {error}")

    # --- churn --------------------------------------------------------------------------------------------

    async def _churn(self) -> None:
        for number in itertools.count():
            if not self._goes_on():
                return
            self._say(
                f"{self._seconds:.0f} of {self._settings.seconds:.0f} s: {number} cycles, "
                f"{self.found.outcomes.answers} answers, {self.found.outcomes.errors.total()} errors, "
                f"{len(self.found.outcomes.lost)} lost"
            )
            try:
                await self._cycle(number)
            except RefusedError as error:
                self.found.outcomes.errors[f"churn {error.failure.kind}"] += 1
            except MusterError as error:
                self.found.stuck.append(f"cycle {number}: {error}")
            self.found.cycles += 1

    async def _cycle(self, number: int) -> None:
        """Create, use, perhaps kill, delete; six kinds in turn."""
        model = ModelWorkload(model=str(DEMO_MODEL), served_name=f"churn-{number}")
        kinds: tuple[tuple[Workload, int], ...] = (
            (GroupWorkload(), 2),
            (model, 1),
            (GroupWorkload(), 3),
            (model, 2),
            (ScriptWorkload(path=str(self._script)), 2),
            (GroupWorkload(), 2),
        )
        kind = number % len(kinds)
        workload, ranks = kinds[kind]
        spec = InstanceSpec(workload=workload, ranks=ranks, restart=RestartOnFailure())
        request = Create(spec=spec, key=secrets.token_hex(8))
        created = await self._insist(
            partial(self._observer.ask, request, Created, timeout_seconds=_CALL_SECONDS), "create"
        )
        instance = created.instance
        attempt: int | None = None
        try:
            if kind != _EARLY:
                await self._settle(instance)
            async with anyio.create_task_group() as group:
                if isinstance(workload, ModelWorkload):
                    group.start_soon(self._use, workload.public_name)
                if kind in _BROKEN:
                    attempt = self._kill_rank(instance)
            if attempt is not None:
                await self._settle(instance, attempt + 1)
        finally:
            wish = Delete(instance=instance)
            with contextlib.suppress(RefusedError):  # it is gone
                await self._insist(partial(self._observer.ask, wish, Accepted, timeout_seconds=_CALL_SECONDS), "delete")
            await self._observer.wait_gone(instance, deadline_seconds=_READY_SECONDS)

    async def _use(self, model: str) -> None:
        async with ControlClient(self._own.cluster.address) as client:
            began = time.monotonic()
            error = await ask_once(client, model, "What is an instance?")
            self.found.outcomes.add(error, began, time.monotonic(), self._outages)

    async def _settle(self, instance: InstanceId, attempt: int = 1) -> str:
        """Wait until an instance is ready in this attempt or a later one, or over."""
        return await self._observer.wait_state(
            lambda state: settled(state.instances.get(instance), attempt),
            f"{instance} waits to be ready or over",
            deadline_seconds=_READY_SECONDS,
        )

    async def _insist(self, call: Callable[[], Awaitable[T]], what: str) -> T:
        """Ask until there is an answer.

        Raises:
            BenchError: there is none for long.
            RefusedError: that is the answer.
        """
        deadline = time.monotonic() + _READY_SECONDS
        while True:
            try:
                return await call()
            except UnreachableError as error:
                if time.monotonic() > deadline:
                    raise BenchError(f"no answer to {what} for {_READY_SECONDS:g} s: {error}") from error

    # --- faults -------------------------------------------------------------------------------------------

    async def _kill(self, asked: InstanceId) -> None:
        """Carry out the plan of kills."""
        seconds = self._settings.seconds
        plan = [(at, "rank") for at in times_of(seconds, _RANK_SECONDS, 0.7)]
        plan += [(at, "worker") for at in times_of(seconds, _WORKER_SECONDS, 0.2)]
        plan += [(at, "coordinator") for at in times_of(seconds, _COORDINATOR_SECONDS, 0.45)]
        nodes: Iterator[str] = itertools.cycle(_NODES)
        for at, what in sorted(plan):
            await anyio.sleep(max(0.0, at - self._seconds))
            match what:
                case "rank":
                    self._kill_rank(asked)
                case "worker":
                    await self._restart(next(nodes))
                case _:
                    await self._restart_coordinator()

    def _kill_rank(self, instance: InstanceId) -> int | None:
        """SIGKILL one rank of an instance; the attempt that this ends, `None` where it is not ready."""
        found = self._observer.state.instances.get(instance)
        if found is None or not isinstance(found.status, Running):
            return None
        rank = self._chance.choice(found.ranks)
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.pid, signal.SIGKILL)
            self.found.kills["ranks"] += 1
        return found.attempt

    async def _restart(self, node: str) -> None:
        await self._own.kill(node)
        self.found.kills["workers"] += 1
        await anyio.sleep(_AWAY_SECONDS)
        await self._own.start_workers([node])

    async def _restart_coordinator(self) -> None:
        outage = Outage(began=time.monotonic())
        self._outages.append(outage)
        await self._own.kill("coordinator")
        self.found.kills["coordinators"] += 1
        await anyio.sleep(_AWAY_SECONDS)
        await self._own.start_coordinator()
        outage.ended = time.monotonic()

    async def _operate(self) -> None:
        """Resume every node that is set aside: what happens to it here is not its fault."""
        while True:
            name = await self._observer.wait_state(_aside, "a node is set aside", deadline_seconds=float("inf"))
            with contextlib.suppress(MusterError):
                await self._observer.ask(Resume(node=name), Noted)
                self.found.asides += 1
            with anyio.move_on_after(_CALL_SECONDS), contextlib.suppress(BenchError):
                await self._observer.wait_state(
                    lambda state, name=name: not isinstance(state.nodes[name].duty, Aside) or None,
                    f"{name} waits to be resumed",
                    deadline_seconds=_CALL_SECONDS,
                )

    # --- what is held -------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Note what the long-lived processes hold, and how large the log is."""
        while True:
            await anyio.sleep(min(_LOOK_SECONDS, self._settings.seconds / 30))
            with contextlib.suppress(MusterError):
                snapshot = await self._observer.snapshot()
                roles = {"coordinator": ("coordinator",), "workers": _NODES}
                held = {role: vitals for role, names in roles.items() if (vitals := self._vitals(names))}
                moment = Moment(
                    seconds=self._seconds,
                    roles=held,
                    cycles=self.found.cycles,
                    events=self._observer.state.sequence,
                    log_bytes=snapshot.log_bytes,
                )
                self.found.moments.append(moment)

    def _vitals(self, names: tuple[str, ...]) -> Vitals | None:
        """What these hold together; `None` where one is not there."""
        memory = descriptors = threads = 0
        try:
            for name in names:
                process = psutil.Process(self._own.pid(name))
                with process.oneshot():
                    memory += process.memory_info().rss
                    descriptors += process.num_fds()
                    threads += process.num_threads()
        except psutil.Error:
            return None
        return Vitals(memory_bytes=memory, descriptors=descriptors, threads=threads)


def _aside(state: State) -> NodeId | None:
    return next((name for name, node in state.nodes.items() if isinstance(node.duty, Aside)), None)
