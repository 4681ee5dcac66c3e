"""What must not be there once an attempt is over: processes, ports, files and records, on every node."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import psutil
from grounds import Ground
from kit import alive

from muster.spec import Address, NodeId


def children(ground: Ground, node: str) -> list[psutil.Process]:
    """Everything that a node's worker has started and not yet reaped, but its reaper."""
    found: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(ground.cluster.members[node].process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "reaper.py" not in " ".join(child.cmdline()):
                    found.append(child)
    return found


def leftovers(
    ground: Ground, wanted: set[int], ports: Iterable[tuple[NodeId, Address]] = (), gone: Iterable[int] = ()
) -> list[str]:
    """What is left beside the `wanted` runners: those that must be `gone`, their `ports`, and anything else at all."""
    found = [f"runner {pid}" for pid in gone if alive(pid)]
    found += [f"port {address}" for node, address in ports if ground.is_taken(node, address)]
    for node in ground.nodes:
        directory = ground.cluster.directory / node
        found += [str(path) for path in (directory / "groups").glob("*")]
        recorded = {int(path.name.split("-")[0]) for path in (directory / "runners").glob("*.runner")}
        found += [f"record of {pid} on {node}" for pid in recorded - wanted]
        found += [f"process {one.pid} on {node}" for one in children(ground, node) if one.pid not in wanted]
    return found
