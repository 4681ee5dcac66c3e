"""From the Thunderbolt and RDMA facts of nodes to JACCL's device matrix, or to the reasons why there is none. Pure.

A cable joins two ports of which each names the other's bus as its peer. RDMA works over it when both ports are
Thunderbolt 5, RDMA is enabled on both machines, and each port's RDMA device is active, in no bridge, and has a GID that
maps an IPv4 address.

Source: mlx issues 3467 and 4191 (GIDs), 3207 (bridges), 3777 and omlx 3037 (Thunderbolt 4).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from muster.device_matrix import MAX_MESH_RANKS, MAX_RING_WIRES, Topology, Use, names, topology, usage
from muster.errors import PayloadError
from muster.facts import NodeFacts, RdmaDevice, ThunderboltPort
from muster.layout import Devices, Layout
from muster.spec import NodeId

#: The first generation of Thunderbolt that can do RDMA.
RDMA_GENERATION: Final = 5
#: Steps that the search for a ring may take: more than all orders of 8 nodes, a few milliseconds.
_SEARCH_STEPS: Final = 50_000


class InUse(msgspec.Struct, frozen=True, kw_only=True):
    """What other instances take of devices, by machine and device: the nodes of a machine share them.

    A node that `machines` does not name is a machine by itself.
    """

    devices: Mapping[tuple[str, str], Use] = {}
    machines: Mapping[NodeId, str] = {}

    def machine(self, node: NodeId) -> str:
        """The machine of a node."""
        return self.machines.get(node, node)

    def of(self, node: NodeId, device: str) -> Use:
        """What is taken of a device of this node's machine."""
        return self.devices.get((self.machine(node), device), Use())


_NOTHING: Final = InUse()


class Wiring(msgspec.Struct, frozen=True, kw_only=True):
    """What JACCL can form of nodes in a given rank order; a matrix is empty where its fault says why there is none.

    `ring` is for this order, with `wires` cables to each neighbour, and wants `Layout.jaccl_ring`.
    """

    mesh: Devices = ()
    mesh_fault: str = ""
    ring: Devices = ()
    ring_fault: str = ""
    wires: int = 0


class _Wire(msgspec.Struct, frozen=True):
    """A cable seen from one of its ends: the ports, this end's and the other end's device, or why it is of no use.

    `regions` is what other instances have registered with the device that has most of them.
    """

    port: str
    other_port: str
    device: str = ""
    other_device: str = ""
    fault: str = ""
    regions: int = 0

    def reversed(self) -> _Wire:
        return _Wire(self.other_port, self.port, self.other_device, self.device, self.fault, self.regions)


#: All cables between pairs of ranks, under (lower, higher), seen from the lower; in one order for both ends, in which
#: those that nobody uses come first.
_Cables = dict[tuple[int, int], tuple[_Wire, ...]]


def wire(nodes: Sequence[NodeFacts], in_use: InUse = _NOTHING) -> Wiring:
    """The matrices for `nodes`, one per rank in rank order, beside what other groups take of the devices."""
    if len(nodes) < 2:
        return Wiring(mesh_fault="a single rank needs no group", ring_fault="a single rank needs no group")
    cables = _cables(nodes, in_use)
    mesh, mesh_fault = _mesh(nodes, cables, in_use)
    ring, ring_fault = _ring(nodes, cables, in_use)
    wires = max((len(names(entry)) for row in ring for entry in row), default=0)
    return Wiring(mesh=mesh, mesh_fault=mesh_fault, ring=ring, ring_fault=ring_fault, wires=wires)


def cabled(nodes: Sequence[NodeFacts], in_use: InUse = _NOTHING) -> dict[tuple[int, int], int]:
    """How many usable cables that no other group uses each pair (lower index first) has; pairs without are left out."""
    found = _cables(nodes, in_use)
    counts = {pair: sum(not one.fault and not one.regions for one in wires) for pair, wires in found.items()}
    return {pair: count for pair, count in counts.items() if count}


def ring_order(nodes: Sequence[NodeFacts], in_use: InUse = _NOTHING) -> tuple[int, ...]:
    """Indices into `nodes` in an order in which each is cabled to the next and the last to the first; node 0 is first.

    Of several, the one whose thinnest pair has most cables that nobody uses, then the smallest. Empty where there is
    none. Exact for up to 8 nodes; above, the search gives up after so many steps that it takes some 10 ms.
    """
    size, counts = len(nodes), cabled(nodes, in_use)
    if size < 2:
        return ()
    if found := _order(size, counts):
        return found
    return _order(size, cabled(nodes)) if in_use.devices else ()


def _order(size: int, counts: dict[tuple[int, int], int]) -> tuple[int, ...]:
    if size == 2:
        return (0, 1) if counts else ()
    for wires in sorted({min(count, MAX_RING_WIRES) for count in counts.values()}, reverse=True):
        beside: list[list[int]] = [[] for _ in range(size)]
        for (low, high), count in sorted(counts.items()):
            if count >= wires:
                beside[low].append(high)
                beside[high].append(low)
        if found := _cycle([sorted(others) for others in beside]):
            return found
    return ()


def _cycle(beside: list[list[int]]) -> tuple[int, ...]:
    """The smallest cycle through all, from 0; empty where there is none, or none was found in time."""
    size = len(beside)
    if any(len(others) < 2 for others in beside):
        return ()
    path, options, on_path = [0], [iter(beside[0])], {0}
    for _ in range(_SEARCH_STEPS):
        following = next((one for one in options[-1] if one not in on_path), None)
        if following is None:
            on_path.discard(path.pop())
            options.pop()
            if not path:
                return ()
        else:
            path.append(following)
            on_path.add(following)
            options.append(iter(beside[following]))
            if len(path) == size and 0 in beside[following]:
                return tuple(path)
    return ()


def node_fault(facts: NodeFacts) -> str:
    """Why this machine can do no RDMA at all, with what to do; empty where nothing is known against it."""
    node, rdma = facts.node, facts.rdma
    generations = [port.generation for port in facts.thunderbolt if port.generation is not None]
    if generations and max(generations) < RDMA_GENERATION:
        return f"{node} has Thunderbolt {max(generations)}, which can never do RDMA (it takes Thunderbolt 5)"
    if rdma.enabled is False:
        return f"RDMA is disabled on {node}: start it into Recovery, and run there: rdma_ctl enable"
    if not facts.thunderbolt:
        why = facts.unknown.get("thunderbolt", "")
        return f"{node} has no Thunderbolt port" + (f" that could be found out ({why})" if why else "")
    if not rdma.devices:
        why = facts.unknown.get("rdma", "")
        return f"{node} shows no RDMA device (ibv_devices lists none)" + (f": {why}" if why else "")
    if facts.backends and "jaccl" not in facts.backends:
        return f"MLX on {node} has no jaccl backend (it needs macOS 26.2 or newer)"
    return ""


def check_devices(devices: Devices, nodes: Sequence[NodeFacts], *, ring: bool = False, in_use: InUse = _NOTHING) -> str:
    """Why an operator's own matrix would fail, or empty. `nodes` is in rank order, or empty where nothing is known.

    A node that told of no RDMA device at all is believed to have what the matrix says.
    """
    try:
        chosen = topology(devices, prefer_ring=ring)
    except PayloadError as error:
        return f"{error.message}; {error.remedy}"
    if not nodes:
        return ""
    if len(nodes) != len(devices):
        return f"the devices have {len(devices)} rows for {len(nodes)} ranks: give one row per rank"
    for rank, (facts, row) in enumerate(zip(nodes, devices, strict=True)):
        there = {device.name: device for device in facts.rdma.devices}
        for name in [name for entry in row for name in names(entry)] if there else []:
            if name not in there:
                return f"rank {rank}: {facts.node} has no RDMA device {name}; it has {', '.join(sorted(there))}"
            if fault := _device_fault(facts, there[name]):
                return f"rank {rank}: {fault}"
    return _crossed(devices, nodes) or _exceeded(devices, nodes, ring=chosen is Topology.RING, in_use=in_use)


def taken(groups: Iterable[tuple[Sequence[NodeId], Layout]], machines: Mapping[NodeId, str]) -> InUse:
    """What jaccl groups take of their devices: of each, the node per rank, and its layout; `machines` is by node."""
    found: dict[tuple[str, str], Use] = {}
    for nodes, layout in groups:
        if len(layout.devices) != len(nodes):
            continue
        for node, used in zip(nodes, usage(layout.devices, ring=layout.jaccl_ring), strict=True):
            for name, use in used.items():
                key = (machines.get(node, node), name)
                found[key] = found.get(key, Use()) + use
    return InUse(devices=found, machines=machines)


# --- cables -------------------------------------------------------------------------------------------------


def _cables(nodes: Sequence[NodeFacts], in_use: InUse = _NOTHING) -> _Cables:
    found: dict[tuple[int, int], list[_Wire]] = {}
    ports: dict[str, list[tuple[int, ThunderboltPort]]] = {}
    for index, facts in enumerate(nodes):
        for port in facts.thunderbolt:
            ports.setdefault(port.domain, []).append((index, port))
    for index, facts in enumerate(nodes):
        for port in facts.thunderbolt:
            for other, far in ports.get(port.peer_domain, []) if port.peer_domain else []:
                mutual = far.peer_domain == port.domain
                if other > index and nodes[other].node != facts.node:
                    found.setdefault((index, other), []).append(_wire(facts, port, nodes[other], far, mutual=mutual))
                elif other < index and not mutual and nodes[other].node != facts.node:
                    one = _wire(facts, port, nodes[other], far, mutual=False)
                    found.setdefault((other, index), []).append(one.reversed())
    cables: _Cables = {}
    for (low, high), wires in found.items():
        seen = [_used(one, nodes[low].node, nodes[high].node, in_use) for one in wires]
        cables[low, high] = tuple(sorted(seen, key=lambda one: (one.regions, one.port, one.other_port)))
    return cables


def _used(one: _Wire, node: NodeId, other: NodeId, in_use: InUse) -> _Wire:
    uses = (in_use.of(node, one.device), in_use.of(other, one.other_device))
    return msgspec.structs.replace(one, regions=max(use.memory_regions for use in uses))


def _wire(facts: NodeFacts, port: ThunderboltPort, others: NodeFacts, far: ThunderboltPort, *, mutual: bool) -> _Wire:
    near_device, near_fault = _end(facts, port)
    far_device, far_fault = _end(others, far)
    one_sided = (
        ""
        if mutual
        else (
            f"port {port.port} of {facts.node} sees port {far.port} of {others.node}, which does not see it: "
            "replug the cable"
        )
    )
    return _Wire(port.port, far.port, near_device, far_device, one_sided or near_fault or far_fault)


def _end(facts: NodeFacts, port: ThunderboltPort) -> tuple[str, str]:
    """The RDMA device of a port, and why it is of no use."""
    where = f"port {port.port} of {facts.node}"
    if port.generation is not None and port.generation < RDMA_GENERATION:
        return "", f"{where} is Thunderbolt {port.generation}, which can never do RDMA"
    for device in facts.rdma.devices:
        if device.interface == port.interface and port.interface:
            return device.name, _device_fault(facts, device)
    there = ", ".join(device.name for device in facts.rdma.devices) or "none"
    return "", f"{where} ({port.interface or 'no interface'}) has no RDMA device; ibv_devices lists {there}"


def _device_fault(facts: NodeFacts, device: RdmaDevice) -> str:
    for interface in facts.interfaces:
        if interface.kind == "bridge" and interface.up and device.interface in interface.members:
            return f"{device.interface} of {facts.node} is in {interface.name}: take it out of the Thunderbolt bridge"
    if not device.active:
        return f"{device.name} of {facts.node} is not active (ibv_devinfo: PORT_DOWN): check the cable"
    if device.ipv4_gid is False:
        return (
            f"{device.name} of {facts.node} has no IPv4-mapped GID: give {device.interface or 'its interface'} an IPv4 "
            "address"
        )
    return ""


def _pair_fault(nodes: Sequence[NodeFacts], cables: _Cables, one: int, other: int) -> str:
    """Why the ranks of a pair have no usable cable; empty where they have."""
    low, high = min(one, other), max(one, other)
    wires = cables.get((low, high), ())
    if any(not each.fault for each in wires):
        return ""
    a, b = nodes[low], nodes[high]
    if a.node == b.node or {port.domain for port in a.thunderbolt} & {port.domain for port in b.thunderbolt}:
        where = f"node {a.node}" if a.node == b.node else f"the machine of {a.node} and {b.node}"
        return f"ranks {low} and {high} are both on {where}: RDMA joins different machines"
    if fault := node_fault(a) or node_fault(b) or (wires[0].fault if wires else ""):
        return fault
    return f"no cable between {a.node} ({_free(a)}) and {b.node} ({_free(b)})"


def _free(facts: NodeFacts) -> str:
    free = sorted(port.port for port in facts.thunderbolt if not port.peer_domain)
    return f"port {', '.join(free)} free" if free else "no port free"


# --- matrices -----------------------------------------------------------------------------------------------


def _mesh(nodes: Sequence[NodeFacts], cables: _Cables, in_use: InUse) -> tuple[Devices, str]:
    size = len(nodes)
    if size > MAX_MESH_RANKS:
        return (), f"a mesh takes at most {MAX_MESH_RANKS} ranks, not {size}"
    pairs = [(low, high) for low in range(size) for high in range(low + 1, size)]
    return _matrix(nodes, cables, pairs, wires=0, in_use=in_use)


def _ring(nodes: Sequence[NodeFacts], cables: _Cables, in_use: InUse) -> tuple[Devices, str]:
    size = len(nodes)
    pairs = sorted({(min(rank, (rank + 1) % size), max(rank, (rank + 1) % size)) for rank in range(size)})
    counts = [sum(not one.fault and not one.regions for one in cables.get(pair, ())) for pair in pairs]
    # Where all cables of a pair are in use, one may have room for another connection.
    return _matrix(nodes, cables, pairs, wires=min(*counts, MAX_RING_WIRES) or 1, in_use=in_use)


def _matrix(
    nodes: Sequence[NodeFacts], cables: _Cables, pairs: Sequence[tuple[int, int]], *, wires: int, in_use: InUse
) -> tuple[Devices, str]:
    """The matrix that joins `pairs` by so many cables each, or, where `wires` is 0, by one for a mesh."""
    faults = [fault for low, high in pairs if (fault := _pair_fault(nodes, cables, low, high))]
    if faults:
        return (), "; ".join(dict.fromkeys(faults))
    rows: list[list[str | tuple[str, ...] | None]] = [[None] * len(nodes) for _ in nodes]
    for low, high in pairs:
        usable = [one for one in cables[low, high] if not one.fault][: wires or 1]
        near, far = tuple(one.device for one in usable), tuple(one.other_device for one in usable)
        rows[low][high] = near if len(usable) > 1 else usable[0].device
        rows[high][low] = far if len(usable) > 1 else usable[0].other_device
    devices: Devices = tuple(tuple(row) for row in rows)
    fault = _exceeded(devices, nodes, ring=wires > 0, in_use=in_use)
    return (() if fault else devices), fault


def _exceeded(devices: Devices, nodes: Sequence[NodeFacts], *, ring: bool, in_use: InUse) -> str:
    """Which device cannot give what the group takes beside what is taken already; empty where all can."""
    total: dict[tuple[str, str], Use] = {}
    owners: dict[str, NodeId] = {}
    for facts, used in zip(nodes, usage(devices, ring=ring), strict=True):
        machine = in_use.machine(facts.node)
        owners.setdefault(machine, facts.node)
        for name, use in used.items():
            total[machine, name] = total.get((machine, name), Use()) + use
    for (machine, name), use in total.items():
        node = owners[machine]
        there = in_use.of(node, name)
        if excess := (use + there).excess:
            by = (
                f", {there.queue_pairs} and {there.memory_regions} are taken by other instances"
                if there != Use()
                else ""
            )
            return f"{name} of {node}: {excess}{by}"
    return ""


def _crossed(devices: Devices, nodes: Sequence[NodeFacts]) -> str:
    """Where a matrix names, for a pair, devices that are known to be on different cables."""
    cables = _cables(nodes)
    for (low, high), wires in cables.items():
        ends = {one.device: one.other_device for one in wires if one.device and one.other_device}
        near, far = names(devices[low][high]), names(devices[high][low])
        for mine, theirs in zip(near, far, strict=False):
            if mine in ends and ends[mine] != theirs:
                return (
                    f"ranks {low} and {high} (pair {low}-{high}): {mine} of {nodes[low].node} is cabled to "
                    f"{ends[mine]} of {nodes[high].node}, not to {theirs}: list both ends of a cable at the same place"
                )
    return ""
