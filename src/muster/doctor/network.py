"""The checks of one machine's network interfaces, from its facts. Pure."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from muster.doctor.checks import Check, failure, ok, warning
from muster.facts import Interface, NodeFacts

#: Kinds that a group's traffic may go over; the others are the machine's own or somebody's tunnel.
CARRIERS: Final = ("thunderbolt", "ethernet", "wifi", "bridge", "other")
_LINK_LOCAL: Final = ipaddress.IPv4Network("169.254.0.0/16")


def carriers(facts: NodeFacts) -> tuple[Interface, ...]:
    """The interfaces that are up, have an IPv4 address, and may lead to other machines."""
    return tuple(one for one in facts.interfaces if one.up and one.addresses and one.kind in CARRIERS)


def check_interfaces(facts: NodeFacts) -> Iterator[Check]:
    """What the interfaces offer, and what of it leads packets astray."""
    found = carriers(facts)
    if not facts.interfaces:
        return
    yield from _addresses(facts, found)
    yield from _duplicates(facts)
    yield from _same_network(found)
    if found and all(one.kind == "wifi" for one in found):
        names = ", ".join(one.name for one in found)
        yield warning("wi-fi", f"only Wi-Fi ({names}) leads to other machines", "Connect Ethernet or Thunderbolt.")
    vpns = [one.name for one in facts.interfaces if one.up and one.addresses and one.kind == "vpn"]
    if vpns:
        yield ok("vpn", f"{', '.join(vpns)} is used only where nothing better reaches")


def _addresses(facts: NodeFacts, found: tuple[Interface, ...]) -> Iterator[Check]:
    shown = ", ".join(_shown(one) for one in found)
    if not found:
        inside = ", ".join(_shown(one) for one in facts.interfaces if one.up and one.addresses)
        yield warning(
            "network",
            f"no interface with an IPv4 address leads to other machines (there is {inside or 'none at all'})",
            "Connect a cable, or set an address; groups on this machine alone still form.",
        )
    elif all(ipaddress.IPv4Address(address.host) in _LINK_LOCAL for one in found for address in one.addresses):
        yield warning(
            "network", f"{shown}: link-local addresses only, which change", "Give an interface a fixed IPv4 address."
        )
    else:
        yield ok("network", shown)


def _duplicates(facts: NodeFacts) -> Iterator[Check]:
    owners: dict[str, list[str]] = defaultdict(list)
    for one in facts.interfaces:
        for address in one.addresses:
            if one.up:
                owners[address.host].append(one.name)
    for host, names in sorted(owners.items()):
        if len(names) > 1:
            yield failure("duplicate address", f"{host} is on {' and on '.join(names)}", f"Remove it from {names[-1]}.")


def _same_network(found: tuple[Interface, ...]) -> Iterator[Check]:
    networks: dict[str, dict[str, Interface]] = defaultdict(dict)
    for one in found:
        for address in one.addresses:
            if ipaddress.IPv4Address(address.host) not in _LINK_LOCAL:
                networks[address.network][one.name] = one
    for network, members in sorted(networks.items()):
        if len(members) > 1:
            slow = next((one for one in members.values() if one.kind == "wifi"), None)
            help = f"Turn {slow.name} (Wi-Fi) off" if slow else "Give each interface a network of its own"
            names = ", ".join(f"{one.name} ({one.kind})" for one in members.values())
            yield warning("same network", f"{names} are all in {network}: packets may leave by any of them", f"{help}.")


def _shown(one: Interface) -> str:
    speed = f", {one.mbps} Mbit/s" if one.mbps else ""
    return f"{one.name} {'/'.join(address.host for address in one.addresses)} ({one.kind}{speed})"
