"""Waiting for what a runner must say next: until its deadline, or until another rank is late because of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, TypeVar

import anyio

from muster.rank_protocol import FetchedFrame, FromRank, GatherFrame, ProgressFrame
from muster.spec import Failure
from muster.state import State
from muster.worker import diagnosis
from muster.worker.condition import Condition, watch
from muster.worker.line import Line, RankError
from muster.worker.watch import Place

#: A worker that itself stood still finds its alarms first and what it was told meanwhile after that.
CATCH_UP_SECONDS: Final = 0.25

F = TypeVar("F")


class LateError(Exception):
    """What was due did not come. `alarmed`: the deadline is not over, but another rank's is, and this one is halted."""

    def __init__(self, condition: Condition, *, alarmed: bool) -> None:
        super().__init__(condition.text)
        self.condition = condition
        self.alarmed = alarmed


def awaited(place: Place, state: State) -> bool:
    """Whether another rank was late for no reason of its own: it may be this one that it waits for."""
    return bool(diagnosis.others_late(place.ranks(state), place.rank))


def never(state: State) -> bool:
    """No state is worth waking up for."""
    del state
    return False


async def expect(
    line: Line,
    place: Place,
    kind: type[F],
    seconds: float,
    *,
    starts: Callable[[State], bool] = lambda state: True,
    on_progress: Callable[[ProgressFrame], None],
    on_gather: Callable[[GatherFrame], None] | None = None,
    on_fetched: Callable[[FetchedFrame], None] | None = None,
) -> F:
    """The next frame of this kind, at most `seconds` after the last progress, or after `starts` came to hold.

    Raises:
        LateError: it did not come; or another rank was late, and this one's process is halted.
        RankError: something else came, or the runner failed.
        RunnerEndedError: its process ended.
    """
    watched = watch(line.runner.pid, line.runner.started)
    due = anyio.current_time() + seconds if starts(line.state) else math.inf
    looked = False  #: another rank's alarm made us look already

    def wakes(state: State) -> bool:
        return (not looked and awaited(place, state)) or (due == math.inf and starts(state))

    while True:
        frame = await line.receive_or(wakes, due - anyio.current_time())
        if frame is None and due == math.inf and starts(line.state):
            due = anyio.current_time() + seconds
            continue
        alarm = frame is None and not looked and awaited(place, line.state)
        if frame is None and not alarm:
            frame = await line.receive_or(never, CATCH_UP_SECONDS)
        if frame is None:
            condition = await watched.condition()
            # One that is gone has said why, or ended without a word: the line tells which.
            if not alarm or (condition.halted and condition.kind != "gone"):
                raise LateError(condition, alarmed=alarm)
            looked = True
            continue
        if isinstance(frame, kind):
            return frame
        if isinstance(frame, GatherFrame) and on_gather is not None:
            on_gather(frame)
            continue
        if isinstance(frame, FetchedFrame) and on_fetched is not None:
            on_fetched(frame)
            continue
        if not isinstance(frame, ProgressFrame):
            raise RankError(_unexpected(frame, kind))
        on_progress(frame)
        if due < math.inf:
            due = anyio.current_time() + seconds
            watched = watch(line.runner.pid, line.runner.started)


def _unexpected(frame: FromRank, kind: type[object]) -> Failure:
    return Failure(
        kind="protocol-violation",
        message=f"the runner said {type(frame).__name__} when {kind.__name__} was due",
        remedy="Please report this.",
        retryable=True,
    )
