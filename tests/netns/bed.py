"""Real hosts on one Linux machine: network namespaces that meet on bridges, made and removed by root.

Nothing outside the namespaces is touched. The bridges are in a namespace of their own, every address is inside,
and each bed's namespaces carry a prefix of their own, so that beds side by side never meet.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Final, NamedTuple, Self

import psutil

#: How long processes may take to disappear after SIGKILL, and `ip` to answer.
_END_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.01
#: Owner's pid and start time (hundredths of a second since 1970), the bed's number within it, the place.
_NAME: Final = re.compile(r"muster-(\d+)-(\d+)-\d+-\w+")
_SWITCH: Final = "switch"
#: Where iproute2 keeps the namespaces that have a name.
_RUN: Final = Path("/run/netns")
_numbers = itertools.count(1)


class Socket(NamedTuple):
    """A TCP socket, as `ss` shows it; `local` and `remote` are "address:port"."""

    state: str  #: "LISTEN", "ESTAB", "TIME-WAIT", …
    local: str
    remote: str
    pids: frozenset[int]  #: the processes that have it


class BedError(Exception):
    """The machine refused to make or change the bed; the message quotes what `ip` said."""


def unavailable() -> str | None:
    """Why there can be no bed here, `None` where there can be one."""
    if sys.platform != "linux":
        return f"network namespaces need Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("ss") is None:
        return "network namespaces need iproute2 (ip and ss), which is not installed"
    try:
        with Bed(hosts=1):
            return None
    except BedError as error:
        return f"this machine makes no network namespaces: {error}"


class Bed:
    """Hosts "h0", "h1", …, each with one link to every bridge. A context manager: on exit everything is gone.

    A host's link to bridge b is its interface `eth<b>` with the address 10.91.b.(number of the host + 1)/24; the
    other end of the cable is the port `<host>-<b>` in the switch's namespace. Addresses of two beds may be equal.

    Raises (on entering):
        BedError: this machine makes no namespaces or links.
    """

    def __init__(self, hosts: int, bridges: int = 1) -> None:
        self.hosts = tuple(f"h{number}" for number in range(hosts))
        self.bridges = tuple(range(bridges))
        self._prefix = f"muster-{os.getpid()}-{_start_time(os.getpid())}-{next(_numbers)}"
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        sweep()
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process on the hosts, and remove hosts and bridges."""
        for place in (*self.hosts, _SWITCH):
            _remove(self._namespace(place))
        for process in self._processes:
            process.wait(_END_SECONDS)

    # --- what the bed looks like ----------------------------------------------------------------------------

    def address(self, host: str, bridge: int = 0) -> str:
        """The host's IPv4 address on the bridge."""
        return f"10.91.{bridge}.{self.hosts.index(host) + 1}"

    def network(self, bridge: int = 0) -> str:
        """The bridge's network, as CIDR."""
        return f"10.91.{bridge}.0/24"

    def pids(self, host: str) -> set[int]:
        """The processes that run on the host now."""
        return _pids(self._namespace(host))

    def sockets(self, host: str) -> list[Socket]:
        """The IPv4 TCP sockets on the host."""
        lines = _command("ip", "netns", "exec", self._namespace(host), "ss", "-Htanp4").splitlines()
        return [
            Socket(fields[0], fields[3], fields[4], frozenset(map(int, re.findall(r"pid=(\d+)", line))))
            for line, fields in ((line, line.split()) for line in lines)
        ]

    # --- verbs ----------------------------------------------------------------------------------------------

    def run(
        self,
        host: str,
        *command: str | Path,
        stdin: int | IO[bytes] = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a command, and return once it is on the host. Its pid is the command's own: signals reach it."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._namespace(host), *map(str, command)],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=None if environment is None else {**os.environ, **environment},
            start_new_session=True,  # Ctrl-C reaches only the tests, which end it
        )
        self._processes.append(process)
        home = (_RUN / self._namespace(host)).stat().st_ino
        while process.poll() is None and _namespace_of(process.pid) != home:
            time.sleep(0)  # `ip` is on its way there; whoever closes the bed now would not find it
        return process

    def cut(self, host: str, bridge: int = 0) -> None:
        """Pull the host's cable out of the bridge: no packet either way, connections stay as they are."""
        self._ip(_SWITCH, "link", "set", self._port(host, bridge), "down")

    def heal(self, host: str, bridge: int = 0) -> None:
        """Put the cable back."""
        self._ip(_SWITCH, "link", "set", self._port(host, bridge), "up")

    def take_down(self, host: str, bridge: int = 0) -> None:
        """Switch the host's own interface off: it has no route to the bridge any more."""
        self._ip(host, "link", "set", f"eth{bridge}", "down")

    def bring_up(self, host: str, bridge: int = 0) -> None:
        """Switch the host's own interface on again."""
        self._ip(host, "link", "set", f"eth{bridge}", "up")

    def mend(self) -> None:
        """Undo every `cut` and `take_down`."""
        for host in self.hosts:
            for bridge in self.bridges:
                self.heal(host, bridge)
                self.bring_up(host, bridge)

    # --- making it ------------------------------------------------------------------------------------------

    def _make(self) -> None:
        for place in (_SWITCH, *self.hosts):
            _command("ip", "netns", "add", self._namespace(place))
            self._ip(place, "link", "set", "lo", "up")
        for bridge in self.bridges:
            self._ip(_SWITCH, "link", "add", f"br{bridge}", "type", "bridge", "forward_delay", "0")
            self._ip(_SWITCH, "link", "set", f"br{bridge}", "up")
            for host in self.hosts:
                self._connect(host, bridge)

    def _connect(self, host: str, bridge: int) -> None:
        port, interface = self._port(host, bridge), f"eth{bridge}"
        peer = ("type", "veth", "peer", "name", interface, "netns", self._namespace(host))
        self._ip(_SWITCH, "link", "add", port, *peer)
        self._ip(_SWITCH, "link", "set", port, "master", f"br{bridge}", "up")
        self._ip(host, "address", "add", f"{self.address(host, bridge)}/24", "dev", interface)
        self._ip(host, "link", "set", interface, "up")

    def _port(self, host: str, bridge: int) -> str:
        return f"{host}-{bridge}"

    def _namespace(self, place: str) -> str:
        return f"{self._prefix}-{place}"

    def _ip(self, place: str, *arguments: str) -> None:
        _command("ip", "-n", self._namespace(place), *arguments)


def sweep() -> list[str]:
    """Remove what beds of dead test runs left; answers the names of their namespaces."""
    removed: list[str] = []
    for name in _command("ip", "netns", "list").split():
        match = _NAME.fullmatch(name)
        if match is not None and _start_time(int(match[1])) != int(match[2]):
            _remove(name)
            removed.append(name)
    return removed


def _start_time(pid: int) -> int:
    """When the process started, in hundredths of a second since 1970; 0 where there is none."""
    try:
        return round(psutil.Process(pid).create_time() * 100)
    except psutil.NoSuchProcess:
        return 0


def _namespace_of(pid: int) -> int:
    """The inode of the network namespace that a process is in; 0 where it has ended."""
    try:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    except OSError:
        return 0


def _remove(namespace: str) -> None:
    """End what runs in a namespace and delete it; nothing where it is gone already."""
    deadline = time.monotonic() + _END_SECONDS
    while pids := _pids(namespace):
        if time.monotonic() > deadline:
            raise BedError(f"processes {sorted(pids)} in {namespace} do not end")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    with contextlib.suppress(BedError):
        _command("ip", "netns", "delete", namespace)


def _pids(namespace: str) -> set[int]:
    """The living processes of a namespace; a zombie has left it."""
    try:
        return {int(pid) for pid in _command("ip", "netns", "pids", namespace).split()}
    except BedError:
        return set()


def _command(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_END_SECONDS, check=False)
    except OSError as error:
        raise BedError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        raise BedError(f"`{' '.join(command)}` failed: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
