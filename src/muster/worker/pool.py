"""Warm runners: started ahead, with the modules imported and nothing else, so that a rank costs no imports."""

from __future__ import annotations

import time

import anyio
import anyio.abc
import msgspec
import psutil
from loguru import logger

from muster.errors import BackendError
from muster.worker import facts
from muster.worker.process import RunnerProcess
from muster.worker.reaper import Reaper
from muster.worker.records import Records
from muster.worker.unburied import Unburied

#: Before a runner that failed to warm up is tried again; doubled each time, up to a minute.
_RETRY_SECONDS = 1.0
_RETRY_MAX_SECONDS = 60.0


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How many warm runners a worker keeps, and for how long."""

    size: int = 2
    memory_bytes: int = 4 * 2**30  #: resident memory of all warm runners; beyond it none is added
    max_age_seconds: float = 6 * 3600.0  #: a runner that waited longer is replaced by a fresh one
    start_seconds: float = 120.0  #: one that is not warm by then is killed and replaced


class RunnerPool:
    """Hands out runners and replaces them when nothing more urgent is going on.

    `urgent` is held while an instance is coming up here: imports beside it would make it slower.
    """

    def __init__(self, settings: PoolSettings, reaper: Reaper, records: Records) -> None:
        self.unburied = Unburied(records.unended)
        self.blas = ""  #: what MLX multiplies with on this node's CPU, as the runner of `probe` has it in memory
        self._settings = settings
        self._reaper = reaper
        self._records = records
        self._warm: list[RunnerProcess] = []
        self._warming: RunnerProcess | None = None
        self._warm_since: dict[int, float] = {}
        self._changed = anyio.Event()
        self._urgent = 0
        self._group: anyio.abc.TaskGroup | None = None
        self._failures = 0
        self._filled = anyio.Event()

    @property
    def warm_count(self) -> int:
        """How many runners wait."""
        return len(self._warm)

    def warm_bytes(self) -> int:
        """Resident memory of one waiting runner, 0 where none waits."""
        return self._warm[0].resident_bytes() if self._warm else 0

    async def wait_filled(self) -> None:
        """Wait until the pool has been full for the first time."""
        await self._filled.wait()

    async def end(self, runner: RunnerProcess, *, ask: bool, patience_seconds: float) -> list[psutil.Process]:
        """End a runner that was taken, and verify that it and what it started are gone; answers what is not."""
        await runner.end(ask=ask, patience_seconds=patience_seconds)
        left = runner.remains()
        if left:
            self.unburied.add(left)
        return left

    async def probe(self) -> RunnerProcess:
        """Start a light runner to learn what MLX can do here, and end it.

        Raises:
            BackendError: MLX cannot be imported, or the process does not come up.
        """
        assert self._group is not None
        runner = RunnerProcess(self._reaper, self._records, full=False, measure=True)
        await self._group.start(runner.run)
        with anyio.move_on_after(self._settings.start_seconds):
            await runner.wait_warm()
        self.blas = facts.blas(runner.pid)
        await self.end(runner, ask=False, patience_seconds=1.0)
        if runner.warm is None:
            tail = "; ".join(list(runner.tail)[-3:]) or f"exit code {runner.exit_code}"
            raise BackendError(
                f"a runner does not come up on this node: {tail}",
                remedy='Check with: python -c "import mlx.core" (on Linux: pip install "mlx[cpu]").',
            )
        return runner

    async def measure(self) -> float | None:
        """How fast memory is now, in GB/s, as a light runner of its own finds; `None` where it cannot."""
        try:
            runner = await self.probe()
        except (BackendError, OSError) as error:
            logger.warning("how fast memory is was not measured: {}", error)
            return None
        return runner.warm.memory_gbps if runner.warm is not None else None

    async def take(self, *, full: bool) -> RunnerProcess:
        """A runner for a rank: a warm one, or a cold one that imports no more than it must (`full`: mlx-lm).

        Where mlx-lm is needed, one that is importing it for the pool already is the next best.

        The caller waits for a cold one to warm up, and ends whichever it got.
        """
        assert self._group is not None
        self._nudge()
        while self._warm:
            runner = self._warm.pop(0)
            if not runner.ended:
                return runner
        if full and self._warming is not None:
            runner, self._warming = self._warming, None
            return runner
        runner = RunnerProcess(self._reaper, self._records, full=full)
        await self._group.start(runner.run)
        return runner

    def hurry(self) -> None:
        """An instance is coming up here: start nothing beside it."""
        self._urgent += 1

    def relax(self) -> None:
        """That instance is up, or has failed."""
        self._urgent -= 1
        self._nudge()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Keep the pool full until cancelled; then every runner that it started is gone."""
        async with anyio.create_task_group() as self._group:
            task_status.started()
            while True:
                await self._fill(self._group)
                changed = self._changed
                with anyio.move_on_after(self._next_expiry_seconds()):
                    await changed.wait()
                self._expire()

    def _nudge(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def _fill(self, group: anyio.abc.TaskGroup) -> None:
        while len(self._warm) < self._settings.size and not self._urgent:
            if self._memory_is_short():
                return
            if self._failures:
                await anyio.sleep(min(_RETRY_SECONDS * 2.0**self._failures, _RETRY_MAX_SECONDS))
            runner = RunnerProcess(self._reaper, self._records, full=True)
            try:
                await group.start(runner.run)
            except OSError as error:  # no descriptor, no memory: the ranks that run go on
                self._failures += 1
                logger.error("no warm runner can be started: {}; trying again", error)
                continue
            self._warming = runner
            with anyio.move_on_after(self._settings.start_seconds):
                await runner.wait_warm()
            if self._warming is not runner:
                continue  # a rank has taken it meanwhile
            self._warming = None
            if runner.warm is None or runner.ended:
                self._failures += 1
                tail = "; ".join(list(runner.tail)[-3:])
                logger.error("warm runner {} failed to start and is replaced: {}", runner.pid, tail or "no output")
                await self.end(runner, ask=False, patience_seconds=1.0)
                continue
            self._failures = 0
            logger.debug("runner {} is warm after {:.2f} s", runner.pid, runner.warm.seconds)
            self._warm.append(runner)
            self._warm_since[runner.pid] = time.monotonic()
            group.start_soon(self._watch, runner)
        if len(self._warm) >= self._settings.size:
            self._filled.set()

    def _memory_is_short(self) -> bool:
        used = sum(runner.resident_bytes() for runner in self._warm)
        if used and used + used // len(self._warm) > self._settings.memory_bytes:
            logger.info("the pool stays at {} runners: they use {:.0f} MiB", len(self._warm), used / 2**20)
            self._filled.set()
            return True
        return False

    async def _watch(self, runner: RunnerProcess) -> None:
        """A warm runner that dies while it waits is replaced."""
        await runner.wait_ended()
        self._warm_since.pop(runner.pid, None)
        if runner in self._warm:
            self._warm.remove(runner)
            logger.warning("warm runner {} ended with exit code {}; it is replaced", runner.pid, runner.exit_code)
            self._nudge()

    def _next_expiry_seconds(self) -> float:
        waiting = [self._warm_since[runner.pid] for runner in self._warm if runner.pid in self._warm_since]
        if not waiting:
            return float("inf")
        return max(0.0, min(waiting) + self._settings.max_age_seconds - time.monotonic())

    def _expire(self) -> None:
        assert self._group is not None
        now = time.monotonic()
        for runner in list(self._warm):
            if now - self._warm_since.get(runner.pid, now) >= self._settings.max_age_seconds:
                self._warm.remove(runner)
                logger.info("warm runner {} waited too long and is replaced", runner.pid)
                self._group.start_soon(self._discard, runner)

    async def _discard(self, runner: RunnerProcess) -> None:
        await self.end(runner, ask=True, patience_seconds=1.0)
