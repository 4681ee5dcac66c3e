"""A rank on a stand: a process of a few lines in place of its runner, and a state that the test sets."""

from __future__ import annotations

import os
import signal
from typing import cast

import anyio
import msgspec
import psutil
from children import until

from muster.rank_protocol import FromRank
from muster.spec import Assignment, BootId, Deadlines, Failure, InstanceId, InstanceSpec, ModelWorkload, NodeId
from muster.state import Instance, Rank, RankState, Ready, Running, State
from muster.worker.line import Line
from muster.worker.process import RunnerProcess
from muster.worker.watch import Place, StateWatch
from muster.worker.watchdog import StuckError, watch_steps

ONE = InstanceId("one")
STEP_SECONDS = 0.2
LATE = Failure(kind="step-timeout", message="late", rank=0, node=NodeId("n0"), secondary=True)


def stop(process: psutil.Process) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: process.status() == psutil.STATUS_STOPPED)


class Stand:
    """Rank 1 of an instance, with a process that says what the test lets it say."""

    def __init__(self, process: psutil.Process, ranks: int = 2) -> None:
        self.pid = process.pid
        self.started = process.create_time()
        self.step = 0
        self.tail: list[str] = []
        self.say, self.frames = anyio.create_memory_object_stream[FromRank](100)
        self.watch = StateWatch()
        self.ranks = ranks
        spec = InstanceSpec(
            workload=ModelWorkload(model="m"), ranks=ranks, deadlines=Deadlines(step_seconds=STEP_SECONDS)
        )
        self.instance = Instance(
            id=ONE,
            spec=spec,
            created_ns=1,
            attempt=1,
            backend="ring",
            status=Running(),
            since_ns=1,
            ranks=(),
            created_by=1,
            caused_by=1,
        )
        self.others(Ready())
        number = min(1, ranks - 1)
        node, boot = NodeId(f"n{number}"), BootId("b")
        self.place = Place(self.watch.state.instances[ONE], Assignment(rank=number, node=node, boot=boot))
        self.line = Line(cast(RunnerProcess, self), self.watch)

    def others(self, state: RankState) -> None:
        """What is known of rank 0."""
        states = (state, Ready())[: self.ranks]
        ranks = tuple(
            Rank(rank=number, node=NodeId(f"n{number}"), boot="b", state=item, since_ns=1)
            for number, item in enumerate(states)
        )
        self.watch.update(State(instances={ONE: msgspec.structs.replace(self.instance, ranks=ranks)}))

    def close(self) -> None:
        self.say.close()
        self.frames.close()

    async def failure(self) -> Failure:
        with anyio.fail_after(10):
            try:
                await watch_steps(self.line, self.place)
            except StuckError as error:
                return error.failure
        raise AssertionError("the watch ended")
