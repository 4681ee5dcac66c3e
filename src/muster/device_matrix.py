"""A matrix of RDMA devices, and whether MLX's JACCL can form a group of it. Pure.

Entry [i][j] is how rank i reaches rank j: a device's name, several of them, or None. What is refused here would fail,
crash or hang inside MLX.

Source: `mlx/distributed/jaccl/lib/jaccl/jaccl.cpp` (`parse_devices_json`, `is_valid_mesh`, `is_valid_ring`, `init`),
`mesh.cpp` and `ring.cpp` beside it (what is made per peer, the limits of 8 peers and 4 wires); mlx issue 3162 (what a
Thunderbolt device has: 10 queue pairs and about 100 memory regions, counted on two machines with macOS 26).
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter
from typing import Final, cast

import msgspec

from muster.errors import PayloadError
from muster.layout import Devices

#: MLX's mesh holds its peers in arrays of this size.
MAX_MESH_RANKS: Final = 8
#: MLX's jaccl ring holds the connections to one neighbour in arrays of this size.
MAX_RING_WIRES: Final = 4
#: The eleventh queue pair of a device fails with errno 16, however long one waits.
MAX_QUEUE_PAIRS: Final = 10
#: About so many memory regions can be registered with one device.
MAX_MEMORY_REGIONS: Final = 100
#: Buffers that MLX registers for one direction of one connection: 8 sizes, 2 of each.
_BUFFERS: Final = 16

_CABLES: Final = "check the Thunderbolt cables and `ibv_devices` on both nodes"


class Topology(enum.Enum):
    """How jaccl connects the ranks."""

    RING = "ring"
    MESH = "mesh"


class Use(msgspec.Struct, frozen=True):
    """What a group takes of one device."""

    queue_pairs: int = 0
    memory_regions: int = 0

    def __add__(self, other: Use) -> Use:
        return Use(self.queue_pairs + other.queue_pairs, self.memory_regions + other.memory_regions)

    @property
    def excess(self) -> str:
        """Why a device cannot give so much; empty where it can."""
        if self.queue_pairs > MAX_QUEUE_PAIRS:
            return f"{self.queue_pairs} queue pairs are needed; a device has {MAX_QUEUE_PAIRS}"
        if self.memory_regions > MAX_MEMORY_REGIONS:
            return f"{self.memory_regions} memory regions are needed; a device has {MAX_MEMORY_REGIONS}"
        return ""


def names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The devices of one entry."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def cables(devices: Devices) -> tuple[str, ...]:
    """For people: of each pair of ranks that is joined, the devices at both ends, as in "0-1 rdma_en2 ↔ rdma_en4"."""
    found: list[str] = []
    for low, high in itertools.combinations(range(len(devices)), 2):
        ends = zip(names(devices[low][high]), names(devices[high][low]), strict=False)
        found += [f"{low}-{high} {near} ↔ {far}" for near, far in ends]
    return tuple(found)


def topology(devices: Devices, *, prefer_ring: bool = False) -> Topology:
    """What MLX will form of `devices`: a mesh before a ring, unless the ring is preferred.

    Raises:
        PayloadError: it is neither a valid mesh nor a valid ring, or too large for what MLX chooses.
    """
    counts = _counts(devices)
    size = len(devices)
    ring_fault, mesh_fault = _ring_fault(counts), _mesh_fault(counts)
    if ring_fault is not None and mesh_fault is not None:
        raise PayloadError(f"the devices form no mesh ({mesh_fault}) and no ring ({ring_fault})", remedy=_CABLES)
    if mesh_fault is not None or (prefer_ring and ring_fault is None):
        if counts[0][1] > MAX_RING_WIRES:
            raise PayloadError(
                f"rank 0 has {counts[0][1]} devices to rank 1 (pair 0-1): a ring takes at most {MAX_RING_WIRES}",
                remedy=f"list at most {MAX_RING_WIRES} devices for each neighbour",
            )
        return Topology.RING
    if size > MAX_MESH_RANKS:
        raise PayloadError(
            f"world size {size} is too large: a mesh takes at most {MAX_MESH_RANKS} ranks",
            remedy="prefer the ring, or use fewer ranks",
        )
    return Topology.MESH


def against_ring(devices: Devices) -> str:
    """Why a matrix that `topology` takes is no ring; empty where it is one."""
    return _ring_fault(_counts(devices)) or ""


def usage(devices: Devices, *, ring: bool) -> tuple[dict[str, Use], ...]:
    """Per rank, what MLX takes of each of its devices when it forms a ring, or else a mesh, of a valid matrix."""
    size = len(devices)
    found: list[dict[str, Use]] = []
    for rank, row in enumerate(devices):
        left, right = (rank - 1) % size, (rank + 1) % size
        used: dict[str, Use] = {}
        if ring:
            taken = Counter((*names(row[left]), *names(row[right])))
            used = {name: Use(count, 2 * _BUFFERS * count) for name, count in taken.items()}
        else:
            for peer in (peer for peer in range(size) if peer != rank):
                # A mesh sends long messages around a ring, for which both neighbours have buffers of their own.
                shares = 2 + 2 * (peer == left) + 2 * (peer == right)
                for name in names(row[peer])[:1]:
                    used[name] = used.get(name, Use()) + Use(1, shares * _BUFFERS)
        found.append(used)
    return tuple(found)


def _counts(devices: Devices) -> list[list[int]]:
    counts: list[list[int]] = []
    for rank, row in enumerate(devices):
        if isinstance(cast(object, row), str) or len(row) != len(devices):
            raise PayloadError(
                f"the device row of rank {rank} has {len(row)} entries for world size {len(devices)}",
                remedy="give a square matrix: one entry per rank, null for the rank itself",
            )
        counts.append([_entry_count(rank, peer, entry) for peer, entry in enumerate(row)])
        if counts[rank][rank]:
            raise PayloadError(
                f"rank {rank} has a device to itself (pair {rank}-{rank}): {row[rank]!r}",
                remedy="put null on the diagonal",
            )
    if len(devices) < 2:
        raise PayloadError(f"world size {len(devices)} needs no group", remedy="run a single rank without a group")
    return counts


def _entry_count(rank: int, peer: int, entry: object) -> int:
    if entry is None:
        return 0
    single = not isinstance(entry, tuple | list)
    listed = (entry,) if single else tuple(cast("tuple[object, ...] | list[object]", entry))
    for name in listed:
        if not isinstance(name, str) or not name.strip() or name != name.strip():
            raise PayloadError(
                f"rank {rank} to rank {peer} (pair {rank}-{peer}): {name!r} is not a device name",
                remedy="use the names that `ibv_devices` prints, such as rdma_en2, or null",
            )
    if len(set(listed)) != len(listed):
        raise PayloadError(
            f"rank {rank} to rank {peer} (pair {rank}-{peer}): a device is listed twice in {list(listed)}",
            remedy="list each device once",
        )
    return len(listed)


def _mesh_fault(counts: list[list[int]]) -> str | None:
    for rank, row in enumerate(counts):
        for peer, count in enumerate(row):
            if rank != peer and not count:
                return f"rank {rank} has no device to rank {peer}, pair {rank}-{peer}"
    return None


def _ring_fault(counts: list[list[int]]) -> str | None:
    size = len(counts)
    wires = counts[0][1]
    for rank, row in enumerate(counts):
        left, right = (rank - 1) % size, (rank + 1) % size
        for peer in (left, right):
            if not row[peer]:
                return f"rank {rank} has no device to its neighbour rank {peer}, pair {rank}-{peer}"
        if row[left] != row[right]:
            return (
                f"rank {rank} has {row[left]} devices to its left (rank {left}) and {row[right]} to its right "
                f"(rank {right})"
            )
        if row[right] != wires:
            return f"rank {rank} has {row[right]} devices to rank {right}, rank 0 has {wires} to rank 1"
    return None
