"""`muster serve` from its start to nothing left, as a user runs it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from kit.specs import DEMO_MODEL
from kit.waiting import DEADLINE_SECONDS, until

from muster.local import LocalCluster

pytestmark = [pytest.mark.process, pytest.mark.mlx, pytest.mark.timeout(120)]


class Serve:
    """A running `muster serve`; what it printed to standard output so far is in `lines`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    def wait_card(self) -> str:
        """What it says once the model is ready."""
        until(
            lambda: self.process.poll() is not None or any(line.startswith("Ctrl-C") for line in self.lines),
            "the model is ready",
        )
        assert self.process.poll() is None, self.end()
        return "".join(self.lines)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self) -> tuple[int, str]:
        """Wait for its end; the exit code and what it said on standard error."""
        code = self.process.wait(DEADLINE_SECONDS)
        self._reader.join(DEADLINE_SECONDS)
        assert self.process.stderr is not None
        return code, self.process.stderr.read()


@contextmanager
def serve(tmp_path: Path, *arguments: str, **environment: str) -> Generator[Serve]:
    temporary = tmp_path / "t"
    temporary.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "muster", "serve", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "MUSTER_HOME": str(tmp_path / "home"), "TMPDIR": str(temporary), **environment},
    )
    made = Serve(process)
    try:
        yield made
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(DEADLINE_SECONDS)
            finally:
                process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def left_in(tmp_path: Path) -> list[str]:
    # MLX keeps compiled kernels in a directory of its own there.
    return [path.name for path in (tmp_path / "t").iterdir() if path.name != "mlx"]


def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def test_the_lines_that_it_prints_work_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    with serve(tmp_path, str(DEMO_MODEL), "--served-name", "demo", "--quiet") as served:
        text = served.wait_card()
        curl = next(line for line in text.splitlines() if line.startswith("curl "))
        answered = subprocess.run(
            [*shlex.split(curl), "--silent"],
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
            check=True,
        )
        assert '"model":"demo"' in answered.stdout and '"content"' in answered.stdout
        program = re.search(r"^from openai .*?^print[^\n]*", text, re.DOTALL | re.MULTILINE)
        assert program is not None
        printed = subprocess.run(
            [sys.executable, "-c", program[0]], capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=True
        )
        assert printed.stdout.strip()
        children = served.children()
        assert len(children) >= 3  # coordinator, worker, runner
        served.process.send_signal(signal.SIGINT)
        code, errors = served.end()
    assert code == 0, errors
    assert "stopping" in errors
    assert all_gone(children)
    assert left_in(tmp_path) == []


def test_a_signal_before_it_is_ready_leaves_nothing(tmp_path: Path) -> None:
    with serve(tmp_path, str(DEMO_MODEL)) as served:
        until(lambda: len(served.children()) >= 2, "coordinator and worker run")
        children = served.children()
        served.process.send_signal(signal.SIGTERM)
        code, errors = served.end()
    assert code == 128 + signal.SIGTERM, errors
    assert served.lines == []
    assert all_gone(children)
    assert left_in(tmp_path) == []


def test_a_bad_name_is_told_at_once(tmp_path: Path) -> None:
    with serve(tmp_path, str(tmp_path / "nothing")) as served:
        code, errors = served.end()
    assert code == 1
    assert "is no directory" in errors
    assert left_in(tmp_path) == []


def test_a_model_that_cannot_come_up_is_told_with_its_cause(tmp_path: Path) -> None:
    # More ranks than any sharding of it has places for.
    with serve(tmp_path, str(DEMO_MODEL), "--ranks", "3", "--sharding", "tensor", "--quiet") as served:
        code, errors = served.end()
    assert code == 1, errors
    assert "3" in errors and "Traceback" not in errors
    assert served.lines == []
    assert left_in(tmp_path) == []


def test_on_a_cluster_that_runs_only_the_instance_comes_and_goes(tmp_path: Path) -> None:
    with LocalCluster(tmp_path / "cluster", ("a",), node_options=("--pool", "0")) as cluster:
        port = cluster.http.rpartition(":")[2]
        address = cluster.address.removeprefix("tcp://")
        with serve(tmp_path, str(DEMO_MODEL), "--join", address, "--port", port, "--served-name", "joined") as served:
            assert f"{cluster.http}/v1" in served.wait_card()
            assert served.children() == []
            assert "joined" in httpx.get(f"{cluster.http}/v1/models").text
            served.process.send_signal(signal.SIGTERM)
            code, errors = served.end()
        assert code == 0, errors
        assert "joined" not in httpx.get(f"{cluster.http}/v1/models").text


def test_an_instance_that_somebody_deletes_ends_the_command(tmp_path: Path) -> None:
    with LocalCluster(tmp_path / "cluster", ("a",), node_options=("--pool", "0")) as cluster:
        address = cluster.address.removeprefix("tcp://")
        with serve(tmp_path, str(DEMO_MODEL), "--join", address, "--quiet") as served:
            served.wait_card()
            subprocess.run(
                [sys.executable, "-m", "muster", "delete", "--all", "--coordinator", address], check=True, timeout=60
            )
            code, errors = served.end()
        assert code == 1
        assert "deleted by somebody else" in errors


def test_a_port_that_is_taken_is_told_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        with serve(tmp_path, str(DEMO_MODEL), "--port", port) as served:
            code, errors = served.end()
    assert code == 1
    assert f"port {port}" in errors and "--port" in errors
