"""Addresses of the coordinator, as people write them and as ZeroMQ wants them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from muster.errors import RequestError

#: Where a coordinator listens for control messages unless it is told otherwise.
DEFAULT_CONTROL_PORT = 5710

_SCHEME = "tcp://"
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252}[A-Za-z0-9])?\.?")
_REMEDY = f'Write it as "host", "host:port" or "tcp://host:port"; the port is {DEFAULT_CONTROL_PORT} unless given.'


class Endpoint(msgspec.Struct, frozen=True):
    """A TCP address: an IPv4 address or a host name, and a port."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """The address as ZeroMQ writes it."""
        return f"{_SCHEME}{self.host}:{self.port}"

    def at(self, port: int) -> Endpoint:
        """Another port of the same host."""
        return Endpoint(self.host, port)

    def __str__(self) -> str:
        return self.url


def parse_endpoint(text: str, default_port: int = DEFAULT_CONTROL_PORT) -> Endpoint:
    """Read "host", "host:port" or "tcp://host:port".

    Raises:
        RequestError: it is none of these; the message quotes it and says which part is wrong.
    """
    address = text.strip()
    if "://" in address:
        scheme, _, address = address.partition("://")
        if f"{scheme}://" != _SCHEME:
            raise RequestError(f'address {text!r} has the scheme "{scheme}"; only tcp is known', remedy=_REMEDY)
    if address.count(":") > 1:
        raise RequestError(
            f"address {text!r} looks like IPv6, which MLX's groups cannot use",
            remedy="Use an IPv4 address or a host name.",
        )
    host, colon, port_text = address.partition(":")
    if not _HOST.fullmatch(host):
        raise RequestError(f"address {text!r} has no valid host", remedy=_REMEDY)
    if not colon:
        return Endpoint(host, default_port)
    if not (port_text.isascii() and port_text.isdigit() and 1 <= int(port_text[:6]) <= 65_535):
        raise RequestError(f"address {text!r} has the port {port_text!r}; it must be 1 to 65535", remedy=_REMEDY)
    return Endpoint(host, int(port_text))


def parse_endpoints(text: str) -> tuple[Endpoint, ...]:
    """Read one address, or several with commas between: those of a coordinator and of its standby, in any order.

    Raises:
        RequestError: one of them is no address.
    """
    return tuple(dict.fromkeys(parse_endpoint(part) for part in text.split(",")))


def endpoints_of(given: str | Endpoint | Sequence[Endpoint]) -> tuple[Endpoint, ...]:
    """The addresses, however they are given: at least one.

    Raises:
        RequestError: there is none, or one of them is no address.
    """
    if isinstance(given, str):
        return parse_endpoints(given)
    found = (given,) if isinstance(given, Endpoint) else tuple(dict.fromkeys(given))
    if not found:
        raise RequestError("there is no address of a coordinator", remedy="Give at least one.")
    return found
