"""Hosts of a hostfile and nodes of a cluster: which is which, and what a hostfile wishes of an instance. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import msgspec

from muster.errors import RequestError
from muster.facts import NodeFacts
from muster.group.addresses import is_loopback
from muster.group.hostfile import FileBackend, Host, Hostfile, Row
from muster.group.payload import PreparedRank, build_ring
from muster.layout import Devices
from muster.spec import BackendWish, InstanceSpec, NodeId, NodeInfo, ScriptWorkload
from muster.state import Instance


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What a hostfile asks for, over nodes that are there. `nodes` and `addresses` are by rank."""

    nodes: tuple[NodeId, ...]
    backend: BackendWish = "auto"
    addresses: tuple[tuple[str, ...], ...] = ()
    devices: Devices = ()
    environment: dict[str, str] = {}

    def upon(self, spec: InstanceSpec) -> InstanceSpec:
        """The spec with this wish in it; variables that it sets itself stay."""
        return msgspec.structs.replace(
            spec,
            nodes=tuple(dict.fromkeys(self.nodes)),
            ranks=len(self.nodes),
            backend=self.backend,
            addresses=self.addresses,
            devices=self.devices,
            environment={**self.environment, **spec.environment},
        )


def resolve(hostfile: Hostfile, nodes: Iterable[NodeInfo], facts: Mapping[NodeId, NodeFacts] | None = None) -> Wish:
    """Find the node behind each host, by its id, host name, or any of its addresses.

    Args:
        hostfile: As `muster.group.hostfile.parse` gives it.
        nodes: Those that are there.
        facts: What they know of themselves, where they told it: further addresses.

    Raises:
        RequestError: no node answers to a host, or several do; an address is not one of the node's; or the ranks are
            dealt over the nodes in a way that muster does not.
    """
    known = _Known(nodes, facts or {})
    found = tuple(known.node_of(rank, host) for rank, host in enumerate(hostfile.hosts))
    _check_deal(hostfile, found)
    # A ring over TCP has none; mlx.launch passes over them then.
    devices = hostfile.devices if hostfile.backend != "ring" else ()
    backend: BackendWish = hostfile.backend or "auto"
    if hostfile.backend == "jaccl-ring":
        devices = tuple(_neighbours_only(rank, row) for rank, row in enumerate(devices))
    addresses = tuple(host.ips for host in hostfile.hosts)
    return Wish(
        nodes=found, backend=backend, addresses=addresses, devices=devices, environment=dict(hostfile.environment)
    )


def hostfile_of(instance: Instance, nodes: Iterable[NodeInfo]) -> Hostfile:
    """The hostfile with which `mlx.launch` would form the same group as the instance's current attempt.

    Raises:
        RequestError: its ranks have not prepared their addresses, or a node of it is not there.
    """
    everyone = tuple(nodes)
    infos = {info.node: info for info in everyone}
    for rank in instance.ranks:
        if rank.node not in infos:
            raise RequestError(f"node {rank.node} of rank {rank.rank} is not there", remedy="See: muster nodes")
    known = _Known(everyone, {})
    devices = instance.layout.devices if _forms_jaccl(instance) else ()
    backend = _file_backend(instance, devices)
    hosts: list[Host] = []
    for rank, ips in zip(instance.ranks, _ips(instance, infos), strict=True):
        info = infos[rank.node]
        ssh = "127.0.0.1" if ips and is_loopback(ips[0]) else info.hostname
        host = Host(ssh=ssh, ips=ips, rdma=devices[rank.rank] if devices else ())
        plain = [found for found in known.answering(host) if found == rank.node]
        hosts.append(host if plain == known.answering(host) else msgspec.structs.replace(host, node=rank.node))
    workload = instance.spec.workload
    own = workload.environment if isinstance(workload, ScriptWorkload) else {}
    return Hostfile(hosts=tuple(hosts), backend=backend, environment={**instance.spec.environment, **own})


class _Known:
    """The nodes by everything that they answer to."""

    def __init__(self, nodes: Iterable[NodeInfo], facts: Mapping[NodeId, NodeFacts]) -> None:
        self._infos = {info.node: info for info in nodes}
        self._hosts = {node: _hosts(info, facts.get(node)) for node, info in self._infos.items()}

    def node_of(self, rank: int, host: Host) -> NodeId:
        """The one node that the host is; see `resolve`."""
        where, name = f"hosts[{rank}]", host.node or host.ssh
        found = self.answering(host)
        if not found:
            nodes = "; ".join(map(self._described, sorted(self._infos))) or "none"
            raise RequestError(
                f"{where}: no node answers to {name!r}; the nodes are: {nodes}",
                remedy="Start a worker there, or write a node's id, host name or address as ssh.",
                field=f"{where}.{'node' if host.node else 'ssh'}",
            )
        if len(found) > 1:
            raise RequestError(
                f"{where}: nodes {', '.join(found)} all answer to {name!r}",
                remedy='Add "node" with the id of the one that is meant.',
                field=f"{where}.ssh",
            )
        (node,) = found
        for index, ip in enumerate(host.ips):
            if ip not in self._hosts[node] and not is_loopback(ip):
                raise RequestError(
                    f"{where}: {ip} is no address of {self._described(node)}",
                    remedy="Write one of the node's own IPv4 addresses.",
                    field=f"{where}.ips[{index}]",
                )
        return node

    def answering(self, host: Host) -> list[NodeId]:
        """The nodes that the host may be: the best kind of match counts, and its addresses decide between several."""
        if host.node:
            return [NodeId(host.node)] if host.node in self._infos else []
        name = host.ssh.rpartition("@")[2].lower().rstrip(".")
        matches = (
            [node for node in self._infos if node.lower() == name],
            [node for node, info in self._infos.items() if info.hostname.lower().rstrip(".") == name],
            [node for node, info in self._infos.items() if _first_label(info.hostname) == _first_label(name)],
            [node for node in self._infos if ("127.0.0.1" if name == "localhost" else name) in self._hosts[node]],
            # An alias of ssh's own configuration: nobody here knows it, but the addresses are somebody's.
            [node for node in self._infos if self._has_all(node, host.ips)],
        )
        found = next((sorted(nodes) for nodes in matches if nodes), [])
        narrowed = [node for node in found if self._has_all(node, host.ips)]
        return narrowed if len(found) > 1 and narrowed else found

    def _has_all(self, node: NodeId, ips: Sequence[str]) -> bool:
        beyond = [ip for ip in ips if not is_loopback(ip)]
        return bool(beyond) and self._hosts[node] >= set(beyond)

    def _described(self, node: NodeId) -> str:
        addresses = ", ".join(sorted(self._hosts[node]))
        return f"{node} ({self._infos[node].hostname}: {addresses})"


def _hosts(info: NodeInfo, facts: NodeFacts | None) -> set[str]:
    found = {address.host for address in (*info.addresses, *info.candidates)}
    interfaces = facts.interfaces if facts is not None else ()
    return found | {address.host for one in interfaces if one.up for address in one.addresses}


def _first_label(name: str) -> str:
    """A host's name without its domain: Macs call themselves "mac1.local" and "mac1"; an address stays whole."""
    head, _, rest = name.lower().partition(".")
    return name if rest and head.isdigit() else head


def _check_deal(hostfile: Hostfile, nodes: Sequence[NodeId]) -> None:
    """A spec names each node once, and ranks are dealt evenly over them, neighbours together."""
    runs = [(node, len(list(ranks))) for node, ranks in groupby(nodes)]
    if len(runs) != len(set(nodes)) or len({count for _, count in runs}) > 1:
        shown = ", ".join(f"{node}" + (f" {count} times" if count > 1 else "") for node, count in runs)
        raise RequestError(
            f"hosts gives the ranks to {shown}",
            remedy="List every node equally often, all ranks of one node after the other.",
            field="hosts",
        )


def _neighbours_only(rank: int, row: Row) -> Row:
    size = len(row)
    kept = {(rank - 1) % size, (rank + 1) % size}
    return tuple(entry if other in kept else None for other, entry in enumerate(row))


def _forms_jaccl(instance: Instance) -> bool:
    """One rank forms no group, whatever was asked for, and has no devices to write."""
    return instance.backend == "jaccl" and len(instance.ranks) > 1


def _file_backend(instance: Instance, devices: Devices) -> FileBackend:
    if not _forms_jaccl(instance):
        return "ring"
    missing = any(entry is None for i, row in enumerate(devices) for j, entry in enumerate(row) if i != j)
    return "jaccl-ring" if instance.layout.jaccl_ring or missing else "jaccl"


def _ips(instance: Instance, infos: Mapping[NodeId, NodeInfo]) -> list[tuple[str, ...]]:
    """By rank, where it listens for its left neighbour; with jaccl, where the others reach it."""
    if instance.spec.addresses:
        return list(instance.spec.addresses)
    own = [(infos[rank.node].addresses[0].host,) for rank in instance.ranks]
    if len(instance.ranks) == 1:
        return own
    if instance.backend == "jaccl":
        dialled = [rank.coordinator.partition(":")[0] for rank in instance.layout.ranks[1:]]
        return [(dialled[0],), *own[1:]] if dialled and dialled[0] else own
    if missing := [rank.rank for rank in instance.ranks if not rank.addresses]:
        raise RequestError(
            f"rank {missing[0]} of {instance.id} has prepared no address",
            remedy="Wait until the instance is ready (muster ps), and ask again.",
        )
    prepared = [PreparedRank(rank.rank, rank.addresses) for rank in instance.ranks]
    payload = build_ring(instance.id, instance.attempt, 0, prepared, dialled=_dialled(instance))
    return [tuple(text.partition(":")[0] for text in texts) for texts in payload.hosts]


def _dialled(instance: Instance) -> tuple[str, ...]:
    """By rank, the address at which the one before it dials it; empty where the layout left that to the ranks."""
    hosts = [rank.next.host for rank in instance.layout.ranks if rank.next is not None]
    return (hosts[-1], *hosts[:-1]) if len(hosts) == len(instance.ranks) else ()
