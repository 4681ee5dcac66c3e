"""What a runner has started and left: its process group, and what went into a session of its own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

#: In the environment of a runner, and so of whatever it starts: which runner it was.
MARK: Final = "MUSTER_RUNNER"


def left_of(pid: int, mark: str | None) -> list[psutil.Process]:
    """Processes that live in the group `pid`, whose leader is gone, or that have `mark` in their environment.

    `None` spares the walk over all processes, some 10 ms, where nothing can have left the group. One that dropped its
    environment as well is not found; nor is one that a set-uid program runs.
    """
    found = list(_group(pid))
    return found if mark is None else [*found, *(one for one in _marked(mark) if one not in found)]


def _group(pid: int) -> Iterator[psutil.Process]:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return  # nobody: no need to look
    except PermissionError:
        pass  # macOS answers so for zombies, and any system for other users' processes
    for other in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getpgid(other) == pid and (process := _living(other)) is not None:
                yield process


def _marked(mark: str) -> Iterator[psutil.Process]:
    for pid in psutil.pids():
        if pid != os.getpid() and _mark_of(pid) == mark and (process := _living(pid)) is not None:
            yield process


def _mark_of(pid: int) -> str:
    if psutil.LINUX:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # gone, or not ours
            return ""
        name = f"{MARK}=".encode()
        return next((part[len(name) :].decode() for part in environment.split(b"\0") if part.startswith(name)), "")
    with contextlib.suppress(psutil.Error, OSError):
        return psutil.Process(pid).environ().get(MARK, "")
    return ""


def _living(pid: int) -> psutil.Process | None:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process
    return None
