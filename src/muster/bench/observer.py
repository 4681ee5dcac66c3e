"""A client that creates instances and knows when each event of theirs arrived."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import anyio
import msgspec

from muster.bus import Applied, ControlClient, Follower, Synchronised
from muster.errors import MusterError, UnreachableError
from muster.events import InstanceDeleted, InstanceFact, InstanceFailed, InstanceReady
from muster.protocol import Accepted, Beat, Create, Created, Delete, Get, Snapshot
from muster.spec import InstanceId, InstanceSpec
from muster.state import Instance, State

_CALL_SECONDS = 10.0
_POLL_SECONDS = 0.05


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
    """Creates and deletes instances, and notes each of their events as it arrives."""

    def __init__(self, client: ControlClient, follower: Follower) -> None:
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
        created = await self._client.ask(Create(spec=spec), _CALL_SECONDS, Created)
        end = await self._until(
            created.instance, (InstanceReady, InstanceFailed), began + deadline_seconds - time.monotonic()
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
            await self._client.ask(Delete(instance=instance), _CALL_SECONDS, Accepted)
        for instance in instances:
            await self._until(instance, (InstanceDeleted,), deadline - time.monotonic())
            del self._seen[instance]

    async def snapshot(self) -> Snapshot:
        """State and telemetry now."""
        return await self._client.ask(Get(), _CALL_SECONDS, Snapshot)

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

    async def _until(self, instance: InstanceId, kinds: tuple[type[InstanceFact], ...], seconds: float) -> Seen:
        """The first event of these kinds that an instance has seen, waiting for it."""
        return await self._wait(
            lambda: self._find(instance, kinds), f"{instance} waits for {kinds[0].__name__}", seconds
        )

    def _find(self, instance: InstanceId, kinds: tuple[type[InstanceFact], ...]) -> Seen | None:
        return next((one for one in self._seen.get(instance, ()) if isinstance(one.event, kinds)), None)

    async def _wait(self, find: Callable[[], Seen | None], what: str, seconds: float) -> Seen:
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
                case Synchronised():
                    self._synchronised.set()
                case Applied(envelope=envelope, event=InstanceFact() as event):
                    seen = Seen(event, envelope.time_ns, arrived)
                    self._seen.setdefault(event.instance, []).append(seen)
                    self._changed.set()
                    self._changed = anyio.Event()
                case _:
                    pass
