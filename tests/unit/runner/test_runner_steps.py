"""Every rank gets rank 0's steps once and in order; whoever does not belong here neither gets nor disturbs them."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from muster.errors import ProtocolError
from muster.rank_protocol import Admission, JoinSteps, Leave, Step, WarmUp
from muster.runner.steps import StepSink, StepSource
from muster.spec import InstanceId

ONE = InstanceId("one")
HOST = "127.0.0.1"
#: No receive of these tests waits for longer.
LIMIT_MS = 10_000


class Context(zmq.Context[zmq.Socket[bytes]]):
    """Keeps the sockets of a test until its end, also those that it drops."""

    kept: list[zmq.Socket[bytes]]

    def socket(self, *arguments: Any, **options: Any) -> zmq.Socket[bytes]:
        made = super().socket(*arguments, **options)
        self.kept.append(made)
        return made


@pytest.fixture
def context() -> Iterator[Context]:
    made = Context()
    object.__setattr__(made, "kept", [])
    made.setsockopt(zmq.RCVTIMEO, LIMIT_MS)
    yield made
    made.destroy(linger=0)


@pytest.fixture
def source(context: Context) -> StepSource:
    return StepSource(context, HOST, ONE, 1)


def sink_of(
    context: Context, source: StepSource, rank: int, *, instance: InstanceId = ONE, attempt: int = 1
) -> StepSink:
    return StepSink(context, source.address, instance, attempt, rank)


def joined(source: StepSource, world_size: int) -> bool:
    def holds() -> bool:
        source.take_join()
        return source.joined(world_size)

    return until(holds)


def until(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def test_steps_arrive_in_order_at_every_rank(context: Context, source: StepSource) -> None:
    sinks = [sink_of(context, source, rank) for rank in (1, 2, 3)]
    assert joined(source, 4)
    admission = Admission(sequence=5, tokens=(1, 2, 3), max_tokens=7, cached_tokens=1, segments=(1, 1))
    steps = [
        WarmUp(step=1),
        Step(step=2, admit=(admission,)),
        *(Step(step=3 + number) for number in range(200)),
        Step(step=203, remove=(5,), cache_entries=4),
        Leave(step=204),
    ]
    for step in steps:
        source.send(step)
    assert source.sent == 204
    for sink in sinks:
        assert [sink.receive() for _ in steps] == steps


def test_rank_0_waits_for_every_other_rank(context: Context, source: StepSource) -> None:
    assert source.joined(1)
    assert not source.joined(3)
    sink_of(context, source, 2)
    assert not joined_within(source, 3, 0.2)
    sink_of(context, source, 1)
    assert joined(source, 3)


def joined_within(source: StepSource, world_size: int, seconds: float) -> bool:
    return until(lambda: source.take_join() or source.joined(world_size), seconds)


@pytest.mark.parametrize(
    "stranger",
    [
        JoinSteps(instance=InstanceId("two"), attempt=1, rank=1),
        JoinSteps(instance=ONE, attempt=2, rank=1),
        JoinSteps(instance=ONE, attempt=1, rank=0),
        JoinSteps(instance=ONE, attempt=1, rank=-1),
    ],
)
def test_a_rank_of_another_group_is_ignored(context: Context, source: StepSource, stranger: JoinSteps) -> None:
    other = context.socket(zmq.DEALER)
    other.connect(f"tcp://{source.address}")
    other.send(msgspec.msgpack.encode(stranger))
    sink = sink_of(context, source, 1)
    assert joined(source, 2)
    source.take_join()
    source.send(WarmUp(step=1))
    assert sink.receive() == WarmUp(step=1)
    assert other.poll(50) == 0


def test_garbage_is_ignored(context: Context, source: StepSource) -> None:
    other = context.socket(zmq.DEALER)
    other.connect(f"tcp://{source.address}")
    for frames in ([b""], [b"\xff\xff"], [b"a", b"b", b"c"], [msgspec.msgpack.encode({"type": "join"})]):
        other.send_multipart(frames)
    sink_of(context, source, 1)
    assert joined(source, 2)


def test_a_rank_cannot_be_taken_over(context: Context, source: StepSource) -> None:
    first = sink_of(context, source, 1)
    assert joined(source, 2)
    second = sink_of(context, source, 1)
    assert until(lambda: source.socket.poll(10) != 0)
    source.take_join()
    source.send(WarmUp(step=1))
    assert first.receive() == WarmUp(step=1)
    assert second.socket.poll(50) == 0


def test_a_prompt_of_many_tokens_arrives(context: Context, source: StepSource) -> None:
    sink = sink_of(context, source, 1)
    assert joined(source, 2)
    tokens = list(range(300_000))
    step = Step(step=1, admit=(Admission(sequence=1, tokens=tuple(tokens), max_tokens=1),))
    source.send(step)
    assert sink.receive() == step


def test_a_rank_that_is_gone_is_noticed_by_the_next_step(context: Context, source: StepSource) -> None:
    sink = sink_of(context, source, 1)
    assert joined(source, 2)
    sink.close()

    def lost() -> bool:
        try:
            source.send(Step(step=source.sent + 1))
        except ProtocolError as error:
            assert "connection to a peer was lost" in error.message
            assert "rank 1" in error.message
            return True
        return False

    assert until(lost)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ([b"\xff"], "cannot be decoded"),
        ([msgspec.msgpack.encode(WarmUp(step=2))], "step 2 came instead of step 1"),
        ([msgspec.msgpack.encode(WarmUp(step=1))] * 2, "step 1 came instead of step 2"),
    ],
)
def test_a_rank_that_is_out_of_step_does_not_go_on(context: Context, sent: list[bytes], message: str) -> None:
    fake = context.socket(zmq.ROUTER)
    port = fake.bind_to_random_port(f"tcp://{HOST}")
    sink = StepSink(context, f"{HOST}:{port}", ONE, 1, 1)
    identity, join = fake.recv_multipart()
    assert msgspec.msgpack.decode(join, type=JoinSteps) == JoinSteps(instance=ONE, attempt=1, rank=1)
    for body in sent:
        fake.send_multipart((identity, body))
    with pytest.raises(ProtocolError, match=message):
        for _ in sent:
            sink.receive()


def test_a_sink_may_start_before_its_source(context: Context) -> None:
    with socket.socket() as probe:  # never in LISTEN: the sink must not find it
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    sink = StepSink(context, f"{HOST}:{port}", ONE, 1, 1)
    late = context.socket(zmq.ROUTER)

    def bound() -> bool:
        try:
            late.bind(f"tcp://{HOST}:{port}")
        except zmq.ZMQError:
            return False
        return True

    assert until(bound)
    assert len(late.recv_multipart()) == 2
    sink.close()


def test_a_sink_hears_that_rank_0_is_lost(context: Context, source: StepSource) -> None:
    sink = sink_of(context, source, 1)
    loss = sink.loss()
    assert joined(source, 2)
    assert loss.poll(0) == 0
    source.send(Leave(step=1))
    source.close()
    assert loss.poll(LIMIT_MS) != 0
    assert sink.receive() == Leave(step=1)
    sink.close()
