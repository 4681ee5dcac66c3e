"""What MLX would refuse, misread or hang on is refused before, with the rank and the pair."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from muster.errors import PayloadError
from muster.group.payload import JacclPayload, RingPayload, validate
from muster.group.rules import Topology, jaccl_topology, resolved

GOOD = "10.0.0.1:5000"


def ring(*hosts: Any, rank: int = 0, size: int | None = None) -> RingPayload:
    return RingPayload("one", 1, rank, len(hosts) if size is None else size, hosts)


def jaccl(*rows: Any, rank: int = 0, ring_first: bool = False, at: str = GOOD) -> JacclPayload:
    return JacclPayload("one", 1, rank, len(rows), rows, at, ring_first)


def refused(payload: RingPayload | JacclPayload) -> str:
    with pytest.raises(PayloadError) as caught:
        validate(payload)
    assert caught.value.remedy
    return caught.value.message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("10.0.0.2", "no port"),
        ("10.0.0.2:", "no port"),
        (":5000", "no host"),
        ("", "no port"),
        ("[::1]:5000", "IPv6"),
        ("::1", "IPv6"),
        ("fe80::1%en0:5000", "IPv6"),
        ("10.0.0.2:5000 ", "space"),
        (" 10.0.0.2:5000", "space"),
        ("10.0.0.2: 5000", "space"),
        ("10.0.0.2:5000\0", "control"),
        ("10.0.0.2:0", "out of range"),
        ("10.0.0.2:99999", "out of range"),
        ("10.0.0.2:65536", "out of range"),
        ("10.0.0.2:" + "9" * 5000, "out of range"),
        ("10.0.0.2:-1", "not a number"),
        ("10.0.0.2:http", "not a number"),
        ("10.0.0.2:٣", "not a number"),
        ("no-such-host.invalid:5000", "no IPv4 address"),
        ("a" * 300 + ":5000", "no IPv4 address"),
        ("a..b:5000", "no IPv4 address"),
        (5000, "not text"),
        (None, "not text"),
    ],
)
def test_an_address_that_mlx_cannot_use(text: object, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_dns(*_: object) -> list[Any]:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr("muster.group.addresses.socket.getaddrinfo", no_dns)
    message = refused(ring((GOOD,), (text,)))
    assert reason in message
    assert "rank 1, address 0" in message
    coordinator = refused(jaccl((None, "a"), ("b", None), rank=1, at=text))  # pyright: ignore[reportArgumentType]
    assert reason in coordinator
    assert "coordinator of rank 1" in coordinator


def test_names_are_replaced_by_their_ipv4_address() -> None:
    payload = resolved(ring(("localhost:5000",), ("127.0.0.1:5001",)))
    assert isinstance(payload, RingPayload)
    assert payload.hosts == (("127.0.0.1:5000",), ("127.0.0.1:5001",))
    other = resolved(jaccl((None, "a"), ("b", None), at="localhost:80"))
    assert isinstance(other, JacclPayload)
    assert other.coordinator == "127.0.0.1:80"


@pytest.mark.parametrize(
    ("payload", "reasons"),
    [
        (ring(), ["world size 0"]),
        (ring((GOOD,)), ["world size 1 needs no group"]),
        (ring((GOOD,), ("10.0.0.2:1",), size=3), ["2 host entries", "world size 3"]),
        (ring((GOOD,), ("10.0.0.2:1",), rank=2), ["rank 2 is out of range"]),
        (ring((GOOD,), ("10.0.0.2:1",), rank=-1), ["rank -1 is out of range"]),
        (ring((GOOD,), ()), ["rank 1 lists no address"]),
        (ring((GOOD,), "10.0.0.2:1"), ["rank 1", "not a list"]),
        (ring((GOOD,), ("10.0.0.2:1",), ("10.0.0.3:1", "10.0.1.3:1")), ["rank 2 lists 2", "pair 1-2"]),
        (ring((GOOD,), ("10.0.0.2:1",), (GOOD,)), [GOOD, "ranks 0 and 2", "pair 0-2"]),
        (ring((GOOD, GOOD), ("10.0.0.2:1", "10.0.0.2:2")), [GOOD, "rank 0 twice"]),
        (ring((GOOD,), ("0.0.0.0:1",)), ["rank 1: 0.0.0.0:1 cannot be dialled from rank 0"]),
    ],
)
def test_a_ring_that_mlx_cannot_form(payload: RingPayload, reasons: list[str]) -> None:
    message = refused(payload)
    assert all(reason in message for reason in reasons), message


def test_names_of_one_address_count_as_the_same() -> None:
    assert "ranks 0 and 1" in refused(ring(("localhost:5000",), ("127.0.0.1:5000",)))


def test_a_rank_may_listen_on_every_interface() -> None:
    validate(ring(("10.0.0.1:1",), ("0.0.0.0:1",), rank=1))
    validate(jaccl((None, "a"), ("b", None), at="0.0.0.0:1"))
    assert "cannot be dialled" in refused(jaccl((None, "a"), ("b", None), rank=1, at="0.0.0.0:1"))


def mesh(size: int, device: Any = "a") -> list[tuple[Any, ...]]:
    return [tuple(None if i == j else device for j in range(size)) for i in range(size)]


def circle(size: int, device: Any = "a") -> list[tuple[Any, ...]]:
    return [
        tuple(device if (i - j) % size in (1, size - 1) and i != j else None for j in range(size)) for i in range(size)
    ]


@pytest.mark.parametrize(
    ("payload", "topology"),
    [
        (jaccl(*mesh(2)), Topology.MESH),
        (jaccl(*mesh(2), ring_first=True), Topology.RING),
        (jaccl(*mesh(3), ring_first=True), Topology.RING),
        (jaccl(*mesh(4)), Topology.MESH),
        (jaccl(*mesh(8)), Topology.MESH),
        (jaccl(*mesh(9), ring_first=True), Topology.RING),
        (jaccl(*circle(5)), Topology.RING),
        (jaccl(*circle(12)), Topology.RING),
        (jaccl(*circle(4, ("a", "b", "c", "d"))), Topology.RING),
        (jaccl(*mesh(3, ("a", "b", "c", "d", "e"))), Topology.MESH),
        (jaccl((None, ("a", "b"), "c"), ("a", None, "b"), ("a", "b", None), ring_first=True), Topology.MESH),
    ],
)
def test_topology_as_mlx_chooses_it(payload: JacclPayload, topology: Topology) -> None:
    validate(payload)
    assert jaccl_topology(payload) is topology


@pytest.mark.parametrize(
    ("payload", "reasons"),
    [
        (jaccl((None,)), ["world size 1"]),
        (jaccl((None, "a"), ("b",)), ["row of rank 1", "1 entries"]),
        (jaccl((None, "a"), "bc"), ["row of rank 1"]),
        (jaccl(("a", "b"), ("c", None)), ["pair 0-0", "to itself"]),
        (jaccl((None, "a"), (None, None)), ["rank 1 has no device to rank 0", "pair 1-0"]),
        (jaccl((None, "a"), ((), None)), ["pair 1-0"]),
        (jaccl((None, "a"), ("", None)), ["pair 1-0", "not a device name"]),
        (jaccl((None, "a"), ("b ", None)), ["pair 1-0", "not a device name"]),
        (jaccl((None, "a"), (("b", 3), None)), ["pair 1-0", "3 is not a device name"]),
        (jaccl((None, "a"), (7, None)), ["pair 1-0", "7 is not a device name"]),
        (jaccl((None, "a"), (("b", "b"), None)), ["pair 1-0", "twice"]),
        (jaccl(*mesh(9)), ["world size 9", "at most 8"]),
        (jaccl(*mesh(9), rank=9, ring_first=True), ["rank 9 is out of range"]),
        (jaccl(*mesh(3, ("a", "b", "c", "d", "e")), ring_first=True), ["5 devices", "pair 0-1", "at most 4"]),
        (jaccl(*circle(4, ("a", "b", "c", "d", "e"))), ["5 devices", "at most 4"]),
        (
            jaccl((None, "a", None, ("a", "b")), *circle(4)[1:]),
            ["no mesh (rank 0 has no device to rank 2", "rank 0 has 2 devices to its left (rank 3) and 1"],
        ),
        (
            jaccl(*circle(4)[:2], (None, ("a", "b"), None, ("a", "b")), circle(4)[3]),
            ["rank 2 has 2 devices to rank 3", "rank 0 has 1"],
        ),
        (jaccl(circle(4)[0], (None, None, "a", None), *circle(4)[2:]), ["rank 1", "rank 0, pair 1-0"]),
    ],
)
def test_a_matrix_that_mlx_cannot_use(payload: JacclPayload, reasons: list[str]) -> None:
    message = refused(payload)
    assert all(reason in message for reason in reasons), message
