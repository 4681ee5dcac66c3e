"""Building payloads: every rank's view must fit every other's."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.errors import PayloadError
from muster.group.payload import (
    JacclPayload,
    Payload,
    PreparedRank,
    RankAddress,
    RingPayload,
    build_jaccl,
    build_ring,
    validate,
)

NETWORKS = ("10.0.0.0/24", "10.0.1.0/24", "10.0.2.0/24")


def address(rank: int, network: str, port: int = 5000) -> RankAddress:
    return RankAddress(network.replace(".0/24", f".{rank + 1}"), port, network)


def prepare(*networks_by_rank: tuple[str, ...]) -> list[PreparedRank]:
    return [
        PreparedRank(rank, tuple(address(rank, network) for network in networks))
        for rank, networks in enumerate(networks_by_rank)
    ]


def views(prepared: list[PreparedRank], max_links: int | None = None) -> list[RingPayload]:
    return [build_ring("one", 1, rank, prepared, max_links=max_links) for rank in range(len(prepared))]


some_networks = st.lists(st.sampled_from(NETWORKS), min_size=1, max_size=3, unique=True).map(tuple)
clusters = st.lists(some_networks, min_size=2, max_size=8).map(lambda rows: prepare(*rows))


@given(clusters, st.randoms(use_true_random=False))
def test_every_rank_dials_what_its_right_neighbour_listens_on(prepared: list[PreparedRank], shuffler: Random) -> None:
    size = len(prepared)
    built: list[RingPayload] = []
    for rank in range(size):
        shuffled = list(prepared)
        shuffler.shuffle(shuffled)
        built.append(build_ring("one", 1, rank, shuffled))
    offered = [[str(one) for one in rank.addresses] for rank in prepared]
    counts = set[int]()
    for rank, view in enumerate(built):
        right = (rank + 1) % size
        assert view.hosts[right] == built[right].hosts[right]
        assert len(set(view.hosts[rank])) == len(view.hosts[rank])
        assert set(view.hosts[rank]) <= set(offered[rank])
        counts |= {len(entry) for entry in view.hosts}
        validate(view)
    assert len(counts) == 1


@given(clusters)
def test_the_pair_with_the_fewest_common_networks_decides(prepared: list[PreparedRank]) -> None:
    networks = [{one.network for one in rank.addresses} for rank in prepared]
    shared = [len(networks[rank - 1] & networks[rank]) or 1 for rank in range(len(prepared))]
    assert len(views(prepared)[0].hosts[0]) == min(shared)


@given(clusters)
def test_common_networks_are_used_before_others(prepared: list[PreparedRank]) -> None:
    networks = [{one.network for one in rank.addresses} for rank in prepared]
    by_text = {str(one): one.network for rank in prepared for one in rank.addresses}
    for rank, entry in enumerate(views(prepared)[0].hosts):
        common = networks[rank - 1] & networks[rank]
        assert {by_text[text] for text in entry} <= common or (not common and len(entry) == 1)


def test_two_links_in_the_order_of_the_dialled_rank() -> None:
    prepared = prepare(NETWORKS[:2], (NETWORKS[1], NETWORKS[0]))
    for view in views(prepared):
        assert view.hosts == (("10.0.0.1:5000", "10.0.1.1:5000"), ("10.0.1.2:5000", "10.0.0.2:5000"))


def test_max_links_limits_the_connections() -> None:
    prepared = prepare(NETWORKS, NETWORKS, NETWORKS)
    assert [len(entry) for entry in views(prepared, max_links=1)[0].hosts] == [1, 1, 1]
    with pytest.raises(PayloadError, match="max_links"):
        build_ring("one", 1, 0, prepared, max_links=0)


LOOPBACK = RankAddress("127.0.0.1", 6000, "127.0.0.0/8")


def test_loopback_is_used_only_when_nothing_else_is_offered() -> None:
    both = [PreparedRank(rank, (LOOPBACK, address(rank, NETWORKS[0]))) for rank in range(2)]
    assert build_ring("one", 1, 0, both).hosts == (("10.0.0.1:5000",), ("10.0.0.2:5000",))
    alone = [PreparedRank(rank, (RankAddress("127.0.0.1", 6000 + rank, "127.0.0.0/8"),)) for rank in range(2)]
    assert build_ring("one", 1, 0, alone).hosts == (("127.0.0.1:6000",), ("127.0.0.1:6001",))
    mixed = [alone[0], PreparedRank(1, (RankAddress("127.0.0.1", 6001, "127.0.0.0/8"), address(1, NETWORKS[0])))]
    assert build_ring("one", 1, 1, mixed).hosts == (("127.0.0.1:6000",), ("127.0.0.1:6001",))


def test_loopback_against_another_network_is_refused() -> None:
    prepared = [PreparedRank(0, (LOOPBACK,)), PreparedRank(1, (address(1, NETWORKS[0]),))]
    with pytest.raises(PayloadError, match=r"pair 1-0.*10\.0\.0\.0/24"):
        build_ring("one", 1, 0, prepared)


@pytest.mark.parametrize(
    ("prepared", "rank", "message"),
    [
        ([], 0, "world size 0"),
        (prepare(NETWORKS), 0, "world size 1 needs no group"),
        (prepare(NETWORKS, NETWORKS), 2, "rank 2 is out of range"),
        (prepare(NETWORKS, NETWORKS), -1, "rank -1 is out of range"),
        (prepare(NETWORKS, NETWORKS)[:1] * 2, 0, "rank 1 is missing"),
        (prepare(NETWORKS, NETWORKS, NETWORKS)[1:], 0, "rank 0 is missing"),
        (prepare(NETWORKS, ()), 0, "rank 1 prepared no address"),
    ],
)
def test_what_cannot_be_a_ring_is_refused(prepared: list[PreparedRank], rank: int, message: str) -> None:
    with pytest.raises(PayloadError, match=message) as caught:
        build_ring("one", 1, rank, prepared)
    assert caught.value.remedy


def test_jaccl_takes_each_ranks_own_view_of_the_coordinator() -> None:
    devices = [[None, "rdma_en2"], [["rdma_en3", "rdma_en4"], None]]
    payload = build_jaccl("one", 2, 1, devices, ["0.0.0.0:7000", "10.0.0.1:7000"], True)
    assert payload.coordinator == "10.0.0.1:7000"
    assert payload.devices == ((None, "rdma_en2"), (("rdma_en3", "rdma_en4"), None))
    assert (payload.rank, payload.world_size, payload.attempt, payload.prefer_ring) == (1, 2, 2, True)
    with pytest.raises(PayloadError, match="1 coordinator addresses"):
        build_jaccl("one", 1, 0, devices, ["10.0.0.1:7000"])
    with pytest.raises(PayloadError, match="world size 1"):
        build_jaccl("one", 1, 0, [[None]], ["10.0.0.1:7000"])
    with pytest.raises(PayloadError, match="rank 2 is out of range"):
        build_jaccl("one", 1, 2, devices, ["10.0.0.1:7000"] * 2)


@pytest.mark.parametrize("codec", [msgspec.json, msgspec.msgpack])
def test_payloads_cross_a_wire(codec: Any) -> None:
    payloads: list[Payload] = [
        RingPayload("one", 1, 0, 2, (("10.0.0.1:1",), ("10.0.0.2:1",))),
        JacclPayload("one", 1, 1, 2, ((None, "a"), (("b", "c"), None)), "10.0.0.1:2", True),
    ]
    for payload in payloads:
        assert codec.decode(codec.encode(payload), type=Payload) == payload
    assert b'"type":"ring"' in msgspec.json.encode(payloads[0])
