"""The memory's speed is measured again when somebody asks, and while there is nothing else to do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from muster.spec import InstanceId, NodeId
from muster.worker import speed
from muster.worker.service import Worker
from muster.worker.settings import WorkerSettings
from muster.worker.speed import SpeedMeter


class Bench:
    """Measures what a test says, and remembers what is told."""

    def __init__(self, *samples: float | None) -> None:
        self.samples = list(samples)
        self.idle = False
        self.told: list[float] = []
        self.measured = 0
        self.done = anyio.Event()

    async def measure(self) -> float | None:
        self.measured += 1
        found = self.samples.pop(0)
        if not self.samples:
            self.done.set()
        return found

    def is_idle(self) -> bool:
        return self.idle


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(speed, "_FIRST_SECONDS", 3600.0)
    monkeypatch.setattr(speed, "_LINKS_SECONDS", 0.0)
    return monkeypatch


async def until_done(bench: Bench, *rounds: int) -> None:
    meter = SpeedMeter(bench.measure, bench.is_idle, bench.told.append)
    for number in rounds:
        meter.hear(number)
    async with anyio.create_task_group() as group:
        group.start_soon(meter.run)
        with anyio.fail_after(10):
            await bench.done.wait()
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()


def test_a_round_that_grew_measures_and_the_first_that_is_heard_does_not(patience: pytest.MonkeyPatch) -> None:
    async def run() -> Bench:
        bench = Bench(50.0)
        await until_done(bench, 3, 3, 4, 4)
        return bench

    bench = anyio.run(run)
    assert (bench.told, bench.measured) == ([50.0], 1)

    async def unasked() -> bool:
        bench = Bench(50.0)
        with anyio.move_on_after(0.05):
            await until_done(bench, 3, 3, 2)
        return bench.measured == 0

    assert anyio.run(unasked)


def test_an_idle_machine_measures_now_and_then_and_a_busy_one_does_not(patience: pytest.MonkeyPatch) -> None:
    patience.setattr(speed, "_FIRST_SECONDS", 0.0)
    patience.setattr(speed, "_AGAIN_SECONDS", 0.0)

    async def run() -> Bench:
        bench = Bench(40.0, None, 60.0, 50.0)
        bench.idle = True
        meter = SpeedMeter(bench.measure, bench.is_idle, bench.told.append)
        async with anyio.create_task_group() as group:
            group.start_soon(meter.run)
            with anyio.fail_after(10):
                await bench.done.wait()
            bench.idle = False
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        return bench

    bench = anyio.run(run)
    assert (bench.told, bench.measured) == ([40.0, 60.0, 50.0], 4)


def test_the_gpu_is_looked_at_soon_after_a_rank_has_ended(tmp_path: Path) -> None:
    looked: list[bool] = []

    class Task:
        async def run(self) -> None:
            assert looked == []

    async def run() -> None:
        worker: Any = Worker(WorkerSettings(node=NodeId("a"), coordinators=(), directory=tmp_path))
        worker._teller = SimpleNamespace(look_soon=lambda: looked.append(True))
        key = (InstanceId("i"), 1, 0)
        worker._tasks[key] = Task()
        await worker._run_rank(key, worker._tasks[key])
        assert worker._tasks == {}

    anyio.run(run)
    assert looked == [True]
