"""`muster bench formation` runs from end to end and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import anyio
import msgspec
import psutil
import pytest

from muster.bench import launch
from muster.bench.launch import LAUNCH_MARK, end_marked, launch_seconds, launcher
from muster.bench.report import Report

pytestmark = pytest.mark.process


@pytest.mark.mlx
@pytest.mark.timeout(120)
def test_a_quick_run_measures_everything_and_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "muster", "bench", "formation", "--quick", "--json"],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(done.stdout, type=Report)
    figures = {one.name: one for one in report.figures}
    for ranks in (2, 4):
        formed = figures[f"create to ready, {ranks} ranks, median of 1"]
        assert formed.muster is not None and formed.peer is not None and formed.ratio is not None
    at_once = {name.rpartition(": ")[2]: one.muster for name, one in figures.items() if "at once" in name}
    assert at_once.pop("until all are ready")
    assert at_once == {"ready": 3, "collisions": 0, "files": 0, "ports": 0, "processes": 0}
    assert [one.number for one in report.rounds] == [1, 1, 2]
    assert all(one.steps for one in report.rounds)
    # MLX keeps compiled kernels in a directory of its own there.
    assert [path.name for path in tmp_path.iterdir() if path.name != "mlx"] == []
    assert _processes_naming(str(tmp_path)) == []


def test_only_the_processes_of_one_launch_are_ended() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    ours = subprocess.Popen(command, env={**os.environ, LAUNCH_MARK: "ours"})
    theirs = subprocess.Popen(command, env={**os.environ, LAUNCH_MARK: "theirs"})
    try:
        _until_marked(ours.pid, theirs.pid)
        assert end_marked("ours") == 1
        assert not psutil.pid_exists(ours.pid)
        assert theirs.poll() is None
    finally:
        for process in (ours, theirs):
            process.kill()
            process.wait()


def test_a_launch_that_hangs_gives_no_figure_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = tmp_path / "launcher"
    first, second = (f"sleep {seconds}.{os.getpid()}" for seconds in (61, 62))  # nobody else's command
    hanging.write_text(f"#!/bin/sh\n{first} &\n{second}\n")
    hanging.chmod(0o700)
    monkeypatch.setattr(launch, "LAUNCH_SECONDS", 0.5)
    assert anyio.run(launch_seconds, str(hanging), 2, tmp_path / "work") is None
    assert _processes_naming(first) == []
    assert _processes_naming(second) == []


def test_a_launch_whose_ranks_did_not_form_gives_no_figure(tmp_path: Path) -> None:
    pretending = tmp_path / "launcher"
    pretending.write_text("#!/bin/sh\nexit 0\n")
    pretending.chmod(0o700)
    assert anyio.run(launch_seconds, str(pretending), 2, tmp_path / "work") is None


@pytest.mark.mlx
def test_the_real_launcher_gives_a_figure(tmp_path: Path) -> None:
    program = launcher()
    assert program is not None
    seconds = anyio.run(launch_seconds, program, 2, tmp_path)
    assert seconds is not None and 0.1 < seconds < launch.LAUNCH_SECONDS


def _processes_naming(text: str) -> list[int]:
    found: list[int] = []
    for process in psutil.process_iter(["cmdline"]):
        if text in " ".join(process.info["cmdline"] or ()):
            found.append(process.pid)
    return found


def _until_marked(*pids: int) -> None:
    """A child has its own environment only once it has executed its program."""
    deadline = time.monotonic() + 10
    while not all(LAUNCH_MARK in psutil.Process(pid).environ() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.005)
