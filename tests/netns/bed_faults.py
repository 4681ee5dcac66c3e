"""Faults of links, disks and clocks. The kernel needs tc with its BPF classifier and token bucket, and tmpfs."""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from bed_kernel import BedError, command, unmount

#: Which packets of a host's link: those that come from the host, those that go to it, or both.
Way = Literal["both", "from", "to"]
#: Where `sitecustomize.py` is, which shifts clocks.
_SHIM: Final = Path(__file__).parent / "clock_shim"
_FILLER: Final = "filler"
#: A token bucket passes this much at once; less than a full segment would lose it.
_BURST_BYTES: Final = 16 * 1024
#: The longest that a packet waits for its turn before it is lost.
_QUEUE_MILLISECONDS: Final = 400
#: Classic BPF: load a random number; is it at least so large?; the two verdicts of tc.
_RANDOM, _AT_LEAST = "32 0 0 4294963256", "53 1 0"
_PASS, _LOSE = "6 0 0 0", "6 0 0 2"
#: The same for what opens a TCP connection: IPv4, TCP, SYN without ACK; each test skips to `_PASS` otherwise.
_OPENS = ("40 0 0 12", "21 0 6 2048", "48 0 0 23", "21 0 4 6", "48 0 0 47", "84 0 0 18", "21 0 1 2")


# --- links --------------------------------------------------------------------------------------------------


def lose(namespace: str, port: str, way: Way, share: float) -> None:
    """Lose this share (0 to 1) of the packets that pass a port of the switch one way or both.

    Raises:
        BedError: this kernel has no BPF classifier for tc.
    """
    if not 0 <= share <= 1:
        raise BedError(f"share is {share}; it must be from 0 to 1")
    threshold = round(share * 2**32)
    program = [_LOSE] if threshold == 2**32 else [_RANDOM, f"{_AT_LEAST} {threshold}", _LOSE, _PASS]
    _filter(namespace, port, way, program)


def bar(namespace: str, port: str) -> None:
    """Lose what opens TCP connections from the host behind a port of the switch, as a firewall does.

    Raises:
        BedError: this kernel has no BPF classifier for tc.
    """
    _filter(namespace, port, "from", [*_OPENS, _LOSE, _PASS])


def _filter(namespace: str, port: str, way: Way, program: Sequence[str]) -> None:
    bytecode = ",".join([str(len(program)), *program])
    # Of a port of the switch: what comes in is from the host, what goes out is to it.
    hooks = {"from": ("ingress",), "to": ("egress",), "both": ("ingress", "egress")}[way]
    _tc(namespace, "qdisc", "replace", "dev", port, "clsact")
    for hook in hooks:
        filter_ = ("dev", port, hook, "prio", "1", "handle", "1", "bpf", "direct-action", "bytecode", bytecode)
        _tc(namespace, "filter", "replace", *filter_)


def slow(namespace: str, device: str, bits_per_second: int) -> None:
    """Let a device send no more than this; what waits longer than `_QUEUE_MILLISECONDS` is lost.

    Raises:
        BedError: this kernel has no token bucket.
    """
    burst = max(_BURST_BYTES, bits_per_second // 8 // 100)
    bucket = ("rate", f"{bits_per_second}bit", "burst", str(burst), "latency", f"{_QUEUE_MILLISECONDS}ms")
    _tc(namespace, "qdisc", "replace", "dev", device, "root", "tbf", *bucket)


def clear(namespace: str, device: str) -> None:
    """Undo `lose` and `slow` of a device; nothing where there was neither."""
    for qdisc in ("clsact", "root"):
        with contextlib.suppress(BedError):
            _tc(namespace, "qdisc", "delete", "dev", device, qdisc)


def _tc(namespace: str, *arguments: str) -> None:
    command("tc", "-netns", namespace, *arguments)


# --- disks --------------------------------------------------------------------------------------------------


class Disk:
    """A file system in memory, mounted on a directory of the machine, whose size is fixed."""

    def __init__(self, name: str, directory: Path, size_bytes: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        command("mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=0700", name, str(directory))
        self.directory = directory

    def fill(self) -> None:
        """Take all that is free, to the last page."""
        space = os.statvfs(self.directory)
        with (self.directory / _FILLER).open("ab") as file:
            wanted = space.f_bfree * space.f_frsize
            while wanted >= space.f_frsize:
                try:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, wanted)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    wanted //= 2  # somebody was faster

    def free(self) -> None:
        """Give back what `fill` took."""
        (self.directory / _FILLER).unlink(missing_ok=True)

    def remove(self) -> None:
        """Unmount it; what was written there is lost."""
        unmount(self.directory)


# --- clocks -------------------------------------------------------------------------------------------------


class Clock:
    """The wall clock of the Python processes that run with `environment`, ahead of the machine's by `offset`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.offset = 0.0
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(8))

    def environment(self) -> dict[str, str]:
        """What a process must have in its environment to live by this clock."""
        path = os.pathsep.join(filter(None, (str(_SHIM), os.environ.get("PYTHONPATH"))))
        return {"PYTHONPATH": path, "MUSTER_BED_CLOCK": str(self._file)}

    def set(self, offset_seconds: float) -> None:
        """Set how far it is ahead; behind, where that is negative."""
        with self._file.open("r+b") as file:  # the same file: the processes have it mapped
            file.write(struct.pack("<d", offset_seconds))
        self.offset = offset_seconds
