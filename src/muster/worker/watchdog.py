"""The watchdog on steps: a rank whose process lives and whose steps do not end."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import anyio

from muster.rank_protocol import StepFrame
from muster.spec import Failure
from muster.worker import diagnosis
from muster.worker.condition import Condition, watch
from muster.worker.line import Line, RankError
from muster.worker.waiting import CATCH_UP_SECONDS, awaited, never
from muster.worker.watch import Place

KIND: Final = "step-timeout"


class StuckError(RankError):
    """A step did not end in time, or the process cannot go on: asking it to end is no use."""


async def watch_steps(line: Line, place: Place) -> None:
    """Read what a model's runner says of its steps.

    Raises:
        StuckError: the rank is busy and silent for `step_seconds`. Or another rank was, and this one's process is
            halted or swaps, or it stands still too, or is at an earlier step. Or its process was halted at two looks
            `step_seconds` apart while nothing was asked of it.
        RankError: the runner says that it failed.
        RunnerEndedError: its process ended.
    """
    seconds = place.spec.deadlines.step_seconds
    alone = place.world_size == 1
    runner = line.runner
    last, heard = StepFrame(step=0, active=0), anyio.current_time()
    watched = watch(runner.pid, runner.started)
    looked = False  #: another rank's alarm made us look already
    halted = False  #: idle, and not running when we looked last
    while True:
        frame = await line.receive_or(never if looked else partial(awaited, place), seconds)
        alarm = frame is None and not looked and awaited(place, line.state)
        condition = await watched.condition() if alarm else None
        if condition is not None and condition.hindered:
            raise StuckError(_awaited(condition, runner.step))
        step = runner.step
        if frame is None:
            frame = await line.receive_or(never, CATCH_UP_SECONDS)
        if frame is not None:
            last, heard, halted = frame if isinstance(frame, StepFrame) else last, anyio.current_time(), False
            watched = watch(runner.pid, runner.started)
        looked = looked or alarm
        if alarm and frame is None:
            others = diagnosis.others_late(place.ranks(line.state), place.rank)
            if _ahead(others, runner.step) is not None or (last.active and runner.step == step):
                silence = anyio.current_time() - heard
                raise StuckError(_late(max(last.step, runner.step), silence, condition, others, alone=alone))
        elif frame is None:
            condition = await watched.condition()
            if last.active:
                others = diagnosis.others_late(place.ranks(line.state), place.rank)
                raise StuckError(_late(max(last.step, runner.step), seconds, condition, others, alone=alone))
            if condition.halted and halted:
                raise StuckError(_stuck(f"no request can reach the rank: {condition.text}", condition, runner.step))
            halted = condition.halted


def _ahead(others: Sequence[Failure], step: int) -> Failure | None:
    """Of the ranks that are late as well, the one that is furthest, where it is further than `step`."""
    further = [failure for failure in others if failure.step is not None and failure.step > step]
    return max(further, key=lambda failure: failure.step or 0, default=None)


def _late(step: int, silence: float, condition: Condition | None, others: Sequence[Failure], *, alone: bool) -> Failure:
    """A step that did not end. A rank that runs is probably waiting for one that does not."""
    told = f"nothing was heard of the rank for {round(silence, 1):g} s after step {step} began"
    if condition is not None and condition.hindered:
        return _stuck(f"{told}: {condition.text}", condition, step)
    ahead = _ahead(others, step)
    behind = f"; rank {ahead.rank} is at step {ahead.step} already" if ahead is not None else ""
    return Failure(
        kind=KIND,
        message=f"{told}; its process runs: it computes" + ("" if alone else ", or waits for another rank") + behind,
        remedy="See its output: muster logs. Where the steps only are slow, raise step_seconds.",
        retryable=True,
        secondary=not alone,
        step=step,
    )


def _awaited(condition: Condition, step: int) -> Failure:
    return _stuck(f"another rank waits for a step of this one, and {condition.text}", condition, step)


def _stuck(message: str, condition: Condition, step: int) -> Failure:
    return Failure(kind=KIND, message=message, remedy=condition.remedy, retryable=True, step=step)
