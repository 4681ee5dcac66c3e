"""What a worker leaves behind is ended by its reaper, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from children import exists, until

from muster.worker.reaper import Reaper

pytestmark = pytest.mark.process

SLEEPER = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"]


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Three processes, each the leader of its own group, as runners are."""
    started = [subprocess.Popen(SLEEPER, start_new_session=True) for _ in range(3)]
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_closing_ends_what_is_watched_and_nothing_else(sleepers: list[subprocess.Popen[bytes]]) -> None:
    watched, forgotten, unknown = sleepers
    reaper = Reaper()
    reaper.watch(watched.pid)
    reaper.watch(forgotten.pid)
    reaper.forget(forgotten.pid)
    reaper.close()
    assert watched.wait(10) == -signal.SIGKILL
    assert forgotten.poll() is None
    assert unknown.poll() is None
    assert not exists(reaper.pid)


def test_the_death_of_the_worker_ends_its_runners_and_their_children() -> None:
    program = (
        "import os, subprocess, sys, time\n"
        "from muster.worker.reaper import Reaper\n"
        "child = 'import os, sys, time; os.fork() or os.setsid(); sys.stdout.write(str(os.getpid()) + chr(10)); "
        "sys.stdout.flush(); time.sleep(60)'\n"
        "reaper = Reaper()\n"
        "runner = subprocess.Popen([sys.executable, '-I', '-S', '-c', child], start_new_session=True, "
        "env={'MUSTER_RUNNER': reaper.mark + '-1'})\n"
        "reaper.watch(runner.pid)\n"
        "time.sleep(60)\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    pids = [int(worker.stdout.readline()) for _ in range(2)]
    worker.kill()
    worker.wait(10)
    until(lambda: not any(map(exists, pids)), 10)
    worker.stdout.close()


def test_a_reaper_that_was_killed_is_replaced_and_knows_what_there_is_to_watch(
    sleepers: list[subprocess.Popen[bytes]],
) -> None:
    first, second, forgotten = sleepers
    reaper = Reaper()
    reaper.watch(first.pid)
    reaper.watch(forgotten.pid)
    old = reaper.pid
    os.kill(old, signal.SIGKILL)
    until(lambda: not exists(old))
    reaper.watch(second.pid)
    reaper.forget(forgotten.pid)
    assert reaper.pid != old
    reaper.close()
    assert first.wait(10) == second.wait(10) == -signal.SIGKILL
    assert forgotten.poll() is None


def test_signals_that_end_a_terminal_do_not_end_the_reaper(sleepers: list[subprocess.Popen[bytes]]) -> None:
    reaper = Reaper()
    reaper.watch(sleepers[0].pid)
    until(lambda: _ignores(reaper.pid))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(reaper.pid, number)
    assert exists(reaper.pid)
    reaper.close()
    assert sleepers[0].wait(10) == -signal.SIGKILL


def test_a_process_that_leads_no_group_is_left_alone() -> None:
    process = subprocess.Popen(SLEEPER)
    reaper = Reaper()
    reaper.watch(process.pid)
    reaper.close()
    assert process.poll() is None
    process.kill()
    process.wait()


def _ignores(pid: int) -> bool:
    """Whether SIGTERM is ignored by now (Linux; elsewhere there is nothing to wait for)."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return True
    ignored = next(line for line in lines if line.startswith("SigIgn:"))
    return bool(int(ignored.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
