"""Processes and ports of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Generator

import psutil

from muster.errors import PortError
from muster.group.ports import reserve_at
from muster.spec import Address


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
    """The first of so many ports in a row that nobody has; tests that run side by side look in ranges of their own."""
    side = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 8
    for first in range(21_000 + 1_000 * side, 22_000 + 1_000 * side, count):
        with contextlib.ExitStack() as stack, contextlib.suppress(PortError):
            for port in range(first, first + count):
                stack.enter_context(reserve_at("127.0.0.1", port))
            return first
    raise AssertionError("no free ports in a row")


def port_left(address: Address, ranks: Collection[int]) -> str | None:
    """What still holds the port of ranks that have ended, whose pids these are.

    The system may give the port to anybody at once. A listener is theirs if it is in the session that each rank
    leads; a socket that only keeps the port has no owner that could be seen, and counts as a reservation for them.
    """
    try:
        reserve_at(address.host, address.port).close()
    except PortError as error:
        listeners = {
            one.pid
            for one in psutil.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == address.port and one.pid
        }
        return f"port {address}: {error}" if not listeners or any(_session(pid) in ranks for pid in listeners) else None
    return None


def _session(pid: int) -> int:
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(pid)
    return 0
