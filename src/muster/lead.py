"""Where the ranks of a jaccl group dial rank 0, to exchange their connection data over TCP. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from muster.facts import NodeFacts
from muster.known import Known
from muster.links import within
from muster.spec import NodeInfo

#: Kinds of interface that RDMA itself runs over.
_CARRIERS: Final = frozenset({"thunderbolt"})
#: What the side channel prefers: it carries a few hundred bytes, so that reaching matters, and not speed.
_KIND_ORDER: Final = {"ethernet": 0, "loopback": 0, "bridge": 1, "virtual": 1, "other": 1, "wifi": 2, "vpn": 3}
#: What rank 0 listens on where the others dial different addresses of it.
_EVERY_ADDRESS: Final = "0.0.0.0"


class Coordinators(msgspec.Struct, frozen=True, kw_only=True):
    """By rank, the address of rank 0 that it dials; rank 0's own entry is what it listens on. Or why there is none."""

    hosts: tuple[str, ...] = ()
    fault: str = ""


def coordinators(nodes: Sequence[NodeInfo], known: Known, network: str = "") -> Coordinators:
    """Which address of rank 0's node each rank dials for the side channel. `nodes` is in rank order.

    Never a Thunderbolt port's: those are for RDMA, and have new addresses after every start. One address for all is
    taken where there is one; else rank 0 listens on all of its own. `network`, as CIDR, is the only one allowed.
    """
    lead, ways = nodes[0], [_ways(info, nodes[0], known, network) for info in nodes]
    own = [one.host for one in lead.addresses if not network or within(one.host, network)]
    own = [host for host in own if _kind(known.facts.get(lead.node), host) not in _CARRIERS] or own
    for rank, (info, found) in enumerate(zip(nodes, ways, strict=True)):
        if rank and not (own if found is None else found):
            reason = "was reached" if found is not None else "is known"
            return Coordinators(
                fault=f"rank {rank} on {info.node} dials rank 0 on {lead.node} for jaccl's side channel, but no "
                f"address of {lead.node} outside Thunderbolt {reason} from there"
            )
    dialled = [own if found is None else found for found in ways[1:]]
    common = [host for host in dialled[0] if all(host in hosts for hosts in dialled)] if dialled else own
    if common:
        return Coordinators(hosts=(common[0],) * len(nodes))
    return Coordinators(hosts=(_EVERY_ADDRESS, *(hosts[0] for hosts in dialled)))


def _ways(info: NodeInfo, lead: NodeInfo, known: Known, network: str) -> list[str] | None:
    """The addresses of rank 0's node that were reached from a node, the best first; `None` where none was measured."""
    links = known.links.get(info.node)
    measured = (
        [one for one in links.measured if (one.other, one.other_boot) == (lead.node, lead.boot)]
        if links is not None
        else []
    )
    if not measured or info.node == lead.node:
        return None
    near, far = known.facts.get(info.node), known.facts.get(lead.node)
    given = {one.host for one in lead.addresses} if lead.addresses_given else set[str]()
    usable: list[tuple[int, bool, float, str]] = []
    for one in measured:
        kinds = {_kind(near, one.own), _kind(far, one.host)}
        allowed = (not given or one.host in given) and (not network or within(one.host, network))
        if one.reached and allowed and not kinds & _CARRIERS:
            rank = max(_KIND_ORDER.get(kind, len(_KIND_ORDER)) for kind in kinds)
            usable.append((rank, not one.dialled_back, one.rtt_us if one.rtt_us is not None else 1e9, one.host))
    return list(dict.fromkeys(host for *_, host in sorted(usable)))


def _kind(facts: NodeFacts | None, host: str) -> str:
    """The kind of the interface that has this address; a bridge of Thunderbolt ports counts as one of them."""
    interfaces = facts.interfaces if facts is not None else ()
    kinds = {interface.name: interface.kind for interface in interfaces}
    for interface in interfaces:
        if any(address.host == host for address in interface.addresses):
            bridged = {kinds.get(member) for member in interface.members}
            return "thunderbolt" if "thunderbolt" in bridged else interface.kind
    return "other"
