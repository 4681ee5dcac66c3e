"""Interfaces of a Mac: what kind each is, and what is up."""

from __future__ import annotations

import macos_samples as samples
import pytest

from muster.facts import Interface, InterfaceKind
from muster.probe.macos_network import kind_of, parse_hardware_ports, parse_ifconfig
from muster.probe.reading import Unread
from muster.spec import NodeAddress


@pytest.fixture(scope="module")
def shown() -> dict[str, Interface]:
    found = parse_ifconfig(samples.IFCONFIG, samples.PORTS)
    assert not isinstance(found, Unread)
    return {one.name: one for one in found}


def test_every_interface_has_its_kind(shown: dict[str, Interface]) -> None:
    assert {name: one.kind for name, one in shown.items()} == {
        "lo0": "loopback",
        "gif0": "other",
        "anpi0": "other",
        "en0": "ethernet",
        "en1": "wifi",
        "en2": "thunderbolt",
        "en3": "thunderbolt",
        "bridge0": "bridge",
        "bridge100": "virtual",
        "utun4": "vpn",
        "en9": "ethernet",
    }


def test_addresses_speeds_and_sizes_are_read(shown: dict[str, Interface]) -> None:
    assert shown["en0"].addresses == (NodeAddress(host="10.0.1.21", network="10.0.1.0/24"),)
    assert (shown["en0"].mbps, shown["en0"].mtu, shown["en0"].mac) == (10_000, 1500, "02:11:22:33:44:00")
    assert shown["en1"].addresses == (NodeAddress(host="10.0.2.33", network="10.0.2.0/23"),)
    assert shown["en1"].mbps is None
    assert shown["en9"].mbps == 2500
    assert shown["utun4"].addresses == (NodeAddress(host="100.101.102.103", network="100.101.102.103/32"),)
    assert shown["en3"].mtu == 9000


def test_a_port_with_a_link_local_address_only_has_that(shown: dict[str, Interface]) -> None:
    assert shown["en3"].up
    assert shown["en3"].addresses == (NodeAddress(host="169.254.10.1", network="169.254.0.0/16"),)


def test_an_active_bridge_names_its_members_and_a_port_without_cable_is_not_up(shown: dict[str, Interface]) -> None:
    assert shown["bridge0"].up
    assert shown["bridge0"].members == ("en2", "en4")
    assert not shown["en2"].up
    assert not shown["gif0"].up


@pytest.mark.parametrize(
    ("name", "port", "kind"),
    [
        ("en5", "Thunderbolt 1", "thunderbolt"),
        ("en8", "Thunderbolt Ethernet", "ethernet"),
        ("en8", "USB 10/100/1000 LAN", "ethernet"),
        ("en7", "iPhone USB", "other"),
        ("en1", "WLAN", "wifi"),
        ("en0", "AirPort", "wifi"),
        ("bridge0", "Thunderbolt-Bridge", "bridge"),
        ("en11", "", "other"),
        ("feth1", "", "vpn"),
        ("wg0", "", "vpn"),
        ("ipsec0", "", "vpn"),
        ("awdl0", "", "other"),
        ("vmenet0", "", "virtual"),
    ],
)
def test_kinds_by_name_and_port(name: str, port: str, kind: InterfaceKind) -> None:
    assert kind_of(name, port) == kind


def test_hardware_ports_map_to_devices() -> None:
    assert parse_hardware_ports(samples.HARDWARE_PORTS) == samples.PORTS
    for text in ("", "** Error: Unable to find item in network database.\n", "Device: en0\n"):
        assert isinstance(parse_hardware_ports(text), Unread)


def test_ifconfig_that_says_nothing_is_not_read() -> None:
    for text in ("", "ifconfig: interface en77 does not exist\n", "\t\t\n"):
        assert isinstance(parse_ifconfig(text), Unread)
