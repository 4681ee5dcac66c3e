"""Thunderbolt ports of a Mac, from `system_profiler SPThunderboltDataType -json`. Pure.

Source: the fields that `mlx.distributed_config` reads (mlx/_distributed_utils/config.py: domain_uuid_key,
receptacle_1_tag, receptacle_id_key), and captures of macOS 15 to 26 that people published with their issues.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TypeGuard, cast

import msgspec

from muster.facts import ThunderboltPort
from muster.probe.reading import Unread, unlike

_WHAT = "system_profiler SPThunderboltDataType"
_RECEPTACLE = re.compile(r"receptacle_(\d+)_tag")
_SPEED = re.compile(r"([0-9]{1,5}(?:\.[0-9]+)?)\s*Gb/s", re.IGNORECASE)
#: From Thunderbolt 5 on a port is faster than this, in Gbit/s.
_TB4_GBPS = 40
#: Chips whose ports are all Thunderbolt 5; asked only where nothing that the ports say decides it.
_TB5_CHIP = re.compile(r"M(3 Ultra|[4-9] (Pro|Max|Ultra)|\d\d (Pro|Max|Ultra))")

_Map = dict[str, object]


def parse_thunderbolt(text: str, ports: Mapping[str, str], chip: str = "") -> tuple[ThunderboltPort, ...] | Unread:
    """The ports in the order of their receptacles. `ports` maps names of hardware ports to devices.

    Another computer counts as a peer only where it is cabled directly: a Mac behind a dock is not on a link of ours.
    Of a dock or a display `peer_name` alone is known. `generation` is the port's, whatever is plugged into it; `gbps`
    is the speed of the link, and of an idle port what it could do.
    """
    begin, end = text.find("{"), text.rfind("}")
    try:
        found: object = msgspec.json.decode(text[begin : end + 1]) if 0 <= begin < end else None
    except (msgspec.DecodeError, RecursionError):
        found = None
    buses = found.get("SPThunderboltDataType") if _is_map(found) else None
    if not isinstance(buses, list):
        return unlike(_WHAT, text)
    maps = [bus for bus in cast("list[object]", buses) if _is_map(bus)]
    newest = any(_gbps(receptacle) > _TB4_GBPS for bus in maps for _, receptacle in _receptacles(bus))
    newest = newest or _TB5_CHIP.search(chip) is not None
    read = [port for bus in maps for port in _ports(bus, ports, newest=newest)]
    return tuple(sorted(read, key=lambda port: (len(port.port), port.port, port.domain)))


def _ports(bus: _Map, ports: Mapping[str, str], *, newest: bool) -> Iterator[ThunderboltPort]:
    receptacles = list(_receptacles(bus))
    connected = [one for one in receptacles if one[1].get("receptacle_status_key") == "receptacle_connected"]
    generation = _generation(bus, newest=newest)
    for number, receptacle in receptacles:
        # Which of two receptacles on one bus a device is at is not said, but where only one is in use.
        there = _peer(bus) if len(receptacles) == 1 or [(number, receptacle)] == connected else None
        peer = there or {}
        port = _text(receptacle, "receptacle_id_key") or number
        yield ThunderboltPort(
            port=port,
            domain=_text(bus, "domain_uuid_key").upper(),
            peer_domain=_text(peer, "domain_uuid_key").upper(),
            peer_name=_text(peer, "_name") or _text(peer, "device_name_key"),
            generation=generation,
            gbps=int(_gbps(receptacle)) or None,
            interface=ports.get(f"Thunderbolt {port}", ""),
        )


def _receptacles(bus: _Map) -> Iterator[tuple[str, _Map]]:
    for key, value in bus.items():
        match = _RECEPTACLE.fullmatch(key)
        if match is not None and _is_map(value):
            yield match[1], value


def _peer(bus: _Map) -> _Map | None:
    """What is at the other end: the computer among what is there, or the first device."""
    items = bus.get("_items")
    there = [item for item in cast("list[object]", items) if _is_map(item)] if isinstance(items, list) else []
    return next((item for item in there if _text(item, "domain_uuid_key")), there[0] if there else None)


def _generation(bus: _Map, *, newest: bool) -> int | None:
    """Macs have ports of one generation; a link that is slower says nothing about the port that it is at."""
    if newest:
        return 5
    speeds = [_gbps(receptacle) for _, receptacle in _receptacles(bus)]
    idle = [
        str(receptacle.get("current_speed_key", "")).lower().startswith("up to") for _, receptacle in _receptacles(bus)
    ]
    usb4 = "usb4" in _text(bus, "_name")
    if any(idle) and max(speeds) == _TB4_GBPS:
        return 4 if usb4 else 3
    return None if usb4 or max(speeds, default=0) < _TB4_GBPS else 3


def _gbps(receptacle: _Map) -> float:
    match = _SPEED.search(_text(receptacle, "current_speed_key"))
    return 0.0 if match is None else float(match[1])


def _text(found: _Map, key: str) -> str:
    value = found.get(key)
    return value.strip() if isinstance(value, str) else ""


def _is_map(value: object) -> TypeGuard[_Map]:
    return isinstance(value, dict)
