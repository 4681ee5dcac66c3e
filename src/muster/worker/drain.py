"""Letting a runner of an instance that is being deleted finish the requests that it has begun."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from muster.rank_protocol import Stop
from muster.state import Deleting, Ending, Failed, Gone, State
from muster.worker.process import RunnerProcess
from muster.worker.watch import Place, StateWatch


def drain_seconds(place: Place, state: State) -> float:
    """How long the rank may go on with what it has begun; 0 where it may not, or can not since another rank ended."""
    instance = state.instances.get(place.id)
    if instance is None or instance.attempt != place.attempt or not isinstance(instance.status, Deleting | Ending):
        return 0.0
    if any(isinstance(rank.state, Failed | Gone) for rank in instance.ranks):
        return 0.0
    return instance.status.drain_seconds


async def drain(runner: RunnerProcess, place: Place, watch: StateWatch, hurry: anyio.Event) -> None:
    """Ask the runner to finish, and wait until it has ended or may go on no longer.

    An idle runner ends at once. `hurry` cuts the waiting short, and so does whatever makes `drain_seconds` 0.
    """
    seconds = drain_seconds(place, watch.state)
    if seconds <= 0 or runner.ended or hurry.is_set():
        return
    await runner.send(Stop(drain_seconds=seconds))
    async with anyio.create_task_group() as group:
        group.cancel_scope.deadline = anyio.current_time() + seconds

        async def end_with(something: Callable[[], Awaitable[object]]) -> None:
            await something()
            group.cancel_scope.cancel()

        group.start_soon(end_with, runner.wait_ended)
        group.start_soon(end_with, hurry.wait)
        group.start_soon(end_with, lambda: watch.until(lambda state: drain_seconds(place, state) <= 0))
