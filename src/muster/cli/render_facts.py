"""What a node knows of its machine, as `muster nodes NODE` shows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from muster.cli.render import cell, rate, size, state_cell, table
from muster.cli.render_nodes import memory_in_use_bytes, node_state
from muster.facts import Interface, NodeFacts, RdmaDevice, System, ThunderboltPort
from muster.protocol import Beat
from muster.spec import NodeId
from muster.state import Node, State


def node_details(
    state: State, node: Node, facts: Mapping[NodeId, NodeFacts], beat: Beat | None = None
) -> RenderableType:
    """Everything known of one node. `facts` are those of all nodes: a cable has two ends."""
    info = node.info
    own = facts.get(info.node) if node.lost is None else None
    grid = Table.grid(padding=(0, 2))
    rows: list[tuple[str, Text]] = [("node", cell(info.node)), ("state", state_cell(node_state(node)))]
    rows.append(("worker", cell(f"pid {info.pid} on {info.hostname}")))
    hosts = ", ".join(one.host for one in info.candidates or info.addresses)
    rows.append(("addresses", cell(hosts + (" (given by the operator)" if info.addresses_given else ""))))
    rows.append(("budget", cell(f"{size(memory_in_use_bytes(state, node))} reserved of {size(info.memory_bytes)}")))
    if own is not None:
        rows += [(label, cell(text)) for label, text in _machine(own, beat)]
    for label, value in rows:
        grid.add_row(cell(label, "bold"), value)
    if own is None:
        return Group(grid, cell("nothing is told of its machine", "yellow"))
    return Group(grid, *_tables(own, facts))


def _machine(facts: NodeFacts, beat: Beat | None) -> Iterator[tuple[str, str]]:
    yield "chip", f"{facts.chip or 'unknown'}, {facts.cores} cores, {facts.architecture}"
    yield "system", f"{facts.os} {facts.os_version}".strip()
    free = beat.memory_available_bytes if beat is not None else 0
    memory = [f"{size(free or facts.memory_available_bytes)} free of {size(facts.memory_total_bytes)}"]
    memory.append(f"pressure {facts.memory_pressure}")
    if facts.wired_limit_bytes is not None:
        memory.append(f"the GPU may wire {size(facts.wired_limit_bytes)}")
    if facts.memory_gbps is not None:
        memory.append(f"copied at {facts.memory_gbps:.{0 if facts.memory_gbps >= 10 else 1}f} GB/s")
    yield "memory", ", ".join(memory)
    for gpu in facts.gpus:
        free = "" if gpu.free_bytes is None else f"{size(gpu.free_bytes)} free of "
        yield "gpu", gpu.name + ("" if gpu.memory_bytes is None else f", {free}{size(gpu.memory_bytes)}")
    for disk in facts.disks:
        yield "disk", f"{size(disk.free_bytes)} free of {size(disk.total_bytes)} under {disk.path}"
    yield "backends", ", ".join(facts.backends) or "none"
    yield "versions", ", ".join(f"{name} {version}" for name, version in sorted(facts.versions.items()))
    yield "settings", ", ".join(_settings(facts.system)) or "unknown"


def _settings(system: System) -> Iterator[str]:
    if system.firewall != "unknown":
        yield f"firewall {system.firewall}"
    if system.sleep_minutes is not None:
        yield "never sleeps" if system.sleep_minutes == 0 else f"sleeps after {system.sleep_minutes} min"
    if system.clock_synchronised is not None:
        yield "clock " + ("synchronised" if system.clock_synchronised else "not synchronised")
    if system.open_files is not None:
        yield f"{system.open_files} open files"
    if system.blas:
        yield system.blas


def _tables(facts: NodeFacts, all_facts: Mapping[NodeId, NodeFacts]) -> Iterator[RenderableType]:
    yield Text()
    yield _interfaces(facts.interfaces)
    if facts.thunderbolt:
        yield Text()
        yield _thunderbolt(facts.thunderbolt, all_facts)
    if facts.rdma.enabled is not None or facts.rdma.devices:
        yield Text()
        yield from _rdma(facts.rdma.devices, facts.rdma.enabled)
    if facts.models:
        yield Text()
        found = table("MODEL", "SIZE", "REVISION", "FILES")
        for model in sorted(facts.models, key=lambda one: one.model):
            whole = "whole" if model.complete else "in part"
            found.add_row(cell(model.model), cell(size(model.bytes)), cell(model.revision[:12]), cell(whole))
        yield found
    if facts.unknown:
        yield Text()
    for name, reason in sorted(facts.unknown.items()):
        yield cell(f"not known: {name.replace('_', ' ')}: {reason}", "dim")


def _interfaces(interfaces: Sequence[Interface]) -> Table:
    """Those that are up, or have an address or members."""
    found = table("INTERFACE", "KIND", "STATE", "SPEED", "MTU", "ADDRESSES")
    for one in interfaces:
        if not (one.up or one.addresses or one.members):
            continue
        addresses = ", ".join(f"{address.host}/{address.network.rpartition('/')[2]}" for address in one.addresses)
        members = f"of {', '.join(one.members)}" if one.members else ""
        found.add_row(
            cell(one.name),
            cell(one.kind),
            cell("up" if one.up else "down", "" if one.up else "yellow"),
            cell(rate(one.mbps)),
            cell("" if one.mtu is None else str(one.mtu)),
            cell(" ".join(filter(None, (addresses, members)))),
        )
    return found


def _thunderbolt(ports: Sequence[ThunderboltPort], facts: Mapping[NodeId, NodeFacts]) -> Table:
    owners = {port.domain: (name, port.port) for name, one in facts.items() for port in one.thunderbolt if port.domain}
    found = table("THUNDERBOLT", "GENERATION", "SPEED", "INTERFACE", "AT THE OTHER END")
    for port in ports:
        owner = owners.get(port.peer_domain)
        there = port.peer_name if owner is None else f"port {owner[1]} of node {owner[0]}"
        found.add_row(
            cell(f"port {port.port}"),
            cell("" if port.generation is None else str(port.generation)),
            cell("" if port.gbps is None else f"{port.gbps} Gbit/s"),
            cell(port.interface),
            cell(there),
        )
    return found


def _rdma(devices: Sequence[RdmaDevice], enabled: bool | None) -> Iterator[RenderableType]:
    if enabled is not None:
        yield cell(f"RDMA {'enabled' if enabled else 'disabled'}" + ("" if devices else ", no devices"))
    if devices:
        found = table("RDMA DEVICE", "INTERFACE", "PORT", "IPV4 GID")
        for one in devices:
            gid = {True: "yes", False: "no", None: ""}[one.ipv4_gid]
            found.add_row(cell(one.name), cell(one.interface), cell("active" if one.active else "down"), cell(gid))
        yield found
