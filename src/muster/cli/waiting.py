"""Waiting for instances that a command has asked for: shown on the way, and the exit code in the end."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import anyio

from muster.bus import ControlClient
from muster.cli.client import view
from muster.cli.errors import EXIT_FAILED, show_failure, show_note
from muster.cli.watch import Display, Quiet, Seen, Watcher, display, doing, is_awaited
from muster.spec import InstanceId, InstanceSpec, ScriptWorkload
from muster.state import Broken, State


class Waiting(NamedTuple):
    """How long to wait for what was asked for (`None`: as long as it takes), and whether to be silent meanwhile."""

    seconds: float | None
    quiet: bool

    def display(self) -> Display:
        """What shows how it goes."""
        return Quiet() if self.quiet else display()


def goal_of(spec: InstanceSpec) -> str:
    """What an instance is awaited to be: ready, or for a script finished."""
    return "finished" if isinstance(spec.workload, ScriptWorkload) else "ready"


async def until_awaited(
    client: ControlClient, watcher: Watcher, instances: Collection[InstanceId], sequence: int, seconds: float | None
) -> State:
    """Wait until each is what it is awaited to be or has failed for good, or the time is over; the state then.

    `sequence` is that of the last event that was asked for: before it nothing is decided.
    """
    with anyio.move_on_after(seconds):
        await watcher.until(
            lambda state: watcher.reached(sequence, *instances) and all(is_awaited(state, name) for name in instances)
        )
    if not watcher.reached(sequence, *instances):  # so little time that its own event was not even seen
        return (await view(client)).state
    return watcher.state


def conclude(state: State, name: InstanceId, goal: str, waiting: Waiting) -> int:
    """Say how the waiting for an instance ended, unless it is well. The exit code."""
    instance = state.instances.get(name)
    if instance is None:
        show_note(f"{name} was deleted before it was {goal}")
        return EXIT_FAILED
    if not is_awaited(state, name):
        seen = Seen(instance=instance)
        ranks = (f"rank {rank.rank} on {rank.node} is {doing(seen, rank.rank)}" for rank in instance.ranks)
        show_note(f"{name} is not {goal} after {waiting.seconds or 0:g} s: {'; '.join(ranks)}")
        show_note(f"it goes on; see `muster describe {name}`, or end it with `muster delete {name}`")
        return EXIT_FAILED
    if isinstance(instance.status, Broken):
        show_failure(instance.status.failure)
        return EXIT_FAILED
    return 0
