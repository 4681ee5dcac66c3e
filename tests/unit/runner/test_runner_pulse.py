"""A worker hears of its rank when it becomes busy or idle, and not more than about once a second in between."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import muster.runner.pulse
from muster.rank_protocol import StepFrame
from muster.runner.pulse import Pulse


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        """The time."""
        return self.now


class Sent:
    """A channel that keeps what is sent."""

    def __init__(self) -> None:
        self.frames: list[Any] = []

    def send(self, frame: Any) -> None:
        """Keep it."""
        self.frames.append(frame)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(muster.runner.pulse, "time", made)
    return made


def test_busy_and_idle_are_told_at_once_and_the_rest_once_a_second(clock: Clock) -> None:
    channel: Any = Sent()
    counter: Any = SimpleNamespace(step=0)
    pulse = Pulse(channel, counter)
    pulse.idle(0)
    assert channel.frames == []
    for step in range(1, 31):
        pulse.busy(step, 2)
        assert counter.step == step
        clock.now += 0.125
    pulse.idle(31)
    pulse.idle(31)
    assert channel.frames == [
        StepFrame(step=1, active=2),
        StepFrame(step=9, active=2),
        StepFrame(step=17, active=2),
        StepFrame(step=25, active=2),
        StepFrame(step=31, active=0),
    ]
    pulse.busy(32, 1)
    assert channel.frames[-1] == StepFrame(step=32, active=1)


def test_a_step_that_only_removes_counts_as_busy(clock: Clock) -> None:
    channel: Any = Sent()
    Pulse(channel).busy(7, 0)
    assert channel.frames == [StepFrame(step=7, active=1)]


def test_what_mlx_has_allocated_is_noted_whenever_something_is_told(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel: Any = Sent()
    counter: Any = SimpleNamespace(step=0, allocated_bytes=0)
    sizes = iter(range(1, 10))
    mlx = SimpleNamespace(get_active_memory=lambda: 1000 * next(sizes), get_cache_memory=lambda: 7)
    monkeypatch.setitem(muster.runner.pulse.sys.modules, "mlx.core", mlx)
    pulse = Pulse(channel, counter)
    pulse.busy(1, 1)
    assert counter.allocated_bytes == 1007
    pulse.busy(2, 1)  # the same second: nothing is told, and MLX is not asked
    assert counter.allocated_bytes == 1007
    pulse.idle(2)
    assert counter.allocated_bytes == 2007
