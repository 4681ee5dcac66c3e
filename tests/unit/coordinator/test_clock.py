"""The clock of the log counts on, whatever the wall clock does."""

from __future__ import annotations

import time

import pytest

from muster.coordinator.clock import Clock


def test_it_starts_at_the_wall_clock_and_never_goes_back() -> None:
    before = time.time_ns()
    clock = Clock()
    times = [clock.now_ns() for _ in range(1000)]
    assert before <= times[0]
    assert times == sorted(times)


def test_a_wall_clock_that_jumps_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    first = clock.now_ns()
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    assert 0 <= clock.now_ns() - first < 60 * 10**9


def test_a_log_from_the_future_is_continued() -> None:
    future = time.time_ns() + 10**18
    assert Clock(not_before_ns=future).now_ns() >= future
