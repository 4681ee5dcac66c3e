"""Which backend a group gets, and why not a better one. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from muster.facts import NodeFacts
from muster.layout import Devices
from muster.placement.choose import Arrangement, Chooser, Demand
from muster.placement.words import Candidate, Cluster, Refusal
from muster.rdma import cabled, check_devices, coordinators, ring_order, wire
from muster.spec import Backend, GroupWorkload, InstanceSpec


class Backed(msgspec.Struct, frozen=True, kw_only=True):
    """An arrangement with its backend; `coordinators` are hosts by rank, for a jaccl group that wants them."""

    arrangement: Arrangement
    backend: Backend
    devices: Devices = ()
    jaccl_ring: bool = False
    coordinators: tuple[str, ...] = ()
    steps_down: tuple[str, ...] = ()


def forms_group(wish: InstanceSpec, ranks: int) -> bool:
    """Whether so many ranks of this workload need a backend at all."""
    return ranks > 1 or isinstance(wish.workload, GroupWorkload)


def able(cluster: Cluster, wish: InstanceSpec) -> Cluster | Refusal:
    """The nodes whose MLX has the backend; of nodes that were asked for, each must."""
    backend: Backend = "ring" if wish.backend == "auto" else wish.backend
    having = tuple(candidate for candidate in cluster.nodes if backend in candidate.info.backends)
    lacking = [candidate.info for candidate in cluster.nodes if backend not in candidate.info.backends]
    if lacking and (cluster.named or not having):
        has = ", ".join(lacking[0].backends) or "none"
        return Refusal(
            message=f"MLX on node {lacking[0].node} has no {backend} backend (it has: {has})",
            remedies=("use --backend ring, or nodes whose MLX has it (jaccl: macOS 26.2, Thunderbolt 5, RDMA on)",),
        )
    return msgspec.structs.replace(cluster, nodes=having)


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
    pairs = cabled([facts for _, facts in ported])
    return tuple((ported[one][0], ported[other][0]) for one, other in pairs)


def choose_backend(chooser: Chooser, found: Arrangement, demand: Demand, wish: InstanceSpec) -> Backed | Refusal:
    """The best backend that these ranks can have, or why the one that was asked for cannot be."""
    if not forms_group(wish, len(found.order)):
        return Backed(arrangement=found, backend="ring" if wish.backend == "auto" else wish.backend)
    if wish.backend == "ring":
        return Backed(arrangement=found, backend="ring")
    backed, faults = _jaccl(chooser, found, demand, wish)
    if backed is not None:
        return msgspec.structs.replace(backed, steps_down=faults)
    if wish.backend == "jaccl":
        return Refusal(
            message=f"these ranks cannot form a jaccl group: {'; '.join(dict.fromkeys(faults))}",
            remedies=("use --backend ring", "see what helps with: muster doctor --cluster"),
        )
    return Backed(arrangement=found, backend="ring", steps_down=faults)


def _jaccl(
    chooser: Chooser, found: Arrangement, demand: Demand, wish: InstanceSpec
) -> tuple[Backed | None, tuple[str, ...]]:
    nodes = [chooser.cluster.nodes[index] for index in found.order]
    if fault := _against(nodes, wish):
        return None, (f"no jaccl: {fault}",)
    facts = [candidate.facts for candidate in nodes if candidate.facts is not None]
    if wish.devices:
        return _given(chooser, found, facts, wish)
    wiring = wire(facts, chooser.cluster.in_use)
    faults = (f"no jaccl mesh: {wiring.mesh_fault}", f"no jaccl ring: {wiring.ring_fault}")
    if wiring.mesh:
        return _coordinated(chooser, Backed(arrangement=found, backend="jaccl", devices=wiring.mesh), wish, ())
    turned = found
    if not wiring.ring and not chooser.cluster.named and (order := ring_order(facts)):
        again = chooser.fitted(tuple(found.order[position] for position in order), demand)
        if again is not None:
            turned, wiring = again, wire([facts[position] for position in order], chooser.cluster.in_use)
    if not wiring.ring:
        return None, faults
    backed = Backed(arrangement=turned, backend="jaccl", devices=wiring.ring, jaccl_ring=True)
    return _coordinated(chooser, backed, wish, faults[:1])


def _against(nodes: Sequence[Candidate], wish: InstanceSpec) -> str:
    """Why these ranks cannot even be considered for jaccl."""
    lacking = [candidate.node for candidate in nodes if "jaccl" not in candidate.info.backends]
    if lacking:
        return f"MLX on node {lacking[0]} has no jaccl backend"
    untold = [candidate.node for candidate in nodes if candidate.facts is None]
    if untold and not wish.devices:
        return f"node {untold[0]} has not told its RDMA devices yet"
    return ""


def _given(
    chooser: Chooser, found: Arrangement, facts: Sequence[NodeFacts], wish: InstanceSpec
) -> tuple[Backed | None, tuple[str, ...]]:
    """The matrix that somebody gave: a ring where an entry has several devices, or where it is no mesh."""
    told = facts if len(facts) == len(found.order) else ()
    faults = {
        ring: check_devices(wish.devices, told, ring=ring, in_use=chooser.cluster.in_use) for ring in (False, True)
    }
    several = any(isinstance(entry, tuple) and len(entry) > 1 for row in wish.devices for entry in row)
    order = (True, False) if several else (False, True)
    for ring in order:
        if not faults[ring]:
            backed = Backed(arrangement=found, backend="jaccl", devices=wish.devices, jaccl_ring=ring)
            return _coordinated(chooser, backed, wish, ())
    return None, (f"the devices given are refused: {faults[order[0]]}",)


def _coordinated(
    chooser: Chooser, backed: Backed, wish: InstanceSpec, faults: tuple[str, ...]
) -> tuple[Backed | None, tuple[str, ...]]:
    """With the address at which each rank dials rank 0, where the side channel is a port of it."""
    if wish.side_channel == "bus":
        return backed, faults
    order = backed.arrangement.order
    if wish.addresses and wish.addresses[0]:
        return msgspec.structs.replace(backed, coordinators=(wish.addresses[0][0],) * len(order)), faults
    infos = [chooser.cluster.nodes[index].info for index in order]
    found = coordinators(infos, chooser.cluster.known, wish.network)
    if found.fault:
        return None, (*faults, f"no jaccl: {found.fault}")
    return msgspec.structs.replace(backed, coordinators=found.hosts), faults
