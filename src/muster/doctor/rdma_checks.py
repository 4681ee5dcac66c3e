"""The checks of Thunderbolt and RDMA, on one machine and between several, from their facts. Pure.

Each step is possible only when the one before it is, so the first that fails is the one to mend.

Source: mlx issues 3207 (bridge), 3467 (GID), 3777 and omlx 3037 (Thunderbolt 4); MLX's documentation of JACCL.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from muster.doctor.checks import Check, failure, numbers, ok, warning
from muster.facts import NodeFacts, RdmaDevice
from muster.rdma import RDMA_GENERATION, ring_order, wire
from muster.spec import NodeId

#: The first macOS with RDMA over Thunderbolt.
RDMA_MACOS: Final = (26, 2)
_BRIDGE_OFF: Final = 'sudo networksetup -setnetworkserviceenabled "Thunderbolt Bridge" off && sudo ifconfig {} down'


def check_rdma(facts: NodeFacts) -> Iterator[Check]:
    """From the cable's socket to a device that a group can use; says so where this machine never can."""
    if facts.os != "macOS":
        yield ok("rdma", "MLX has RDMA on macOS only: groups with this machine run over TCP")
        return
    yield from _thunderbolt(facts)
    generations = [port.generation for port in facts.thunderbolt if port.generation is not None]
    if not facts.thunderbolt:
        if "thunderbolt" not in facts.unknown:
            yield ok("rdma", "there is no Thunderbolt port: groups with this machine run over TCP")
        return
    if generations and max(generations) < RDMA_GENERATION:
        although = ", although rdma_ctl says enabled" if facts.rdma.enabled else ""
        yield ok(
            "rdma",
            f"Thunderbolt {max(generations)} can never do RDMA{although}: groups with this machine run over TCP",
            "Nothing to set: RDMA takes a machine with Thunderbolt 5, and Recovery mode does not change that",
        )
        return
    if numbers(facts.os_version) and numbers(facts.os_version) < RDMA_MACOS:
        yield warning("rdma", f"macOS {facts.os_version}; RDMA needs 26.2 or later", "sudo softwareupdate -i -a")
        return
    yield from _enabled(facts)


def _thunderbolt(facts: NodeFacts) -> Iterator[Check]:
    if not facts.thunderbolt:
        return
    ports = [
        f"port {port.port}: "
        + (f"{port.peer_name or 'a computer'} at {port.gbps or '?'} Gb/s" if port.peer_domain else "free")
        for port in facts.thunderbolt
    ]
    generation = max((port.generation or 0 for port in facts.thunderbolt), default=0)
    yield ok("thunderbolt", f"Thunderbolt {generation or '(unknown)'}; {', '.join(ports)}")
    for port in facts.thunderbolt:
        if port.peer_domain and port.generation == RDMA_GENERATION and port.gbps is not None and port.gbps < 80:
            yield warning(
                "thunderbolt speed",
                f"port {port.port} of Thunderbolt 5 runs at {port.gbps} Gb/s: the cable or the other end is older",
                "Use a Thunderbolt 5 cable of at most 1 m, between Thunderbolt 5 ports.",
            )


def _enabled(facts: NodeFacts) -> Iterator[Check]:
    rdma = facts.rdma
    if rdma.enabled is None:
        why = facts.unknown.get("rdma", "rdma_ctl is not on this machine")
        yield warning("rdma", f"not known to be enabled: {why}", "rdma_ctl status")
    elif not rdma.enabled:
        yield warning(
            "rdma",
            "rdma_ctl says disabled: groups run over TCP",
            "Start into Recovery mode (hold the power button), open Terminal, run: rdma_ctl enable, and restart",
        )
    elif not rdma.devices:
        why = f" ({facts.unknown['rdma.devices']})" if "rdma.devices" in facts.unknown else ""
        yield failure("rdma", f"rdma_ctl says enabled, but ibv_devices shows no device{why}", "sudo reboot")
    else:
        yield from _devices(facts)


def _devices(facts: NodeFacts) -> Iterator[Check]:
    devices, bridged = facts.rdma.devices, set[str]()
    names = {device.interface for device in devices}
    for bridge in facts.interfaces:
        if bridge.kind == "bridge" and bridge.up and (members := sorted(names & set(bridge.members))):
            bridged.update(members)
            yield failure(
                "thunderbolt bridge",
                f"{bridge.name} is up with {', '.join(members)}: RDMA over these fails with errno 22",
                _BRIDGE_OFF.format(bridge.name),
            )
    active = [device for device in devices if device.active]
    for device in active:
        if device.ipv4_gid is False and device.interface not in bridged:
            yield failure(
                "rdma gid",
                f"{device.name} has no GID of an IPv4 address: RDMA over it fails with errno 22",
                f"sudo ifconfig {device.interface} inet 10.99.{_number(device)}.1 netmask 255.255.255.252, "
                "and .2 at the other end",
            )
    if not active:
        shown = ", ".join(device.name for device in devices)
        yield warning(
            "rdma", f"none of {shown} is active", "Connect a Thunderbolt 5 cable to another Mac with RDMA on."
        )
    else:
        yield ok("rdma", f"enabled; active: {', '.join(device.name for device in active)}")


def check_cables(facts: Mapping[NodeId, NodeFacts]) -> Iterator[Check]:
    """Whether the machines that could do RDMA are cabled for it, each to each other or in a ring."""
    able = [found for _, found in sorted(facts.items()) if any(device.active for device in found.rdma.devices)]
    if len(able) < 2:
        return
    wiring, names = wire(able), ", ".join(found.node for found in able)
    order = ring_order(able) if not wiring.mesh else ()
    if wiring.mesh:
        more = f"; --backend jaccl-ring uses {wiring.wires} cables to each neighbour" if wiring.wires > 1 else ""
        yield ok("rdma cables", f"{names}: each is cabled to each other{more}")
    elif order:
        yield ok("rdma cables", f"{', '.join(able[index].node for index in order)}: cabled in a ring")
    else:
        yield warning(
            "rdma cables",
            f"{names} form neither a mesh nor a ring: {wiring.mesh_fault}",
            "Add that Thunderbolt cable; smaller groups of those that are cabled still form",
        )


def _number(device: RdmaDevice) -> int:
    """A number of its own for each interface, so that each cable gets a network of its own."""
    digits = "".join(filter(str.isdigit, device.interface))
    return int(digits or 0) % 256
