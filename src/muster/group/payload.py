"""What MLX reads to form a group, built from what the ranks prepared.

A ring payload is MLX's hostfile plus the rank; a jaccl payload is MLX's device file plus the coordinator's
address and the rank. Both are values: building them touches no file and no variable. `validate` applies the
rules of `muster.group.rules`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from muster.errors import PayloadError
from muster.group.addresses import Address, is_loopback
from muster.group.rules import validate
from muster.group.shapes import Devices, JacclPayload, Payload, PreparedRank, RankAddress, RingPayload
from muster.spec import SideChannel

__all__ = [
    "Address",
    "Devices",
    "JacclPayload",
    "Payload",
    "PreparedRank",
    "RankAddress",
    "RingPayload",
    "build_given_ring",
    "build_jaccl",
    "build_ring",
    "validate",
]

_REACHABLE: Final = "start the workers with addresses that the other nodes can reach"


def build_ring(
    instance: str,
    attempt: int,
    rank: int,
    prepared: Sequence[PreparedRank],
    *,
    max_links: int | None = None,
    dialled: Sequence[str] = (),
) -> RingPayload:
    """The ring payload of `rank`, the same choice on every rank that has the same `prepared`.

    Each rank dials its right neighbour over the networks that both have, in the neighbour's order. MLX wants
    equally many connections everywhere, so the pair with the fewest common networks decides. A pair without
    any common network uses the neighbour's first address: routing may still connect them. Loopback counts
    only when a rank of the pair offers nothing else, because 127.0.0.0/8 is a different network on each node.

    More than one link costs time: a rank listens on its addresses one after the other, so a neighbour that
    dials the second right after the first is refused and MLX waits a second (seen with mlx 0.32.4: 1.05 s on
    the dialling rank, per hop). Links also share each message equally, so the slowest decides.

    Args:
        instance: Id of the instance.
        attempt: Number of the attempt, from 1.
        rank: Whose view to build.
        prepared: One per rank, in any order.
        max_links: Upper limit of connections per neighbour; None for all common networks.
        dialled: By rank, the address at which its left neighbour dials it, where placement has decided that.

    Raises:
        PayloadError: Fewer than two ranks, a rank missing, twice or without addresses, `rank` out of range,
            a neighbour that offers only loopback to a rank that offers only other networks, or one that has not
            prepared the address at which it is to be dialled.

    Source: `mlx/distributed/ring/ring.cpp` (`RingGroup`, `accept_connections`, `make_connections`).
    """
    ranks = _in_order(prepared)
    size = len(ranks)
    if not 0 <= rank < size:
        raise PayloadError(f"rank {rank} is out of range for world size {size}", remedy=f"use 0 … {size - 1}")
    if max_links is not None and max_links < 1:
        raise PayloadError(f"max_links is {max_links}", remedy="use at least 1")
    if dialled and len(dialled) != size:
        raise PayloadError(f"{len(dialled)} addresses are dialled for world size {size}", remedy="give one per rank")
    found = [
        [_prepared_at(ranks[index], dialled[index])] if dialled else _common(ranks[index - 1], ranks[index])
        for index in range(size)
    ]
    links = min(len(addresses) for addresses in found)
    links = links if max_links is None else min(links, max_links)
    hosts = tuple(tuple(str(address) for address in addresses[:links]) for addresses in found)
    return RingPayload(instance=instance, attempt=attempt, rank=rank, world_size=size, hosts=hosts)


def build_given_ring(instance: str, attempt: int, rank: int, prepared: Sequence[PreparedRank]) -> RingPayload:
    """The ring payload of `rank` where an operator chose all addresses: a connection for each, as with `mlx.launch`.

    Raises:
        PayloadError: Fewer than two ranks, a rank missing, twice or without addresses, or `rank` out of range.
    """
    ranks = _in_order(prepared)
    size = len(ranks)
    if not 0 <= rank < size:
        raise PayloadError(f"rank {rank} is out of range for world size {size}", remedy=f"use 0 … {size - 1}")
    hosts = tuple(tuple(str(address) for address in one.addresses) for one in ranks)
    return RingPayload(instance=instance, attempt=attempt, rank=rank, world_size=size, hosts=hosts)


def build_jaccl(
    instance: str,
    attempt: int,
    rank: int,
    devices: Sequence[Sequence[str | Sequence[str] | None]],
    coordinators: Sequence[str],
    prefer_ring: bool = False,
    side_channel: SideChannel = "tcp",
) -> JacclPayload:
    """The jaccl payload of `rank`.

    Args:
        instance: Id of the instance.
        attempt: Number of the attempt, from 1.
        rank: Whose view to build.
        devices: The whole matrix, the same on every rank.
        coordinators: By rank, the `ip:port` at which that rank reaches rank 0; its own entry for rank 0. Empty
            with the bus.
        prefer_ring: See `JacclPayload`.
        side_channel: See `JacclPayload`.

    Raises:
        PayloadError: Fewer than two ranks, `rank` out of range, or not one coordinator address per rank.
    """
    size = len(devices)
    if size < 2:
        raise PayloadError(f"world size {size} needs no group", remedy="run a single rank without a group")
    if not 0 <= rank < size:
        raise PayloadError(f"rank {rank} is out of range for world size {size}", remedy=f"use 0 … {size - 1}")
    if side_channel == "tcp" and len(coordinators) != size:
        raise PayloadError(
            f"{len(coordinators)} coordinator addresses for world size {size}",
            remedy="give one address of rank 0 per rank, as that rank reaches it",
        )
    matrix = tuple(
        tuple(entry if entry is None or isinstance(entry, str) else tuple(entry) for entry in row) for row in devices
    )
    return JacclPayload(
        instance=instance,
        attempt=attempt,
        rank=rank,
        world_size=size,
        devices=matrix,
        coordinator=coordinators[rank] if side_channel == "tcp" else "",
        prefer_ring=prefer_ring,
        side_channel=side_channel,
    )


def _in_order(prepared: Sequence[PreparedRank]) -> list[PreparedRank]:
    size = len(prepared)
    if size < 2:
        raise PayloadError(f"world size {size} needs no group", remedy="run a single rank without a group")
    ranks = sorted(prepared, key=lambda one: one.rank)
    for expected, one in enumerate(ranks):
        if one.rank != expected:
            found = [each.rank for each in ranks]
            raise PayloadError(
                f"rank {expected} is missing, or another is there twice: prepared ranks are {found}",
                remedy="wait until every rank of the attempt has reported its addresses",
            )
        if not one.addresses:
            raise PayloadError(f"rank {expected} prepared no address", remedy=_REACHABLE)
    return ranks


def _prepared_at(rank: PreparedRank, host: str) -> RankAddress:
    for address in rank.addresses:
        if address.host == host:
            return address
    raise PayloadError(
        f"rank {rank.rank} prepared no port at {host}, where rank {rank.rank - 1} is to dial it"
        if rank.rank
        else f"rank 0 prepared no port at {host}, where the last rank is to dial it",
        remedy="create the instance again: the addresses of its node have changed",
    )


def _common(left: PreparedRank, right: PreparedRank) -> list[RankAddress]:
    """The addresses of `right` that `left` dials: one per common network, or the first one."""
    beyond_left = {one.network for one in left.addresses if not is_loopback(one.host)}
    beyond_right = [one for one in right.addresses if not is_loopback(one.host)]
    if beyond_left and beyond_right:
        candidates, networks = beyond_right, beyond_left
    else:
        candidates = [one for one in right.addresses if is_loopback(one.host)]
        networks = {one.network for one in left.addresses if is_loopback(one.host)}
    if not candidates or not networks:
        raise PayloadError(
            f"rank {left.rank} cannot dial rank {right.rank} (pair {left.rank}-{right.rank}): one offers only "
            f"loopback addresses, the other only {sorted(beyond_left or {one.network for one in beyond_right})}",
            remedy=_REACHABLE,
        )
    chosen: dict[str, RankAddress] = {}
    for address in candidates:
        if address.network in networks:
            chosen.setdefault(address.network, address)
    return list(chosen.values()) or candidates[:1]
