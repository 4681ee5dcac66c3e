"""A program on a terminal of its own, as a person sees and uses it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Generator, Mapping
from pathlib import Path

from kit.waiting import DEADLINE_SECONDS

#: Makes the terminal the child's own, so that Ctrl-C typed there becomes a signal.
_OWN_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, "
    "[sys.executable, *sys.argv[1:]])"
)
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[=>]|\x1b\][^\x07]*\x07")
_COLUMNS, _ROWS = 100, 40


class Terminal:
    """What is shown is in `shown`, without colours and cursor movements."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self._raw = b""
        self._seen = 0

    @property
    def shown(self) -> str:
        """Everything so far."""
        return _ESCAPES.sub("", self._raw.decode(errors="replace"))

    def type(self, keys: str) -> None:
        """Press these keys."""
        os.write(self._descriptor, keys.encode())

    def wait_for(self, pattern: str, seconds: float = DEADLINE_SECONDS) -> re.Match[str]:
        """The first match behind what was waited for before."""
        deadline = time.monotonic() + seconds
        while True:
            match = re.compile(pattern, re.DOTALL).search(self.shown, self._seen)
            if match is not None:
                self._seen = match.end()
                return match
            if not self._read(deadline):
                raise AssertionError(f"{pattern!r} is not shown behind {self._seen}: {self.shown!r}")

    def wait_end(self, seconds: float = DEADLINE_SECONDS) -> int:
        """Read until the program has ended; its exit code."""
        deadline = time.monotonic() + seconds
        while self._read(deadline):
            pass
        return self.process.wait(max(0.1, deadline - time.monotonic()))

    def _read(self, deadline: float) -> bool:
        """Whether there was more before the deadline."""
        ready, _, _ = select.select([self._descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return False
        try:
            data = os.read(self._descriptor, 65_536)
        except OSError:  # EIO: nobody has the terminal open any more
            return False
        self._raw += data
        return bool(data)


@contextlib.contextmanager
def on_terminal(*arguments: str, directory: Path, environment: Mapping[str, str]) -> Generator[Terminal]:
    """`python ARGUMENTS` on a new terminal; killed in the end if it is still there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _OWN_TERMINAL, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=directory,
            env={**os.environ, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", **environment},
            start_new_session=True,
        )
    finally:
        os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(ours)
