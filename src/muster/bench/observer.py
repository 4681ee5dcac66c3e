"""A client that creates instances and knows when each event of theirs arrived."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio
import msgspec

from muster.bus import Applied, ControlClient, Follower, RefusedError, ReplyStream, Synchronised
from muster.errors import MusterError, UnreachableError
from muster.events import InstanceFact, InstanceFailed, InstanceReady, RankPrepared
from muster.protocol import AnyRequest, Beat, Create, Delete, Get
from muster.replies import Accepted, Created, Reply, Snapshot
from muster.spec import Address, InstanceId, InstanceSpec
from muster.state import Instance, State

_CALL_SECONDS = 10.0
_POLL_SECONDS = 0.05

T = TypeVar("T")
R = TypeVar("R", bound=Reply)


class BenchError(MusterError):
    """A measurement could not be made."""

    kind = "bench-failed"


class Seen(msgspec.Struct, frozen=True):
    """An event of an instance: when the coordinator logged it, and when it arrived here."""

    event: InstanceFact
    logged_ns: int
    arrived_seconds: float  #: monotonic clock


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """An instance that came up. `seconds` is from just before the request to the arrival of `InstanceReady`."""

    instance: Instance
    seconds: float
    began_ns: int  #: wall clock, just before the request
    seen: tuple[Seen, ...]


@asynccontextmanager
async def observing(address: str) -> AsyncGenerator[Observer]:
    """An observer of the coordinator at this control address, connected.

    Raises:
        UnreachableError: nobody answers there.
    """
    trouble: MusterError | None = None
    async with ControlClient(address) as client, Follower(client) as follower, anyio.create_task_group() as group:
        observer = Observer(client, follower)
        group.start_soon(observer.follow)
        try:
            await observer.wait_synchronised()
            yield observer
        except MusterError as error:
            trouble = error  # raised outside, or the task groups would wrap it
        group.cancel_scope.cancel()
    if trouble is not None:
        raise trouble


class Observer:
    """Creates and deletes instances, and notes each of their events as it arrives.

    `processes` are the ranks' that it heard of: the addresses of each by pid and start time.
    """

    def __init__(self, client: ControlClient, follower: Follower) -> None:
        self.processes: dict[tuple[int, float], tuple[Address, ...]] = {}
        self._synchronised = anyio.Event()
        self._client = client
        self._follower = follower
        self._seen: dict[InstanceId, list[Seen]] = {}
        self._changed = anyio.Event()

    @property
    def state(self) -> State:
        """The newest state."""
        return self._follower.state

    @property
    def heartbeat_seconds(self) -> float:
        """Between two heartbeats."""
        welcome = self._follower.welcome
        return welcome.heartbeat_seconds if welcome is not None else 1.0

    async def wait_synchronised(self) -> None:
        """Wait until the coordinator has told its state.

        Raises:
            UnreachableError: it does not answer.
        """
        with anyio.move_on_after(_CALL_SECONDS):
            await self._synchronised.wait()
            return
        raise UnreachableError(f"the coordinator at {self._client.endpoint} does not answer", remedy="See its log.")

    async def bring_up(self, spec: InstanceSpec, *, deadline_seconds: float) -> Trial:
        """Create an instance and wait until it is ready.

        Raises:
            BenchError: it failed, or is not ready in time.
            RefusedError: the coordinator refused it.
        """
        began_ns = time.time_ns()
        began = time.monotonic()
        created = await self.ask(Create(spec=spec), Created)
        end = await self.next_event(
            created.instance,
            (InstanceReady, InstanceFailed),
            deadline_seconds=began + deadline_seconds - time.monotonic(),
        )
        if isinstance(end.event, InstanceFailed):
            raise BenchError(f"{created.instance} failed: {end.event.failure.sentence()}")
        return Trial(
            instance=self.state.instances[created.instance],
            seconds=end.arrived_seconds - began,
            began_ns=began_ns,
            seen=tuple(self._seen[created.instance]),
        )

    async def delete_all(self, *, deadline_seconds: float = 30.0) -> None:
        """Delete every instance, and wait until all are gone.

        Raises:
            BenchError: one is not gone in time.
        """
        deadline = time.monotonic() + deadline_seconds
        instances = list(self.state.instances)
        for instance in instances:
            with contextlib.suppress(RefusedError):  # gone already, by an earlier wish
                await self.ask(Delete(instance=instance), Accepted)
        for instance in instances:
            await self.wait_gone(instance, deadline_seconds=deadline - time.monotonic())

    async def wait_gone(self, instance: InstanceId, *, deadline_seconds: float) -> None:
        """Wait until an instance that was deleted is gone, and forget what was seen of it.

        Raises:
            BenchError: it is not gone in time.
        """
        await self.wait_state(
            lambda state: instance not in state.instances or None,
            f"{instance} waits to be gone",
            deadline_seconds=deadline_seconds,
        )
        self._seen.pop(instance, None)

    async def ask(self, request: AnyRequest, kind: type[R], *, timeout_seconds: float = _CALL_SECONDS) -> R:
        """One request that is answered by one reply of this type.

        Raises:
            RefusedError: the coordinator refused it.
            UnreachableError: no reply within the time.
            ProtocolError: the reply is of another type.
        """
        return await self._client.ask(request, timeout_seconds, kind)

    def stream(self, request: AnyRequest, *, timeout_seconds: float) -> ReplyStream:
        """One request that is answered by several replies; see `ControlClient.stream`."""
        return self._client.stream(request, timeout_seconds=timeout_seconds)

    async def snapshot(self) -> Snapshot:
        """State and telemetry now."""
        return await self.ask(Get(), Snapshot)

    async def wait_warm(self, warm_runners: int, *, deadline_seconds: float = 120.0) -> tuple[Beat, ...]:
        """Wait until every node has at least that many warm runners, by heartbeats that are newer than this call.

        Raises:
            BenchError: they have not in time.
        """
        # What a heartbeat says may be as old as one period: of before the pool was drawn upon.
        await anyio.sleep(1.5 * self.heartbeat_seconds)
        deadline = time.monotonic() + deadline_seconds
        while time.monotonic() < deadline:
            beats = (await self.snapshot()).beats
            if len(beats) == len(self.state.nodes) and all(beat.warm_runners >= warm_runners for beat in beats):
                return beats
            await anyio.sleep(_POLL_SECONDS)
        raise BenchError(
            f"the pools are not warm after {deadline_seconds:g} s",
            remedy="Look at the load and memory of this machine.",
        )

    async def next_event(
        self,
        instance: InstanceId,
        kinds: tuple[type[InstanceFact], ...],
        *,
        deadline_seconds: float,
        attempt: int | None = None,
    ) -> Seen:
        """The first event of these kinds (and of this attempt) that an instance has seen, waiting for it.

        Raises:
            BenchError: there is none in time.
        """

        def find() -> Seen | None:
            return next(
                (
                    one
                    for one in self._seen.get(instance, ())
                    if isinstance(one.event, kinds) and attempt in (None, one.event.attempt)
                ),
                None,
            )

        return await self._wait(find, f"{instance} waits for {kinds[0].__name__}", deadline_seconds)

    async def wait_state(self, find: Callable[[State], T | None], what: str, *, deadline_seconds: float) -> T:
        """What `find` answers of the state, waiting until it is something; also over a coordinator's restart.

        Raises:
            BenchError: it is `None` until the end.
        """
        return await self._wait(lambda: find(self.state), what, deadline_seconds)

    async def _wait(self, find: Callable[[], T | None], what: str, seconds: float) -> T:
        with anyio.move_on_after(max(seconds, 0.0)):
            while True:
                if (found := find()) is not None:
                    return found
                await self._changed.wait()
        raise BenchError(f"{what} for more than {seconds:.0f} s", remedy="Look at the load of this machine.")

    async def follow(self) -> None:
        """Note what arrives, until cancelled."""
        async for change in self._follower.changes():
            arrived = time.monotonic()
            match change:
                case Synchronised(state=state):
                    for rank in (rank for one in state.instances.values() for rank in one.ranks if rank.pid):
                        self.processes[rank.pid, rank.process_started] = rank.addresses
                    self._synchronised.set()
                case Applied(envelope=envelope, event=InstanceFact() as event):
                    seen = Seen(event, envelope.time_ns, arrived)
                    self._seen.setdefault(event.instance, []).append(seen)
                    if isinstance(event, RankPrepared):
                        self.processes[event.pid, event.process_started] = event.addresses
                case _:
                    pass
            self._changed.set()
            self._changed = anyio.Event()
