"""The last one out: a tiny process that ends the runners of a worker that died without doing it itself.

It reads the worker's runners from a pipe and waits for the pipe to close, which happens however the worker ends.
Then it kills each runner's process group, so that what a script started goes too, and on Linux whatever of it went
into a session of its own: a runner has a mark in its environment, which what it starts inherits.

On Linux every runner asks the kernel for its end as well (`muster.runner.parent`); macOS has nothing like it, and
nothing but a second process helps while MLX holds the GIL of the first.

Run as a file with `python -I -S`: only the standard library, about 8 MB.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path


class Reaper:
    """The worker's end. `close` lets the process go without killing anything."""

    def __init__(self, mark: str | None = None) -> None:
        #: What the mark of every runner begins with; it is given only to follow a reaper that was killed.
        self.mark = mark or f"{os.getpid()}-{secrets.token_hex(4)}"
        read, write = os.pipe()
        os.set_inheritable(write, False)
        with os.fdopen(read, "rb", buffering=0) as source:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, f"MUSTER_RUNNER={self.mark}"],
                stdin=source,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._write = write
        self._watched: set[int] = set()

    @property
    def pid(self) -> int:
        """The reaper's own process."""
        return self._process.pid

    def watch(self, pid: int) -> None:
        """Kill this runner and its process group when the worker ends."""
        self._watched.add(pid)
        self._say(f"+{pid}\n")

    def forget(self, pid: int) -> None:
        """This runner is gone; its number may soon be another process."""
        self._watched.discard(pid)
        self._say(f"-{pid}\n")

    def check(self) -> None:
        """Have another reaper where somebody killed this one."""
        if self._process.poll() is not None:
            self._start_again()

    def close(self) -> None:
        """End the reaper; whatever it still watches is killed."""
        os.close(self._write)
        self._process.wait()

    def _say(self, line: str) -> None:
        try:
            os.write(self._write, line.encode())
        except BrokenPipeError:
            self._start_again()

    def _start_again(self) -> None:
        """Somebody killed the reaper: have another one, which learns what there is to watch."""
        fresh = Reaper(self.mark)
        os.close(self._write)
        self._process.wait()
        self._process, self._write = fresh._process, fresh._write
        for pid in sorted(self._watched):
            os.write(self._write, f"+{pid}\n".encode())


def _start_time(pid: int) -> str:
    """What tells a process from a later one with its number: field 22 of /proc/PID/stat; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _leads_or_led(pid: int, started: str) -> bool:
    """Whether the group `pid` is that of the runner, which the kernel may have ended before us.

    Its number is given to no other process while anything is left in its group.
    """
    try:
        return os.getpgid(pid) == pid and _start_time(pid) == started
    except ProcessLookupError:
        return True


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watched: dict[int, str] = {}
    for line in sys.stdin:
        pid = int(line[1:])
        if line.startswith("+"):
            watched[pid] = _start_time(pid)
        else:
            watched.pop(pid, None)
    for pid, started in watched.items():
        with contextlib.suppress(OSError):
            if _leads_or_led(pid, started):
                os.killpg(pid, signal.SIGKILL)
    if watched:
        _end_marked(sys.argv[1].encode())


def _end_marked(mark: bytes) -> None:
    """Kill whatever has an environment with `mark` in it, again while something new appears (Linux)."""
    ended: set[int] = set()
    found = {0}
    while found - ended:
        ended |= found
        found = {int(path.parent.name) for path in Path("/proc").glob("[1-9]*/environ") if _is_marked(path, mark)}
        for pid in found - ended:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _is_marked(path: Path, mark: bytes) -> bool:
    try:
        return any(part.startswith(mark) for part in path.read_bytes().split(b"\0"))
    except OSError:  # gone, or not ours
        return False


if __name__ == "__main__":
    _main()
