"""A rank whose steps do not end is told by what its process does."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Generator
from typing import cast

import anyio
import msgspec
import psutil
import pytest
from children import until

from muster.rank_protocol import FromRank, StepFrame
from muster.spec import (
    Assignment,
    BootId,
    Deadlines,
    Failure,
    InstanceId,
    InstanceSpec,
    ModelWorkload,
    NodeId,
)
from muster.state import Failed, Instance, Rank, RankState, Ready, Running, State
from muster.worker.line import Line, RunnerEndedError
from muster.worker.process import RunnerProcess
from muster.worker.watch import Place, StateWatch
from muster.worker.watchdog import StuckError, watch_steps, why_halted

ONE = InstanceId("one")
STEP_SECONDS = 0.2
LATE = Failure(kind="step-timeout", message="late", rank=0, node=NodeId("n0"), secondary=True)


@pytest.fixture
def child() -> Generator[psutil.Process]:
    process = subprocess.Popen(["sleep", "600"])
    try:
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def stop(process: psutil.Process) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: process.status() == psutil.STATUS_STOPPED)


class Stand:
    """Rank 1 of an instance, with a process that says what the test lets it say."""

    def __init__(self, process: psutil.Process, ranks: int = 2) -> None:
        self.pid = process.pid
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


Make = Callable[..., Stand]
pytestmark = [pytest.mark.process, pytest.mark.anyio]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def make() -> Generator[Make]:
    made: list[Stand] = []

    def stand(process: psutil.Process, ranks: int = 2) -> Stand:
        made.append(Stand(process, ranks))
        return made[-1]

    yield stand
    for one in made:
        one.close()


async def test_a_busy_rank_that_is_silent_and_stopped_is_the_cause(child: psutil.Process, make: Make) -> None:
    stand = make(child)
    stop(child)
    await stand.say.send(StepFrame(step=7, active=2))
    failure = await stand.failure()
    assert (failure.kind, failure.secondary, failure.retryable) == ("step-timeout", False, True)
    assert f"for {STEP_SECONDS:g} s after step 7 began: its process is stopped (SIGSTOP)" in failure.message
    assert f"kill -CONT {child.pid}" in failure.remedy


@pytest.mark.parametrize(("ranks", "secondary"), [(2, True), (1, False)])
async def test_a_busy_rank_that_runs_waits_for_another_if_there_is_one(
    child: psutil.Process, make: Make, ranks: int, secondary: bool
) -> None:
    stand = make(child, ranks)
    await stand.say.send(StepFrame(step=7, active=2))
    failure = await stand.failure()
    assert failure.secondary is secondary
    assert ("waits for another rank" in failure.message) is secondary
    assert "it computes" in failure.message


async def test_steps_that_go_on_are_left_alone_and_so_is_an_idle_rank(child: psutil.Process, make: Make) -> None:
    stand = make(child)
    async with anyio.create_task_group() as group:
        group.start_soon(watch_steps, stand.line, stand.place)
        for step in range(8):
            await stand.say.send(StepFrame(step=step, active=1))
            await anyio.sleep(STEP_SECONDS / 2)
        await stand.say.send(StepFrame(step=8, active=0))
        await anyio.sleep(STEP_SECONDS * 4)
        group.cancel_scope.cancel()


async def test_an_idle_rank_that_is_stopped_is_found_too(child: psutil.Process, make: Make) -> None:
    stand = make(child)
    stop(child)
    failure = await stand.failure()
    assert "no request can reach the rank: its process is stopped" in failure.message
    assert not failure.secondary


async def test_another_ranks_alarm_makes_a_stopped_one_known_at_once(child: psutil.Process, make: Make) -> None:
    stand = make(child)
    stand.others(Failed(LATE))
    stop(child)
    begin = anyio.current_time()
    failure = await stand.failure()
    assert anyio.current_time() - begin < STEP_SECONDS
    assert "another rank waits for a step of this one, and its process is stopped" in failure.message
    assert not failure.secondary


async def test_another_ranks_alarm_says_nothing_of_one_that_runs(child: psutil.Process, make: Make) -> None:
    stand = make(child)
    stand.others(Failed(LATE))
    with anyio.move_on_after(STEP_SECONDS * 4) as scope:
        await watch_steps(stand.line, stand.place)
    assert scope.cancelled_caught


async def test_the_end_of_the_runner_ends_the_watch(child: psutil.Process, make: Make) -> None:
    stand = make(child)
    stand.say.close()
    with pytest.raises(RunnerEndedError):
        await watch_steps(stand.line, stand.place)


def test_a_process_that_is_gone_is_not_halted(child: psutil.Process, make: Make) -> None:
    stand = cast(RunnerProcess, make(child))
    assert why_halted(stand) == ""
    stop(child)
    assert "SIGSTOP" in why_halted(stand)
    child.kill()
    child.wait()
    assert why_halted(stand) == ""
