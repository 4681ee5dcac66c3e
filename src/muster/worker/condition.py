"""What a process does that is late: it is stopped, blocked in the kernel, swapping, gone, or it runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final, Literal

import anyio
import msgspec
import psutil

#: Between the two looks that tell a process that stays in the kernel from one that is there for a moment.
_SECOND_LOOK_SECONDS: Final = 0.25
#: A process with less in swap has what it works with in memory.
_SWAPPED_BYTES: Final = 16 * 2**20
#: Pages that it had to fetch each second, of which a disk gives hundreds and a process that fits needs none.
_FAULTS_PER_SECOND: Final = 20.0

_STOPPED: Final = {
    psutil.STATUS_STOPPED: "its process is stopped (SIGSTOP)",
    psutil.STATUS_TRACING_STOP: "its process is stopped by a debugger",
}

Kind = Literal["running", "swapping", "stopped", "blocked", "gone"]


class Condition(msgspec.Struct, frozen=True):
    """What a process does, in words for a failure: `text` is a clause, `remedy` empty where there is none."""

    kind: Kind
    text: str
    remedy: str = ""

    @property
    def halted(self) -> bool:
        """Whether it does nothing at all."""
        return self.kind not in ("running", "swapping")

    @property
    def hindered(self) -> bool:
        """Whether something keeps it from going on as it should: the wait for it is its own fault, no other rank's."""
        return self.kind != "running"


class Look(msgspec.Struct, frozen=True):
    """One look at a process. `status` is psutil's word, "" where the process is gone.

    `blocked` are the threads that sleep in the kernel uninterruptibly, and `moved` counts what they would move: bytes
    read and pages fetched (Linux). `swapped_bytes` is the process's, on macOS the machine's.
    """

    at_seconds: float
    status: str
    faults: int = 0
    swapped_bytes: int = 0
    blocked: frozenset[int] = frozenset()
    moved: int = 0


class Watched(msgspec.Struct, frozen=True):
    """A process from the beginning of a wait on, so that the end can tell what happened meanwhile."""

    pid: int
    started: float  #: seconds since 1970; 0 where it is not known
    since_seconds: float
    faults: int

    async def condition(self) -> Condition:
        """What it does now; takes a quarter of a second where one look cannot tell."""
        before = now = look(self.pid, self.started)
        if now.blocked or now.swapped_bytes >= _SWAPPED_BYTES:
            await anyio.sleep(_SECOND_LOOK_SECONDS)
            now = look(self.pid, self.started)
        return judge(self, before, now)


def watch(pid: int, started: float) -> Watched:
    """Begin a wait for this process; costs some 20 µs on Linux."""
    return Watched(pid, started, time.monotonic(), _faults(pid))


def judge(watched: Watched, before: Look, now: Look) -> Condition:
    """What the last two looks say, and the pages fetched since the wait began. Pure."""
    if now.status in ("", psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return Condition("gone", "its process is gone", "See its output: muster logs")
    if now.status in _STOPPED:
        remedy = f"See who stopped process {watched.pid}; let it go on with: kill -CONT {watched.pid}"
        return Condition("stopped", _STOPPED[now.status], remedy)
    if now.blocked & before.blocked and now.moved == before.moved:
        remedy = "See what it waits for, such as a disk or a network file system: dmesg"
        return Condition("blocked", "its process is blocked in the kernel", remedy)
    rate = max(
        _rate(now.faults - watched.faults, now.at_seconds - watched.since_seconds),
        _rate(now.faults - before.faults, now.at_seconds - before.at_seconds),
    )
    if now.swapped_bytes >= _SWAPPED_BYTES and rate >= _FAULTS_PER_SECOND:
        text = f"its process is swapping: {now.swapped_bytes // 2**20} MiB in swap, {rate:.0f} major faults/s"
        remedy = "The node's memory is too small for what runs there: end something, or use more nodes."
        return Condition("swapping", text, remedy)
    return Condition("running", "its process runs")


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def look(pid: int, started: float) -> Look:
    """Look at a process now. One that began at another time than `started` is not ours: gone."""
    at = time.monotonic()
    try:
        process = psutil.Process(pid)
        if started and abs(process.create_time() - started) >= 1.0:
            return Look(at, "")
        status = str(process.status())
    except psutil.NoSuchProcess:
        return Look(at, "")
    except psutil.Error:  # it is there, and more is not for us to see
        return Look(at, psutil.STATUS_SLEEPING)
    faults = _faults(pid)
    return Look(
        at,
        status,
        faults=faults,
        swapped_bytes=_swapped_bytes(pid),
        blocked=_blocked_threads(pid) if status not in _STOPPED else frozenset(),
        moved=faults + _read_bytes(pid),
    )


# --- what only one system tells -----------------------------------------------------------------------------------


def _fields(path: str) -> list[str]:
    """The fields of a /proc/PID/stat behind the name, from the state on; empty where there is none."""
    try:
        return Path(path).read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _faults(pid: int) -> int:
    """Pages that the process had to wait for since it began (proc(5): field 12, majflt; macOS: page-ins)."""
    if psutil.LINUX:
        fields = _fields(f"/proc/{pid}/stat")
        return int(fields[9]) if fields else 0
    try:
        return int(getattr(psutil.Process(pid).memory_info(), "pageins", 0))
    except psutil.Error:
        return 0


def _swapped_bytes(pid: int) -> int:
    if not psutil.LINUX:
        return int(psutil.swap_memory().used)
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmSwap:")), 0)


def _blocked_threads(pid: int) -> frozenset[int]:
    """Threads in an uninterruptible sleep: weights are read by others than the main one."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir()) if psutil.LINUX else []
    except OSError:
        return frozenset()
    return frozenset(int(thread.name) for thread in threads if _fields(f"{thread}/stat")[:1] == ["D"])


def _read_bytes(pid: int) -> int:
    if not psutil.LINUX:
        return 0
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar:", "read_bytes:")))
