"""Which pairs of addresses two nodes measure, and which of the two does it. Pure."""

from __future__ import annotations

import itertools
import zlib
from typing import Final

from muster.links import is_link_local, is_loopback, offered
from muster.spec import NodeAddress, NodeId, NodeInfo

#: Pairs of addresses that are tried with one other node.
MAXIMUM_PAIRS: Final = 16
#: Of a node's addresses that are a network by themselves, so many are tried.
_ALONE: Final = 2


def pairs_of(one: NodeInfo, other: NodeInfo) -> tuple[tuple[str, str], ...]:
    """The pairs of addresses that are measured: those of neighbours, and those that routing may join."""
    near = neighbours(one, other)
    return tuple(dict.fromkeys((*near, *_routed(one, other))))[:MAXIMUM_PAIRS]


def neighbours(one: NodeInfo, other: NodeInfo) -> tuple[tuple[str, str], ...]:
    """The pairs of addresses of the same network."""
    ends = ((own, there) for own in _beyond(one) for there in _beyond(other) if own.network == there.network)
    return tuple((own.host, there.host) for own, there in ends)[:MAXIMUM_PAIRS]


def _routed(one: NodeInfo, other: NodeInfo) -> tuple[tuple[str, str], ...]:
    """The first of each that routers know, and those that are a network by themselves, as in many VPNs.

    The first is the one at which the node reaches the coordinator.
    """
    ends = [_beyond(info) for info in (one, other)]
    firsts = [[at for at in some if not is_link_local(at.host)][:1] or some[:1] for some in ends]
    alone = [[at for at in some if at.network.endswith("/32")][:_ALONE] for some in ends]
    pairs = [*itertools.product(*firsts), *itertools.product(*alone)]
    return tuple((own.host, there.host) for own, there in pairs)


def _beyond(info: NodeInfo) -> list[NodeAddress]:
    return [address for address in offered(info) if not is_loopback(address.host)]


def is_reachable(own: NodeInfo, other: NodeInfo) -> bool:
    """Whether there is something to measure: a peer port, on another network stack, with addresses beyond loopback."""
    return bool(
        other.peer_port and not (own.network_id and own.network_id == other.network_id) and pairs_of(own, other)
    )


def lot(one: NodeId, other: NodeId) -> int:
    """A number that both ends draw from their two names: the same for both, and without a pattern."""
    return zlib.crc32(f"{min(one, other)}\0{max(one, other)}".encode())


def leads(own: NodeId, other: NodeId) -> bool:
    """Whether it is this end that sends the bursts, and watches the link."""
    return (own < other) == (lot(own, other) % 2 == 0)
