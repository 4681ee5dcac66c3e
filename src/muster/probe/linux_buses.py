"""Thunderbolt and InfiniBand on Linux, from /sys/bus/thunderbolt and /sys/class/infiniband."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from muster.facts import RdmaDevice, ThunderboltPort
from muster.probe.reading import Unread, number

#: A port of USB4 version 2 has lanes of 40 Gbit/s, which is Thunderbolt 5.
_TB5_LANE_GBPS = 40.0


def read_thunderbolt(root: Path = Path("/sys")) -> tuple[ThunderboltPort, ...] | Unread:
    """The host's Thunderbolt ports; with what is at the other end of each where that is another computer.

    Source: Documentation/ABI/testing/sysfs-bus-thunderbolt of the kernel. A host is "DOMAIN-0", what is at its port N
    is "DOMAIN-N", and another computer there is of the type thunderbolt_xdomain, with its network at "DOMAIN-N.0".
    """
    devices = root / "bus/thunderbolt/devices"
    try:
        names = sorted(entry.name for entry in devices.iterdir())
    except OSError:
        return Unread("the kernel has no Thunderbolt bus")
    found: list[ThunderboltPort] = []
    for host in names:
        match = re.fullmatch(r"(\d+)-0", host)
        if match is not None:
            found.extend(_ports(devices, match[1], names))
    return tuple(found)


def _ports(devices: Path, domain: str, names: list[str]) -> Iterator[ThunderboltPort]:
    host = devices / f"{domain}-0"
    generation = number(_text(host / "generation"))
    there = {name.partition("-")[2] for name in names if re.fullmatch(rf"{domain}-[1-9a-f]\d*", name)}
    there |= {entry.name.removeprefix("usb4_port") for entry in host.glob("usb4_port*")}
    for port in sorted(there):
        peer = devices / f"{domain}-{port}"
        computer = "DEVTYPE=thunderbolt_xdomain" in _text(peer / "uevent")
        lane_gbps, lanes = _number(peer / "rx_speed"), _number(peer / "rx_lanes")
        network = sorted(devices.glob(f"{domain}-{port}.*/net/*"))
        yield ThunderboltPort(
            port=f"{domain}.{port}",
            domain=_text(host / "unique_id").upper(),
            peer_domain=_text(peer / "unique_id").upper() if computer else "",
            peer_name=_text(peer / "device_name"),
            generation=5 if lane_gbps >= _TB5_LANE_GBPS else generation,
            gbps=int(lane_gbps * max(lanes, 1)) or None,
            interface=network[0].name if network else "",
        )


def read_infiniband(root: Path = Path("/sys")) -> tuple[RdmaDevice, ...]:
    """The RDMA devices, by their first port."""
    found: list[RdmaDevice] = []
    for device in sorted((root / "class/infiniband").glob("*")):
        port = device / "ports/1"
        gids = [_text(gid) for gid in sorted((port / "gids").glob("*"))]
        interfaces = [_text(path) for path in sorted((port / "gid_attrs/ndevs").glob("*"))]
        mapped = any(re.fullmatch(r"(0000:){5}ffff:[0-9a-f]{4}:[0-9a-f]{4}", gid) for gid in gids)
        found.append(
            RdmaDevice(
                name=device.name,
                interface=next(filter(None, interfaces), ""),
                active="ACTIVE" in _text(port / "state"),
                ipv4_gid=mapped if gids else None,
            )
        )
    return tuple(found)


def _number(path: Path) -> float:
    match = re.match(r"\d+(\.\d+)?", _text(path))
    return 0.0 if match is None else float(match[0])


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
