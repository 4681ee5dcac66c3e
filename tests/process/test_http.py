"""The HTTP API of a real coordinator: where it is, how it comes and goes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import httpx
import psutil
import pytest
from kit import free_ports

from muster.local import LocalCluster

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]


@pytest.fixture
def coordinator(tmp_path: Path) -> Generator[LocalCluster]:
    """A coordinator without workers."""
    first, key = free_ports(4), {"coordinator": {"MUSTER_API_KEY": "sesame"}}
    with LocalCluster(tmp_path / "cluster", (), port=first, http_port=first + 3, environments=key) as cluster:
        yield cluster


def muster(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "muster", *arguments], capture_output=True, text=True, timeout=30)


def test_a_coordinator_that_is_started_again_has_its_port_again(coordinator: LocalCluster) -> None:
    before = coordinator.http
    assert httpx.get(f"{before}/health").json()["status"] == "ok"
    coordinator.kill("coordinator")
    coordinator.start_coordinator()
    assert coordinator.http == before
    assert httpx.get(f"{before}/health").status_code == 200


def test_open_streams_do_not_keep_a_coordinator_from_stopping(coordinator: LocalCluster) -> None:
    process = coordinator.members["coordinator"].process
    key = {"x-api-key": "sesame"}
    with (
        httpx.Client(timeout=20) as client,
        client.stream("GET", f"{coordinator.http}/api/events", headers=key) as events,
    ):
        lines = events.iter_lines()
        assert next(lines).startswith(": after")
        began = time.monotonic()
        process.terminate()
        assert process.wait(10) == 0
        assert time.monotonic() - began < 10, "a stream may last for ever"
        assert "event: error" in list(lines)
    assert "Traceback" not in coordinator.log_of("coordinator")


def test_a_key_is_no_secret_on_a_command_line(coordinator: LocalCluster) -> None:
    process = psutil.Process(coordinator.members["coordinator"].process.pid)
    assert "sesame" not in " ".join(process.cmdline())
    assert httpx.get(f"{coordinator.http}/api/state").status_code == 401
    assert httpx.get(f"{coordinator.http}/api/state", headers={"x-api-key": "sesame"}).status_code == 200


def test_a_coordinator_without_http(tmp_path: Path) -> None:
    with LocalCluster(tmp_path / "cluster", (), http_port=None) as cluster:
        assert cluster.http == ""
        process = psutil.Process(cluster.members["coordinator"].process.pid)
        listening = [one for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        assert len(listening) == 3


def test_a_port_for_http_that_is_taken_is_said_at_once(coordinator: LocalCluster, tmp_path: Path) -> None:
    port = coordinator.http.rpartition(":")[2]
    own = ["--directory", str(tmp_path / "second"), "--port", "0", "--http-port", port]
    for command in ("coordinator", "up"):
        found = muster(command, *own)
        assert found.returncode == 1
        assert f"port {port} (for HTTP) on 127.0.0.1 cannot be had" in found.stderr
        assert "Traceback" not in found.stderr
