"""Ports that others have, strangers on the ring's port, and garbage on every socket."""

from __future__ import annotations

import socket
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import zmq
from kit import DEMO_MODEL, Stage, assert_blames, group, model, stopped, until

from muster.events import InstanceFailed, RankListening, RankPrepared
from muster.protocol import Generate, Hello
from muster.replies import Chunk, Welcome
from muster.sampling import Message
from muster.spec import Address, Deadlines, InstanceId, RestartOnFailure

pytestmark = [pytest.mark.process, pytest.mark.mlx]

GARBAGE = [b"", b"\x00" * 70_000, b"GET / HTTP/1.1\r\n\r\n", b"\x83\xa4type\xa5hello", bytes(range(256)) * 4]


@contextmanager
def occupied(count: int) -> Generator[tuple[int, int]]:
    """So many ports in a row, on each of which somebody listens."""
    with ExitStack() as stack:
        for first in range(41_000, 60_000, count):
            with ExitStack() as attempt:
                try:
                    for port in range(first, first + count):
                        listener = attempt.enter_context(socket.socket())
                        listener.bind(("127.0.0.1", port))
                        listener.listen()
                except OSError:
                    continue
                stack.push(attempt.pop_all())
            yield first, first + count - 1
            return
    raise AssertionError("no free ports in a row")


def test_a_port_range_that_others_have_is_named_with_its_holder(shared: Stage) -> None:
    with occupied(3) as (first, last):
        shared.cluster.start_worker("ports", options=["--ports", f"{first}-{last}"])
        instance = shared.client.create(group(nodes=("a", "ports")))
        failure = shared.client.failure_of(instance)
    assert_blames(failure, kind="port-unavailable", rank=1, node="ports", phase="preparing")
    assert f"{first}-{last}" in failure.message
    assert "pid" in failure.message  # who has the port
    shared.clean(instance)
    again = shared.client.create(group(nodes=("a", "ports")))
    addresses = shared.client.ready(again).ranks[1].addresses
    assert all(first <= address.port <= last for address in addresses)
    shared.clean(again)


@contextmanager
def stranger_on_rank_0(shared: Stage, seconds: float, **options: Any) -> Generator[InstanceId]:
    """A group of which rank 0 listens, and a stranger dials it before rank 1 does."""
    deadlines = Deadlines(form_seconds=seconds, stop_seconds=1.0)
    instance = shared.client.create(group(deadlines=deadlines, **options))
    with stopped(shared.new_runner("a")) as first, stopped(shared.new_runner("b")) as second:
        second.resume()
        shared.client.wait(RankPrepared, instance, rank=1)
        second.suspend()
        first.resume()
        shared.client.wait(RankListening, instance, rank=0)
        address = address_of_rank_0(shared, instance)
        with socket.create_connection((address.host, address.port)):
            second.resume()
            yield instance


def address_of_rank_0(shared: Stage, instance: InstanceId) -> Address:
    return shared.client.wait(RankPrepared, instance, rank=0).addresses[0]


def test_a_stranger_that_dials_first_is_named(shared: Stage) -> None:
    with stranger_on_rank_0(shared, 3.0) as instance:
        failure = shared.client.failure_of(instance)
        assert_blames(failure, kind="stranger-connected", rank=0, node="a", phase="forming")
        assert "pid" in failure.message
        shared.clean(instance)


def test_after_a_stranger_the_next_attempt_gets_ready(shared: Stage) -> None:
    with stranger_on_rank_0(shared, 3.0, restart=RestartOnFailure(maximum=2)) as instance:
        assert shared.client.wait(InstanceFailed, instance).retry_at_ns is not None
        ranks = shared.client.ready(instance, attempt=2).ranks
        assert ranks[0].addresses[0] != address_of_rank_0(shared, instance)
        shared.clean(instance)


def throw_garbage(port: int) -> None:
    """Bytes that are no ZeroMQ, and messages that are none of ours, on one port."""
    for bytes_ in GARBAGE:
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(bytes_)
    with zmq.Context() as context:
        for kind in (zmq.DEALER, zmq.SUB, zmq.REQ):
            with context.socket(kind) as speaker:
                speaker.setsockopt(zmq.LINGER, 200)
                speaker.connect(f"tcp://127.0.0.1:{port}")
                if kind == zmq.SUB:
                    speaker.setsockopt(zmq.SUBSCRIBE, b"\xff" * 200)
                    continue
                for bytes_ in GARBAGE if kind == zmq.DEALER else GARBAGE[:1]:
                    speaker.send_multipart([bytes_])
                    if kind == zmq.DEALER:
                        speaker.send_multipart([bytes_, b"", bytes_])


def test_garbage_on_the_coordinators_sockets_harms_nobody(shared: Stage) -> None:
    welcome = shared.client.call(Hello())
    assert isinstance(welcome, Welcome)
    control = int(shared.cluster.address.rpartition(":")[2])
    for port in (control, welcome.events_port, welcome.generation_port):
        throw_garbage(port)
    instance = shared.client.create(group())
    shared.client.ready(instance)
    shared.clean(instance)
    assert shared.cluster.members["coordinator"].process.poll() is None
    assert all(node.lost is None for node in shared.client.latest.nodes.values())
    until(lambda: "dropped" in shared.cluster.log_of("coordinator"), "a line about the garbage")


def test_garbage_on_the_steps_socket_harms_no_answer(shared: Stage) -> None:
    instance = shared.client.create(model(DEMO_MODEL, sharding="pipeline"))
    steps = shared.client.ready(instance).ranks[0].steps
    assert steps is not None
    throw_garbage(int(steps.rpartition(":")[2]))
    question = Generate(instance=instance, messages=(Message(role="user", content="What is an instance?"),))
    replies = shared.client.stream(question)
    assert "".join(reply.text for reply in replies if isinstance(reply, Chunk)).strip()
    shared.clean(instance)
