"""What instances leave behind on this machine after they were deleted: nothing, if all is well."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from muster.errors import PortError
from muster.group.ports import reserve_at
from muster.group.scope import owner_alive
from muster.spec import Address
from muster.state import Instance

_RECORD = re.compile(r"(\d+)-(\d+)\.runner")
#: A worker's directories of which nothing may be left when it has ended: coordination files, records of runners.
_PASSING = ("groups", "runners")
_NEWEST_RANKS = 100


class Leftovers(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of what is still there."""

    files: int
    ports: int
    processes: int


def left_by(instances: Iterable[Instance], files: Iterable[Path], directories: Sequence[Path]) -> Leftovers:
    """Look for what these instances left.

    Args:
        instances: As they were when they were ready.
        files: What `files_in` answered before they were created.
        directories: The workers' own, where coordination files and records of runners are.
    """
    ranks = [rank for instance in instances for rank in instance.ranks]
    return Leftovers(
        files=len(files_in(directories) - set(files)),
        ports=sum(port_left(address, {rank.pid}) is not None for rank in ranks for address in rank.addresses),
        processes=sum(is_alive(rank.pid, rank.process_started) for rank in ranks),
    )


def files_in(directories: Sequence[Path]) -> set[Path]:
    """All files below these, without the records of runners that are alive, as those of the pool are."""
    return {
        path for directory in directories for path in directory.rglob("*") if path.is_file() and not _of_living(path)
    }


def left_after(
    processes: Mapping[tuple[int, float], Sequence[Address]], homes: Iterable[Path], ports: Iterable[int]
) -> Leftovers:
    """Look for what a whole cluster left when it was stopped.

    Args:
        processes: All that were seen, by pid and start time, with the addresses of those that were ranks.
        homes: The workers' own directories.
        ports: Of the coordinator, on loopback.

    Of many ranks only the newest count for ports: what older ones had, others may have by now.
    """
    newest = list(processes.values())[-_NEWEST_RANKS:]
    addresses = {(one.host, one.port) for found in newest for one in found}
    addresses |= {("127.0.0.1", port) for port in ports}
    pids = {pid for pid, _ in processes}
    return Leftovers(
        files=sum(1 for home in homes for name in _PASSING for path in (home / name).rglob("*") if path.is_file()),
        ports=sum(port_left(Address(host, port, ""), pids) is not None for host, port in addresses),
        processes=sum(is_alive(pid, started) for pid, started in processes),
    )


def is_alive(pid: int, started: float) -> bool:
    """Whether the process that started then still runs; one that only waits to be buried does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE and owner_alive(pid, started)
    except psutil.NoSuchProcess:
        return False


def collisions(instances: Iterable[Instance]) -> int:
    """How many times an endpoint was given out that another rank of these instances has."""
    endpoints = [
        (address.host, address.port) for instance in instances for rank in instance.ranks for address in rank.addresses
    ]
    return len(endpoints) - len(set(endpoints))


def _of_living(path: Path) -> bool:
    match = _RECORD.fullmatch(path.name)
    return match is not None and owner_alive(int(match[1]), int(match[2]) / 100)


def port_left(address: Address, ranks: Collection[int]) -> str | None:
    """What still holds the port of ranks that have ended, whose pids these are; `None` where nothing of theirs does.

    The system may give the port to anybody at once. Whoever has it there is one of theirs in the session that a rank
    leads; a socket that only keeps the port has no owner that could be seen, and counts as a reservation for them.
    Closing connections do not count.
    """
    try:
        reserve_at(address.host, address.port).close()
    except PortError as error:
        seen = psutil.net_connections("tcp")
        owners = {one.pid for one in seen if one.pid and one.laddr and one.laddr.port == address.port}
        return f"port {address}: {error}" if not owners or any(_session(pid) in ranks for pid in owners) else None
    return None


def _session(pid: int) -> int:
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(pid)
    return 0
