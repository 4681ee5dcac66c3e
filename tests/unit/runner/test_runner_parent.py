"""A runner does not outlive its worker, whatever it is doing at the moment."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

RUNNER = (
    "import os, sys, time\n"
    "from muster.runner.parent import die_with\n"
    "die_with(int(sys.argv[1]))\n"
    "sys.stdout.write(f'{os.getpid()}\\n'); sys.stdout.flush()\n"
    "time.sleep(60)\n"
)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
def test_it_is_killed_when_its_parent_is() -> None:
    worker_source = (
        f"import os, subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {RUNNER!r}, str(os.getpid())]).wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", worker_source], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        runner = int(worker.stdout.readline())
        worker.kill()
        deadline = time.monotonic() + 10
        while _runs(runner):
            assert time.monotonic() < deadline, "the runner outlived its worker"
            time.sleep(0.01)


def test_it_ends_at_once_when_its_parent_is_gone_already() -> None:
    done = subprocess.run([sys.executable, "-c", RUNNER, "1"], capture_output=True, timeout=30, check=False)
    assert done.returncode == 1
    assert done.stdout == b""


def test_it_lives_with_its_parent() -> None:
    source = RUNNER.replace("time.sleep(60)", "")
    done = subprocess.run([sys.executable, "-c", source, str(os.getpid())], capture_output=True, timeout=30, check=True)
    assert done.stdout.strip().isdigit()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
