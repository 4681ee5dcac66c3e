"""`muster bench recovery` breaks everything once, sees the right causes, loses nothing and leaves nothing.

How long it takes is no part of the tests: other work on the machine changes that.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import anyio
import anyio.abc
import msgspec
import pytest

from muster.bench import launch
from muster.bench.launch import free_ports, killed_seconds, launcher
from muster.bench.relay import Relay, has_address
from muster.bench.report import Report

pytestmark = [pytest.mark.process, pytest.mark.mlx, pytest.mark.timeout(150)]

HERE, THERE = "127.0.0.1", "127.0.0.9"
#: The others break what the fault matrix breaks; they take their time.
PARTS = ("rank-kill", "coordinator-kill", "log")


def test_a_quick_run_finds_every_cause_and_leaves_nothing(tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    only = [option for part in PARTS for option in ("--only", part)]
    done = subprocess.run(
        [sys.executable, "-m", "muster", "bench", "recovery", "--quick", *only, "--output", str(output)],
        capture_output=True,
        text=True,
        timeout=140,
        env={**os.environ, "TMPDIR": str(tmp_path), "COLUMNS": "200"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(output.read_bytes(), type=Report)
    # A wrong rank or cause, a lost runner or a request without an end would be a note, and a round less.
    assert not [note for note in report.notes if note.startswith("round ")]
    timed = [one for one in report.figures if one.unit == "s"]
    assert len(timed) >= len(PARTS) and all(one.count == 1 for one in timed)
    assert "3 kills of the coordinator: events seen but not in the log" in done.stdout
    assert [one.name for one in report.figures if one.unit != "s" and not one.holds] == []
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("mlx", "report.json")] == []


def test_the_peer_is_measured_with_a_rank_killed(tmp_path: Path) -> None:
    program = launcher()
    assert program is not None
    seconds = anyio.run(killed_seconds, program, tmp_path)
    assert seconds is not None and seconds > 0


def test_a_launcher_without_ranks_gives_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = tmp_path / "launcher"
    hanging.write_text("#!/bin/sh\nexec sleep 63\n")
    hanging.chmod(0o700)
    monkeypatch.setattr(launch, "LAUNCH_SECONDS", 0.2)
    assert anyio.run(killed_seconds, str(hanging), tmp_path) is None


@pytest.mark.skipif(not has_address(THERE), reason="this machine has no second loopback address")
def test_a_cut_link_lets_nothing_pass_and_loses_nothing() -> None:
    async def echo(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            async for data in stream:
                await stream.send(data)

    async def run() -> None:
        port = free_ports(1)
        relay = Relay(THERE, [port])
        listener = await anyio.create_tcp_listener(local_host=HERE, local_port=port)
        async with listener, anyio.create_task_group() as group:
            group.start_soon(listener.serve, echo)
            await group.start(relay.run)
            async with await anyio.connect_tcp(THERE, port) as stream:
                await stream.send(b"one")
                assert await stream.receive() == b"one"
                relay.cut()
                await stream.send(b"two")
                with anyio.move_on_after(0.1):
                    pytest.fail(f"{await stream.receive()!r} passed a cut link")
                relay.heal()
                assert await stream.receive() == b"two"
            group.cancel_scope.cancel()
        with socket.socket() as again:  # the relay gave its port back
            again.bind((THERE, port))

    anyio.run(run)
