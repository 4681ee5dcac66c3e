"""Reports arrive once and in order, whatever is lost, sent twice or started again."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import anyio
import pytest
from bus_coordinator import HOST, FakeCoordinator, Proxy, created, node_info, until

from muster.bus import ControlClient, Outbox
from muster.events import InstanceCreated, NodeJoined
from muster.protocol import Hello
from muster.replies import Welcome
from muster.spec import InstanceId

pytestmark = [pytest.mark.anyio, pytest.mark.process]

INFO = node_info()
INSTANCE = InstanceId("i1")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def sending(endpoint: str, limit: int = 1_000, *, resend_seconds: float = 0.1) -> AsyncGenerator[Outbox]:
    async with ControlClient(endpoint) as client:
        await client.ask(Hello(info=INFO), 10, Welcome)
        async with Outbox(client, INFO.node, INFO.boot, limit, resend_seconds=resend_seconds) as outbox:
            yield outbox
            await until(lambda: not client._waiting, "every call is forgotten")


def reported(coordinator: FakeCoordinator) -> list[str]:
    """The instances of the reports, in the order of the log."""
    events = [envelope.event() for envelope in coordinator.log if envelope.report is not None]
    return [event.instance for event in events if isinstance(event, InstanceCreated)]


def expected(count: int) -> list[str]:
    return [f"i{number}" for number in range(count)]


async def test_reports_and_outputs_arrive_in_order() -> None:
    async with FakeCoordinator().running() as coordinator, sending(coordinator.endpoint) as outbox:
        for number in range(200):
            outbox.report(created(number), cause=number)
            await outbox.output(INSTANCE, 1, 0, (f"line {number}",))
        assert await outbox.drained(20)
        assert reported(coordinator) == expected(200)
        assert coordinator.outputs == [(f"line {number}",) for number in range(200)]
        assert outbox.statistics().sent_again == 0


def lose_the_first(_n: int, times: int) -> int:
    return int(times > 1)


def lose_two_of_three(n: int, times: int) -> int:
    return int(n % 3 == 0 or times > 2)


def repeat(_n: int, _times: int) -> int:
    return 3


@pytest.mark.parametrize("answers", [lose_the_first, lose_two_of_three, repeat])
async def test_lost_and_repeated_acknowledgements_apply_nothing_twice(
    answers: Callable[[int, int], int],
) -> None:
    coordinator = FakeCoordinator()
    coordinator.answer_report = answers
    async with coordinator.running(), sending(coordinator.endpoint) as outbox:
        for number in range(100):
            outbox.report(created(number), cause=0)
            if number % 4 == 0:
                await outbox.output(INSTANCE, 1, 0, (str(number),))
        assert await outbox.drained(20)
        assert reported(coordinator) == expected(100)
        assert coordinator.outputs == [(str(number),) for number in range(0, 100, 4)]


async def test_a_cut_connection_loses_and_repeats_nothing() -> None:
    async with (
        FakeCoordinator().running() as coordinator,
        Proxy(coordinator.server.port).running() as proxy,
        sending(f"{HOST}:{proxy.port}") as outbox,
    ):
        for number in range(300):
            outbox.report(created(number), cause=0)
            if number % 60 == 30:
                await anyio.sleep(0.002)
                accepted = proxy.accepted
                proxy.cut()
                await until(lambda accepted=accepted: proxy.accepted > accepted, "the reconnection")
        assert await outbox.drained(20)
        assert reported(coordinator) == expected(300)


async def test_a_restarted_coordinator_goes_on_where_the_log_ends() -> None:
    """The marks in memory are lost; outputs that were acknowledged are not in the log."""
    first = FakeCoordinator("c1")
    async with first.running():
        port = first.server.port
        async with sending(first.endpoint) as outbox:
            for number in range(5):
                outbox.report(created(number), cause=0)
            for number in range(10):
                await outbox.output(INSTANCE, 1, 0, (str(number),))
            assert await outbox.drained(20)
            first.answer_report = lambda _n, _times: 0
            for number in range(5, 10):
                outbox.report(created(number), cause=0)
            await until(lambda: len(reported(first)) == 10, "applied without acknowledgement")
            first.stop()
            outbox.report(created(10), cause=0)
            second = FakeCoordinator("c2", log=first.log, control_port=port)
            async with second.running():
                assert await outbox.drained(20)
                assert reported(second) == expected(11)


async def test_a_restarted_coordinator_that_knows_nothing_of_the_outputs_does_not_wait_for_them() -> None:
    first = FakeCoordinator("c1")
    async with first.running():
        port = first.server.port
        async with sending(first.endpoint) as outbox:
            outbox.report(created(0), cause=0)
            for number in range(10):
                await outbox.output(INSTANCE, 1, 0, (str(number),))
            assert await outbox.drained(20)
            first.stop()
            second = FakeCoordinator("c2", log=first.log, control_port=port)
            async with second.running():
                outbox.report(created(1), cause=0)
                assert await outbox.drained(20)
                assert reported(second) == expected(2)
                assert second.outputs == []


async def test_a_coordinator_with_an_empty_log_wants_a_hello_first() -> None:
    first = FakeCoordinator("c1")
    async with first.running():
        port = first.server.port
        async with sending(first.endpoint) as outbox:
            outbox.report(created(0), cause=0)
            assert await outbox.drained(20)
            first.stop()
            outbox.report(created(1), cause=0)
            second = FakeCoordinator("c2", epoch="epoch-2", control_port=port)
            async with second.running():
                await until(lambda: second.requests["Report"] >= 1, "the report comes")
                assert reported(second) == []
                second.emit(NodeJoined(info=INFO))
                outbox.resend()
                assert await outbox.drained(20)
                assert reported(second) == ["i1"]


async def test_output_waits_for_room_and_reports_do_not() -> None:
    coordinator = FakeCoordinator()
    coordinator.answer_report = lambda _n, _times: 0
    async with coordinator.running(), sending(coordinator.endpoint, limit=10) as outbox:
        for number in range(10):
            await outbox.output(INSTANCE, 1, 0, (str(number),))
        with anyio.move_on_after(0.1) as scope:
            await outbox.output(INSTANCE, 1, 0, ("late",))
        assert scope.cancelled_caught
        outbox.report(created(0), cause=0)
        assert not await outbox.drained(0.05)
        coordinator.answer_report = lambda _n, _times: 1
        with anyio.fail_after(10):
            await outbox.output(INSTANCE, 1, 0, ("in time",))
        assert await outbox.drained(20)
        assert coordinator.outputs[-1] == ("in time",)
        assert len(coordinator.outputs) == 11


async def test_a_report_that_cannot_be_sent_does_not_hold_up_the_others() -> None:
    async with FakeCoordinator().running() as coordinator, sending(coordinator.endpoint, resend_seconds=60) as outbox:
        for number in range(4):
            outbox.report(created(number), cause=0)
            await outbox.output(INSTANCE, 1, 0, ("x" * (2_000_000 if number == 1 else 10),))
        assert await outbox.drained(20)
        assert reported(coordinator) == expected(4)
        assert len(coordinator.outputs) == 3
        assert outbox.statistics().refused == 1


async def test_a_report_is_on_its_way_at_once() -> None:
    """Report to acknowledgement needs two hops and no timer."""
    async with FakeCoordinator().running() as coordinator, sending(coordinator.endpoint, resend_seconds=60) as outbox:
        with anyio.fail_after(20):
            for number in range(100):
                outbox.report(created(number), cause=0)
                assert await outbox.drained(20)
