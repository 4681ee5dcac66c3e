"""A rank whose steps do not end is told by what its process does."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Generator

import anyio
import msgspec
import psutil
import pytest
from stand import LATE, STEP_SECONDS, Stand, stop

from muster.rank_protocol import StepFrame
from muster.state import Failed
from muster.worker.line import RunnerEndedError
from muster.worker.watchdog import watch_steps


@pytest.fixture
def child() -> Generator[psutil.Process]:
    process = subprocess.Popen(["sleep", "600"])
    try:
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


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


async def test_another_ranks_alarm_makes_one_that_stands_still_tell_its_step(child: psutil.Process, make: Make) -> None:
    stand = make(child)
    stand.step = 7
    await stand.say.send(StepFrame(step=5, active=2))
    stand.others(Failed(msgspec.structs.replace(LATE, step=7)))
    failure = await stand.failure()
    assert (failure.step, failure.secondary) == (7, True)
    assert "after step 7 began" in failure.message
    assert "behind" not in failure.message


async def test_an_idle_rank_that_has_not_heard_of_the_step_says_that_it_is_behind(
    child: psutil.Process, make: Make
) -> None:
    stand = make(child)
    stand.step = 41
    stand.others(Failed(msgspec.structs.replace(LATE, step=42)))
    failure = await stand.failure()
    assert (failure.step, failure.secondary) == (41, True)
    assert "rank 0 is at step 42 already" in failure.message


async def test_another_ranks_alarm_says_nothing_of_one_whose_steps_go_on(child: psutil.Process, make: Make) -> None:
    stand = make(child)
    stand.others(Failed(msgspec.structs.replace(LATE, step=1)))
    with anyio.move_on_after(STEP_SECONDS * 4) as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(watch_steps, stand.line, stand.place)
            while True:
                stand.step += 1
                await stand.say.send(StepFrame(step=stand.step, active=1))
                await anyio.sleep(STEP_SECONDS / 4)
    assert scope.cancelled_caught
