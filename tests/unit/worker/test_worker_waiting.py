"""A frame that is due: it comes, or what the process does instead is told, at the deadline or at another's."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Generator

import anyio
import msgspec
import psutil
import pytest
from stand import LATE, Stand, stop

from muster.rank_protocol import ConnectedFrame, FailedFrame, LoadedFrame, ProgressFrame, ReadyFrame
from muster.spec import Failure, Phase
from muster.state import Failed, Loaded, State
from muster.worker.condition import Condition
from muster.worker.diagnosis import awaited, late, others_late
from muster.worker.line import RankError
from muster.worker.waiting import LateError, expect

SECONDS = 0.2
PROGRESS = ProgressFrame(phase=Phase.LOADING, done=1, total=9, unit="layers")
RUNS = Condition("running", "its process runs")
STOPPED = Condition("stopped", "its process is stopped (SIGSTOP)", "kill -CONT 7")
pytestmark = [pytest.mark.process, pytest.mark.anyio]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def child() -> Generator[psutil.Process]:
    process = subprocess.Popen(["sleep", "600"])
    try:
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def stand(child: psutil.Process) -> Generator[Stand]:
    made = Stand(child)
    yield made
    made.close()


async def wait_ready(
    stand: Stand, seconds: float = SECONDS, starts: Callable[[State], bool] = lambda state: True
) -> list[ProgressFrame]:
    seen: list[ProgressFrame] = []
    with anyio.fail_after(10):
        await expect(stand.line, stand.place, ReadyFrame, seconds, starts=starts, on_progress=seen.append)
    return seen


async def test_progress_moves_the_deadline_and_the_frame_ends_the_wait(stand: Stand) -> None:
    told: list[ProgressFrame] = []

    async def listen() -> None:
        told.extend(await wait_ready(stand))

    async with anyio.create_task_group() as group:
        group.start_soon(listen)
        for _ in range(4):
            await anyio.sleep(SECONDS / 2)
            await stand.say.send(PROGRESS)
        await stand.say.send(ReadyFrame())
    assert told == [PROGRESS] * 4


async def test_a_deadline_that_passes_tells_what_the_process_does(stand: Stand, child: psutil.Process) -> None:
    with pytest.raises(LateError) as runs:
        await wait_ready(stand)
    assert (runs.value.condition.kind, runs.value.alarmed) == ("running", False)
    stop(child)
    with pytest.raises(LateError) as halted:
        await wait_ready(stand)
    assert (halted.value.condition.kind, halted.value.alarmed) == ("stopped", False)


async def test_another_rank_that_is_late_makes_a_stopped_one_known_at_once(stand: Stand, child: psutil.Process) -> None:
    stop(child)
    stand.others(Failed(msgspec.structs.replace(LATE, kind="formation-timeout")))
    with pytest.raises(LateError) as error:
        await wait_ready(stand, 60.0, starts=lambda state: False)
    assert (error.value.condition.kind, error.value.alarmed) == ("stopped", True)


async def test_one_that_is_gone_says_itself_why_when_another_rank_waits_for_it(
    stand: Stand, child: psutil.Process
) -> None:
    child.kill()
    stand.others(Failed(msgspec.structs.replace(LATE, kind="formation-timeout")))
    failed: list[Failure] = []

    async def listen() -> None:
        try:
            await wait_ready(stand, 60.0)
        except RankError as error:
            failed.append(error.failure)

    async with anyio.create_task_group() as group:
        group.start_soon(listen)
        await anyio.sleep(SECONDS)  # by then the alarm has been looked into
        await stand.say.send(FailedFrame(failure=Failure(kind="rdma-unusable", message="rank 1 never came")))
    assert [failure.kind for failure in failed] == ["rdma-unusable"]


async def test_another_rank_that_is_late_changes_nothing_for_one_that_runs(stand: Stand) -> None:
    stand.others(Failed(LATE))
    with pytest.raises(LateError) as error:
        await wait_ready(stand, SECONDS)
    assert not error.value.alarmed


async def test_the_clock_starts_with_the_others(stand: Stand) -> None:
    def loaded(state: State) -> bool:
        return isinstance(stand.place.ranks(state)[0].state, Loaded)

    with anyio.move_on_after(SECONDS * 3) as scope:
        await wait_ready(stand, SECONDS, starts=loaded)
    assert scope.cancelled_caught
    stand.others(Loaded())
    with pytest.raises(LateError):
        await wait_ready(stand, SECONDS, starts=loaded)


async def test_a_frame_that_is_not_due_is_a_violation(stand: Stand) -> None:
    await stand.say.send(ConnectedFrame(seconds=1.0))
    with pytest.raises(RankError, match="said ConnectedFrame when ReadyFrame was due"):
        await wait_ready(stand)


async def test_what_was_said_before_the_worker_could_look_counts(stand: Stand) -> None:
    await stand.say.send(LoadedFrame(layers=None, sharding="none", weights_bytes=1, seconds=1.0))
    with anyio.fail_after(5):
        frame = await expect(stand.line, stand.place, LoadedFrame, -1.0, on_progress=lambda frame: None)
    assert frame.weights_bytes == 1


@pytest.mark.parametrize(("shared", "secondary"), [(True, True), (False, False)])
def test_a_rank_that_runs_is_an_echo_only_where_it_may_wait_for_others(shared: bool, secondary: bool) -> None:
    failure = late(RUNS, 5.0, what="no progress for", shared=shared)
    assert failure.secondary is secondary
    assert failure.message.startswith("no progress for 5 s: its process runs")
    assert ("waits for another rank" in failure.message) is shared
    assert "deadline" in failure.remedy


def test_a_rank_that_is_stopped_is_the_cause_in_any_phase() -> None:
    failure = late(STOPPED, 5.0, what="no progress for", shared=True)
    assert (failure.message, failure.secondary) == ("no progress for 5 s: its process is stopped (SIGSTOP)", False)
    assert failure.remedy == "kill -CONT 7"
    told = awaited("formation-timeout", STOPPED)
    assert (told.kind, told.secondary) == ("formation-timeout", False)
    assert told.message == "another rank waits for this one, and its process is stopped (SIGSTOP)"


def test_only_others_that_had_no_reason_of_their_own_are_alarms(stand: Stand) -> None:
    def alarms(failure: Failure, rank: int = 1) -> int:
        stand.others(Failed(failure))
        return len(others_late(stand.place.ranks(stand.watch.state), rank))

    assert alarms(LATE) == 1
    assert alarms(LATE, rank=0) == 0
    assert alarms(msgspec.structs.replace(LATE, secondary=False)) == 0
    assert alarms(msgspec.structs.replace(LATE, kind="peer-lost")) == 0
