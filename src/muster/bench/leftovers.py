"""What instances leave behind on this machine after they were deleted: nothing, if all is well."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
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
        ports=sum(not _is_free(address) for rank in ranks for address in rank.addresses),
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
    return Leftovers(
        files=sum(1 for home in homes for name in _PASSING for path in (home / name).rglob("*") if path.is_file()),
        ports=sum(not _is_free(Address(host, port, "")) for host, port in addresses),
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


def _is_free(address: Address) -> bool:
    """Whether nobody listens on the endpoint or holds it; closing connections do not count."""
    try:
        reserve_at(address.host, address.port).close()
    except PortError:
        return False
    return True
