"""The interfaces and IPv4 addresses of this machine now, as cheaply as they can be had."""

from __future__ import annotations

import ipaddress
import re
import socket

import psutil

from muster.facts import Interface
from muster.probe import linux_network, macos_network
from muster.spec import NodeAddress

Glance = tuple[tuple[str, bool, tuple[str, ...]], ...]

#: Radios of a Mac that go up and down all day for AirDrop and the like, and carry nothing of ours.
_RESTLESS = re.compile(r"(awdl|llw|anpi|ap|p2p)\d+")


def glance() -> Glance:
    """What tells that something changed: name, whether it is up, and the addresses of each; some 0.1 ms."""
    stats = psutil.net_if_stats()
    found = psutil.net_if_addrs()
    return tuple(
        (
            name,
            name in stats and stats[name].isup,
            tuple(sorted(f"{one.address}/{one.netmask}" for one in found[name] if one.family == socket.AF_INET)),
        )
        for name in sorted(found)
        if not _RESTLESS.fullmatch(name)
    )


def interfaces() -> tuple[Interface, ...]:
    """Every interface. On macOS the kind of en0, en1, … is not known here: that takes `networksetup`."""
    stats = psutil.net_if_stats()
    found: list[Interface] = []
    for name, entries in sorted(psutil.net_if_addrs().items()):
        known = stats.get(name)
        device = linux_network.Device(name=name)
        if psutil.LINUX and re.fullmatch(r"[^/]+", name):
            device = linux_network.read_device(name, _index(name))
        mbps = known.speed if known is not None and known.speed > 0 else device.mbps
        found.append(
            Interface(
                name=name,
                kind=linux_network.kind_of(device) if psutil.LINUX else macos_network.kind_of(name, ""),
                up=known is not None and known.isup,
                addresses=tuple(
                    NodeAddress(host=entry.address, network=network_of(entry.address, entry.netmask))
                    for entry in entries
                    if entry.family == socket.AF_INET
                ),
                mbps=mbps if mbps is None or mbps < 2**31 else None,
                mtu=known.mtu if known is not None else None,
                mac=next((entry.address for entry in entries if entry.family == psutil.AF_LINK), ""),
                members=device.members,
            )
        )
    return tuple(found)


def network_of(host: str, netmask: str | None) -> str:
    """The network of an IPv4 address, as CIDR; of a point-to-point link, which has no mask, the address itself."""
    return str(ipaddress.IPv4Network(f"{host}/{netmask or '255.255.255.255'}", strict=False))


def _index(name: str) -> int:
    try:
        return socket.if_nametoindex(name)
    except OSError:
        return 0
