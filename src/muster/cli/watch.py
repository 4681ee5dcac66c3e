"""Waiting for instances: until one is up, over or gone, with what each rank is doing on the way."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Protocol

import anyio
import anyio.abc
import msgspec

from muster.bus import Applied, ControlClient, Disconnected, Follower, Synchronised
from muster.cli.client import view
from muster.cli.errors import show_note
from muster.cli.progress_text import amount, milestone
from muster.cli.render import exit_text
from muster.errors import MusterError
from muster.events import InstanceCleared
from muster.protocol import Progress
from muster.spec import InstanceId, Phase
from muster.state import (
    Broken,
    Ending,
    Finished,
    Gone,
    Instance,
    Ready,
    Running,
    State,
    all_gone,
    is_script,
    phase_of,
    status_name,
    wants_ranks,
)

#: How often progress within a phase, which has no events, is asked for.
_PROGRESS_SECONDS = 0.3


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """An instance as it is now, and how far each rank is within its phase."""

    instance: Instance
    progress: dict[int, Progress] = {}


class Display(Protocol):
    """Shows how instances come up."""

    def __enter__(self) -> Display: ...

    def __exit__(self, *error: object) -> None: ...

    def show(self, seen: Seen) -> None:
        """Show this one, anew."""
        ...


class Quiet:
    """Shows nothing."""

    def __enter__(self) -> Quiet:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def show(self, seen: Seen) -> None:
        """Nothing."""


class Lines:
    """A line on standard error whenever something has changed, for logs and pipes."""

    def __init__(self) -> None:
        self._shown: dict[str, str] = {}

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def show(self, seen: Seen) -> None:
        """Print what is new about the ranks."""
        instance = seen.instance
        for rank in instance.ranks:
            place = f"{instance.id}: rank {rank.rank} on {rank.node}"
            text = doing(seen, rank.rank)
            progress = seen.progress.get(rank.rank)
            # The rate of a download changes all the time: a line is due for each tenth of it.
            mark = str(milestone(progress)) if progress is not None and amount(progress) in text else text
            if self._shown.get(place) != mark:
                self._shown[place] = mark
                show_note(f"{place}: {text}")


def doing(seen: Seen, rank_number: int) -> str:
    """What a rank is doing, for a person: "loading 3/24 layers"."""
    rank = seen.instance.ranks[rank_number]
    if isinstance(rank.state, Gone):
        return "gone" if rank.state.exit_code is None else f"gone ({exit_text(rank.state.exit_code)})"
    if not wants_ranks(seen.instance):
        finishing = isinstance(rank.state, Ready) and getattr(seen.instance.status, "drain_seconds", 0.0) > 0
        return "finishing its requests" if finishing else "stopping"
    phase = phase_of(seen.instance, rank)
    progress = seen.progress.get(rank_number)
    name = "ready" if status_name(rank.state) == "ready" else phase.value
    if progress is None or progress.phase is not phase:
        return name
    return f"{name} {amount(progress)}".rstrip()


@asynccontextmanager
async def watching(client: ControlClient, display: Display | None = None) -> AsyncGenerator[Watcher]:
    """Follow the cluster while the body runs."""
    async with Follower(client) as follower, anyio.create_task_group() as group:
        watcher = Watcher(client, follower, display or Quiet())
        await group.start(watcher.follow)
        group.start_soon(watcher.ask_progress)
        yield watcher
        group.cancel_scope.cancel()


class Watched:
    """The cluster's state as it changes, and what is said of the instances in `shown`, which may change at any time."""

    def __init__(self) -> None:
        self._changed = anyio.Event()
        self._said: dict[InstanceId, tuple[int, str]] = {}
        self._log: tuple[str, int] | None = None  #: epoch and term of the first state: who counts the events
        self._cleared: set[InstanceId] = set()
        self.state = State()
        self.shown: set[InstanceId] = set()

    def reached(self, sequence: int, *instances: InstanceId) -> bool:
        """Whether the state is as new as that event.

        Another log counts from elsewhere: there it is new enough once it says what became of these instances.
        """
        if self._log == (self.state.epoch, self.state.term):
            return self.state.sequence >= sequence
        return all(name in self.state.instances or name in self._cleared for name in instances)

    def clear(self, instance: InstanceId) -> None:
        """A coordinator that did not know the instance has judged that it is not kept."""
        self._cleared.add(instance)

    async def until(self, condition: Callable[[State], bool]) -> None:
        """Wait until the state is so."""
        while not condition(self.state):
            await self._changed.wait()

    def take(self, state: State) -> None:
        """Take a newer state: show what is new in it, and wake whoever waits for it."""
        self.state = state
        self._log = self._log or (state.epoch, state.term)
        for instance in state.instances.values():
            if instance.id in self.shown:
                self.say_what_follows(instance)
        self.draw()
        self._changed.set()
        self._changed = anyio.Event()

    def draw(self) -> None:
        """Show the instances as they are now; here nothing is shown."""

    def say_what_follows(self, instance: Instance) -> None:
        """Say once why another attempt of the instance follows, where one does."""
        text = _what_follows(instance)
        if text and self._said.get(instance.id) != (instance.attempt, text):
            self._said[instance.id] = (instance.attempt, text)
            show_note(text)


class Watcher(Watched):
    """Keeps the state up to date from a coordinator, while `watching` runs."""

    def __init__(self, client: ControlClient, follower: Follower, display: Display) -> None:
        super().__init__()
        self._client = client
        self._display = display
        self._follower = follower
        self._progress: dict[tuple[InstanceId, int, int], Progress] = {}
        self.boot = ""  #: of the coordinator; another one has forgotten what ranks printed

    async def follow(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Keep the state up to date; started once there is one."""
        started = False
        lost = False
        async for change in self._follower.changes():
            match change:
                case Synchronised(state=state, welcome=welcome):
                    self.boot = welcome.coordinator_boot
                    if lost:
                        show_note("the coordinator is back")
                    lost = False
                    self.take(state)
                case Applied(event=event, state=state):
                    if isinstance(event, InstanceCleared):
                        self.clear(event.instance)
                    self.take(state)
                case Disconnected():
                    if not lost:
                        show_note("the coordinator does not answer; waiting for it")
                    lost = True
            if not started and isinstance(change, Synchronised):
                task_status.started()
                started = True

    def draw(self) -> None:
        """Show the instances with their progress."""
        for name in sorted(self.shown & set(self.state.instances)):
            instance = self.state.instances[name]
            mine = {
                rank.rank: found
                for rank in instance.ranks
                if (found := self._progress.get((instance.id, instance.attempt, rank.rank)))
            }
            self._display.show(Seen(instance=instance, progress=mine))

    async def ask_progress(self) -> None:
        """Keep the progress within phases up to date, while it is displayed."""
        while True:
            await anyio.sleep(_PROGRESS_SECONDS)
            if not self.shown or isinstance(self._display, Quiet):
                continue
            try:
                beats = (await view(self._client)).beats
            except MusterError:
                continue  # the follower says when the coordinator is gone
            self._progress = {(p.instance, p.attempt, p.rank): p for beat in beats for p in beat.progress}
            self.draw()


def _what_follows(instance: Instance) -> str:
    """Why another attempt follows; "" where none does."""
    match instance.status:
        case Broken(failure=failure, retry_at_ns=int()) if failure.phase is Phase.PLACING:
            return f"{instance.id} waits for a place: {failure.sentence()}"
        case Broken(failure=failure, retry_at_ns=int()):
            return f"{instance.id}: attempt {instance.attempt} failed: {failure.sentence()} It is tried again."
        case Ending(reason=reason):
            return f"{instance.id}: attempt {instance.attempt} is ended: {reason}. The next one follows."
        case _:
            return ""


def is_settled(state: State, instance: InstanceId) -> bool:
    """Whether the instance is ready, or will not be any more."""
    found = state.instances.get(instance)
    if found is None:
        return True
    match found.status:
        case Broken(retry_at_ns=None):
            return all_gone(found)
        case Running() | Finished():
            return True
        case _:
            return False


def is_over(state: State, instance: InstanceId) -> bool:
    """Whether no process of the instance is left and none will come."""
    found = state.instances.get(instance)
    if found is None:
        return True
    match found.status:
        case Broken(retry_at_ns=None) | Finished():
            return all_gone(found)
        case _:
            return False


def is_awaited(state: State, instance: InstanceId) -> bool:
    """Whether `muster create --wait` has seen what it waits for: a script's end, or that anything else is settled."""
    found = state.instances.get(instance)
    return found is None or (is_over(state, instance) if is_script(found) else is_settled(state, instance))


def left_over(state: State, instances: Collection[InstanceId]) -> list[str]:
    """The ranks of these instances whose processes may still be there, each with its node."""
    return [
        f"rank {rank.rank} of {name} on {rank.node}" + (f" (pid {rank.pid})" if rank.pid else "")
        for name in sorted(instances)
        if name in state.instances
        for rank in state.instances[name].ranks
        if not isinstance(rank.state, Gone)
    ]


def display() -> Display:
    """The live table on a terminal, plain lines elsewhere."""
    if sys.stderr.isatty():
        from muster.cli.live import LiveTable

        return LiveTable()
    return Lines()
