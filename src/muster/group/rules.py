"""The rules that MLX applies to a coordination payload, and those it forgets.

MLX answers a bad hostfile or device file with a JSON parse error, with a wait of 31 seconds, with a crash, or
with a wait for ever. `validate` answers before MLX sees it, and names the rank and the pair.

Source: `mlx/distributed/ring/ring.cpp` (`load_nodes`, `RingGroup`), and for jaccl
`mlx/distributed/jaccl/lib/jaccl/jaccl.cpp` (`parse_devices_json`, `is_valid_mesh`, `is_valid_ring`, `init`),
`mesh.h` and `ring.h` beside it (limits of 8 peers and 4 wires). Waits and crashes: seen with mlx 0.32.4.
"""

from __future__ import annotations

import enum
from typing import Final, cast

import msgspec

from muster.errors import PayloadError
from muster.group.addresses import WILDCARD, Address, resolve
from muster.group.shapes import JacclPayload, Payload, RingPayload

#: MLX's mesh holds its peers in arrays of this size.
MAX_MESH_RANKS: Final = 8
#: MLX's jaccl ring holds the connections to one neighbour in arrays of this size.
MAX_RING_WIRES: Final = 4

_CABLES: Final = "check the Thunderbolt cables and `ibv_devices` on both nodes"


class Topology(enum.Enum):
    """How jaccl connects the ranks."""

    RING = "ring"
    MESH = "mesh"


def validate(payload: Payload) -> None:
    """Refuses what MLX would refuse, misread or hang on.

    Raises:
        PayloadError: Names the rank, the pair where there is one, the value, and the remedy.
    """
    resolved(payload)


def resolved(payload: Payload) -> Payload:
    """`payload` with every name replaced by its IPv4 address, after the same checks as `validate`.

    MLX tries only the first address of a name, which may be IPv6; a dotted address leaves no choice.

    Raises:
        PayloadError: As `validate`.
    """
    _check_rank(payload)
    match payload:
        case RingPayload():
            return _resolved_ring(payload)
        case JacclPayload():
            jaccl_topology(payload)
            coordinator = resolve(payload.coordinator, whose=f"coordinator of rank {payload.rank}")
            if coordinator.host == WILDCARD and payload.rank != 0:
                raise PayloadError(
                    f"coordinator of rank {payload.rank}: {payload.coordinator} cannot be dialled",
                    remedy="use the address at which this rank reaches rank 0",
                )
            return msgspec.structs.replace(payload, coordinator=str(coordinator))


def jaccl_topology(payload: JacclPayload) -> Topology:
    """The topology that MLX will choose for this matrix: mesh before ring, unless the ring is preferred.

    Raises:
        PayloadError: The matrix is neither a valid mesh nor a valid ring, or too large for what MLX chooses.
    """
    counts = _device_counts(payload)
    size = payload.world_size
    ring_fault = _ring_fault(counts)
    mesh_fault = _mesh_fault(counts)
    if ring_fault is not None and mesh_fault is not None:
        raise PayloadError(f"the devices form no mesh ({mesh_fault}) and no ring ({ring_fault})", remedy=_CABLES)
    if mesh_fault is not None or (payload.prefer_ring and ring_fault is None):
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


def _check_rank(payload: Payload) -> None:
    rows = payload.hosts if isinstance(payload, RingPayload) else payload.devices
    what = "host entries" if isinstance(payload, RingPayload) else "device rows"
    size = payload.world_size
    if size < 2:
        raise PayloadError(f"world size {size} needs no group", remedy="run a single rank without a group")
    if len(rows) != size:
        raise PayloadError(f"{len(rows)} {what} for world size {size}", remedy="give one per rank")
    if not 0 <= payload.rank < size:
        raise PayloadError(f"rank {payload.rank} is out of range for world size {size}", remedy=f"use 0 … {size - 1}")


def _resolved_ring(payload: RingPayload) -> RingPayload:
    hosts: list[tuple[str, ...]] = []
    owners: dict[Address, int] = {}
    for rank, entry in enumerate(payload.hosts):
        # From a file the entry may be a flat text, which MLX would read letter by letter and wait for ever.
        if isinstance(cast(object, entry), str):
            raise PayloadError(f"rank {rank}: {entry!r} is not a list of addresses", remedy="write a list")
        if not entry:
            raise PayloadError(f"rank {rank} lists no address", remedy="give each rank at least one")
        if len(entry) != len(payload.hosts[0]):
            raise PayloadError(
                f"rank {rank} lists {len(entry)} addresses but rank 0 lists {len(payload.hosts[0])} "
                f"(pair {(rank - 1) % payload.world_size}-{rank}): MLX needs as many connections to the left as "
                "to the right",
                remedy="list equally many addresses for every rank",
            )
        addresses = [resolve(text, whose=f"rank {rank}, address {i}") for i, text in enumerate(entry)]
        for address in addresses:
            _check_use(payload, rank, address, owners)
            owners[address] = rank
        hosts.append(tuple(str(address) for address in addresses))
    return msgspec.structs.replace(payload, hosts=tuple(hosts))


def _check_use(payload: RingPayload, rank: int, address: Address, owners: dict[Address, int]) -> None:
    if address in owners:
        other = owners[address]
        text = f"ranks {other} and {rank} (pair {other}-{rank})" if other != rank else f"rank {rank} twice"
        raise PayloadError(
            f"{address} is used by {text}: they would steal each other's connections",
            remedy="reserve a port of its own for each rank and link",
        )
    if address.host == WILDCARD and rank != payload.rank:
        raise PayloadError(
            f"rank {rank}: {address} cannot be dialled from rank {payload.rank}",
            remedy="use the address at which the other ranks reach it",
        )


def _device_counts(payload: JacclPayload) -> list[list[int]]:
    counts: list[list[int]] = []
    for rank, row in enumerate(payload.devices):
        if isinstance(cast(object, row), str) or len(row) != payload.world_size:
            raise PayloadError(
                f"the device row of rank {rank} has {len(row)} entries for world size {payload.world_size}",
                remedy="give a square matrix: one entry per rank, null for the rank itself",
            )
        counts.append([_entry_count(rank, peer, entry) for peer, entry in enumerate(row)])
        if counts[rank][rank]:
            raise PayloadError(
                f"rank {rank} has a device to itself (pair {rank}-{rank}): {row[rank]!r}",
                remedy="put null on the diagonal",
            )
    return counts


def _entry_count(rank: int, peer: int, entry: object) -> int:
    if entry is None:
        return 0
    single = not isinstance(entry, tuple | list)
    names = (entry,) if single else tuple(cast("tuple[object, ...] | list[object]", entry))
    for name in names:
        if not isinstance(name, str) or not name.strip() or name != name.strip():
            raise PayloadError(
                f"rank {rank} to rank {peer} (pair {rank}-{peer}): {name!r} is not a device name",
                remedy="use the names that `ibv_devices` prints, such as rdma_en2, or null",
            )
    if len(set(names)) != len(names):
        raise PayloadError(
            f"rank {rank} to rank {peer} (pair {rank}-{peer}): a device is listed twice in {list(names)}",
            remedy="list each device once",
        )
    return len(names)


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
