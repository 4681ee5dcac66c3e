"""What instances leave behind on this machine after they were deleted: nothing, if all is well."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import psutil

from muster.errors import PortError
from muster.group.ports import reserve_at
from muster.group.scope import owner_alive
from muster.spec import Address
from muster.state import Instance

_RECORD = re.compile(r"(\d+)-(\d+)\.runner")


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
        processes=sum(_alive(rank.pid, rank.process_started) for rank in ranks),
    )


def files_in(directories: Sequence[Path]) -> set[Path]:
    """All files below these, without the records of runners that are alive, as those of the pool are."""
    return {
        path for directory in directories for path in directory.rglob("*") if path.is_file() and not _of_living(path)
    }


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


def _alive(pid: int, started: float) -> bool:
    return psutil.pid_exists(pid) and owner_alive(pid, started)
