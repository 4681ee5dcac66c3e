"""The pool keeps warm runners, hands them out, replaces them, and starts none beside something urgent."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import psutil
import pytest
from children import WARM, FakeReaper, as_reaper, records_in

from muster.errors import BackendError
from muster.rank_protocol import WarmFrame
from muster.worker import pool as pool_module
from muster.worker.pool import PoolSettings, RunnerPool

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class FakeRunner:
    """A runner without a process: warm at once, unless `broken`."""

    made: list[FakeRunner]
    broken: bool

    def __init__(self, reaper: object, records: object, *, full: bool, measure: bool = False) -> None:
        del reaper, records
        self.full = full
        self.measure = measure
        self.made.append(self)
        self.pid = len(self.made)
        self.warm: WarmFrame | None = None
        self.exit_code: int | None = None
        self.tail = deque(["no module named mlx"])
        self.ended = False
        self.left: list[psutil.Process] = []
        self._end = anyio.Event()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        self.warm = None if self.broken else WARM
        if self.broken:
            self.die(1)
        task_status.started()
        try:
            await self._end.wait()
        finally:
            self.die(0)

    async def wait_warm(self) -> bool:
        return self.warm is not None

    async def wait_ended(self) -> int:
        await self._end.wait()
        return self.exit_code or 0

    async def end(self, *, ask: bool, patience_seconds: float) -> int:
        del ask, patience_seconds
        self.die(0)
        return self.exit_code or 0

    def remains(self) -> list[psutil.Process]:
        return self.left

    def resident_bytes(self) -> int:
        return 100

    def die(self, code: int) -> None:
        if not self.ended:
            self.ended, self.exit_code = True, code
            self._end.set()


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeRunner]:
    """Every runner that the pool has started."""
    FakeRunner.made = []
    FakeRunner.broken = False
    monkeypatch.setattr(pool_module, "RunnerProcess", FakeRunner)
    monkeypatch.setattr(pool_module, "_RETRY_SECONDS", 0.001)
    return FakeRunner.made


@asynccontextmanager
async def running(settings: PoolSettings, tmp_path: Path, *, urgent: bool = False) -> AsyncGenerator[RunnerPool, None]:
    pool = RunnerPool(settings, as_reaper(FakeReaper()), records_in(tmp_path))
    if urgent:
        pool.hurry()
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            await group.start(pool.run)
            yield pool
            group.cancel_scope.cancel()


async def until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(5):
        while not holds():  # noqa: ASYNC110 - what is waited for has no event
            await anyio.sleep(0.001)


async def test_it_fills_up_and_stops(tmp_path: Path, made: list[FakeRunner]) -> None:
    async with running(PoolSettings(size=3), tmp_path) as pool:
        await pool.wait_filled()
        assert pool.warm_count == 3
        assert pool.warm_bytes() == 100
        assert all(runner.full for runner in made)
    assert len(made) == 3
    assert all(runner.ended for runner in made), "cancelling the pool ends every runner"


async def test_what_is_taken_is_replaced(tmp_path: Path, made: list[FakeRunner]) -> None:
    async with running(PoolSettings(size=2), tmp_path) as pool:
        await pool.wait_filled()
        assert await pool.take(full=False) is made[0]
        await until(lambda: pool.warm_count == 2)
        assert len(made) == 3
        assert not made[0].ended


async def test_an_empty_pool_gives_a_cold_runner_with_no_more_than_asked_for(
    tmp_path: Path, made: list[FakeRunner]
) -> None:
    async with running(PoolSettings(size=0), tmp_path) as pool:
        for full in (False, True):
            assert (await pool.take(full=full)).full is full
    assert len(made) == 2


async def test_nothing_is_started_while_something_is_urgent(tmp_path: Path, made: list[FakeRunner]) -> None:
    async with running(PoolSettings(size=2), tmp_path, urgent=True) as pool:
        await anyio.wait_all_tasks_blocked()
        assert made == []
        pool.hurry()
        pool.relax()
        await anyio.wait_all_tasks_blocked()
        assert made == []
        pool.relax()
        await pool.wait_filled()
        assert len(made) == 2


async def test_a_warm_runner_that_dies_is_replaced_and_never_handed_out(tmp_path: Path, made: list[FakeRunner]) -> None:
    async with running(PoolSettings(size=2), tmp_path) as pool:
        await pool.wait_filled()
        made[0].die(-9)
        assert await pool.take(full=True) is made[1]
        await until(lambda: pool.warm_count == 2)
        assert [runner.ended for runner in made] == [True, False, False, False]


async def test_a_runner_that_waited_too_long_is_replaced(tmp_path: Path, made: list[FakeRunner]) -> None:
    async with running(PoolSettings(size=1, max_age_seconds=0.05), tmp_path) as pool:
        await until(lambda: len(made) >= 3)
        await until(lambda: made[0].ended and made[1].ended)
        assert pool.warm_count <= 1


async def test_memory_bounds_the_pool(tmp_path: Path, made: list[FakeRunner]) -> None:
    async with running(PoolSettings(size=10, memory_bytes=350), tmp_path) as pool:
        await pool.wait_filled()
        assert pool.warm_count == 3
    assert len(made) == 3


async def test_a_runner_that_fails_to_start_is_replaced_with_growing_pauses(
    tmp_path: Path, made: list[FakeRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    sleep = anyio.sleep

    async def remember(seconds: float) -> None:
        pauses.append(seconds)
        FakeRunner.broken = len(made) < 4
        await sleep(0)

    monkeypatch.setattr(pool_module.anyio, "sleep", remember)
    monkeypatch.setattr(pool_module, "_RETRY_SECONDS", 1.0)
    monkeypatch.setattr(pool_module, "_RETRY_MAX_SECONDS", 5.0)
    FakeRunner.broken = True
    async with running(PoolSettings(size=1), tmp_path) as pool:
        await pool.wait_filled()
        assert pool.warm_count == 1
    assert pauses == [2.0, 4.0, 5.0, 5.0]
    assert [runner.exit_code for runner in made] == [1, 1, 1, 1, 0]


async def test_a_probe_is_light_and_measures_and_ends(tmp_path: Path, made: list[FakeRunner]) -> None:
    async with running(PoolSettings(size=0), tmp_path) as pool:
        probe = await pool.probe()
        assert (probe.full, probe.measure, probe.ended, probe.warm) == (False, True, True, WARM)
        FakeRunner.broken = True
        with pytest.raises(BackendError, match="does not come up on this node: no module named mlx"):
            await pool.probe()
    assert len(made) == 2


async def test_an_idle_pool_sleeps(tmp_path: Path, made: list[FakeRunner]) -> None:
    async with running(PoolSettings(size=2), tmp_path) as pool:
        await pool.wait_filled()
        await anyio.wait_all_tasks_blocked()
        begin = time.process_time()
        await anyio.sleep(0.1)
        assert time.process_time() - begin < 0.05
        assert len(made) == 2
