"""Links as people and programs see them."""

from __future__ import annotations

import io

import cluster_states
import msgspec
from rich.console import Console, RenderableType

from muster.cli.render import rate, trip
from muster.cli.render_instance import gone_addresses, instance_details
from muster.cli.render_links import links_view, pair_document, trials_view
from muster.facts import Interface, NodeFacts
from muster.layout import Layout, RankLayout, RankLink
from muster.links import LinkMap, Measured, NodeLinks
from muster.spec import BootId, NodeAddress, NodeId, NodeInfo
from muster.state import Node

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def info(name: NodeId, *hosts: str) -> NodeInfo:
    addresses = tuple(NodeAddress(host=host, network=host.rpartition(".")[0] + ".0/24") for host in hosts)
    return NodeInfo(
        node=name,
        boot=BootId(name),
        hostname=name,
        machine=name,
        pid=1,
        addresses=addresses[:1],
        candidates=addresses,
        backends=("ring",),
        memory_bytes=1,
        max_ranks=1,
        peer_port=1,
        network_id=name,
    )


def measured(host: str, other: NodeId, **fields: object) -> Measured:
    one = Measured(other=other, other_boot=BootId(other), own="10.0.0.1", host=host, reached=True, dialled_back=True)
    return msgspec.structs.replace(one, **fields)


def some() -> LinkMap:
    """`a` reaches `b` well, and nothing of `c`; `b` and `c` have not measured."""
    told = NodeLinks(
        node=A,
        boot=BootId(A),
        measured=(
            measured("10.0.0.2", B, mbps_out=9_410.0, mbps_in=940.0, rtt_us=212.0),
            measured("10.0.0.3", C, reached=False, dialled_back=False, error="10.0.0.3:1 does not answer within 2 s"),
        ),
    )
    addresses = (info(A, "10.0.0.1", "10.0.1.1"), info(B, "10.0.0.2", "10.0.1.2"), info(C, "10.0.0.3"))
    interface = Interface(name="eth0", kind="ethernet", up=True, addresses=addresses[0].addresses)
    kinds = {
        one.node: NodeFacts(
            node=one.node,
            boot=one.boot,
            interfaces=(msgspec.structs.replace(interface, addresses=one.addresses),),
        )
        for one in addresses
    }
    return LinkMap({one.node: one for one in addresses}, {A: told}, kinds)


def shown(view: RenderableType, width: int = 200) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_rates_and_round_trips_are_short() -> None:
    assert [rate(value) for value in (None, 94.2, 999.4, 9_410.0)] == ["", "94 Mbit/s", "999 Mbit/s", "9.4 Gbit/s"]
    assert [trip(value) for value in (None, 85.2, 1_234.0)] == ["", "85 µs", "1.2 ms"]


def test_the_matrix_gives_each_direction_its_rate_and_says_why_there_is_no_link() -> None:
    lines = shown(links_view(some(), (A, B, C), 200))
    assert lines[0].split() == ["FROM", "TO", "a", "TO", "b", "TO", "c"]
    assert "ethernet 9.4 Gbit/s 212 µs" in lines[1]
    assert "ethernet 940 Mbit/s 212 µs" in lines[2]
    assert "ethernet, not measured" in lines[2]
    assert lines[1].endswith("no link")
    assert lines[-1] == "a - c: a does not reach c by 10.0.0.1 → 10.0.0.3: 10.0.0.3:1 does not answer within 2 s"


def test_where_the_matrix_does_not_fit_pairs_are_listed() -> None:
    lines = shown(links_view(some(), (A, B, C), 60))
    assert lines[0].split() == ["FROM", "TO", "LINK", "BACK", "ADDRESSES"]
    assert "10.0.0.1 → 10.0.0.2" in lines[1]
    assert lines[2].startswith("a     c   no link")


def test_two_nodes_show_every_pair_of_addresses() -> None:
    lines = shown(trials_view(some(), A, B))
    assert lines[0].split() == ["ON", "a", "ON", "b", "KIND", "OUT", "IN", "ROUND", "TRIP", "WHY", "NOT"]
    assert "used" in lines[1]
    assert "9.4 Gbit/s  940 Mbit/s  212 µs" in lines[1]
    assert shown(trials_view(some(), A, A)) == ["node a is one node and not two"]


def test_a_pair_for_programs_has_the_link_and_every_trial() -> None:
    document = pair_document(some(), A, C)
    assert document["link"] is None
    assert document["why_not"] == "a does not reach c by 10.0.0.1 → 10.0.0.3: 10.0.0.3:1 does not answer within 2 s"
    found = pair_document(some(), B, A)
    assert found["why_not"] is None
    assert found["link"] == {
        "a_host": "10.0.0.2",
        "b_host": "10.0.0.1",
        "kind": "ethernet",
        "mbps_out": 940.0,
        "mbps_in": 9_410.0,
        "rtt_us": 212.0,
    }


def test_describe_shows_the_links_of_the_ring_and_addresses_that_are_gone() -> None:
    link = RankLink(own="10.0.0.1", host="10.0.0.2", kind="ethernet", mbps=9_410.0, rtt_us=212.0, own_interface="en0")
    back = RankLink(own="10.0.0.2", host="10.0.0.1", kind="ethernet")
    instance = cluster_states.instance()
    layout = Layout(ranks=(RankLayout(next=link), RankLayout(next=back)))
    instance = msgspec.structs.replace(instance, layout=layout)
    text = "\n".join(shown(instance_details(instance, [])))
    assert "0 → 1  ethernet  9.4 Gbit/s" in text
    assert "1 → 0  ethernet  not measured" in text
    assert "10.0.0.1 (en0) → 10.0.0.2" in text

    rank = instance.ranks[0]
    there = msgspec.structs.replace(info(rank.node, "10.0.0.1"), boot=rank.boot)
    assert gone_addresses(instance, {rank.node: Node(info=there, since_ns=0)}) == []
    moved = msgspec.structs.replace(info(rank.node, "10.0.7.1"), boot=rank.boot)
    lines = gone_addresses(instance, {rank.node: Node(info=moved, since_ns=0)})
    assert lines[0] == f"rank 0 uses 10.0.0.1, which node {rank.node} does not have any more"
