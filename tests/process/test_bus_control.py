"""Calls are answered, strangers are not, and nobody makes the coordinator wait or grow."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
import psutil
import pytest
import zmq
import zmq.asyncio
from bus_coordinator import HOST, FakeCoordinator, until
from kit import free_ports

from muster.bus import ControlClient, ControlServer, Publisher
from muster.errors import PortError, ProtocolError, RequestError, UnreachableError
from muster.protocol import Call, Generate, Get
from muster.replies import Answer, Chunk, Done, Refused, Snapshot, Welcome

pytestmark = [pytest.mark.anyio, pytest.mark.process]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def generate(prompt: str) -> Generate:
    return Generate(instance="i1", prompt=prompt)


async def test_concurrent_calls_get_their_own_answers() -> None:
    async with FakeCoordinator().running() as coordinator, ControlClient(coordinator.endpoint) as client:
        got: dict[int, list[str]] = {}

        async def one(number: int) -> None:
            words = [f"{number}-{index}" for index in range(20)]
            async with client.stream(generate(" ".join(words)), timeout_seconds=10) as replies:
                got[number] = [reply.text async for reply in replies if isinstance(reply, Chunk)]
            assert got[number] == words

        async with anyio.create_task_group() as group:
            for number in range(30):
                group.start_soon(one, number)
        assert len(got) == 30
        assert not client._waiting


async def test_a_stream_may_be_left_early() -> None:
    async with FakeCoordinator().running() as coordinator, ControlClient(coordinator.endpoint) as client:
        async with client.stream(generate("a b c"), timeout_seconds=10) as replies:
            async for reply in replies:
                assert isinstance(reply, Chunk)
                break
        assert not client._waiting
        assert isinstance(await client.ask(Get(), 10, Snapshot), Snapshot)


async def test_more_replies_than_are_read_is_an_error_and_not_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.bus.client.QUEUED_REPLIES", 5)
    async with (
        FakeCoordinator().running() as coordinator,
        ControlClient(coordinator.endpoint) as client,
        client.stream(generate(" ".join("abcdefghij")), timeout_seconds=10) as replies,
    ):
        assert isinstance(await client.ask(Get(), 10, Snapshot), Snapshot)
        with pytest.raises(ProtocolError, match="waited unread"):
            async for reply in replies:
                assert not isinstance(reply, Done)


async def test_nobody_there_is_told_with_address_and_remedy() -> None:
    async with ControlClient("127.0.0.1:9") as client:
        with pytest.raises(UnreachableError, match=r"tcp://127\.0\.0\.1:9 within 0\.2 s.*muster coordinator"):
            await client.call(Get(), timeout_seconds=0.2)


async def test_an_answer_of_the_wrong_type_and_a_refusal_are_errors_of_ask() -> None:
    async with ControlServer(HOST) as server, ControlClient(f"{HOST}:{server.port}") as client:

        async def answer() -> None:
            incoming = await server.incoming.receive()
            snapshot = Snapshot(state=msgspec.Raw(msgspec.msgpack.encode({})))
            server.send(incoming.identity, Answer(id=incoming.call.id, reply=snapshot))

        async with anyio.create_task_group() as group:
            group.start_soon(answer)
            with pytest.raises(ProtocolError, match="answered get with snapshot"):
                await client.ask(Get(), 10, Welcome)
        with pytest.raises(UnreachableError, match=r"did not answer get within 0\.1 s"):
            await client.call(Get(), timeout_seconds=0.1)


async def test_an_error_of_the_body_comes_out_unwrapped() -> None:
    with pytest.raises(KeyError):
        async with ControlServer(HOST) as server, ControlClient(f"{HOST}:{server.port}"):
            raise KeyError("own")


async def test_a_request_that_cannot_be_read_is_refused_with_the_path() -> None:
    async with FakeCoordinator().running() as coordinator:
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as raw:
            raw.setsockopt(zmq.LINGER, 0)
            raw.connect(f"tcp://{coordinator.endpoint}")
            bad = {"id": 7, "request": {"type": "create", "spec": {"workload": {"type": "group"}, "ranks": 5000}}}
            await raw.send(msgspec.msgpack.encode(bad))
            with anyio.fail_after(10):
                answer = msgspec.msgpack.decode(await raw.recv(), type=Answer)
            assert answer.id == 7
            assert isinstance(answer.reply, Refused)
            failure = answer.reply.failure
            assert failure.kind == "request-invalid"
            assert "ranks is 5000" in failure.message
            assert "$.request.spec" in failure.message


async def test_a_request_that_is_too_large_is_not_sent() -> None:
    async with ControlServer(HOST) as server, ControlClient(f"{HOST}:{server.port}") as client:
        with pytest.raises(RequestError, match="at most 1048576 are accepted"):
            await client.call(generate("x" * 2_000_000), timeout_seconds=1)
        assert not client._waiting


async def test_garbage_is_counted_and_changes_nothing() -> None:
    async with FakeCoordinator().running() as coordinator, ControlClient(coordinator.endpoint) as client:
        before = coordinator.state
        deep = b"\x91" * 100_000
        nested = msgspec.msgpack.encode({"id": 1, "request": {"type": "get", "new": 0}})[:-1] + deep + b"\xc0"
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as raw:
            raw.setsockopt(zmq.LINGER, 0)
            raw.connect(f"tcp://{coordinator.endpoint}")
            for frames in (
                [b""],
                [b"", b""],
                [b"x"] * 50,
                [b"\xc1"],
                [os.urandom(2_000)],
                [deep],
                [nested],
                [msgspec.msgpack.encode({"id": "seven", "request": {}})],
                [msgspec.msgpack.encode({"id": 2**63, "request": {"type": "get", "x": b"\xff"}})],
                [b"\x82\xa2id\x01\xa7request\x81\xa4type\xa3\xff\xfe\xfd"],
            ):
                await raw.send_multipart(frames)
            await until(lambda: coordinator.server.statistics().garbage >= 6, "garbage is counted")
            await raw.send(b"x" * 3_000_000)
        for bytes_ in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(5_000), b"\xff" + b"\0" * 8 + b"\x01\x7f" + b"\x03"):
            async with await anyio.connect_tcp(HOST, coordinator.server.port) as stream:
                await stream.send(bytes_)
        snapshot = await client.ask(Get(), 10, Snapshot)
        assert msgspec.msgpack.decode(snapshot.state) == msgspec.msgpack.decode(msgspec.msgpack.encode(before))


async def test_a_flood_grows_nothing_and_others_are_still_served() -> None:
    async with FakeCoordinator().running() as coordinator, ControlClient(coordinator.endpoint) as client:
        memory = psutil.Process().memory_info().rss
        payload = msgspec.msgpack.encode(Call(id=1, request=Get()))
        with zmq.Context() as context, context.socket(zmq.DEALER) as flood:
            flood.setsockopt(zmq.LINGER, 0)
            flood.setsockopt(zmq.SNDHWM, 10)
            flood.setsockopt(zmq.RCVHWM, 1)  # and it never reads the answers
            flood.connect(f"tcp://{coordinator.endpoint}")
            sent = 0
            slowest = 0.0
            end = time.monotonic() + 2
            while time.monotonic() < end:
                for _ in range(200):
                    try:
                        flood.send(payload, zmq.NOBLOCK)
                        sent += 1
                    except zmq.Again:
                        break
                start = time.perf_counter()
                await client.ask(Get(), 10, Snapshot)
                slowest = max(slowest, time.perf_counter() - start)
            assert sent > 100
            assert slowest < 5.0
        assert psutil.Process().memory_info().rss - memory < 50_000_000


async def test_a_flood_of_garbage_does_not_keep_others_waiting() -> None:
    async with FakeCoordinator().running() as coordinator, ControlClient(coordinator.endpoint) as client:
        ended = threading.Event()

        def flood() -> None:
            with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
                stranger.setsockopt(zmq.LINGER, 0)
                stranger.setsockopt(zmq.SNDTIMEO, 100)
                stranger.connect(f"tcp://{coordinator.endpoint}")
                while not ended.is_set():
                    with contextlib.suppress(zmq.Again):
                        stranger.send(b"\xc1")

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            await until(lambda: coordinator.server.statistics().garbage > 1_000, "the flood")
            for _ in range(20):
                await client.ask(Get(), 5, Snapshot)
        finally:
            ended.set()
            await anyio.to_thread.run_sync(thread.join)


async def test_a_request_that_timed_out_is_not_delivered_later() -> None:
    port = free_ports(1)
    async with ControlClient(f"{HOST}:{port}") as client:
        for _ in range(3):
            with pytest.raises(UnreachableError):
                await client.call(Get(), timeout_seconds=0.05)
        coordinator = FakeCoordinator(control_port=port)
        async with coordinator.running():
            await client.ask(generate("late"), 10, Chunk)
            assert coordinator.requests == {"Generate": 1}


async def test_calls_that_nobody_takes_hold_the_sender_back() -> None:
    async with ControlServer(HOST) as server:
        with zmq.Context() as context, context.socket(zmq.DEALER) as flood:
            flood.setsockopt(zmq.LINGER, 0)
            flood.setsockopt(zmq.SNDHWM, 10)
            flood.setsockopt(zmq.SNDBUF, 65_536)
            flood.connect(f"tcp://{HOST}:{server.port}")
            payload = msgspec.msgpack.encode(Call(id=1, request=generate("x" * 500_000)))
            memory = psutil.Process().memory_info().rss
            sent, refused = 0, 0
            while refused < 100:
                try:
                    flood.send(payload, zmq.NOBLOCK)
                    sent, refused = sent + 1, 0
                except zmq.Again:
                    refused += 1
                await anyio.sleep(0.002)
            assert server.statistics().calls <= 130
            assert sent < 250
            assert psutil.Process().memory_info().rss - memory < 200_000_000


async def test_large_answers_to_a_client_that_does_not_read_are_bounded_in_bytes() -> None:
    async with ControlServer(HOST) as server:
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as lazy:
            lazy.setsockopt(zmq.LINGER, 0)
            lazy.setsockopt(zmq.RCVHWM, 1)
            lazy.connect(f"tcp://{HOST}:{server.port}")
            await lazy.send(msgspec.msgpack.encode(Call(id=1, request=Get())))
            incoming = await server.incoming.receive()
            memory = psutil.Process().memory_info().rss
            answer = Answer(id=1, reply=Chunk(text="x" * 1_000_000))
            for _ in range(300):
                server.send(incoming.identity, answer)
                await anyio.lowlevel.checkpoint()
            assert server.statistics().answers_dropped > 200
            assert psutil.Process().memory_info().rss - memory < 80_000_000


async def test_a_port_in_use_names_the_process() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        for part in (ControlServer(HOST, port), Publisher(HOST, port)):
            with pytest.raises(PortError, match=rf"{HOST}:{port}: the port is in use by process {os.getpid()}") as info:
                await part.__aenter__()
            assert info.value.remedy


async def test_a_host_that_is_not_of_this_machine_is_refused() -> None:
    with pytest.raises(PortError, match=r"192\.0\.2\.1"):
        await ControlServer("192.0.2.1").__aenter__()
