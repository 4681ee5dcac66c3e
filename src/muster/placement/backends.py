"""Which backend a group gets, and why not a better one. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from muster.device_matrix import Topology, against_ring, topology
from muster.facts import NodeFacts
from muster.layout import Devices
from muster.lead import coordinators
from muster.placement.choose import Arrangement, Chooser
from muster.placement.demands import Demand
from muster.placement.words import Candidate, Cluster, Refusal, told
from muster.rdma import cabled, check_devices, ring_order, wire
from muster.spec import Backend, GroupWorkload, InstanceSpec, Shortfall


class Backed(msgspec.Struct, frozen=True, kw_only=True):
    """An arrangement with its backend; `coordinators` are hosts by rank, for a jaccl group that wants them."""

    arrangement: Arrangement
    backend: Backend
    devices: Devices = ()
    jaccl_ring: bool = False
    coordinators: tuple[str, ...] = ()
    steps_down: tuple[str, ...] = ()


class _Tried(msgspec.Struct, frozen=True, kw_only=True):
    """What became of jaccl: `faults` are reasons why there is not better, or none; `remedies` what would help."""

    backed: Backed | None = None
    faults: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()


def forms_group(wish: InstanceSpec, ranks: int) -> bool:
    """Whether so many ranks of this workload need a backend at all."""
    return ranks > 1 or isinstance(wish.workload, GroupWorkload)


def able(cluster: Cluster, wish: InstanceSpec) -> Cluster | Refusal:
    """The nodes whose MLX has the backend; of nodes that were asked for, each must."""
    backend = _needed(wish)
    having = tuple(candidate for candidate in cluster.nodes if backend in candidate.info.backends)
    lacking = without_backend(cluster, wish)
    if lacking and (cluster.named or not having):
        needs = "jaccl takes macOS 26.2, Thunderbolt 5 and RDMA switched on; " if backend == "jaccl" else ""
        return Refusal(
            message=told(lacking),
            remedies=(f"use nodes whose MLX has it ({needs}see: muster doctor --cluster)",),
            shortfalls=lacking,
        )
    return msgspec.structs.replace(cluster, nodes=having)


def without_backend(cluster: Cluster, wish: InstanceSpec) -> tuple[Shortfall, ...]:
    """The nodes whose MLX has not what a group of this wish needs."""
    backend = _needed(wish)
    return tuple(
        Shortfall(
            node=info.node,
            what="backend",
            reason=f"MLX on node {info.node} has no {backend} backend (it has: {', '.join(info.backends) or 'none'})",
        )
        for info in (candidate.info for candidate in cluster.nodes)
        if backend not in info.backends
    )


def _needed(wish: InstanceSpec) -> Backend:
    """What MLX has to have for it; every MLX has the ring."""
    return "jaccl" if wish.backend in ("jaccl", "jaccl-ring") else "ring"


def wired(cluster: Cluster, wish: InstanceSpec) -> tuple[tuple[int, int], ...]:
    """The pairs of nodes that JACCL could join, where it may be used."""
    if wish.backend == "ring" or wish.devices:
        return ()
    ported = [
        (index, candidate.facts)
        for index, candidate in enumerate(cluster.nodes)
        if "jaccl" in candidate.info.backends and candidate.facts is not None and candidate.facts.thunderbolt
    ]
    if len(ported) < 2:
        return ()
    facts = [told for _, told in ported]
    # A cable that another group uses may have room for one more, but one that is free is better.
    pairs = cabled(facts, cluster.in_use) or cabled(facts)
    return tuple((ported[one][0], ported[other][0]) for one, other in pairs)


def choose_backend(chooser: Chooser, found: Arrangement, demand: Demand, wish: InstanceSpec) -> Backed | Refusal:
    """The best backend that these ranks can have, or why the one that was asked for cannot be."""
    if not forms_group(wish, len(found.order)):
        return Backed(arrangement=found, backend="ring")  # none is used
    if wish.backend == "ring":
        return Backed(arrangement=found, backend="ring")
    tried = _jaccl(chooser, found, demand, wish)
    if tried.backed is not None:
        return msgspec.structs.replace(tried.backed, steps_down=tried.faults)
    if _needed(wish) == "jaccl":
        what = "jaccl ring" if wish.backend == "jaccl-ring" else "jaccl group"
        return Refusal(
            message=f"these ranks cannot form a {what}: {'; '.join(dict.fromkeys(tried.faults))}",
            remedies=(*tried.remedies, "use --backend ring", "see what helps with: muster doctor --cluster"),
        )
    return Backed(arrangement=found, backend="ring", steps_down=(*tried.faults, *tried.remedies))


def _jaccl(chooser: Chooser, found: Arrangement, demand: Demand, wish: InstanceSpec) -> _Tried:
    nodes = [chooser.cluster.nodes[index] for index in found.order]
    if fault := _against(nodes, wish):
        return _Tried(faults=(f"no jaccl: {fault}",))
    facts = [candidate.facts for candidate in nodes if candidate.facts is not None]
    if wish.devices:
        return _given(chooser, found, facts, wish)
    in_use = chooser.cluster.in_use
    wiring = wire(facts, in_use)
    # Who asks for a ring is not told why there is no mesh.
    over = () if wish.backend == "jaccl-ring" else (f"no jaccl mesh: {wiring.mesh_fault}",)
    if wiring.mesh and over:
        return _coordinated(chooser, Backed(arrangement=found, backend="jaccl", devices=wiring.mesh), wish, ())
    turned, remedies = found, ()
    order = ring_order(facts, in_use)
    other = wire([facts[position] for position in order], in_use) if order else wiring
    if other.wires > wiring.wires and chooser.cluster.named:
        names = [nodes[position].node for position in order]
        if len(set(names)) == len(names):
            remedies = (f"use --nodes {','.join(names)}, an order in which each is cabled to the next",)
    elif other.wires > wiring.wires:
        again = chooser.fitted(tuple(found.order[position] for position in order), demand)
        turned, wiring = (again, other) if again is not None else (found, wiring)
    if not wiring.ring:
        return _Tried(faults=(*over, f"no jaccl ring: {wiring.ring_fault}"), remedies=remedies)
    backed = Backed(arrangement=turned, backend="jaccl", devices=wiring.ring, jaccl_ring=True)
    return _coordinated(chooser, backed, wish, over)


def _against(nodes: Sequence[Candidate], wish: InstanceSpec) -> str:
    """Why these ranks cannot even be considered for jaccl."""
    lacking = [candidate.node for candidate in nodes if "jaccl" not in candidate.info.backends]
    if lacking:
        return f"MLX on node {lacking[0]} has no jaccl backend"
    untold = [candidate.node for candidate in nodes if candidate.facts is None]
    if untold and not wish.devices:
        return f"node {untold[0]} has not told its RDMA devices yet"
    return ""


def _given(chooser: Chooser, found: Arrangement, facts: Sequence[NodeFacts], wish: InstanceSpec) -> _Tried:
    """The matrix that somebody gave, as MLX takes it: a mesh before a ring.

    Where the backend is open, a ring comes first if an entry has several devices: a mesh uses one of them.
    """
    told = facts if len(facts) == len(found.order) else ()
    several = any(isinstance(entry, tuple) and len(entry) > 1 for row in wish.devices for entry in row)
    rings = (True,) if wish.backend == "jaccl-ring" else (True, False) if several else (False, True)
    if wish.backend == "jaccl":
        rings = (False, True)
    faults: list[str] = []
    for ring in rings:
        fault = check_devices(wish.devices, told, ring=ring, in_use=chooser.cluster.in_use)
        if not fault and wish.backend == "jaccl-ring" and (fault := against_ring(wish.devices)):
            fault, mesh = f"they form no ring ({fault})", ("use --backend jaccl",)
            return _Tried(faults=(f"the devices given are refused: {fault}",), remedies=mesh)
        if not fault:
            formed = topology(wish.devices, prefer_ring=ring)
            backed = Backed(
                arrangement=found, backend="jaccl", devices=wish.devices, jaccl_ring=formed is Topology.RING
            )
            return _coordinated(chooser, backed, wish, ())
        faults.append(fault)
    return _Tried(faults=(f"the devices given are refused: {faults[0]}",))


def _coordinated(chooser: Chooser, backed: Backed, wish: InstanceSpec, faults: tuple[str, ...]) -> _Tried:
    """With the address at which each rank dials rank 0, where the side channel is a port of it."""
    if wish.side_channel == "bus":
        return _Tried(backed=backed, faults=faults)
    order = backed.arrangement.order
    if wish.addresses and wish.addresses[0]:
        hosts = (wish.addresses[0][0],) * len(order)
    else:
        infos = [chooser.cluster.nodes[index].info for index in order]
        found = coordinators(infos, chooser.cluster.known, wish.network)
        if found.fault:
            return _Tried(faults=(*faults, f"no jaccl: {found.fault}"))
        hosts = found.hosts
    return _Tried(backed=msgspec.structs.replace(backed, coordinators=hosts), faults=faults)
