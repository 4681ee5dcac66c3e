"""Several addresses of a coordinator: the active one with the highest term is followed, and no other."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import anyio.abc
import pytest
from bus_coordinator import FakeCoordinator, created, encoded, node_info, until

from muster.bus import Change, ControlClient, Disconnected, Follower, Outbox, Synchronised
from muster.cli.asking import generation
from muster.cli.reaching import reach
from muster.errors import AnswerLostError, UnreachableError
from muster.events import InstanceCreated
from muster.protocol import Generate, Get
from muster.replies import AnyPiece, Snapshot
from muster.spec import InstanceId

pytestmark = [pytest.mark.anyio, pytest.mark.process]

INFO = node_info()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Node:
    """A worker's half of the bus: it reports, and synchronises its outbox with whoever is followed."""

    def __init__(self, client: ControlClient, follower: Follower, outbox: Outbox) -> None:
        self.client = client
        self.follower = follower
        self.outbox = outbox
        self.changes: list[Change] = []

    async def follow(self) -> None:
        async for change in self.follower.changes():
            self.changes.append(change)
            if isinstance(change, Synchronised):
                self.outbox.synchronise(change.state)

    async def follows(self, coordinator: FakeCoordinator) -> None:
        def same() -> bool:
            welcome = self.follower.welcome
            return welcome is not None and welcome.coordinator_boot == coordinator.boot

        await until(
            lambda: same() and encoded(self.follower.state) == encoded(coordinator.state), "the follower's move"
        )


@asynccontextmanager
async def node_at(*coordinators: FakeCoordinator) -> AsyncGenerator[Node]:
    async with ControlClient(",".join(one.endpoint for one in coordinators)) as client:
        follower = Follower(client, info=INFO)
        outbox = Outbox(client, INFO.node, INFO.boot, resend_seconds=0.1)
        async with outbox, follower, anyio.create_task_group() as group:
            node = Node(client, follower, outbox)
            group.start_soon(node.follow)
            yield node
            group.cancel_scope.cancel()


def reported(coordinator: FakeCoordinator) -> list[str]:
    events = [envelope.event() for envelope in coordinator.log if envelope.report is not None]
    return [event.instance for event in events if isinstance(event, InstanceCreated)]


def expected(count: int) -> list[str]:
    return [f"i{number}" for number in range(count)]


async def test_a_promoted_standby_is_followed_and_gets_what_its_log_lacks() -> None:
    heir = FakeCoordinator("c2", term=2, role="standby")
    async with FakeCoordinator().running() as first, heir.running(), node_at(heir, first) as node:
        await node.follows(first)
        assert heir.requests["Hello"] == 0  # `Who` was enough
        for number in range(10):
            node.outbox.report(created(number), 0)
            await node.outbox.output(InstanceId("i0"), 1, 0, (f"line {number}",))
        assert await node.outbox.drained(20)
        first.stop()
        heir.promote([one for one in first.log if one.report is None or one.report.n < 8])
        await node.follows(heir)
        node.outbox.report(created(10), 0)
        assert await node.outbox.drained(20)
        assert reported(heir) == expected(11)
        assert node.outbox.statistics().rewound == 6
        assert node.client.endpoint.port == heir.server.port
        pulse_ns, age_ns = node.follower.pulse_age()
        assert heir.log[-1].time_ns < pulse_ns + age_ns + 20e9
        assert 0 <= age_ns < 20e9
        assert [(one.epoch, one.term) for one in (first.hellos[0], heir.hellos[0])] == [("", 0), ("epoch-1", 1)]


async def test_a_coordinator_that_was_replaced_is_fenced_and_never_followed() -> None:
    old, new = FakeCoordinator("c1"), FakeCoordinator("c2", term=2)
    async with old.running(), new.running(), node_at(old, new) as node:
        await node.follows(new)
        assert not old.hellos
        new.stop()
        await until(lambda: old.role == "fenced", "the end of the old term")
        await until(lambda: isinstance(node.changes[-1], Disconnected), "news of it")
        assert sum(isinstance(change, Synchronised) for change in node.changes) == 1
        assert node.follower.statistics().fenced > 0
        assert old.hellos[0].info is None


async def test_one_address_with_an_older_term_is_not_followed_either() -> None:
    async with FakeCoordinator("c2", term=2).running() as first:
        control, events = first.server.port, first.publisher.port
        async with node_at(first) as node:
            await node.follows(first)
            first.stop()
            old = FakeCoordinator("c1", control_port=control, events_port=events)
            old.minds_terms = False
            async with old.running():
                await until(lambda: len(old.hellos) > 1 and node.follower.statistics().fenced > 1, "refused welcomes")
                old.stop()
            async with FakeCoordinator("c3", control_port=control, events_port=events, term=3).running() as third:
                await node.follows(third)
            boots = [one.welcome.coordinator_boot for one in node.changes if isinstance(one, Synchronised)]
            assert set(boots) == {"c2", "c3"}


async def test_a_replay_of_another_log_asks_for_a_hello() -> None:
    coordinator = FakeCoordinator()
    coordinator.announced_heartbeat_seconds = 60
    async with coordinator.running(), node_at(coordinator) as node:
        await node.follows(coordinator)
        coordinator.beating = False
        coordinator.replaying_boot = "other"
        coordinator.emit(created(1), publish=False)
        coordinator.emit(created(2))
        await node.follows(coordinator)
        assert len(coordinator.hellos) == 2
        assert node.follower.statistics().replayed == 0


async def test_a_pulse_of_an_older_term_is_ignored_and_counted() -> None:
    coordinator = FakeCoordinator(term=2)
    coordinator.announced_heartbeat_seconds = 60
    async with coordinator.running(), node_at(coordinator) as node:
        await node.follows(coordinator)
        coordinator.beating = False
        coordinator.term = 1
        coordinator.emit(created(1), publish=False)
        coordinator.pulse()
        await until(lambda: node.follower.statistics().fenced > 0, "the older pulse")
        assert coordinator.requests["Replay"] == 0
        coordinator.term = 2
        coordinator.pulse()
        await node.follows(coordinator)


async def test_a_call_under_way_ends_when_its_client_moves() -> None:
    async with (
        FakeCoordinator().running() as first,
        FakeCoordinator("c2").running() as second,
        ControlClient(f"127.0.0.1:9,{first.endpoint},{second.endpoint}") as client,
    ):
        first.answering = False
        nobody, *others = client.endpoints
        async with anyio.create_task_group() as group:

            async def ask_nobody() -> None:
                with pytest.raises(UnreachableError, match="was left for"):
                    await client.call(Get(), timeout_seconds=60)

            group.start_soon(ask_nobody)
            await anyio.wait_all_tasks_blocked()
            client.move(others[0])
        assert first.requests["Get"] == 0
        async with client.stream(Generate(instance="m", prompt=""), timeout_seconds=60) as replies:
            client.move(others[1])
            with pytest.raises(UnreachableError, match="was left for"):
                await replies.receive()
        assert isinstance(await client.call(Get(), timeout_seconds=10), Snapshot)
        assert second.requests["Get"] == 1
        client.move(nobody)
        assert client.endpoint == nobody


# --- commands -----------------------------------------------------------------------------------------------


async def test_a_command_takes_the_active_coordinator_or_else_a_standby(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.cli.reaching.CONNECT_SECONDS", 0.5)
    standby = FakeCoordinator("c2", role="standby")
    async with (
        FakeCoordinator().running() as active,
        standby.running(),
        ControlClient(f"{standby.endpoint},{active.endpoint}") as client,
    ):
        await reach(client)
        assert client.endpoint.port == active.server.port
        active.stop()
        await reach(client)
        assert client.endpoint.port == standby.server.port
        assert isinstance(await client.call(Get(), timeout_seconds=10), Snapshot)
        standby.stop()
        with pytest.raises(UnreachableError, match="no active coordinator"):
            await reach(client)


@pytest.fixture
def watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.cli.asking._WATCH_SECONDS", 0.02)
    monkeypatch.setattr("muster.cli.asking._WHO_SECONDS", 0.3)


@pytest.mark.usefixtures("watchful")
@pytest.mark.parametrize("moves", [False, True])
async def test_a_request_without_a_token_is_asked_again(*, moves: bool) -> None:
    async with FakeCoordinator().running() as first:
        first.answering = False
        if moves:
            second = FakeCoordinator("c2", term=2, role="standby")
        else:
            second = FakeCoordinator("c2", control_port=first.server.port, events_port=first.publisher.port)
        pieces: list[AnyPiece] = []

        async def succeed(*, task_status: anyio.abc.TaskStatus[None]) -> None:
            if not moves:
                task_status.started()
                await until(lambda: not first.beating, "the end of the first")
            async with second.running():
                if moves:
                    task_status.started()
                    await until(lambda: not first.beating, "the end of the first")
                    second.promote(first.log)
                await anyio.sleep_forever()

        async def end_first() -> None:
            await until(
                lambda: first.requests["Generate"] == 1 and first.requests["Who"] > 1, "the request, and a look"
            )
            first.stop()

        async with anyio.create_task_group() as group:
            await group.start(succeed)
            group.start_soon(end_first)
            addresses = dict.fromkeys([first.endpoint, second.endpoint])
            async with ControlClient(",".join(addresses)) as client:
                done = await generation(client, Generate(instance="m", prompt=""), 30.0, pieces.append)
            assert (done.reason, pieces) == ("stop", [])
            group.cancel_scope.cancel()
        assert second.requests["Generate"] == 1


@pytest.mark.usefixtures("watchful")
async def test_an_answer_that_had_begun_is_lost_with_its_coordinator() -> None:
    async with FakeCoordinator().running() as coordinator, ControlClient(coordinator.endpoint) as client:
        coordinator.answering = False
        with pytest.raises(AnswerLostError, match="is gone, and the rest"):
            await generation(client, Generate(instance="m", prompt="Well"), 30.0, lambda _: coordinator.stop())
