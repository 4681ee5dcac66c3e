"""Parts with a task of their own start, end and fail as their user expects."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from muster.bus.server import ControlServer
from muster.bus.sockets import Resident, Signal, Throttle

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Part(Resident):
    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error
        self.steps: list[str] = []

    async def _open(self) -> None:
        self.steps.append("open")

    async def _serve(self) -> None:
        self.steps.append("serve")
        if self.error is not None:
            raise self.error
        await anyio.sleep_forever()

    def _close(self) -> None:
        self.steps.append("close")


async def test_it_serves_inside_and_closes_after() -> None:
    part = Part()
    async with part:
        await anyio.wait_all_tasks_blocked()
        assert part.steps == ["open", "serve"]
    assert part.steps == ["open", "serve", "close"]


async def test_an_error_of_the_body_is_not_wrapped() -> None:
    part = Part()
    with pytest.raises(KeyError):
        async with part:
            raise KeyError
    assert part.steps[-1] == "close"


async def test_an_error_of_the_task_ends_the_body_and_comes_out() -> None:
    part = Part(ValueError("broken"))
    with pytest.raises(ExceptionGroup) as info:
        async with part:
            await anyio.sleep(10)
    assert info.group_contains(ValueError, match="broken")
    assert part.steps[-1] == "close"


async def test_cancellation_from_outside_passes_through() -> None:
    part = Part()
    with anyio.move_on_after(0) as scope:
        async with part:
            await anyio.sleep(10)
    assert scope.cancelled_caught
    assert part.steps[-1] == "close"


async def test_closing_early_ends_the_task_and_not_the_body() -> None:
    reached = False
    async with ControlServer("127.0.0.1") as server:
        await anyio.wait_all_tasks_blocked()
        server.close()
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        reached = True
    assert reached


async def test_run_says_when_it_is_open_and_closes_on_cancellation() -> None:
    part = Part()
    async with anyio.create_task_group() as group:
        assert await group.start(part.run) is part
        group.cancel_scope.cancel()
    assert part.steps[-1] == "close"


async def test_run_inside_its_own_block_returns() -> None:
    async with Part() as part:
        await part.run()


async def test_a_signal_before_the_wait_is_not_lost() -> None:
    signal = Signal()
    signal.set()
    with anyio.fail_after(1):
        await signal.wait()
    with anyio.move_on_after(0.01) as scope:
        await signal.wait()
    assert scope.cancelled_caught


def test_a_throttle_lets_the_first_through_and_counts_the_rest() -> None:
    throttle = Throttle(interval_seconds=3_600)
    assert [throttle.count() for _ in range(3)] == [1, 0, 0]
