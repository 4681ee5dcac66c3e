"""A worker's surroundings for tests: a reaper and records that only remember, and children of a few lines."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.abc
import pytest

from muster.rank_protocol import FromRank, WarmFrame
from muster.runner.frames import encode_frame
from muster.worker.reaper import Reaper
from muster.worker.records import Records

WARM = WarmFrame(seconds=0.1, memory_bytes=1, backends=("ring",), versions={})

#: What every child begins with; it imports nothing that costs time.
PRELUDE = """
import os, signal, socket, sys, time
worker = socket.socket(fileno=int(sys.argv[1]))
def say(text):
    sys.stdout.write(text)
    sys.stdout.flush()
def send(number):
    worker.sendall(FRAMES[number])
def receive():
    header = worker.recv(4, socket.MSG_WAITALL)
    return worker.recv(int.from_bytes(header, "big"), socket.MSG_WAITALL) if len(header) == 4 else None
"""


class FakeReaper:
    """Remembers what it was told to watch."""

    def __init__(self) -> None:
        self.mark = "fake"
        self.watched: set[int] = set()
        self.ever: set[int] = set()

    def watch(self, pid: int) -> None:
        self.watched.add(pid)
        self.ever.add(pid)

    def forget(self, pid: int) -> None:
        self.watched.discard(pid)


def as_reaper(fake: FakeReaper) -> Reaper:
    return cast(Reaper, fake)


def records_in(directory: Path) -> Records:
    return Records(directory / "runners")


def use_child(monkeypatch: pytest.MonkeyPatch, body: str, *frames: FromRank) -> list[list[str]]:
    """Every runner that is started from now on is this little program; answers the commands it was started with.

    `body` may use `say(text)`, `send(number of a frame)` and `receive()`.
    """
    encoded = repr([encode_frame(frame) for frame in frames])
    source = f"FRAMES = {encoded}\n{PRELUDE}\n{body}"
    commands: list[list[str]] = []
    real: Callable[..., Any] = anyio.open_process

    async def open_process(command: list[str], **options: object) -> anyio.abc.Process:
        commands.append(command)
        return await real([sys.executable, "-I", "-S", "-c", source, *command[3:]], **options)

    monkeypatch.setattr("muster.worker.process.anyio.open_process", open_process)
    return commands


def exists(pid: int) -> bool:
    """Whether a process has this number and is not a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z" if stat.parent.parent.is_dir() else True
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for a condition, with a deadline."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "the condition did not come to hold in time"
        time.sleep(0.01)


_FREEZER = Path("/sys/fs/cgroup/freezer")


@contextlib.contextmanager
def frozen(pid: int) -> Generator[None]:
    """Have the kernel hold a process for the block, so that not even SIGKILL ends it (root, and cgroup v1)."""
    group = _FREEZER / f"muster-{secrets.token_hex(4)}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no freezer that holds a process against SIGKILL: {error}")
    try:
        (group / "cgroup.procs").write_text(str(pid))
        (group / "freezer.state").write_text("FROZEN")
        until(lambda: (group / "freezer.state").read_text().strip() == "FROZEN")
        yield
    finally:
        (group / "freezer.state").write_text("THAWED")
        until(lambda: _removed(group))


def _removed(group: Path) -> bool:
    with contextlib.suppress(OSError):  # who is in it may be gone meanwhile
        for pid in (group / "cgroup.procs").read_text().split():
            (_FREEZER / "cgroup.procs").write_text(pid)
        group.rmdir()
    return not group.exists()
