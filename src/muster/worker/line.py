"""A rank's line to its runner: the next frame, or the failure or the end that comes instead."""

from __future__ import annotations

import math
from collections.abc import Callable

import anyio
import msgspec

from muster.rank_protocol import FailedFrame, FromRank
from muster.spec import Failure
from muster.state import State
from muster.worker import diagnosis
from muster.worker.process import RunnerProcess
from muster.worker.watch import StateWatch


class RankError(Exception):
    """The rank cannot go on."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class RunnerEndedError(Exception):
    """The runner's process has ended, or is about to: it closed its line."""


class Line:
    """Waits for a runner, and for the state of the cluster while the runner lives.

    Every method raises `RankError` where the runner says that it failed, and `RunnerEndedError` where it ends.
    """

    def __init__(self, runner: RunnerProcess, watch: StateWatch) -> None:
        self.runner = runner
        self._watch = watch

    async def receive(self) -> FromRank:
        """The next frame."""
        try:
            frame = await self.runner.frames.receive()
        except anyio.EndOfStream:
            raise RunnerEndedError from None
        if isinstance(frame, FailedFrame):
            tail = tuple(self.runner.tail)[-diagnosis.TAIL_LINES :]
            raise RankError(msgspec.structs.replace(frame.failure, log_tail=tail))
        return frame

    @property
    def state(self) -> State:
        """The cluster as this worker knows it."""
        return self._watch.state

    async def receive_or(self, holds: Callable[[State], bool], seconds: float = math.inf) -> FromRank | None:
        """A frame, or `None` once `holds` does, or after `seconds`; no frame is lost to that."""
        frame: FromRank | None = None

        async def stop_waiting() -> None:
            await self._watch.until(holds)
            group.cancel_scope.cancel()

        failed: Exception | None = None
        async with anyio.create_task_group() as group:
            group.cancel_scope.deadline = anyio.current_time() + seconds
            group.start_soon(stop_waiting)
            try:
                frame = await self.receive()
            except (RankError, RunnerEndedError) as error:
                failed = error  # raised outside, or the group would wrap it
            group.cancel_scope.cancel()
        if failed is not None:
            raise failed
        return frame

    async def until(self, holds: Callable[[State], bool]) -> int:
        """The sequence of the state in which `holds` does. Takes no frame while the runner lives."""
        sequence: int | None = None

        async def stop_waiting() -> None:
            await self.runner.wait_ended()
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(stop_waiting)
            sequence = await self._watch.until(holds)
            group.cancel_scope.cancel()
        while sequence is None:
            await self.receive()
        return sequence
