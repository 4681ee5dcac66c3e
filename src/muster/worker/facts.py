"""What a worker finds out about its node before it joins."""

from __future__ import annotations

import ipaddress
import platform
import socket
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

from muster.bus import Endpoint
from muster.errors import RequestError, UnreachableError
from muster.facts import Interface
from muster.probe import linux_system
from muster.spec import NodeAddress

#: Part of the machine's memory that instances may have unless the operator says otherwise.
_MEMORY_SHARE = 0.9
#: Kinds of interfaces whose speed is agreed on with the other end of a cable, and not another one every second.
_STEADY = ("ethernet", "thunderbolt")


def default_memory_bytes() -> int:
    """Memory that instances may have on this machine."""
    return int(psutil.virtual_memory().total * _MEMORY_SHARE)


def machine_id() -> str:
    """The same for every worker on this machine, another on every other one."""
    for path in (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id")):
        if path.is_file():
            return path.read_text().strip()
    return f"{platform.node()}-{uuid.getnode():x}"


def network_id() -> str:
    """The same for processes that share their network stack, another for every other one.

    On Linux that is a namespace of a booted kernel; machines that were cloned may have equal machine ids.
    """
    try:
        booted = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{machine_id()}/{booted}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return machine_id()


def blas(pid: int) -> str:
    """What MLX multiplies with in this process, on the CPU; "" where that is not to be seen."""
    try:
        return linux_system.blas_of(Path(f"/proc/{pid}/maps").read_text(errors="replace"))
    except OSError:
        return ""


def candidates(
    addresses: tuple[NodeAddress, ...], interfaces: Iterable[Interface], *, given: bool
) -> tuple[NodeAddress, ...]:
    """The addresses that other nodes may try now. Pure; `addresses` are those that the node joined with.

    Those that the operator gave, as far as they are there. Otherwise every one of an interface that is up, those that
    the node joined with first: but for loopback, and for what serves only containers and virtual machines of this
    one. A node that has nothing else, or joined over loopback, is reached by nobody outside: loopback is all.
    """
    up = {address: one for one in interfaces if one.up for address in one.addresses}
    if given:
        return tuple(address for address in addresses if address in up)
    first = [address for address in addresses if address in up]
    others = [one for one, interface in up.items() if interface.kind not in ("loopback", "virtual")]
    if not others or (first and all(up[address].kind == "loopback" for address in first)):
        return tuple(first or [one for one, interface in up.items() if interface.kind == "loopback"])
    rest = sorted((one for one in others if one not in first), key=lambda one: ipaddress.IPv4Address(one.host))
    return (*first, *rest)


def carriers(
    addresses: Iterable[NodeAddress], interfaces: Sequence[Interface], told: Sequence[Interface]
) -> dict[str, str]:
    """What carries each of the addresses, for people, as in "eth0 (ethernet, 10000 Mbit/s)". Pure.

    `told` are the interfaces as the system's slow tools last saw them: they know kinds and bridges that others do not.
    """
    better = {one.name: one for one in told}
    found: dict[str, str] = {}
    bridges = {
        name: one.name for one in interfaces for name in one.members or better.get(one.name, one).members if one.up
    }
    for one in interfaces:
        known = better.get(one.name, one)
        kind = known.kind if one.kind == "other" else one.kind
        words = [kind]
        if one.mbps and kind in _STEADY:
            words.append(f"{one.mbps} Mbit/s")
        if members := one.members or known.members:
            words.append(f"of {' and '.join(sorted(members))}")
        if one.name in bridges:
            words.append(f"in {bridges[one.name]}")
        found.update((each.host, f"{one.name} ({', '.join(words)})") for each in one.addresses if one.up)
    return {one.host: found[one.host] for one in addresses if one.host in found}


def addresses(wanted: tuple[str, ...], coordinator: Endpoint) -> tuple[NodeAddress, ...]:
    """The addresses that other nodes dial: those the operator gave, or the one that the coordinator is reached from.

    Others of this machine are not offered by themselves: two nodes may both have a bridge or a VPN with the same
    network and not reach each other over it.

    Raises:
        RequestError: an address is not IPv4, or not one of this machine's.
        UnreachableError: the coordinator's name does not resolve, or no interface leads there.
    """
    own = _own()
    if not wanted:
        wanted = (_towards(coordinator),)
    found: list[NodeAddress] = []
    for host in wanted:
        if host not in own:
            raise RequestError(
                f"--address {host} is no IPv4 address of this machine; it has {', '.join(sorted(own))}",
                remedy="Give an address that the other nodes reach this one at.",
            )
        found.append(NodeAddress(host=host, network=own[host]))
    return tuple(found)


def _own() -> dict[str, str]:
    """IPv4 addresses of this machine and their networks."""
    found: dict[str, str] = {}
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.family == socket.AF_INET:
                mask = entry.netmask or "255.255.255.255"
                found[entry.address] = str(ipaddress.IPv4Network(f"{entry.address}/{mask}", strict=False))
    return found


def _towards(coordinator: Endpoint) -> str:
    """The address that packets to the coordinator leave with; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((coordinator.host, coordinator.port))
        except OSError as error:
            raise UnreachableError(
                f"no way leads to the coordinator at {coordinator}: {error.strerror or error}",
                remedy="Check the address given with --join, and the network.",
            ) from error
        return str(probe.getsockname()[0])
