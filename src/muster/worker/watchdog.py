"""The watchdog on steps: a rank whose process lives and whose steps do not end."""

from __future__ import annotations

from functools import partial
from typing import Final

import psutil

from muster.rank_protocol import StepFrame
from muster.spec import Failure
from muster.state import Failed, State
from muster.worker.line import Line, RankError
from muster.worker.process import RunnerProcess
from muster.worker.watch import Place

KIND: Final = "step-timeout"
#: A worker that itself stood still finds its alarms first and what it was told meanwhile after that.
_CATCH_UP_SECONDS = 0.25

_STOPPED = {
    psutil.STATUS_STOPPED: "its process is stopped (SIGSTOP)",
    psutil.STATUS_TRACING_STOP: "its process is stopped by a debugger",
}
_IN_KERNEL = "its process is blocked in the kernel"


class StuckError(RankError):
    """A step did not end in time, or the process cannot go on: asking it to end is no use."""


async def watch_steps(line: Line, place: Place) -> None:
    """Read what a model's runner says of its steps.

    Raises:
        StuckError: the rank is busy and silent for `step_seconds`. Or its process does not run, and either another
            rank waits for a step to end, or this was so at two looks that far apart while nothing was asked of it.
        RankError: the runner says that it failed.
        RunnerEndedError: its process ended.
    """
    seconds = place.spec.deadlines.step_seconds
    last = StepFrame(step=0, active=0)
    alarmed = partial(_alarmed, place)
    looked = False  #: another rank's alarm made us look already
    halted = False  #: idle, and not running when we looked last
    while True:
        frame = await line.receive_or(_never if looked else alarmed, seconds)
        alarm = not looked and alarmed(line.state)
        if frame is None and not alarm:
            frame = await line.receive_or(_never, _CATCH_UP_SECONDS)
        if frame is not None:
            last, halted = frame if isinstance(frame, StepFrame) else last, False
            continue
        looked = looked or alarm
        reason = why_halted(line.runner)
        if alarm and reason:
            raise StuckError(_stuck(f"another rank waits for a step of this one, and {reason}", reason, line.runner))
        if not alarm and last.active:
            raise StuckError(_late(last.step, seconds, reason, line.runner, alone=place.world_size == 1))
        if not alarm and reason and halted:
            raise StuckError(_stuck(f"no request can reach the rank: {reason}", reason, line.runner))
        halted = bool(reason)


def _never(state: State) -> bool:
    del state
    return False


def why_halted(runner: RunnerProcess) -> str:
    """Why the runner's process cannot run; empty where it can, or is gone."""
    try:
        status = psutil.Process(runner.pid).status()
    except psutil.Error:
        return ""
    return _IN_KERNEL if status == psutil.STATUS_DISK_SLEEP else _STOPPED.get(status, "")


def _alarmed(place: Place, state: State) -> bool:
    """Whether another rank of the attempt is stuck: it may be this one that it waits for."""
    return any(
        isinstance(rank.state, Failed) and rank.state.failure.kind == KIND and rank.rank != place.rank
        for rank in place.ranks(state)
    )


def _late(step: int, seconds: float, reason: str, runner: RunnerProcess, *, alone: bool) -> Failure:
    """A step that did not end. A rank that runs is probably waiting for one that does not."""
    silence = f"nothing was heard of the rank for {seconds:g} s after step {step} began"
    if reason:
        return _stuck(f"{silence}: {reason}", reason, runner)
    return Failure(
        kind=KIND,
        message=f"{silence}; its process runs: it computes" + ("" if alone else ", or waits for another rank"),
        remedy="See its output: muster logs. Where the steps only are slow, raise step_seconds.",
        retryable=True,
        secondary=not alone,
    )


def _stuck(message: str, reason: str, runner: RunnerProcess) -> Failure:
    remedies = {_IN_KERNEL: "See what it waits for, such as a disk or a network file system: dmesg"}
    remedy = remedies.get(reason, f"See who stopped process {runner.pid}; let it go on with: kill -CONT {runner.pid}")
    return Failure(kind=KIND, message=message, remedy=remedy, retryable=True)
