"""Runners on disk: what an earlier worker left is ended, and nobody else's process ever is."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from muster.worker.records import Records

pytestmark = pytest.mark.process


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    program = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(program, start_new_session=True) as process:
        yield process
        process.kill()


def test_a_record_is_there_for_as_long_as_the_runner(tmp_path: Path) -> None:
    directory = tmp_path / "state" / "runners"
    records = Records(directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    records.add(4711, 1_700_000_000.25)
    (path,) = directory.iterdir()
    assert path.name == "4711-170000000025.runner"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    records.remove(4711)
    records.remove(4711)
    assert list(directory.iterdir()) == []


def test_the_runner_of_an_earlier_worker_is_ended(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    Records(tmp_path).add(sleeper.pid, psutil.Process(sleeper.pid).create_time())
    assert Records(tmp_path).sweep() == [sleeper.pid]
    assert sleeper.wait(10) == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_a_later_process_with_the_same_number_is_left_alone(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    Records(tmp_path).add(sleeper.pid, psutil.Process(sleeper.pid).create_time() - 100)
    assert Records(tmp_path).sweep() == []
    assert sleeper.poll() is None
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", ""]) as process:
        process.wait()
    Records(tmp_path).add(process.pid, 1.0)
    assert Records(tmp_path).sweep() == []
    assert list(tmp_path.iterdir()) == []


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    names = {"notes.txt", "1.runner", "x-1.runner", "1-2.runner.bak", "0x1-2.runner"}
    for name in names:
        (tmp_path / name).touch()
    assert Records(tmp_path).sweep() == []
    assert {path.name for path in tmp_path.iterdir()} == names


def test_the_sweep_never_ends_its_own_process(tmp_path: Path) -> None:
    """Pid and start time match, but the runner led a group of its own, and this process does not lead that one."""
    started = psutil.Process().create_time()
    assert os.getpid() > 1
    Records(tmp_path).add(os.getpid(), started - 1000)
    assert Records(tmp_path).sweep() == []
