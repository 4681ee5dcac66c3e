"""Whether what a node tells can be: placement and every view of the cluster reckon with it. Pure."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterable

from muster.facts import NodeFacts
from muster.links import NodeLinks

#: Entries of a list that any machine may have.
_MOST_ENTRIES = 20_000
_MOST_NUMBER = 2**63
#: A rate in Mbit/s, or a round trip in µs, beyond anything that is measured.
_MOST_MEASURED = 1e12


def fault_of_links(links: NodeLinks) -> str:
    """What is wrong with a node's measurements; empty where nothing is."""
    if len(links.measured) > _MOST_ENTRIES:
        return f"{len(links.measured)} measured pairs"
    for one in links.measured:
        for name in ("rtt_us", "mbps_out", "mbps_in"):
            value: float | None = getattr(one, name)
            if value is not None and not (math.isfinite(value) and 0 <= value <= _MOST_MEASURED):
                return f"{name} is {value} between {one.own!r} and {one.host!r}"
        if not are_ipv4((one.own, one.host)):
            return f"a pair of addresses is {one.own!r} and {one.host!r}"
    return ""


def fault_of_facts(facts: NodeFacts) -> str:
    """What is wrong with what a node says of its machine; empty where nothing is."""
    speed = facts.memory_gbps
    if speed is not None and not (math.isfinite(speed) and 0 <= speed <= _MOST_MEASURED):
        return f"memory_gbps is {speed}"
    sizes = [facts.memory_total_bytes, facts.memory_available_bytes, facts.wired_limit_bytes, facts.cores]
    sizes += [size for disk in facts.disks for size in (disk.total_bytes, disk.free_bytes)]
    sizes += [size for gpu in facts.gpus for size in (gpu.memory_bytes, gpu.free_bytes)]
    sizes += [held.bytes for held in facts.models]
    sizes += [number for interface in facts.interfaces for number in (interface.mbps, interface.mtu)]
    for size in sizes:
        if size is not None and not 0 <= size < _MOST_NUMBER:
            return f"a size is {size}"
    hosts = [address.host for interface in facts.interfaces for address in interface.addresses]
    if not are_ipv4(hosts):
        return "an address of an interface is not IPv4"
    lists = (facts.interfaces, facts.thunderbolt, facts.models, facts.disks, facts.gpus, facts.rdma.devices)
    return "" if max(map(len, lists)) <= _MOST_ENTRIES else "one of its lists is longer than any machine's"


def are_ipv4(hosts: Iterable[str]) -> bool:
    """Whether each of them is an IPv4 address, as every user of one takes it."""
    try:
        for host in hosts:
            ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True
