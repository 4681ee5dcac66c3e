"""What a bed of hosts needs of the machine: commands, the processes of a namespace, and names that tell whose it is.

All that a bed makes outside of its namespaces carries a name of the bed: mounts as their source, directories in `RUN`.
So whatever the owner of a bed left when it was killed is known for what it is, and swept by the next one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

#: How long processes may take to disappear after SIGKILL, and a command to answer.
END_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.01
#: Where iproute2 keeps the namespaces that have a name.
NAMESPACES: Final = Path("/run/netns")
#: Where a bed keeps its files, in a directory with its name.
RUN: Final = Path("/run")
#: Owner's pid and start time (hundredths of a second since 1970), the bed's number within it, the place.
_NAME: Final = re.compile(r"muster-(\d+)-(\d+)-\d+-\w+")


class BedError(Exception):
    """The machine refused to make or change the bed; the message quotes what the command said."""


def prefix_of(number: int) -> str:
    """What the names of everything of this process's bed of this number begin with."""
    return f"muster-{os.getpid()}-{_start_time(os.getpid())}-{number}"


def command(*arguments: str) -> str:
    """Run a command; answers its standard output.

    Raises:
        BedError: it cannot be run, or failed; the message quotes its standard error.
    """
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=END_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BedError(f"{arguments[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise BedError(f"`{' '.join(arguments)}` failed: {reason}")
    return done.stdout


def pids_in(namespace: str) -> set[int]:
    """The living processes of a namespace; a zombie has left it."""
    try:
        return {int(pid) for pid in command("ip", "netns", "pids", namespace).split()}
    except BedError:
        return set()


def home_of(pid: int) -> int:
    """The inode of the network namespace that a process is in; 0 where it has ended."""
    try:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    except OSError:
        return 0


def is_still(pid: int) -> bool:
    """Whether a process stands still since SIGSTOP. The signal counts only when each of its threads has come to it."""
    try:
        states = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:
        return False
    return bool(states) and all(state.rpartition(")")[2].split()[0] == "T" for state in states)


def remove_namespace(namespace: str) -> None:
    """End what runs in a namespace and delete it; nothing where it is gone already."""
    deadline = time.monotonic() + END_SECONDS
    while pids := pids_in(namespace):
        if time.monotonic() > deadline:
            raise BedError(f"processes {sorted(pids)} in {namespace} do not end")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    with contextlib.suppress(BedError):
        command("ip", "netns", "delete", namespace)


def mounts_of(prefix: str) -> Iterator[tuple[str, Path]]:
    """The source and the place of every mount whose source begins so."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        source = after.split()[1]
        if source.startswith(prefix):
            # A blank in a path stands there as \040.
            place = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), before.split()[4])
            yield source, Path(place)


def unmount(place: Path) -> None:
    """Take a mount away at once, whoever still has a file of it open."""
    with contextlib.suppress(BedError):
        command("umount", "--lazy", str(place))


def sweep() -> list[str]:
    """Remove what beds of dead test runs left; answers the names of it."""
    namespaces = filter(_is_orphan, command("ip", "netns", "list").split())
    removed: list[str] = []
    for namespace in namespaces:
        remove_namespace(namespace)
        removed.append(namespace)
    for source, place in list(mounts_of("muster-")):
        if _is_orphan(source):
            unmount(place)
            removed.append(source)
    for directory in RUN.glob("muster-*"):
        if _is_orphan(directory.name):
            shutil.rmtree(directory, ignore_errors=True)
            removed.append(directory.name)
    return removed


def _is_orphan(name: str) -> bool:
    """Whether a name is that of a bed whose owner has ended."""
    match = _NAME.fullmatch(name)
    # The system's clock may be set meanwhile, and with it when a process seems to have started.
    return match is not None and abs(_start_time(int(match[1])) - int(match[2])) > 200


def _start_time(pid: int) -> int:
    """When the process started, in hundredths of a second since 1970; 0 where there is none."""
    try:
        return round(psutil.Process(pid).create_time() * 100)
    except psutil.NoSuchProcess:
        return 0
