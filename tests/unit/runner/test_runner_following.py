"""A rank that follows: it carries out rank 0's steps in order, and knows when to end."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from muster.rank_protocol import AnyStep, Leave, ReadyFrame, Step, StepFrame, Stop, WarmUp
from muster.runner.following import Following
from muster.runner.frames import HEADER_BYTES, Channel, encode_frame, frame_length
from muster.runner.steps import StepSink, StepSource
from muster.spec import InstanceId

LIMIT_SECONDS = 10.0
ONE = InstanceId("one")


class FakeBatch:
    """Has as many sequences as the last step's number says by its `cache_entries`."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.warm = False
        self.settled = False

    def __len__(self) -> int:
        return self.steps[-1].cache_entries or 0 if self.steps else 0

    def run(self, step: Step) -> None:
        """Keep it."""
        self.steps.append(step)

    def warm_up(self) -> None:
        """Remember it."""
        self.warm = True

    def settle(self) -> None:
        """Remember it."""
        self.settled = True


class Rank:
    """A context with nothing but a channel."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.counter: Any = None
        self.phase: Any = None


class Stage:
    """A rank 1 that follows in a thread, and its rank 0 and its worker."""

    def __init__(self) -> None:
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self.source = StepSource(self._context, "127.0.0.1", ONE, 1)
        self._sink = StepSink(self._context, self.source.address, ONE, 1, 1)
        assert self.source.socket.poll(int(LIMIT_SECONDS * 1000))
        self.source.take_join()
        self.worker, self._theirs = socket.socketpair()
        self.worker.settimeout(LIMIT_SECONDS)
        self.batch: Any = FakeBatch()
        self.rank: Any = Rank(Channel(self._theirs))
        self._following = Following(self.rank, self.batch, self._sink)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.code: int | None = None
        self._thread.start()

    def _run(self) -> None:
        self.code = self._following.run()

    def send(self, *steps: AnyStep) -> None:
        """As rank 0."""
        for step in steps:
            self.source.send(step)

    def stop(self, drain_seconds: float) -> None:
        """As the worker."""
        self.worker.sendall(encode_frame(Stop(drain_seconds=drain_seconds)))

    def frame(self) -> Any:
        """The next frame to the worker."""
        body = self.worker.recv(frame_length(self.worker.recv(HEADER_BYTES)))
        return msgspec.msgpack.decode(body, type=StepFrame | ReadyFrame)

    def ended(self) -> int | None:
        """The exit code, once it has ended."""
        self._thread.join(LIMIT_SECONDS)
        assert not self._thread.is_alive(), "it still follows"
        return self.code

    def close(self) -> None:
        """End what is left."""
        if self._thread.is_alive():
            self.worker.close()
            self._thread.join(LIMIT_SECONDS)
        self.worker.close()
        self._theirs.close()
        self._sink.close()
        self._context.destroy(linger=0)


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.close()


def test_it_warms_up_and_replays_every_step_until_it_may_leave(stage: Stage) -> None:
    steps = [Step(step=2, cache_entries=1), Step(step=3, cache_entries=1), Step(step=4)]
    stage.send(WarmUp(step=1), *steps, Leave(step=5))
    assert stage.ended() == 0
    assert stage.batch.warm
    assert stage.batch.steps == steps
    assert stage.batch.settled
    assert [stage.frame() for _ in range(3)] == [ReadyFrame(), StepFrame(step=2, active=1), StepFrame(step=4, active=0)]


def test_what_mlx_has_allocated_is_noted_once_it_is_warm(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    mlx = SimpleNamespace(get_active_memory=lambda: 4000, get_cache_memory=lambda: 7)
    monkeypatch.setitem(sys.modules, "mlx.core", mlx)
    stage.rank.counter = SimpleNamespace(step=0, allocated_bytes=0)
    stage.send(WarmUp(step=1))
    assert stage.frame() == ReadyFrame()
    assert stage.rank.counter.allocated_bytes == 4007
    stage.send(Leave(step=2))
    assert stage.ended() == 0


def test_it_ends_at_once_where_nothing_is_to_be_finished(stage: Stage) -> None:
    stage.stop(0.0)
    assert stage.ended() == 0


def test_while_draining_it_follows_until_rank_0_leaves(stage: Stage) -> None:
    stage.send(Step(step=1, cache_entries=1))
    assert stage.frame() == StepFrame(step=1, active=1)
    stage.stop(60.0)
    stage.send(Step(step=2))
    assert stage.frame() == StepFrame(step=2, active=0)
    assert stage.code is None
    stage.send(Leave(step=3))
    assert stage.ended() == 0


def test_while_draining_it_ends_when_rank_0_is_lost(stage: Stage) -> None:
    stage.send(Step(step=1, cache_entries=1))
    assert stage.frame() == StepFrame(step=1, active=1)
    stage.stop(60.0)
    stage.send(Step(step=2))  # carried out after the stop was read: from then on a loss is seen
    assert stage.frame() == StepFrame(step=2, active=0)
    stage.source.close()
    assert stage.ended() == 0


def test_draining_has_an_end(stage: Stage) -> None:
    stage.stop(0.05)
    assert stage.ended() == 0


def test_it_ends_with_its_worker(stage: Stage) -> None:
    stage.worker.close()
    assert stage.ended() == 0
