"""Real hosts on one Linux machine: network namespaces that meet on bridges, made and removed by root.

Nothing outside the namespaces is touched, but for the disks that a test asks for. The bridges are in a namespace of
their own, every address is inside, and each bed's namespaces carry a prefix of their own, so that beds side by side
never meet.
"""

from __future__ import annotations

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
from typing import IO, Final, Literal, NamedTuple, Self

from bed_faults import Clock, Disk, Way, bar, clear, lose, slow
from bed_kernel import (
    END_SECONDS,
    NAMESPACES,
    RUN,
    BedError,
    command,
    home_of,
    is_still,
    pids_in,
    prefix_of,
    remove_namespace,
    sweep,
)

_SWITCH: Final = "switch"
_numbers = itertools.count(1)


class Socket(NamedTuple):
    """A TCP socket, as `ss` shows it; `local` and `remote` are "address:port"."""

    state: str  #: "LISTEN", "ESTAB", "TIME-WAIT", …
    local: str
    remote: str
    pids: frozenset[int]  #: the processes that have it


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
    With `clocks`, every host has a wall clock that can be set apart from the others'.

    Raises (on entering):
        BedError: this machine makes no namespaces or links.
    """

    def __init__(self, hosts: int, bridges: int = 1, *, clocks: bool = False) -> None:
        self.hosts = tuple(f"h{number}" for number in range(hosts))
        self.bridges = tuple(range(bridges))
        self._prefix = prefix_of(next(_numbers))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._down: set[tuple[str, int]] = set()
        self._faulty: set[tuple[str, int]] = set()
        self._still: set[tuple[str, int]] = set()
        self._disks: dict[str, Disk] = {}
        self._files = RUN / self._namespace("files")
        self._clocks: dict[str, Clock] = {}
        self._with_clocks = clocks

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
        """End every process on the hosts, and remove hosts and bridges, disks and clocks."""
        for place in (*self.hosts, _SWITCH):
            remove_namespace(self._namespace(place))
        for process in self._processes:
            process.wait(END_SECONDS)
        for disk in self._disks.values():
            disk.remove()
        shutil.rmtree(self._files, ignore_errors=True)

    # --- what the bed looks like ----------------------------------------------------------------------------

    def address(self, host: str, bridge: int = 0) -> str:
        """The host's IPv4 address on the bridge."""
        return f"10.91.{bridge}.{self.hosts.index(host) + 1}"

    def network(self, bridge: int = 0) -> str:
        """The bridge's network, as CIDR."""
        return f"10.91.{bridge}.0/24"

    def pids(self, host: str) -> set[int]:
        """The processes that run on the host now."""
        return pids_in(self._namespace(host))

    def sockets(self, host: str) -> list[Socket]:
        """The IPv4 TCP sockets on the host."""
        lines = command("ip", "netns", "exec", self._namespace(host), "ss", "-Htanp4").splitlines()
        return [
            Socket(fields[0], fields[3], fields[4], frozenset(map(int, re.findall(r"pid=(\d+)", line))))
            for line, fields in ((line, line.split()) for line in lines)
        ]

    def refusal(self, verb: Literal["drop", "limit"]) -> str | None:
        """Why this kernel cannot lose packets (and cut one way), or limit a rate; `None` where it can."""
        try:
            if verb == "drop":
                lose(self._namespace(_SWITCH), "lo", "both", 0.0)
            else:
                slow(self._namespace(_SWITCH), "lo", 10**9)
        except BedError as error:
            return f"this kernel cannot {verb}: {error}"
        finally:
            clear(self._namespace(_SWITCH), "lo")
        return None

    # --- processes ------------------------------------------------------------------------------------------

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
        clock = self._clocks[host].environment() if host in self._clocks else {}
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._namespace(host), *map(str, command)],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env={**os.environ, **clock, **(environment or {})},
            start_new_session=True,  # Ctrl-C reaches only the tests, which end it
        )
        self._processes.append(process)
        home = (NAMESPACES / self._namespace(host)).stat().st_ino
        while process.poll() is None and home_of(process.pid) != home:
            time.sleep(0)  # `ip` is on its way there; whoever closes the bed now would not find it
        return process

    def kill(self, host: str, pid: int) -> None:
        """End a process of the host with SIGKILL. Raises `BedError` where it is not there, as `stop` does."""
        self._signal(host, pid, signal.SIGKILL)
        self._still.discard((host, pid))

    def stop(self, host: str, pid: int) -> None:
        """Let a process of the host stand still (SIGSTOP), and return once it does.

        Raises:
            BedError: no such process is on the host, or it does not come to stand still.
        """
        self._still.add((host, pid))
        self._signal(host, pid, signal.SIGSTOP)
        deadline = time.monotonic() + END_SECONDS
        while not is_still(pid):
            if pid not in self.pids(host) or time.monotonic() > deadline:
                raise BedError(f"process {pid} on {host} was stopped, but has ended or goes on")

    def proceed(self, host: str, pid: int) -> None:
        """Let a process go on that stands still; nothing where it has ended since."""
        self._still.discard((host, pid))
        if pid in self.pids(host):
            self._signal(host, pid, signal.SIGCONT)

    # --- links ----------------------------------------------------------------------------------------------

    def cut(self, host: str, bridge: int = 0, way: Way = "both") -> None:
        """Pull the host's cable out of the bridge: no packet either way, connections stay as they are.

        With a `way`, only packets "from" the host or only those "to" it are lost, and both ends see a link that is up.

        Raises:
            BedError: this kernel cannot cut one way, see `refusal`.
        """
        if way != "both":
            self.drop(host, 1.0, bridge, way)
            return
        self._faulty.add((host, bridge))
        self._ip(_SWITCH, "link", "set", self._port(host, bridge), "down")

    def drop(self, host: str, share: float, bridge: int = 0, way: Way = "both") -> None:
        """Lose a share (0 to 1) of the packets of the host's link, at random.

        Raises:
            BedError: this kernel cannot, see `refusal`; or the share is none.
        """
        self._faulty.add((host, bridge))
        lose(self._namespace(_SWITCH), self._port(host, bridge), way, share)

    def bar(self, host: str, bridge: int = 0) -> None:
        """Let the host open no TCP connection over its link; those that are open, and others' to it, go on.

        Raises:
            BedError: this kernel cannot, see `refusal`.
        """
        self._faulty.add((host, bridge))
        bar(self._namespace(_SWITCH), self._port(host, bridge))

    def limit(self, host: str, bits_per_second: int, bridge: int = 0, way: Way = "both") -> None:
        """Let the host's link carry no more than this in each direction.

        Raises:
            BedError: this kernel cannot, see `refusal`.
        """
        self._faulty.add((host, bridge))
        if way != "to":
            slow(self._namespace(host), f"eth{bridge}", bits_per_second)
        if way != "from":
            slow(self._namespace(_SWITCH), self._port(host, bridge), bits_per_second)

    def heal(self, host: str, bridge: int = 0) -> None:
        """Put the cable back, and undo every `drop` and `limit` of the link."""
        self._faulty.discard((host, bridge))
        clear(self._namespace(host), f"eth{bridge}")
        clear(self._namespace(_SWITCH), self._port(host, bridge))
        self._ip(_SWITCH, "link", "set", self._port(host, bridge), "up")

    def take_down(self, host: str, bridge: int = 0) -> None:
        """Switch the host's own interface off: it has no route to the bridge any more."""
        self._down.add((host, bridge))
        self._ip(host, "link", "set", f"eth{bridge}", "down")

    def bring_up(self, host: str, bridge: int = 0) -> None:
        """Switch the host's own interface on again."""
        self._down.discard((host, bridge))
        self._ip(host, "link", "set", f"eth{bridge}", "up")

    def add_address(self, host: str, address: str, bridge: int = 0) -> None:
        """Give the host one more address on the bridge, for as long as the bed lives."""
        self._ip(host, "address", "add", f"{address}/24", "dev", f"eth{bridge}")

    # --- disks and clocks -----------------------------------------------------------------------------------

    def disk(self, host: str, directory: Path, size_bytes: int) -> None:
        """Give the host a disk of this size at `directory`, which every process sees that is started afterwards.

        Raises:
            BedError: the host has one, or nothing can be mounted.
        """
        if host in self._disks:
            raise BedError(f"{host} has a disk at {self._disks[host].directory}; a host has at most one")
        self._disks[host] = Disk(self._namespace(host), directory, size_bytes)

    def fill(self, host: str) -> None:
        """Leave no byte free on the host's disk."""
        self._disks[host].fill()

    def free(self, host: str) -> None:
        """Give back what `fill` took."""
        self._disks[host].free()

    def jump(self, host: str, seconds: float) -> None:
        """Put the host's wall clock forward, or back where `seconds` is negative.

        It is the clock of Python's `time.time` and `time.time_ns`, in every process on the host, at once. Nothing else
        is shifted: neither the monotonic clock nor what other libraries and the kernel read.

        Raises:
            BedError: the bed was made without clocks.
        """
        if host not in self._clocks:
            raise BedError(f"{host} has no clock of its own; make the bed with clocks=True")
        clock = self._clocks[host]
        clock.set(clock.offset + seconds)

    def mend(self) -> None:
        """Undo all that was done to links, processes that stand still, disks and clocks."""
        for host, bridge in list(self._faulty):
            self.heal(host, bridge)
        for host, bridge in list(self._down):
            self.bring_up(host, bridge)
        for host, pid in list(self._still):
            self.proceed(host, pid)
        for disk in self._disks.values():
            disk.free()
        for clock in self._clocks.values():
            clock.set(0.0)

    # --- making it ------------------------------------------------------------------------------------------

    def _make(self) -> None:
        for place in (_SWITCH, *self.hosts):
            command("ip", "netns", "add", self._namespace(place))
            self._ip(place, "link", "set", "lo", "up")
        for bridge in self.bridges:
            self._ip(_SWITCH, "link", "add", f"br{bridge}", "type", "bridge", "forward_delay", "0")
            self._ip(_SWITCH, "link", "set", f"br{bridge}", "up")
            for host in self.hosts:
                self._connect(host, bridge)
        if self._with_clocks:
            self._clocks = {host: Clock(self._files / f"{host}.clock") for host in self.hosts}

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
        command("ip", "-n", self._namespace(place), *arguments)

    def _signal(self, host: str, pid: int, number: signal.Signals) -> None:
        if pid not in self.pids(host):
            raise BedError(f"process {pid} is not on {host}")
        os.kill(pid, number)
