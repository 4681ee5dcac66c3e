"""Network interfaces of a Mac, from `networksetup` and `ifconfig`. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping

from muster.facts import Interface, InterfaceKind
from muster.probe.reading import Unread, unlike
from muster.spec import NodeAddress

_HEAD = re.compile(r"(?P<name>[A-Za-z][\w.-]*): flags=[0-9a-f]+<(?P<flags>[A-Z0-9_,]*)>.*?mtu (?P<mtu>[0-9]{1,9})")
_INET = re.compile(r"inet (?P<host>[\d.]+)(?: --> [\d.]+)? netmask (?P<mask>0x[0-9a-f]{8}|[\d.]+)")
_MEDIA = re.compile(r"\b([0-9]{1,6})(G)?base", re.IGNORECASE)

#: Beginnings of names that say what an interface is. Bridges of virtual machines count from bridge100.
_NAMES: tuple[tuple[str, InterfaceKind], ...] = (
    (r"lo\d*", "loopback"),
    (r"bridge\d{3,}|vmenet\d+|vmnet\d+", "virtual"),
    (r"bridge\d+", "bridge"),
    (r"(utun|ipsec|ppp|wg|tun|tap|zt|feth|tailscale)\w*", "vpn"),
    (r"(awdl|llw|ap|anpi|p2p|gif|stf|pktap|XHC)\w*", "other"),
)
#: Names of hardware ports, in the languages in which they are not the English ones.
_PORTS: tuple[tuple[str, InterfaceKind], ...] = (
    (r"Wi-Fi|AirPort|WLAN", "wifi"),
    (r"Thunderbolt \d+", "thunderbolt"),
    (r"Thunderbolt[ -].*(Bridge|Brücke)|(Pont|Puente|Ponte) Thunderbolt", "bridge"),
    (r".*(Bluetooth|iPhone|iPad|FireWire|Modem).*", "other"),
)


def parse_hardware_ports(text: str) -> dict[str, str] | Unread:
    """The device of each hardware port, from `networksetup -listallhardwareports`: {"Thunderbolt 1": "en2"}."""
    found: dict[str, str] = {}
    port: str | None = None
    for line in map(str.strip, text.splitlines()):
        if line.startswith("Hardware Port:"):
            port = line.partition(":")[2].strip()
        elif line.startswith("Device:") and port is not None:
            found[port] = line.partition(":")[2].strip()
            port = None
    return found or unlike("networksetup -listallhardwareports", text)


def parse_ifconfig(text: str, ports: Mapping[str, str] | None = None) -> tuple[Interface, ...] | Unread:
    """Every interface of `ifconfig -a`. `ports` maps hardware ports to devices, and decides the kinds of en0, en1, …

    One without a cable ("status: inactive") is not up, though its flags say so.
    """
    names = {device: port for port, device in (ports or {}).items()}
    found: list[Interface] = []
    block: list[str] = []
    for line in [*text.splitlines(), "end"]:
        if line[:1].isspace():
            block.append(line.strip())
            continue
        if block and (head := _HEAD.match(block[0])) is not None:
            found.append(_interface(head, block[1:], kind_of(head["name"], names.get(head["name"], ""))))
        block = [line]
    return tuple(found) or unlike("ifconfig", text)


def _interface(head: re.Match[str], lines: list[str], kind: InterfaceKind) -> Interface:
    return Interface(
        name=head["name"],
        kind=kind,
        up="UP" in head["flags"].split(",") and "status: inactive" not in lines,
        addresses=tuple(_addresses(lines)),
        mbps=next((speed for line in lines if (speed := _media_mbps(line)) is not None), None),
        mtu=int(head["mtu"]),
        mac=next((line.split()[1] for line in lines if line.startswith("ether ") and len(line.split()) > 1), ""),
        members=tuple(line.split()[1] for line in lines if line.startswith("member: ") and len(line.split()) > 1),
    )


def _addresses(lines: Iterable[str]) -> Iterable[NodeAddress]:
    for line in lines:
        match = _INET.match(line)
        if match is None:
            continue
        mask = match["mask"]
        try:
            netmask = str(ipaddress.IPv4Address(int(mask, 16))) if mask.startswith("0x") else mask
            network = ipaddress.IPv4Network(f"{match['host']}/{netmask}", strict=False)
        except ValueError:
            continue
        yield NodeAddress(host=match["host"], network=str(network))


def _media_mbps(line: str) -> int | None:
    match = _MEDIA.search(line) if line.startswith("media:") else None
    return None if match is None else int(match[1]) * (1000 if match[2] else 1)


def kind_of(name: str, port: str) -> InterfaceKind:
    """What an interface is, by its name and by that of its hardware port ("" where there is none).

    "Thunderbolt 2" is a port; "Thunderbolt Ethernet Slot 1" is an Ethernet adapter at one.
    """
    for pattern, kind in _NAMES:
        if re.fullmatch(pattern, name):
            return kind
    for pattern, kind in _PORTS:
        if port and re.fullmatch(pattern, port, re.IGNORECASE):
            return kind
    return "ethernet" if port else "other"
