"""A follower ends with exactly the coordinator's state, whatever the events socket loses."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
import psutil
import pytest
import zmq
from bus_coordinator import HOST, FakeCoordinator, Proxy, created, encoded, load_event, node_info, until

from muster.bus import Applied, Change, ControlClient, Disconnected, Follower, RefusedError, Synchronised
from muster.events import encode_envelope
from muster.replies import Pulse
from muster.spec import BootId, Failure

pytestmark = [pytest.mark.anyio, pytest.mark.process]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Observer:
    """A follower and everything that it handed to its consumer."""

    def __init__(self, follower: Follower) -> None:
        self.follower = follower
        self.changes: list[Change] = []
        self.reading = True
        self.error: RefusedError | None = None

    async def consume(self) -> None:
        try:
            async for change in self.follower.changes():
                await until(lambda: self.reading, "the consumer may go on")
                self.changes.append(change)
        except RefusedError as error:
            self.error = error

    def count(self, kind: type[Change]) -> int:
        return sum(isinstance(change, kind) for change in self.changes)

    def last_sequence(self) -> int:
        for change in reversed(self.changes):
            if not isinstance(change, Disconnected):
                return change.state.sequence
        return 0

    def assert_no_gap(self) -> None:
        """Each event follows the one before, or a snapshot."""
        sequence = None
        for change in self.changes:
            match change:
                case Synchronised(state=state):
                    sequence = state.sequence
                case Applied(envelope=envelope):
                    assert sequence is not None
                    assert envelope.sequence == sequence + 1
                    sequence = envelope.sequence
                case Disconnected():
                    pass

    async def equals(self, coordinator: FakeCoordinator) -> None:
        await until(lambda: self.last_sequence() == coordinator.state.sequence, "the follower is at the head")
        assert encoded(self.follower.state) == encoded(coordinator.state)
        self.assert_no_gap()


@asynccontextmanager
async def observing(endpoint: str, **settings: object) -> AsyncGenerator[Observer]:
    async with ControlClient(endpoint) as client:
        follower = Follower(client, info=node_info() if settings.get("node") else None)
        async with follower, anyio.create_task_group() as group:
            observer = Observer(follower)
            group.start_soon(observer.consume)
            yield observer
            group.cancel_scope.cancel()


async def test_a_late_joiner_gets_the_snapshot_and_then_every_event() -> None:
    async with FakeCoordinator().running() as coordinator:
        for number in range(50):
            coordinator.emit(load_event(number))
        async with observing(coordinator.endpoint) as observer:
            await until(lambda: observer.count(Synchronised) == 1, "the snapshot")
            for number in range(50, 150):
                coordinator.emit(load_event(number))
            await observer.equals(coordinator)
            assert isinstance(observer.changes[0], Synchronised)
            assert observer.count(Applied) >= 100
            assert coordinator.requests["Hello"] == 1


def steady_coordinator() -> FakeCoordinator:
    """One whose followers do not take a busy machine for silence: what they do is for another reason."""
    coordinator = FakeCoordinator()
    coordinator.announced_heartbeat_seconds = 60
    return coordinator


async def test_events_while_joining_are_seen_without_waiting_for_a_heartbeat() -> None:
    """Published between the snapshot and the subscription, an event reaches nobody."""
    coordinator = steady_coordinator()
    coordinator.after_hello = lambda: coordinator.emit(created(1))
    async with coordinator.running():
        coordinator.beating = False
        async with observing(coordinator.endpoint) as observer:
            await until(lambda: observer.count(Applied) == 1, "the event")
            await observer.equals(coordinator)


async def test_a_gap_is_replayed_in_batches_when_the_next_event_shows_it() -> None:
    coordinator = steady_coordinator()
    coordinator.replay_batch = 7
    async with coordinator.running(), observing(coordinator.endpoint) as observer:
        await observer.equals(coordinator)
        coordinator.beating = False
        for number in range(30):
            coordinator.emit(load_event(number), publish=False)
        coordinator.emit(created(1000))
        await observer.equals(coordinator)
        assert coordinator.requests["Replay"] >= 5
        assert observer.count(Synchronised) == 1


async def test_a_gap_at_the_end_is_replayed_when_the_heartbeat_shows_it() -> None:
    async with steady_coordinator().running() as coordinator, observing(coordinator.endpoint) as observer:
        await observer.equals(coordinator)
        coordinator.emit(created(1), publish=False)
        await observer.equals(coordinator)
        assert observer.count(Synchronised) == 1


async def test_a_snapshot_follows_where_the_log_was_pruned() -> None:
    async with steady_coordinator().running() as coordinator, observing(coordinator.endpoint) as observer:
        await observer.equals(coordinator)
        coordinator.pruned = 1_000
        for number in range(40):
            coordinator.emit(load_event(number), publish=False)
        await observer.equals(coordinator)
        assert observer.count(Synchronised) == 2


async def test_a_head_that_cannot_be_replayed_ends_in_a_snapshot() -> None:
    async with steady_coordinator().running() as coordinator, observing(coordinator.endpoint) as observer:
        await observer.equals(coordinator)
        head = coordinator.state.sequence + 5
        coordinator.publisher.pulse(Pulse(epoch="epoch-1", coordinator_boot=coordinator.boot, head=head, time_ns=0))
        await until(lambda: observer.count(Synchronised) == 2, "a snapshot")
        assert coordinator.requests["Replay"] == 1


async def test_far_behind_a_snapshot_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.bus.follower.MAXIMUM_REPLAY_EVENTS", 20)
    async with steady_coordinator().running() as coordinator, observing(coordinator.endpoint) as observer:
        await observer.equals(coordinator)
        for number in range(40):
            coordinator.emit(load_event(number), publish=False)
        await observer.equals(coordinator)
        assert observer.count(Synchronised) == 2
        assert coordinator.requests["Replay"] == 0


async def test_cut_connections_under_load_end_in_the_same_state() -> None:
    async with (
        FakeCoordinator().running() as coordinator,
        Proxy(coordinator.publisher.port).running() as events,
        Proxy(coordinator.server.port).running() as control,
    ):
        coordinator.announced_events_port = events.port
        async with observing(f"{HOST}:{control.port}") as observer:
            await observer.equals(coordinator)
            for round_number in range(4):
                for number in range(round_number * 200, round_number * 200 + 200):
                    coordinator.emit(load_event(number))
                    if number % 20 == 0:
                        await anyio.sleep(0.001)
                    if number % 200 == 100:
                        assert events.cut() == 1
                        if round_number % 2:
                            control.cut()
                await until(lambda n=round_number: events.accepted >= n + 2, "the reconnection")  # type: ignore[misc]
            await observer.equals(coordinator)


async def test_a_stopped_process_under_load_ends_in_the_same_state() -> None:
    async with FakeCoordinator().running() as coordinator:
        command = [sys.executable, str(Path(__file__).with_name("bus_observer.py")), coordinator.endpoint, "load-7777"]
        async with await anyio.open_process(command, stderr=None) as process:
            assert process.stdout is not None
            lines = process.stdout
            first = await lines.receive()
            assert first.startswith(b"synchronised")
            number = 0
            os.kill(process.pid, signal.SIGSTOP)
            end = time.monotonic() + 3
            while time.monotonic() < end:  # far more than every queue on the way holds
                for _ in range(100):
                    coordinator.emit(load_event(number))
                    number += 1
                await anyio.sleep(0.005)
            os.kill(process.pid, signal.SIGCONT)
            for _ in range(500):
                coordinator.emit(load_event(number))
                number += 1
            final = coordinator.emit(created(7777))
            expected = encoded(coordinator.state)
            output = b""
            with anyio.fail_after(30):
                async for data in lines:
                    output += data
            state = next(line for line in output.splitlines() if line.startswith(b"state")).split()[1]
            assert final.sequence > 15_000
            assert bytes.fromhex(state.decode()) == expected


async def test_an_observer_that_never_reads_neither_slows_nor_grows_the_publisher() -> None:
    async with FakeCoordinator().running() as coordinator, observing(coordinator.endpoint) as observer:
        await observer.equals(coordinator)
        with zmq.Context() as context, context.socket(zmq.SUB) as lazy:
            lazy.setsockopt(zmq.RCVHWM, 1)
            lazy.setsockopt(zmq.LINGER, 0)
            lazy.subscribe(b"")
            before = coordinator.publisher.statistics().subscriptions
            lazy.connect(f"tcp://{HOST}:{coordinator.publisher.port}")
            await until(lambda: coordinator.publisher.statistics().subscriptions > before, "the subscription")
            filler = msgspec.Raw(msgspec.msgpack.encode({"type": "x", "filler": b"x" * 20_000}))
            big = msgspec.structs.replace(coordinator.emit(created(1)), body=filler)
            memory = psutil.Process().memory_info().rss
            slowest = 0.0
            for number in range(10_000):  # 200 MB
                start = time.perf_counter()
                coordinator.publisher.publish(big)
                slowest = max(slowest, time.perf_counter() - start)
                if number % 50 == 0:
                    await anyio.lowlevel.checkpoint()
            grown = psutil.Process().memory_info().rss - memory
            assert slowest < 2.0, "the publisher waited for its subscriber"
            assert grown < 110_000_000, grown
        coordinator.emit(created(2))
        await observer.equals(coordinator)


async def test_a_slow_consumer_gets_everything() -> None:
    async with FakeCoordinator().running() as coordinator, observing(coordinator.endpoint) as observer:
        await observer.equals(coordinator)
        observer.reading = False
        for number in range(6_000):
            coordinator.emit(load_event(number))
            if number % 100 == 0:
                await anyio.lowlevel.checkpoint()
        await until(lambda: observer.follower.state.sequence > 250, "the follower is held back")
        observer.reading = True
        await observer.equals(coordinator)


async def test_a_coordinator_that_restarts_on_the_same_ports_is_followed_again() -> None:
    first = FakeCoordinator("c1")
    first.announced_heartbeat_seconds = 60  # the new boot shows it, not the silence
    async with first.running():
        endpoint, control, events = first.endpoint, first.server.port, first.publisher.port
        async with observing(endpoint, node=True) as observer:
            await observer.equals(first)
            first.emit(created(1))
            await observer.equals(first)
            first.beating = False
            log = first.log
            first.publisher.close()
            first.server.close()
            second = FakeCoordinator("c2", log=log, control_port=control, events_port=events)
            async with second.running():
                second.emit(created(2))
                await until(lambda: observer.follower.state.coordinator_boot == "c2", "the new boot")
                await observer.equals(second)
                assert second.requests["Hello"] >= 1
                last = [change for change in observer.changes if isinstance(change, Synchronised)][-1]
                assert last.welcome.coordinator_boot == "c2"
                before = (observer.count(Synchronised), second.requests.copy())
                late = msgspec.structs.replace(second.log[-1], sequence=second.state.sequence + 1)
                await send_raw(second, [b"event", encode_envelope(late), b"c1"])
                pulse = Pulse(epoch="epoch-1", coordinator_boot=BootId("c1"), head=9_999, time_ns=0)
                await send_raw(second, [b"beat", msgspec.msgpack.encode(pulse)])
                second.emit(created(3))
                await observer.equals(second)
                assert (observer.count(Synchronised), second.requests) == before


async def send_raw(coordinator: FakeCoordinator, frames: list[bytes]) -> None:
    socket = coordinator.publisher._socket
    assert socket is not None
    await socket.send_multipart(frames)


async def test_an_event_of_an_unknown_boot_is_not_applied_and_asks_for_a_snapshot() -> None:
    async with steady_coordinator().running() as coordinator, observing(coordinator.endpoint) as observer:
        await observer.equals(coordinator)
        foreign = msgspec.structs.replace(coordinator.log[-1], sequence=coordinator.state.sequence + 1)
        await send_raw(coordinator, [b"event", encode_envelope(foreign), b"c0"])
        await until(lambda: observer.count(Synchronised) == 2, "the snapshot")
        coordinator.emit(created(1))
        await observer.equals(coordinator)


async def test_another_log_on_the_same_ports_replaces_the_state() -> None:
    first = FakeCoordinator("c1")
    first.announced_heartbeat_seconds = 60  # the new boot shows it, not the silence
    async with first.running():
        endpoint, control, events = first.endpoint, first.server.port, first.publisher.port
        async with observing(endpoint) as observer:
            for number in range(5):
                first.emit(created(number))
            await observer.equals(first)
            first.stop()
            second = FakeCoordinator("c2", epoch="epoch-2", control_port=control, events_port=events)
            async with second.running():
                for number in range(20):
                    second.emit(created(100 + number))
                await until(lambda: observer.follower.state.epoch == "epoch-2", "the new log")
                await observer.equals(second)


async def test_a_coordinator_that_is_not_there_yet_is_waited_for() -> None:
    async with FakeCoordinator().running() as placeholder:
        port = placeholder.server.port
    async with observing(f"{HOST}:{port}") as observer:
        await until(lambda: observer.count(Disconnected) >= 1, "the consumer is told")
        assert not observer.follower.connected
        async with FakeCoordinator(control_port=port).running() as coordinator:
            await observer.equals(coordinator)
            assert observer.follower.connected


async def test_silence_is_told_and_ends_with_a_snapshot() -> None:
    async with FakeCoordinator().running() as coordinator, observing(coordinator.endpoint) as observer:
        await observer.equals(coordinator)
        coordinator.beating = False
        await until(lambda: observer.count(Disconnected) >= 1, "the consumer is told")
        lost = next(change for change in observer.changes if isinstance(change, Disconnected))
        assert 0.29 < lost.seconds < 10
        coordinator.beating = True
        await until(lambda: observer.count(Synchronised) >= 2, "the snapshot")
        await until(lambda: observer.follower.connected, "connected")
        coordinator.emit(created(3))
        await observer.equals(coordinator)


async def test_a_refused_hello_reaches_the_consumer() -> None:
    coordinator = FakeCoordinator()
    coordinator.refusal = Failure(kind="node-taken", message="node a is another machine", remedy="Use --node-id.")
    async with coordinator.running(), observing(coordinator.endpoint, node=True) as observer:
        await until(lambda: observer.error is not None, "the refusal")
        assert observer.error is not None
        assert "another machine" in str(observer.error)


async def test_garbage_on_the_events_socket_changes_nothing() -> None:
    async with steady_coordinator().running() as coordinator, observing(coordinator.endpoint) as observer:
        await observer.equals(coordinator)
        for frames in (
            [b"event"],
            [b"event", b"\xff\xff"],
            [b"beat", b"x"],
            [b"event", b"\x93" * 5000],
            [b"eventual", b""],
        ):
            await send_raw(coordinator, frames)
        for raw in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(5_000), b"\xff" + b"\0" * 8 + b"\x01\x7f" + os.urandom(64)):
            async with await anyio.connect_tcp(HOST, coordinator.publisher.port) as stream:
                await stream.send(raw)
        coordinator.emit(created(1))
        await observer.equals(coordinator)
        assert observer.count(Synchronised) == 1
        assert observer.follower.statistics().garbage >= 4
