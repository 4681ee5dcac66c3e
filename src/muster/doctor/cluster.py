"""The checks of a cluster: each node's own, and what only a comparison of several shows. Pure."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Final

import msgspec

from muster.doctor.checks import Check, failure, merged, of_node, ok, warning
from muster.doctor.links import check_links
from muster.doctor.machine import check_machine
from muster.doctor.network import carriers
from muster.doctor.rdma_checks import check_cables
from muster.facts import NodeFacts
from muster.links import LinkMap, NodeLinks
from muster.replies import NodeClock
from muster.spec import NodeId, NodeInfo
from muster.state import Aside, Draining, Node

#: From here on a clock that differs is more than a matter of measuring: a second, in ns, as `muster nodes` has it.
CLOCK_NS: Final = 1_000_000_000
#: Packages that the ranks of a group compare, and refuse to differ in.
_COMPARED: Final = ("muster", "mlx", "mlx-lm")
_LINK_LOCAL: Final = ipaddress.IPv4Network("169.254.0.0/16")


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What a coordinator knows: `facts` and `links` only of boots that are there."""

    nodes: Mapping[NodeId, Node] = {}
    facts: Mapping[NodeId, NodeFacts] = {}
    links: Mapping[NodeId, NodeLinks] = {}
    clocks: tuple[NodeClock, ...] = ()

    @property
    def present(self) -> dict[NodeId, NodeInfo]:
        """The nodes that are there, by name."""
        return {name: node.info for name, node in sorted(self.nodes.items()) if node.lost is None}


def check_cluster(evidence: Evidence) -> tuple[Check, ...]:
    """Every check: the cluster's own, those of each pair of nodes, and those of each node, the same ones as one."""
    if not evidence.nodes:
        return (failure("nodes", "no node has joined", "muster worker --join HOST[:PORT]"),)
    nodes = evidence.present
    facts = {name: found for name, found in evidence.facts.items() if name in nodes and _is_of(found, nodes[name])}
    links = {name: found for name, found in evidence.links.items() if name in nodes and _is_of(found, nodes[name])}
    found = [
        *_nodes(evidence),
        *_told(nodes, facts),
        *_versions(nodes, facts),
        *_backends(nodes),
        *_clocks(evidence, nodes),
        *_machines(nodes),
        *_addresses(nodes, facts),
        *check_cables(facts),
        *check_links(LinkMap(nodes, links, facts), nodes, facts, links),
    ]
    for name in sorted(facts):
        found.extend(of_node(name, check_machine(facts[name])))
    return merged(found)


def _is_of(told: NodeFacts | NodeLinks, info: NodeInfo) -> bool:
    return told.boot == info.boot


def _nodes(evidence: Evidence) -> Iterator[Check]:
    good: list[NodeId] = []
    for name, node in sorted(evidence.nodes.items()):
        checks: list[Check] = []
        if node.lost is not None:
            stopped = "was stopped" in node.lost
            make = warning if stopped else failure
            checks.append(make("node", f"{'stopped' if stopped else 'lost'}: {node.lost}", "Start its worker again."))
        elif node.suspect is not None:
            checks.append(warning("node", f"suspect: {node.suspect}", "Look at its network and at its load."))
        match node.duty:
            case Aside(reason=reason, remedy=remedy):
                checks.append(failure("node", f"set aside: {reason}", remedy or f"muster resume {name}"))
            case Draining(reason=reason):
                checks.append(warning("node", f"draining: {reason}", f"muster resume {name}"))
            case _:
                pass
        if not checks:
            good.append(name)
        yield from of_node(name, checks)
    yield from (check for name in good for check in of_node(name, [ok("node", "ready")]))


def _told(nodes: Mapping[NodeId, NodeInfo], facts: Mapping[NodeId, NodeFacts]) -> Iterator[Check]:
    if nodes and not facts:
        what = (
            "the coordinator has heard nothing of any node's machine: a standby does not, and one that was just started"
        )
        yield warning("facts", f"{what} hears it within seconds", "Ask the active coordinator, or ask again.")
        return
    for name in nodes:
        if name not in facts:
            yield from of_node(
                name,
                [warning("facts", "the node has told nothing of its machine", "Update muster there, and restart it.")],
            )


def _versions(nodes: Mapping[NodeId, NodeInfo], facts: Mapping[NodeId, NodeFacts]) -> Iterator[Check]:
    same: list[str] = []
    for package in _COMPARED:
        owners = _by_value({name: info.versions.get(package, "missing") for name, info in nodes.items()})
        if len(owners) > 1:
            yield failure(
                "versions",
                f"{package} differs: {_shared(owners)}; ranks on these do not form a group",
                _same_version(package, owners),
            )
        elif nodes:
            same.append(f"{package} {next(iter(owners))}")
    told = {name: info.versions.get("python", "") for name, info in nodes.items()}
    told |= {name: found.system.python for name, found in facts.items() if found.system.python}
    # The last number may differ: `muster.group.verify` compares them so.
    pythons = {name: ".".join(python.split(".")[:2]) for name, python in told.items() if python}
    owners = _by_value(pythons)
    if len(owners) > 1:
        yield failure(
            "versions",
            f"Python differs: {_shared(owners)}; ranks on these do not form a group",
            f"uv python install {_newest(owners)}, on all nodes",
        )
    elif owners:
        same.append(f"Python {next(iter(owners))}")
    if len(nodes) > 1 and same:
        yield ok("versions", f"the same on all nodes: {', '.join(same)}")


def _same_version(package: str, owners: Mapping[str, list[NodeId]]) -> str:
    """How the nodes that have another one get the newest version."""
    newest = _newest(owners)
    behind = ", ".join(sorted(name for version, names in owners.items() if version != newest for name in names))
    if package == "muster":  # it is installed from its directory, as README.md says
        return f"on {behind}, in the directory of muster {newest}: pip install ., and start the worker again"
    return f"pip install {package}=={newest}, on {behind}"


def _backends(nodes: Mapping[NodeId, NodeInfo]) -> Iterator[Check]:
    offered = [set(info.backends) for info in nodes.values()]
    if len(offered) > 1 and not set[str].intersection(*offered):
        shown = _shared(_by_value({name: ", ".join(info.backends) or "none" for name, info in nodes.items()}))
        yield failure("backends", f"no backend is on all nodes: {shown}", "pip install --upgrade mlx")


def _clocks(evidence: Evidence, nodes: Mapping[NodeId, NodeInfo]) -> Iterator[Check]:
    known = [clock for clock in evidence.clocks if clock.node in nodes]
    off = [clock for clock in known if abs(clock.offset_ns) > CLOCK_NS + clock.error_ns]
    for clock in off:
        side = "behind" if clock.offset_ns < 0 else "ahead of"
        what = f"{abs(clock.offset_ns) / 1e9:,.1f} s {side} the coordinator's"
        yield from of_node(
            clock.node, [warning("clocks", what, "Set both by NTP, for example: sudo timedatectl set-ntp true")]
        )
    if known and not off:
        most = max(abs(clock.offset_ns) + clock.error_ns for clock in known)
        yield ok("clocks", f"within {most / 1e6:,.1f} ms of the coordinator's")


def _machines(nodes: Mapping[NodeId, NodeInfo]) -> Iterator[Check]:
    """Machines that were cloned have one id, and count as one. Several workers of one machine are fine."""
    for machine in sorted({info.machine for info in nodes.values()}):
        sharing = [info for info in nodes.values() if info.machine == machine]
        names = ", ".join(info.node for info in sharing)
        hosts = sorted({info.hostname for info in sharing})
        if len(hosts) > 1:
            yield warning(
                "machine id",
                f"{names} have the same machine id but other host names ({', '.join(hosts)}): their memory counts once",
                "Where these are different machines, on all but one: sudo rm /etc/machine-id && sudo "
                "systemd-machine-id-setup, then start its worker again",
            )
        elif len(sharing) > 1:
            yield ok("machine id", f"{names} are workers of one machine: its memory counts once")


def _addresses(nodes: Mapping[NodeId, NodeInfo], facts: Mapping[NodeId, NodeFacts]) -> Iterator[Check]:
    """The same address on two machines: packets for one reach the other. Link-local ones are each link's own."""
    owners: dict[str, list[NodeId]] = defaultdict(list)
    for name, info in nodes.items():
        hosts = {address.host for address in info.addresses}
        if name in facts:
            hosts |= {
                address.host for one in carriers(facts[name]) if one.kind != "bridge" for address in one.addresses
            }
        for host in hosts:
            address = ipaddress.IPv4Address(host)
            if not address.is_loopback and address not in _LINK_LOCAL:
                owners[host].append(name)
    for host, names in sorted(owners.items()):
        strangers = [(a, b) for a, b in combinations(names, 2) if not _one_stack(nodes[a], nodes[b])]
        if strangers:
            a, b = strangers[0]
            yield failure(
                "duplicate address",
                f"{host} is an address of {a} and of {b}, on different machines",
                f"Give one of them another address, then start its worker again (muster worker on {b}).",
            )


def _one_stack(a: NodeInfo, b: NodeInfo) -> bool:
    return a.machine == b.machine and a.hostname == b.hostname and a.network_id == b.network_id


def _by_value(values: Mapping[NodeId, str]) -> dict[str, list[NodeId]]:
    owners: dict[str, list[NodeId]] = {}
    for name, value in sorted(values.items()):
        owners.setdefault(value, []).append(name)
    return owners


def _shared(owners: Mapping[str, list[NodeId]]) -> str:
    return "; ".join(f"{value} on {', '.join(names)}" for value, names in sorted(owners.items()))


def _newest(owners: Mapping[str, list[NodeId]]) -> str:
    def order(version: str) -> tuple[int, ...]:
        return tuple(int(part) for part in version.split(".") if part.isdecimal())

    return max((version for version in owners if version != "missing"), key=order, default="")
