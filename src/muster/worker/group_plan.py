"""What a rank needs to form its group, of either backend: where it reserves ports, and its payload."""

from __future__ import annotations

from collections.abc import Sequence

from muster.group.addresses import is_loopback
from muster.group.payload import Payload, PreparedRank, RingPayload, build_given_ring, build_ring
from muster.links import offered, within
from muster.spec import NodeAddress, NodeInfo
from muster.state import Rank
from muster.worker import jaccl
from muster.worker.watch import Place


def endpoints(place: Place, info: NodeInfo) -> Sequence[NodeAddress]:
    """The addresses of its node at each of which the rank reserves a port, in its order of preference."""
    if place.world_size == 1:
        return ()
    if place.backend == "jaccl":
        return jaccl.endpoints(place, info)
    if place.spec.addresses:
        return tuple(_address(host, info) for host in place.spec.addresses[place.rank])
    if hosts := dialled_hosts(place):
        return (_address(hosts[place.rank], info),)
    return _allowed(place, info.addresses) or info.addresses


def payload(place: Place, ranks: Sequence[Rank]) -> Payload:
    """The payload of a rank once all `ranks` of the attempt, in rank order, have said what they reserved.

    Raises:
        PayloadError: what they reserved, or how the attempt was placed, makes no group.
    """
    if place.backend == "jaccl":
        return jaccl.payload(place, ranks)
    prepared = [PreparedRank(rank.rank, rank.addresses) for rank in ranks]
    if place.spec.addresses:
        return build_given_ring(place.id, place.attempt, place.rank, prepared)
    return build_ring(place.id, place.attempt, place.rank, prepared, dialled=dialled_hosts(place))


def dialled_hosts(place: Place) -> tuple[str, ...]:
    """By rank, the address at which the rank before it dials it; empty where the layout leaves that to the ranks."""
    chosen = [rank.next for rank in place.layout.ranks]
    hosts = [one.host for one in chosen if one is not None]
    if len(hosts) != place.world_size or place.world_size < 2:
        return ()
    return (hosts[-1], *hosts[:-1])


def steps_host(place: Place, info: NodeInfo) -> str:
    """The address of rank 0's node that all other ranks reach: there they take their steps from.

    That is the one at which the last rank dials it, where every rank has an address of its network in the ring; else
    the node's first, which all nodes that the coordinator reaches were placed by.
    """
    allowed = _allowed(place, offered(info))
    first = info.addresses[0] if info.addresses[0] in allowed or not allowed else allowed[0]
    hosts = dialled_hosts(place)
    if not hosts:
        return first.host
    own = [rank.next.own for rank in place.layout.ranks if rank.next is not None]
    network = _address(hosts[0], info).network
    return (
        hosts[0]
        if all(within(a, network) or within(b, network) for a, b in zip(own, hosts, strict=True))
        else first.host
    )


def _address(host: str, info: NodeInfo) -> NodeAddress:
    """An address of the node, with its network."""
    for one in (*info.candidates, *info.addresses):
        if one.host == host:
            return one
    return NodeAddress(host=host, network="127.0.0.0/8" if is_loopback(host) else f"{host}/32")


def _allowed(place: Place, addresses: Sequence[NodeAddress]) -> tuple[NodeAddress, ...]:
    network = place.spec.network
    return tuple(one for one in addresses if not network or within(one.host, network))


def links(payload: Payload) -> int:
    """How many connections a rank has to each neighbour in a ring over TCP; 1 for another backend."""
    return len(payload.hosts[0]) if isinstance(payload, RingPayload) else 1
