"""The worker: joins the coordinator, starts a task for every rank that its node is given, and leaves tidily."""

from __future__ import annotations

import functools
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.abc
import msgspec
import psutil
from loguru import logger

from muster.bus import (
    Applied,
    ControlClient,
    Disconnected,
    Follower,
    Outbox,
    Synchronised,
)
from muster.events import (
    AttemptStarted,
    Event,
    InstanceAdopted,
    InstanceCleared,
    InstanceCreated,
    NodeLost,
    NodeResumed,
    NodeSetAside,
    RankFetched,
    Unknown,
)
from muster.fetch.held import caches, held_models
from muster.filelock import FileLock
from muster.group.ports import Reservation, reserve
from muster.group.scope import owner_alive, private_directory, sweep
from muster.peer_protocol import InspectModel
from muster.probe.collect import Subject
from muster.protocol import Beat, Held, RankUse
from muster.spec import Assignment, BootId, NodeInfo
from muster.state import Aside, Assigned, State, wants_ranks
from muster.worker.census import RankKey, endings, holdings
from muster.worker.giving import Giving, Transfers
from muster.worker.inspecting import Inspector
from muster.worker.introducing import introduce
from muster.worker.measuring import Measurer
from muster.worker.peer import PeerServer
from muster.worker.pool import RunnerPool
from muster.worker.rank_task import RankTask
from muster.worker.reaper import Reaper
from muster.worker.records import Records
from muster.worker.settings import WorkerSettings
from muster.worker.sharing import Sharing
from muster.worker.site import Site
from muster.worker.speed import SpeedMeter
from muster.worker.telling import Teller
from muster.worker.unburied import REMEDY
from muster.worker.watch import Place, StateWatch

#: How long the last reports may take when the worker is stopped.
_GOODBYE_SECONDS = 3.0
#: Between heartbeats until the coordinator has said how often it wants them.
_DEFAULT_HEARTBEAT_SECONDS = 1.0
#: How long the news that this node is set aside may take to come back from the coordinator.
_ASIDE_SECONDS = 10.0
#: How old the figures of a heartbeat may be: to read them costs more than everything else that an idle worker does.
_VITALS_SECONDS = 5.0
#: A heartbeat that is so late tells of a standstill of the worker itself.
_STANDSTILL_SECONDS = 1.0
#: The load of a machine that counts as idle, for each of its cores.
_IDLE_SHARE = 0.25
#: Ranks that this boot began, as many as are remembered.
_BEGUN_KEPT = 10_000

T = TypeVar("T")


class Worker:
    """One node's worker. `run` returns when `stop` was called, and raises when it cannot join."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._boot = BootId(secrets.token_hex(8))
        self._watch = StateWatch()
        self._tasks: dict[RankKey, RankTask] = {}
        self._begun: dict[RankKey, None] = {}  #: the ranks that have or had a task, the oldest first
        self._stopped = anyio.Event()
        self._said_lost = False
        self._teller: Teller | None = None
        self._measurer: Measurer | None = None
        self._speed: SpeedMeter | None = None
        self._peers = PeerServer(settings.node, self._boot)
        self._held = functools.partial(
            held_models, settings.models, settings.copies_directory, shareable=settings.share
        )
        self._peers.handle(InspectModel, Inspector(self._held, offline=settings.offline).answer)
        transfers = Transfers()
        Giving(self._held, transfers).register(self._peers)
        if settings.share:
            Sharing(functools.partial(caches, settings.copies_directory), transfers).register(self._peers)

    def stop(self) -> None:
        """End the worker: its ranks fail with that as the cause, and nothing of them is left."""
        self._stopped.set()

    async def run(self, *, task_status: anyio.abc.TaskStatus[NodeInfo] = anyio.TASK_STATUS_IGNORED) -> None:
        """Join and work until stopped; started when the coordinator has said welcome.

        Raises:
            RequestError: another worker runs this node's directory; an address or the node id is bad.
            BackendError: MLX does not work on this node.
            RefusedError: the coordinator refused the node.
        """
        directory = self._settings.directory
        private_directory(directory)
        lock = FileLock(directory / "lock", what=f"node {self._settings.node}", remedy="Use another --node-id.")
        try:
            reaper = Reaper()
            try:
                await self._run(reaper, task_status)
            finally:
                self._peers.close()
                reaper.close()
        finally:
            lock.release()

    async def _run(self, reaper: Reaper, task_status: anyio.abc.TaskStatus[NodeInfo]) -> None:
        records = Records(self._settings.directory / "runners")
        for pid in records.sweep():
            logger.warning("ended runner {} of an earlier worker", pid)
        groups = self._settings.directory / "groups"
        for path in sweep(groups, alive=owner_alive):
            logger.warning("removed {} of an earlier worker", path.name)
        pool = RunnerPool(self._settings.pool, reaper, records)
        async with anyio.create_task_group() as group:
            await group.start(pool.run)
            found = await self._unless_stopped(lambda: introduce(self._settings, self._boot, pool, self._peers))
            if found is not None:
                await self._work(*found, pool, reaper, groups, task_status)
            group.cancel_scope.cancel()

    async def _work(
        self,
        info: NodeInfo,
        subject: Subject,
        pool: RunnerPool,
        reaper: Reaper,
        groups: Path,
        task_status: anyio.abc.TaskStatus[NodeInfo],
    ) -> None:
        """Join, and run ranks until stopped."""
        async with ControlClient(self._settings.coordinators) as client:
            outbox = Outbox(client, info.node, info.boot)
            follower = Follower(client, info=info, holds=self._holdings)
            teller = self._teller = Teller(info, subject, client, outbox, follower, self._held, self._used_bytes)
            async with outbox, follower, anyio.create_task_group() as group:
                welcomed = anyio.Event()
                group.start_soon(self._beat, client, pool, reaper, follower, welcomed)
                group.start_soon(self._tell_unburied, pool, outbox, info, welcomed)
                group.start_soon(teller.run)
                speed = self._speed = SpeedMeter(pool.measure, self._is_idle, teller.measured)
                group.start_soon(speed.run)
                measurer = self._measurer = Measurer(info, self._peers, client.send)
                group.start_soon(measurer.run)
                group.start_soon(self._peers.run)
                async with anyio.create_task_group() as ranks:
                    ranks.start_soon(self._follow, follower, outbox, pool, ranks, groups, welcomed)
                    await self._unless_stopped(welcomed.wait)
                    if welcomed.is_set():
                        task_status.started(info)
                        await self._stopped.wait()
                        await self._leave(outbox, info)
                    ranks.cancel_scope.cancel()
                group.cancel_scope.cancel()

    async def _tell_unburied(self, pool: RunnerPool, outbox: Outbox, info: NodeInfo, welcomed: anyio.Event) -> None:
        """Say what an earlier worker has left here that does not end, and when whatever was left is gone."""
        await welcomed.wait()
        if pids := pool.unburied.pids:
            reason = f"of an earlier worker these processes do not end: {', '.join(map(str, pids))}"
            remedy = REMEDY.format(node=info.node)
            outbox.report(NodeSetAside(node=info.node, boot=info.boot, reason=reason, remedy=remedy), 0)

        def aside(state: State) -> bool:
            node = state.nodes.get(info.node)
            return node is not None and isinstance(node.duty, Aside) and not node.duty.on_trial

        while True:
            pids = await pool.unburied.clean()
            with anyio.move_on_after(_ASIDE_SECONDS):  # an operator may have drained it, and has the last word then
                cause = await self._watch.until(aside)
                reason = f"gone at last: {', '.join(map(str, pids))}"
                outbox.report(NodeResumed(node=info.node, reason=reason), cause)

    async def _unless_stopped(self, action: Callable[[], Awaitable[T]]) -> T | None:
        """What `action` answers, or `None` when the worker is stopped before that."""
        answer: T | None = None

        async def give_up() -> None:
            await self._stopped.wait()
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(give_up)
            answer = await action()
            group.cancel_scope.cancel()
        return answer

    # --- following ----------------------------------------------------------------------------------------

    async def _follow(
        self,
        follower: Follower,
        outbox: Outbox,
        pool: RunnerPool,
        ranks: anyio.abc.TaskGroup,
        groups: Path,
        welcomed: anyio.Event,
    ) -> None:
        site: Site | None = None
        async for change in follower.changes():
            match change:
                case Synchronised(state=state, welcome=welcome, endpoint=endpoint):
                    info = state.nodes[self._settings.node].info
                    generation = endpoint.at(welcome.generation_port).url
                    site = self._site(info, groups, generation)
                    if not welcomed.is_set() or self._said_lost:
                        logger.info("node {} joined {} (term {})", info.node, endpoint, welcome.term)
                    self._said_lost = False
                    self._watch.update(state, welcome.judging)
                    for task in self._tasks.values():
                        ranks.start_soon(task.redial, generation)
                    outbox.synchronise(state)
                    if self._teller is not None:
                        self._teller.tell()
                    if self._measurer is not None:
                        self._measurer.see(state)
                        self._measurer.tell()
                    self._report_missing(state, outbox)
                    self._start_ranks(state, site, pool, outbox, ranks)
                    welcomed.set()
                case Applied(event=event, state=state):
                    self._attend(event, state, follower)
                    self._watch.update(state)
                    if self._measurer is not None:
                        self._measurer.see(state)
                    if isinstance(event, InstanceCreated | AttemptStarted) and site is not None:
                        site = msgspec.structs.replace(site, info=state.nodes[self._settings.node].info)
                        self._start_ranks(state, site, pool, outbox, ranks)
                    elif isinstance(event, InstanceAdopted):
                        self._report_missing(state, outbox)
                case Disconnected(seconds=seconds):
                    if not self._said_lost:
                        logger.warning(
                            "nothing heard from the coordinator at {} for {:.1f} s; trying again until one answers",
                            ", ".join(map(str, self._settings.coordinators)),
                            seconds,
                        )
                    self._said_lost = True

    def _attend(self, event: Event | Unknown, state: State, follower: Follower) -> None:
        """What an event means for this worker beyond the state."""
        if isinstance(event, NodeLost) and event.boot == self._boot and not self._stopped.is_set():
            logger.warning("the coordinator counts this node as lost ({}); joining again", event.reason)
            follower.say_hello()
        elif isinstance(event, InstanceCleared) and self._watch.clear(event.instance, event.attempt):
            logger.warning("{} attempt {} is torn down: {}", event.instance, event.attempt, event.reason)
        elif isinstance(event, RankFetched) and event.boot == self._boot and self._teller is not None:
            self._teller.scan_soon()
        elif isinstance(event, InstanceAdopted):
            for (instance, attempt, _), task in self._tasks.items():
                if (instance, attempt) == (event.instance, event.attempt):
                    task.adopted(state.sequence)

    def _holdings(self, state: State) -> tuple[Held, ...]:
        """What the next hello tells of: a worker that stops holds nothing any more."""
        places = () if self._stopped.is_set() else (task.place for task in self._tasks.values())
        return holdings(places, state, self._watch.state, self._boot)

    def _report_missing(self, state: State, outbox: Outbox) -> None:
        """Ranks that the coordinator takes for alive and that have ended here are gone, whatever became of the news."""
        for event in endings(state, self._boot, self._tasks, self._begun):
            outbox.report(event, 0)

    def _start_ranks(
        self, state: State, site: Site, pool: RunnerPool, outbox: Outbox, ranks: anyio.abc.TaskGroup
    ) -> None:
        """Start a task for every rank that was assigned to this boot and has none."""
        if self._stopped.is_set():
            return  # its `NodeLost` is on the way, which ends those ranks too
        for instance in state.instances.values():
            if not wants_ranks(instance):
                continue
            for rank in instance.ranks:
                key = (instance.id, instance.attempt, rank.rank)
                if rank.boot != self._boot or not isinstance(rank.state, Assigned) or key in self._begun:
                    continue
                assignment = Assignment(rank=rank.rank, node=rank.node, boot=self._boot)
                task = RankTask(Place(instance, assignment), site, pool, self._watch, outbox)
                self._tasks[key] = task
                self._begun[key] = None
                if len(self._begun) > _BEGUN_KEPT:
                    del self._begun[next(iter(self._begun))]
                ranks.start_soon(self._run_rank, key, task)

    async def _run_rank(self, key: RankKey, task: RankTask) -> None:
        try:
            await task.run()
        finally:
            del self._tasks[key]
            if self._teller is not None:
                self._teller.look_soon()

    def _site(self, info: NodeInfo, groups: Path, generation: str) -> Site:
        return Site(
            info=info,
            directory=groups,
            generation=generation,
            reserve=self._reserve,
            copies=self._settings.copies_directory,
            offline=self._settings.offline,
            on_fetched=self._teller.scan_soon if self._teller is not None else None,
        )

    def _reserve(self, host: str) -> Reservation:
        return reserve(host) if self._settings.ports is None else self._settings.ports.reserve(host)

    # --- heartbeat and end --------------------------------------------------------------------------------

    async def _beat(
        self, client: ControlClient, pool: RunnerPool, reaper: Reaper, follower: Follower, welcomed: anyio.Event
    ) -> None:
        await welcomed.wait()
        beat = Beat(node=self._settings.node, boot=self._boot)
        measured = float("-inf")
        while True:
            now = time.monotonic()
            progress = tuple(task.progress for task in self._tasks.values() if task.progress is not None)
            if now - measured >= _VITALS_SECONDS or beat.warm_runners != pool.warm_count:
                measured = now
                try:
                    beat = self._vitals(pool)
                except (OSError, psutil.Error) as error:  # no descriptor left: the heart goes on beating
                    logger.warning("no figures for the heartbeat: {}", error)
            pulse_ns, age_ns = follower.pulse_age()
            beat = msgspec.structs.replace(
                beat, progress=progress, time_ns=time.time_ns(), pulse_ns=pulse_ns, pulse_age_ns=age_ns
            )
            client.send(beat)
            if follower.pulse is not None and self._measurer is not None:
                self._measurer.hear(follower.pulse.measure_round)
            if follower.pulse is not None and self._speed is not None:
                self._speed.hear(follower.pulse.measure_round)
            reaper.check()
            welcome = follower.welcome
            pause = welcome.heartbeat_seconds if welcome is not None else _DEFAULT_HEARTBEAT_SECONDS
            await anyio.sleep(pause)
            if (late := time.monotonic() - now - pause) > _STANDSTILL_SECONDS:
                logger.warning("this worker stood still for {:.1f} s: its machine is overloaded, or was stopped", late)

    def _is_idle(self) -> bool:
        """Whether the node has no rank, and the machine little else to do."""
        try:
            load = os.getloadavg()[0]
        except OSError:  # containers may hide it
            return False
        return not self._tasks and load < _IDLE_SHARE * (os.cpu_count() or 1)

    def _used_bytes(self) -> int:
        return sum(task.memory_bytes for task in self._tasks.values())

    def _vitals(self, pool: RunnerPool) -> Beat:
        uses = tuple(
            RankUse(instance=instance, attempt=attempt, rank=rank, memory_bytes=task.memory_bytes)
            for (instance, attempt, rank), task in self._tasks.items()
        )
        return Beat(
            node=self._settings.node,
            boot=self._boot,
            memory_available_bytes=psutil.virtual_memory().available,
            memory_used_bytes=psutil.Process().memory_info().rss,
            warm_runners=pool.warm_count,
            warm_memory_bytes=pool.warm_bytes(),
            ranks_memory_bytes=sum(use.memory_bytes for use in uses),
            ranks=uses,
        )

    async def _leave(self, outbox: Outbox, info: NodeInfo) -> None:
        """Tear every rank down, say that the node leaves, and give that a moment to arrive."""
        for task in list(self._tasks.values()):
            task.stop()
        for task in list(self._tasks.values()):
            await task.ended.wait()
        outbox.report(NodeLost(node=info.node, boot=info.boot, reason="its worker was stopped"), 0)
        await outbox.drained(_GOODBYE_SECONDS)
