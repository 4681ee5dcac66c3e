"""Where a rank reserves its ports, and what it dials, by the layout of its attempt."""

from __future__ import annotations

import msgspec
import pytest

from muster.errors import PayloadError
from muster.group.payload import RingPayload
from muster.layout import Layout, RankLayout, RankLink
from muster.spec import (
    Address,
    Assignment,
    BootId,
    GroupWorkload,
    InstanceId,
    InstanceSpec,
    NodeAddress,
    NodeId,
    NodeInfo,
)
from muster.state import Assigned, Instance, Rank, Starting
from muster.worker import group_plan
from muster.worker.watch import Place


def at(host: str) -> NodeAddress:
    return NodeAddress(host=host, network=host.rpartition(".")[0] + ".0/24")


def info(*hosts: str, joined_by: int = 1) -> NodeInfo:
    """A node that joined by its first addresses, and has these."""
    return NodeInfo(
        node=NodeId("n"),
        boot=BootId("b"),
        hostname="n",
        machine="n",
        pid=1,
        addresses=tuple(map(at, hosts[:joined_by])),
        candidates=tuple(map(at, hosts)),
        backends=("ring",),
        memory_bytes=1,
        max_ranks=1,
    )


def place(rank: int, *links: tuple[str, str] | None, network: str = "") -> Place:
    """A rank of a group whose ranks dial the next one so."""
    layout = Layout(
        ranks=tuple(RankLayout(next=None if link is None else RankLink(own=link[0], host=link[1])) for link in links)
    )
    ranks = tuple(
        Rank(rank=number, node=NodeId("n"), boot=BootId("b"), state=Assigned(), since_ns=0)
        for number in range(len(links))
    )
    instance = Instance(
        id=InstanceId("i"),
        attempt=1,
        spec=InstanceSpec(workload=GroupWorkload(), ranks=len(links), network=network),
        backend="ring",
        ranks=ranks,
        status=Starting(),
        created_ns=0,
        since_ns=0,
        created_by=1,
        caused_by=1,
        layout=layout,
    )
    return Place(instance, Assignment(rank=rank, node=NodeId("n"), boot=BootId("b")))


#: Rank 0 at 10.0.x.1, rank 1 at 10.0.x.2, rank 2 at 10.0.x.3; ranks 1 and 2 have a faster network between them.
RING = (("10.0.0.1", "10.0.0.2"), ("10.0.1.2", "10.0.1.3"), ("10.0.0.3", "10.0.0.1"))


def hosts(place: Place, node: NodeInfo) -> list[str]:
    return [one.host for one in group_plan.endpoints(place, node)]


def test_a_rank_listens_where_the_one_before_it_dials() -> None:
    assert hosts(place(0, *RING), info("10.0.0.1", "10.0.1.1")) == ["10.0.0.1"]
    assert hosts(place(1, *RING), info("10.0.0.2", "10.0.1.2")) == ["10.0.0.2"]
    assert group_plan.endpoints(place(2, *RING), info("10.0.0.3", "10.0.1.3")) == (at("10.0.1.3"),)


def test_without_links_a_rank_listens_on_every_address_that_it_joined_by() -> None:
    node = info("10.0.0.1", "10.0.1.1", "10.0.2.1", joined_by=2)
    assert hosts(place(0, None, None), node) == ["10.0.0.1", "10.0.1.1"]
    assert hosts(place(0, None, None, network="10.0.1.0/24"), node) == ["10.0.1.1"]
    assert hosts(place(0, RING[0], None), node) == ["10.0.0.1", "10.0.1.1"]
    assert hosts(place(0, None), node) == []


def prepared(attempt: Place, *addresses: tuple[str, int]) -> list[Rank]:
    return [
        Rank(
            rank=number,
            node=NodeId("n"),
            boot=BootId("b"),
            state=Assigned(),
            since_ns=0,
            addresses=(Address(host, port, at(host).network),),
        )
        for number, (host, port) in enumerate(addresses)
    ]


def test_the_ring_is_what_the_layout_says_although_no_two_ranks_offer_the_same_network() -> None:
    attempt = place(1, *RING)
    found = group_plan.payload(attempt, prepared(attempt, ("10.0.0.1", 5), ("10.0.0.2", 6), ("10.0.1.3", 7)))
    assert isinstance(found, RingPayload)
    assert found.hosts == (("10.0.0.1:5",), ("10.0.0.2:6",), ("10.0.1.3:7",))
    assert group_plan.links(found) == 1


def test_a_rank_that_prepared_another_address_than_it_is_dialled_at_is_named() -> None:
    attempt = place(1, *RING)
    with pytest.raises(PayloadError, match=r"rank 2 prepared no port at 10\.0\.1\.3, where rank 1 is to dial it"):
        group_plan.payload(attempt, prepared(attempt, ("10.0.0.1", 5), ("10.0.0.2", 6), ("10.0.0.3", 7)))


def test_steps_come_from_an_address_that_all_ranks_reach() -> None:
    fast = (("10.0.1.1", "10.0.1.2"), ("10.0.1.2", "10.0.1.1"))
    node = info("10.0.0.1", "10.0.1.1")
    assert group_plan.steps_host(place(0, *fast), node) == "10.0.1.1"
    assert group_plan.steps_host(place(0, None, None), node) == "10.0.0.1"
    assert group_plan.steps_host(place(0, None, None, network="10.0.1.0/24"), node) == "10.0.1.1"
    assert group_plan.steps_host(place(0, *RING), node) == "10.0.0.1"
    # Rank 1 is reached by no cable that rank 2 reaches rank 0 by.
    apart = (("10.0.2.1", "10.0.2.2"), ("10.0.3.2", "10.0.3.3"), ("10.0.1.3", "10.0.1.1"))
    assert group_plan.steps_host(place(0, *apart), info("10.0.0.1", "10.0.1.1", "10.0.2.1")) == "10.0.0.1"


def test_an_address_that_came_after_the_node_joined_is_used_too() -> None:
    node = msgspec.structs.replace(info("10.0.0.1"), candidates=())
    assert hosts(place(0, ("10.0.9.1", "10.0.9.2"), ("10.0.9.2", "10.0.9.1")), node) == ["10.0.9.1"]
