"""Processes and ports of this machine."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Generator

import psutil

from muster.errors import PortError
from muster.group.ports import reserve_at


def is_runner(process: psutil.Process) -> bool:
    """Whether a process is a runner, by its command line."""
    with contextlib.suppress(psutil.Error):
        return "muster.runner" in process.cmdline()
    return False


def alive(pid: int, started: float = 0.0) -> bool:
    """Whether a process runs (a zombie does not); `started` tells it from a later one with its number."""
    try:
        process = psutil.Process(pid)
        same = not started or abs(process.create_time() - started) < 1.0
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def stopped(process: psutil.Process) -> Generator[psutil.Process]:
    """The process stands still for the block; it may be gone at the end of it."""
    process.suspend()
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def kill(process: psutil.Process) -> None:
    """SIGKILL."""
    os.kill(process.pid, signal.SIGKILL)


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody has, others each time, so that clusters keep apart.

    The system gives nobody these ports by itself, and tests that run side by side look in ranges of their own.
    """
    side = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 8
    rows = range(21_000 + 1_000 * side, 22_000 + 1_000 * side - count, count)
    for first in random.SystemRandom().sample(rows, len(rows)):
        with contextlib.ExitStack() as stack, contextlib.suppress(PortError):
            for port in range(first, first + count):
                stack.enter_context(reserve_at("127.0.0.1", port))
            return first
    raise AssertionError("no free ports in a row")
