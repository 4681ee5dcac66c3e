"""The rules that MLX applies to a coordination payload, and those it forgets.

MLX answers a bad hostfile or device file with a JSON parse error, with a wait of 31 seconds, with a crash, or
with a wait for ever. `validate` answers before MLX sees it, and names the rank and the pair.

Source: `mlx/distributed/ring/ring.cpp` (`load_nodes`, `RingGroup`); for jaccl see `muster.device_matrix`. Waits and
crashes: seen with mlx 0.32.4.
"""

from __future__ import annotations

from typing import cast

import msgspec

from muster.device_matrix import Topology, topology
from muster.errors import PayloadError
from muster.group.addresses import WILDCARD, Address, resolve
from muster.group.shapes import JacclPayload, Payload, RingPayload


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
            if payload.side_channel == "bus":
                return msgspec.structs.replace(payload, coordinator="")
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
    return topology(payload.devices, prefer_ring=payload.prefer_ring)


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
