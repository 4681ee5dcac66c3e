"""Macs and Thunderbolt cables as facts, for tests that have neither."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from muster.facts import Interface, NodeFacts, Rdma, RdmaDevice, ThunderboltPort
from muster.spec import BootId, NodeAddress, NodeId

#: One end of a cable: which node, and which of its ports, both from 0.
End = tuple[int, int]


def domain(node: str, port: int) -> str:
    return f"BUS-{node}-{port}"


def mac(node: str, ports: int = 3, *, generation: int = 5, gid: bool = True, rdma: bool = True) -> NodeFacts:
    """A Mac with nothing cabled to it. Port 1 is en2 with rdma_en2, port 2 is en3, …"""
    interfaces = [f"en{number + 2}" for number in range(ports)]
    return NodeFacts(
        node=NodeId(node),
        boot=BootId(f"{node}-boot-1"),
        backends=("ring", "jaccl"),
        thunderbolt=tuple(
            ThunderboltPort(
                port=str(number + 1), domain=domain(node, number), generation=generation, interface=interfaces[number]
            )
            for number in range(ports)
        ),
        interfaces=(
            Interface(
                name="en0",
                kind="ethernet",
                up=True,
                addresses=(NodeAddress(host=f"10.0.0.{ord(node[-1])}", network="10.0.0.0/24"),),
            ),
            *(Interface(name=name, kind="thunderbolt", up=True) for name in interfaces),
        ),
        rdma=Rdma(
            enabled=rdma,
            devices=tuple(
                RdmaDevice(name=f"rdma_{name}", interface=name, active=False, ipv4_gid=gid) for name in interfaces
            )
            if rdma and generation >= 5
            else (),
        ),
    )


def cabled(nodes: Sequence[NodeFacts], *cables: tuple[End, End]) -> list[NodeFacts]:
    """The nodes with these cables between them; a device is active once its port has one."""
    found = list(nodes)
    for one, other in cables:
        for (node, port), (far, far_port) in ((one, other), (other, one)):
            facts, peer = found[node], found[far].thunderbolt[far_port].domain
            ports = list(facts.thunderbolt)
            ports[port] = msgspec.structs.replace(ports[port], peer_domain=peer, peer_name=str(found[far].node))
            devices = tuple(
                msgspec.structs.replace(device, active=True) if device.interface == ports[port].interface else device
                for device in facts.rdma.devices
            )
            rdma = msgspec.structs.replace(facts.rdma, devices=devices)
            found[node] = msgspec.structs.replace(facts, thunderbolt=tuple(ports), rdma=rdma)
    return found


def meshed(size: int) -> list[NodeFacts]:
    """Every Mac cabled to every other: port k of each goes to the k-th of the others."""
    nodes = [mac(chr(ord("a") + number), size - 1) for number in range(size)]
    pairs = [(low, high) for low in range(size) for high in range(low + 1, size)]
    return cabled(nodes, *(((low, high - 1), (high, low)) for low, high in pairs))


def ringed(size: int, wires: int = 1) -> list[NodeFacts]:
    """Every Mac cabled to the next by so many cables; of two, to the other."""
    nodes = [mac(chr(ord("a") + number), 2 * wires) for number in range(size)]
    pairs = [(number, (number + 1) % size) for number in range(size)] if size > 2 else [(0, 1)]
    return cabled(nodes, *(((one, wire), (next_, wires + wire)) for one, next_ in pairs for wire in range(wires)))
