"""Which runners a worker has, on disk, for the worker after it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import psutil
from loguru import logger

from muster.group.scope import owner_alive
from muster.worker.unburied import is_living

#: How long the kernel may take to end what is left of an earlier worker, which its reaper has killed long ago.
_END_SECONDS = 1.0

_NAME = re.compile(r"(\d+)-(\d+)\.runner")


class Records:
    """One empty file per runner, named by its pid and start time (hundredths of a second since 1970)."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._paths: dict[int, Path] = {}
        self.unended: list[psutil.Process] = []  #: of an earlier worker, as far as `sweep` could not end them

    def add(self, pid: int, started: float) -> None:
        """Remember a runner."""
        path = self._directory / f"{pid}-{round(started * 100)}.runner"
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)
        except OSError as error:  # the runner is none the worse: only the next worker knows less
            logger.warning("runner {} cannot be recorded: {}", pid, error)
        self._paths[pid] = path

    def remove(self, pid: int) -> None:
        """Forget a runner that is gone."""
        path = self._paths.pop(pid, None)
        if path is not None:
            path.unlink(missing_ok=True)

    def sweep(self) -> list[int]:
        """End the runners that an earlier worker left, and forget them; answers their pids.

        A process counts as one of ours only if pid and start time both match. The record of one that the kernel does
        not end within `_END_SECONDS` stays.
        """
        killed: dict[Path, psutil.Process] = {}
        for path in self._directory.iterdir():
            match = _NAME.fullmatch(path.name)
            if match is None:
                continue
            pid, started = int(match[1]), int(match[2]) / 100
            if owner_alive(pid, started):
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
                    killed[path] = psutil.Process(pid)
                    os.killpg(pid, signal.SIGKILL)
            else:
                path.unlink(missing_ok=True)
        deadline = time.monotonic() + _END_SECONDS
        while (unended := [process for process in killed.values() if is_living(process)]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.01)  # the worker has not joined yet, and nothing else runs in it
        self.unended = unended
        for path, process in killed.items():
            if process in self.unended:
                logger.error("runner {} of an earlier worker does not end", process.pid)
            else:
                path.unlink(missing_ok=True)
        return [process.pid for process in killed.values()]
