"""What a late process does is told by looks at it, and by a real one that stands still."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Generator

import anyio
import psutil
import pytest
from children import until

from muster.worker.condition import Condition, Look, Watched, judge, look, watch

MIB = 2**20
WATCHED = Watched(pid=7, started=0.0, since_seconds=100.0, faults=1000)


def seen(at: float, status: str = psutil.STATUS_SLEEPING, **facts: object) -> Look:
    return Look(at, status, **{"faults": 1000, **facts})  # type: ignore[arg-type]


def judged(now: Look, before: Look | None = None) -> Condition:
    return judge(WATCHED, before or now, now)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (psutil.STATUS_RUNNING, "running"),
        (psutil.STATUS_SLEEPING, "running"),
        (psutil.STATUS_STOPPED, "stopped"),
        (psutil.STATUS_TRACING_STOP, "stopped"),
        (psutil.STATUS_ZOMBIE, "gone"),
        ("", "gone"),
    ],
)
def test_the_status_tells_what_it_can(status: str, kind: str) -> None:
    condition = judged(seen(110.0, status))
    assert condition.kind == kind
    assert condition.halted is condition.hindered is (kind != "running")
    assert bool(condition.remedy) is (kind != "running")


def test_a_stopped_process_is_named_with_what_lets_it_go_on() -> None:
    condition = judged(seen(110.0, psutil.STATUS_STOPPED))
    assert condition.text == "its process is stopped (SIGSTOP)"
    assert "kill -CONT 7" in condition.remedy
    assert "debugger" in judged(seen(110.0, psutil.STATUS_TRACING_STOP)).text


def test_a_thread_that_stays_in_the_kernel_and_moves_nothing_blocks() -> None:
    before = seen(110.0, blocked=frozenset({7, 8}), moved=50)
    assert judged(seen(110.25, blocked=frozenset({8}), moved=50), before).kind == "blocked"
    assert judged(seen(110.25, blocked=frozenset({8}), moved=51), before).kind == "running"  # it reads from a disk
    assert judged(seen(110.25, blocked=frozenset({9}), moved=50), before).kind == "running"  # each only for a moment


def test_swapping_needs_pages_in_swap_and_faults_that_go_on() -> None:
    swapped = seen(110.0, swapped_bytes=800 * MIB, faults=1500)
    condition = judged(swapped)
    assert condition.text == "its process is swapping: 800 MiB in swap, 50 major faults/s"
    assert (condition.hindered, condition.halted) == (True, False)
    assert "memory" in condition.remedy
    assert judged(seen(110.0, swapped_bytes=800 * MIB, faults=1100)).kind == "running"  # it was swapped out, long ago
    assert judged(seen(110.0, swapped_bytes=MIB, faults=9000)).kind == "running"  # it reads a file through mmap
    later = seen(110.25, swapped_bytes=800 * MIB, faults=1110)  # after a long quiet wait
    assert judged(later, seen(110.0, swapped_bytes=800 * MIB, faults=1100)).kind == "swapping"


@pytest.fixture
def child() -> Generator[psutil.Process]:
    process = subprocess.Popen(["sleep", "600"])
    try:
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


@pytest.mark.process
def test_a_real_process_is_seen_as_it_is(child: psutil.Process) -> None:
    watched = watch(child.pid, child.create_time())
    assert anyio.run(watched.condition).kind == "running"
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: child.status() == psutil.STATUS_STOPPED)
    assert anyio.run(watched.condition).kind == "stopped"
    assert look(child.pid, child.create_time() - 10).status == ""  # a later process with the number
    child.kill()
    until(lambda: child.status() == psutil.STATUS_ZOMBIE)
    assert anyio.run(watched.condition).kind == "gone"
    child.wait()
    assert anyio.run(watched.condition).kind == "gone"
