"""One `ip:port` of MLX, read by stricter rules than MLX's own.

Source: `mlx/distributed/utils.cpp` (`parse_address`) and `mlx/distributed/ring/ring.cpp`: the text is split at
the first colon, both parts go to `getaddrinfo` with any family, and the sockets of the ring are IPv4. So an
IPv6 address, or a name whose first result is IPv6, fails late or hangs.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Final

import msgspec

from muster.errors import PayloadError

#: The host that means "every interface": good for listening, useless for dialling.
WILDCARD: Final = "0.0.0.0"
_HIGHEST_PORT: Final = 65_535


class Address(msgspec.Struct, frozen=True):
    """A TCP endpoint: an IPv4 address (or a name that has one) and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def is_loopback(host: str) -> bool:
    """Whether `host` can only be reached from its own machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def resolve_host(host: str) -> str | None:
    """The first IPv4 address of `host` in dotted form, or None when it has none."""
    try:
        return str(ipaddress.IPv4Address(host))
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, ValueError):  # unknown names; labels too long for DNS; embedded zero bytes
        return None
    return str(found[0][4][0]) if found else None


def resolve(text: object, *, whose: str) -> Address:
    """Reads one `ip:port` as MLX would, and replaces a name by its IPv4 address.

    Args:
        text: What a payload holds.
        whose: Who it belongs to, for the error: "rank 1, address 0".

    Returns:
        The endpoint, its host in dotted form.

    Raises:
        PayloadError: Not a string, surrounding or inner spaces, IPv6, no port, a port that is no number or
            outside 1 … 65535, or a name without an IPv4 address.
    """
    if not isinstance(text, str):
        raise PayloadError(f"{whose}: {text!r} is not text", remedy="write it as 'ip:port'")
    if any(character.isspace() or not character.isprintable() for character in text):
        raise PayloadError(f"{whose}: {text!r} has a space or a control character", remedy="remove it")
    if text.startswith("[") or text.count(":") > 1:
        raise PayloadError(f"{whose}: {text!r} looks like IPv6, which MLX cannot parse", remedy="use an IPv4 address")
    host, colon, port = text.partition(":")
    if not colon or not port:
        raise PayloadError(f"{whose}: {text!r} has no port", remedy="write it as 'ip:port'")
    if not host:
        raise PayloadError(f"{whose}: {text!r} has no host", remedy="write it as 'ip:port'")
    if not (port.isascii() and port.isdigit()):
        raise PayloadError(f"{whose}: port {port!r} of {text!r} is not a number", remedy="use 1 … 65535")
    if not 1 <= int(port[:9]) <= _HIGHEST_PORT:
        raise PayloadError(f"{whose}: port {port} of {text!r} is out of range", remedy="use 1 … 65535")
    address = resolve_host(host)
    if address is None:
        raise PayloadError(
            f"{whose}: {host!r} has no IPv4 address on this node",
            remedy="use an IPv4 address, or add the name to DNS or the hosts file",
        )
    return Address(address, int(port))
