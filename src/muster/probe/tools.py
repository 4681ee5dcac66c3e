"""Runs the system's own tools, each with a deadline, and remembers what does not change."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

from muster.probe.reading import Unread

#: As much of a tool's complaint as a reason quotes.
_QUOTED_CHARACTERS = 160
#: Where macOS and Linux keep tools that a service's PATH may lack.
_FURTHER = ("/usr/sbin", "/sbin", "/usr/bin", "/bin", "/usr/libexec/ApplicationFirewall")


class Tools:
    """What tools print. Blocks; use it in a thread. Tests give texts instead: see `run`."""

    def __init__(self) -> None:
        self._remembered: dict[tuple[str, ...], str | Unread] = {}

    def run(self, command: Sequence[str], seconds: float = 5.0, *, once: bool = False) -> str | Unread:
        """What the command prints on stdout, or why nothing; `once` for what stays as it is while this process lives.

        A command that fails and prints something all the same counts for what it printed: `sysctl` does so when it
        does not know one of several names. One that is late is killed.
        """
        key = tuple(command)
        if once and key in self._remembered:
            return self._remembered[key]
        found = _run(command, seconds)
        if once:
            self._remembered[key] = found
        return found


def _run(command: Sequence[str], seconds: float) -> str | Unread:
    name = command[0]
    path = shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), *_FURTHER)))
    if path is None:
        return Unread(f"{name} is not on this machine")
    try:
        done = subprocess.run(
            [path, *command[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            env={**os.environ, "LC_ALL": "C", "LANG": "C"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Unread(f"{name} did not end within {seconds:g} s")
    except OSError as error:
        return Unread(f"{name} cannot be started: {error.strerror or error}")
    printed = done.stdout.decode(errors="replace")
    if done.returncode and not printed.strip():
        said = " ".join(done.stderr.decode(errors="replace").split())[:_QUOTED_CHARACTERS]
        return Unread(f"{name} ended with exit code {done.returncode}" + (f": {said}" if said else ""))
    return printed
