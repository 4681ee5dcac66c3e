"""The checks of the links between the nodes of a cluster, from what both ends measured and what they know. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Final, TypeAlias

from muster.doctor.checks import Check, failure, numbers, ok, warning
from muster.facts import Interface, NodeFacts
from muster.links import LAST_RESORTS, Link, LinkMap, Measured, NodeLinks, is_loopback
from muster.spec import NodeId, NodeInfo

#: Less than this part of what the slower end claims: a bad cable, a slow adapter in between, or much other traffic.
LOW_SHARE: Final = 0.4
#: A single stream over TCP gets no more on most machines, whatever the interface claims; in Mbit/s.
_FAST_ENOUGH_MBPS: Final = 8_000.0
#: What macOS says to a program that may not use the local network.
_NO_ROUTE: Final = ("no route to host", "errno 65")
_ASKING_MACOS: Final = (15,)
_Measured: TypeAlias = Mapping[tuple[NodeId, NodeId], list[Measured]]
_NAMES: Final = {"wifi": "Wi-Fi", "vpn": "a VPN"}


def check_links(
    between: LinkMap,
    nodes: Mapping[NodeId, NodeInfo],
    facts: Mapping[NodeId, NodeFacts],
    links: Mapping[NodeId, NodeLinks],
) -> Iterator[Check]:
    """What is wrong with the link of each pair of nodes; what is right as one finding."""
    good: list[str] = []
    measured = _by_pair(nodes, links)
    for a, b in combinations(sorted(nodes), 2):
        link = between.between(a, b)
        found = [*_one_way(a, b, measured, facts, link)]
        if link is None:
            if not found:
                found = [_no_link(a, b, between, nodes, facts, measured)]
        else:
            found += [*_routed(link, between, nodes), *_kind(link), *_speed(link, facts), *_mtu(link, facts)]
            if not found:
                good.append(_shown(link))
        yield from found
    if good:
        few = "; ".join(good[:4]) + (f"; and {len(good) - 4} more" if len(good) > 4 else "")
        yield ok("links", few)
    # Workers that share their network stack have nothing to measure between them.
    stacks = {info.network_id or name for name, info in nodes.items()}
    unmeasured = [name for name in nodes if name not in links]
    if unmeasured and len(stacks) > 1:
        yield warning("links", f"{', '.join(unmeasured)} measured nothing yet", "muster links --measure")


def _one_way(
    a: NodeId,
    b: NodeId,
    measured: _Measured,
    facts: Mapping[NodeId, NodeFacts],
    link: Link | None,
) -> Iterator[Check]:
    """A pair of addresses of which one end is reached and the other is not: the first of each direction."""
    for here, there in ((a, b), (b, a)):
        one_way = next((one for one in measured.get((here, there), ()) if one.reached and not one.dialled_back), None)
        if one_way is not None:
            what = f"{here} reaches {there} at {one_way.host} (from {one_way.own}), {there} does not reach {here} back"
            if one_way.error:
                what += f": {one_way.error}"
            make = failure if link is None else warning
            yield make("directed link", what, _blocked(here, facts, one_way.error, there))
            return


def _no_link(
    a: NodeId,
    b: NodeId,
    between: LinkMap,
    nodes: Mapping[NodeId, NodeInfo],
    facts: Mapping[NodeId, NodeFacts],
    measured: _Measured,
) -> Check:
    failed = [(x, y, one) for x, y in ((a, b), (b, a)) for one in measured.get((x, y), ()) if not one.reached]
    caller, closed, error = (failed[0][0], failed[0][1], failed[0][2].error) if failed else (a, b, "")
    only_here = next((one for one in (a, b) if all(is_loopback(own.host) for own in nodes[one].addresses)), None)
    if between.trials(a, b):
        help = _blocked(closed, facts, error, caller)
    elif only_here is not None:
        help = f"Start the worker of {only_here} with --address, an address that the others reach it at"
    else:
        help = "Connect both to one network."
    return failure("no link", f"{a} and {b}: {between.why_not(a, b)}", help)


def _blocked(closed: NodeId, facts: Mapping[NodeId, NodeFacts], error: str, caller: NodeId) -> str:
    """What helps where `closed` is not reached by `caller`."""
    known, calls = facts.get(closed), facts.get(caller)
    refused = any(text in error.lower() for text in _NO_ROUTE)
    if calls is not None and calls.os == "macOS" and numbers(calls.os_version) >= _ASKING_MACOS and refused:
        return f"On {caller}: System Settings > Privacy & Security > Local Network, allow the terminal"
    if known is not None and known.system.firewall == "on":
        return f"Let muster's ports through the firewall of {closed}"
    return f"Look at the firewall of {closed} and at the routes between the two; then: muster links --measure"


def _routed(link: Link, between: LinkMap, nodes: Mapping[NodeId, NodeInfo]) -> Iterator[Check]:
    networks = [
        next((one.network for one in (*info.addresses, *info.candidates) if one.host == host), host)
        for info, host in ((nodes[link.a], link.a_host), (nodes[link.b], link.b_host))
    ]
    if networks[0] != networks[1] and link.kind != "loopback" and not between.trials(link.a, link.b)[0].measured:
        yield warning(
            "no common network",
            f"{link.a} is in {networks[0]}, {link.b} in {networks[1]}; nobody measured whether routing connects them",
            "Connect both to one network, or: muster links --measure",
        )


def _kind(link: Link) -> Iterator[Check]:
    if link.kind in LAST_RESORTS:
        yield warning(
            "slow link",
            f"{link.a} and {link.b} reach each other over {_NAMES.get(link.kind, link.kind)} only "
            f"({link.a_host} - {link.b_host}{_rate(link)})",
            "Connect them by Ethernet or Thunderbolt, or choose a network: --network CIDR",
        )


def _speed(link: Link, facts: Mapping[NodeId, NodeFacts]) -> Iterator[Check]:
    ends = [_interface(facts.get(node), host) for node, host in ((link.a, link.a_host), (link.b, link.b_host))]
    claims = [end.mbps for end in ends if end is not None and end.mbps]
    if link.mbps is None or not claims or link.kind in (*LAST_RESORTS, "loopback"):
        return
    claimed = min(claims)
    if link.mbps < LOW_SHARE * claimed and link.mbps < _FAST_ENOUGH_MBPS:
        names = " - ".join(end.name if end else "?" for end in ends)
        yield warning(
            "link speed",
            f"{link.a} and {link.b} ({names}): {link.mbps:,.0f} Mbit/s measured, {claimed:,} claimed",
            "Try another cable and port, end other traffic, then: muster links --measure",
        )


def _mtu(link: Link, facts: Mapping[NodeId, NodeFacts]) -> Iterator[Check]:
    a = _interface(facts.get(link.a), link.a_host)
    b = _interface(facts.get(link.b), link.b_host)
    if a is None or b is None or a.mtu is None or b.mtu is None or a.mtu == b.mtu or link.kind == "loopback":
        return
    small, node = (a, link.b) if a.mtu < b.mtu else (b, link.a)
    large = b if small is a else a
    mac = facts[node].os == "macOS"
    command = f"sudo ifconfig {large.name} mtu {small.mtu}" if mac else f"sudo ip link set {large.name} mtu {small.mtu}"
    yield warning(
        "mtu",
        f"{link.a} {a.name} has an MTU of {a.mtu}, {link.b} {b.name} of {b.mtu}: large packets may be dropped",
        f"On {node}: {command}",
    )


def _by_pair(nodes: Mapping[NodeId, NodeInfo], links: Mapping[NodeId, NodeLinks]) -> _Measured:
    """What each node measured towards each other one, of boots that are there."""
    found: dict[tuple[NodeId, NodeId], list[Measured]] = {}
    for here, told in links.items():
        for one in told.measured:
            if one.other in nodes and nodes[one.other].boot == one.other_boot:
                found.setdefault((here, one.other), []).append(one)
    return found


def _interface(facts: NodeFacts | None, host: str) -> Interface | None:
    interfaces = facts.interfaces if facts is not None else ()
    return next((one for one in interfaces if any(address.host == host for address in one.addresses)), None)


def _rate(link: Link) -> str:
    return f", {link.mbps:,.0f} Mbit/s" if link.mbps is not None else ""


def _shown(link: Link) -> str:
    return f"{link.a} - {link.b}: {link.kind}{_rate(link)}"
