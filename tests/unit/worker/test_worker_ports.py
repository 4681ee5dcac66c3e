"""A range of ports: read strictly, given out without a collision, and honest when it is used up."""

from __future__ import annotations

import pytest

from muster.errors import PortError, RequestError
from muster.group.ports import Reservation, reserve
from muster.worker.ports import PortRange, parse_ports

HOST = "127.0.0.1"


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [("40000-40100", 40_000, 40_100), ("1024-1024", 1024, 1024), ("65535-65535", 65_535, 65_535)],
)
def test_a_range_is_read(text: str, first: int, last: int) -> None:
    assert parse_ports(text) == PortRange(first, last)


@pytest.mark.parametrize(
    "text",
    ["", "40000", "40000-", "-40000", "40100-40000", "1023-2000", "65000-65536", "40000 - 40100", "a-b", "4e4-5e4"],
)
def test_what_is_no_range_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(RequestError, match="FIRST-LAST") as caught:
        parse_ports(text)
    assert repr(text) in caught.value.message
    assert "40000-40100" in caught.value.remedy


def test_every_port_of_the_range_is_given_once_and_comes_back() -> None:
    with reserve(HOST) as found:
        port = found.port
    ports = PortRange(port, port)
    with ports.reserve(HOST) as held:
        assert held.port == port
        with pytest.raises(PortError, match=f"no port of {port}-{port} is free on {HOST}") as caught:
            ports.reserve(HOST)
        assert "--ports" in caught.value.remedy
    with ports.reserve(HOST) as again:
        assert again.port == port


def test_a_port_in_use_is_passed_over() -> None:
    with reserve(HOST) as found:
        taken = found.port
        if taken == 65_535:
            pytest.skip("the last port has none after it")
        held: list[Reservation] = [PortRange(taken, min(taken + 20, 65_535)).reserve(HOST)]
        assert held[0].port > taken
        held[0].close()
