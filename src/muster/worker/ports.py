"""A range of ports that a firewall lets through."""

from __future__ import annotations

import re

import msgspec

from muster.errors import PortError, RequestError
from muster.group.ports import Reservation, reserve_at


class PortRange(msgspec.Struct, frozen=True):
    """Ports `first` to `last`, both included; each is held by at most one rank of this machine."""

    first: int
    last: int

    def reserve(self, host: str) -> Reservation:
        """Hold a free port of the range.

        Raises:
            PortError: none is free; the message says who has the last one that was tried.
        """
        failure: PortError | None = None
        for port in range(self.first, self.last + 1):
            try:
                return reserve_at(host, port)
            except PortError as error:
                failure = error
        assert failure is not None
        raise PortError(
            f"no port of {self.first}-{self.last} is free on {host}: {failure.message}",
            remedy="Widen --ports, or end what uses them.",
        )


def parse_ports(text: str) -> PortRange:
    """Read "40000-40100".

    Raises:
        RequestError: it is no such range.
    """
    match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    if match is None or not 1024 <= int(match[1]) <= int(match[2]) <= 65_535:
        raise RequestError(
            f"--ports is {text!r}; it must be FIRST-LAST with 1024 <= FIRST <= LAST <= 65535",
            remedy="For example: --ports 40000-40100",
        )
    return PortRange(int(match[1]), int(match[2]))
