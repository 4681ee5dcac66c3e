"""Which links placement sees, and which it pins for the ranks of a ring."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
from test_placing_rooms import state_of

from muster.bench.random_clusters import model, wish
from muster.facts import Interface, InterfaceKind, NodeFacts
from muster.known import Known
from muster.layout import RankLink
from muster.links import Measured, NodeLinks
from muster.placement import Placement, decide
from muster.placement.rooms import SeenLinks
from muster.spec import NodeAddress, NodeId, NodeInfo
from muster.state import State

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
NAMES = (A, B, C)


def at(network: int, name: NodeId) -> NodeAddress:
    return NodeAddress(host=f"10.{network}.0.{NAMES.index(name) + 1}", network=f"10.{network}.0.0/24")


def infos(*networks: int) -> dict[NodeId, NodeInfo]:
    nodes = state_of(a=20, b=20, c=20).nodes
    found = {name: tuple(at(network, name) for network in networks) for name in NAMES}
    return {
        name: msgspec.structs.replace(nodes[name].info, addresses=found[name][:1], candidates=found[name])
        for name in NAMES
    }


def told(one: NodeId, *others: tuple[NodeId, int, float, float | None]) -> dict[NodeId, NodeLinks]:
    """What it measured of others: in which network, and the rates out and in."""
    some = tuple(
        Measured(
            other=other,
            other_boot=infos(0)[other].boot,
            own=at(network, one).host,
            host=at(network, other).host,
            reached=True,
            dialled_back=True,
            rtt_us=50.0,
            mbps_out=out,
            mbps_in=into,
        )
        for other, network, out, into in others
    )
    return {one: NodeLinks(node=one, boot=infos(0)[one].boot, measured=some)}


def seen(name: NodeId, **kinds: InterfaceKind) -> NodeFacts:
    """Interfaces by the number of their network, as in i0="ethernet"."""
    interfaces = tuple(
        Interface(name=f"{kind}-{i[1:]}", kind=kind, up=True, addresses=(at(int(i[1:]), name),))
        for i, kind in kinds.items()
    )
    return NodeFacts(node=name, boot=infos(0)[name].boot, interfaces=interfaces)


# --- who is near ----------------------------------------------------------------------------------------------------


def test_the_best_of_several_links_decides_who_is_near() -> None:
    links = told(A, (B, 0, 40_000.0, 40_000.0), (B, 1, 100.0, 100.0), (C, 0, 1_000.0, 1_000.0))
    found = SeenLinks(infos(0, 1), Known(links=links))
    assert [found.nearest(name, 5) for name in NAMES] == [(B, C), (A,), (A,)]
    assert found.nearest(A, 1) == (B,)


def test_the_slower_direction_counts_and_one_alone_is_no_rate() -> None:
    links = told(A, (B, 0, 40_000.0, 10.0), (C, 0, 1_000.0, 900.0))
    assert SeenLinks(infos(0), Known(links=links)).nearest(A, 5) == (C, B)
    assert SeenLinks(infos(0), Known(links=told(A, (B, 0, 40_000.0, None)))).nearest(A, 5) == ()


def test_only_links_of_the_network_asked_for_count() -> None:
    links = told(A, (B, 0, 40_000.0, 40_000.0), (B, 1, 100.0, 100.0), (C, 1, 1_000.0, 1_000.0))
    assert SeenLinks(infos(0, 1), Known(links=links), "10.1.0.0/24").nearest(A, 5) == (C, B)
    assert SeenLinks(infos(0, 1), Known(links=links), "10.2.0.0/24").nearest(A, 5) == ()


@pytest.mark.parametrize("kind", ["wifi", "vpn"])
def test_a_last_resort_is_near_only_where_nothing_else_is(kind: InterfaceKind) -> None:
    links = told(A, (B, 0, 40_000.0, 40_000.0), (B, 1, 100.0, 100.0), (C, 1, 1_000.0, 1_000.0))
    facts = {name: seen(name, i0="ethernet", i1=kind) for name in (A, B)} | {C: seen(C, i1="ethernet")}
    assert SeenLinks(infos(0, 1), Known(links=links, facts=facts)).nearest(A, 5) == (B, C)
    facts = {name: seen(name, i0=kind, i1="ethernet") for name in NAMES}
    assert SeenLinks(infos(0, 1), Known(links=links, facts=facts)).nearest(A, 5) == (C, B)
    assert SeenLinks(infos(0, 1), Known(links=links, facts=facts), "10.0.0.0/8").nearest(A, 5) == (B, C)


# --- what is pinned -------------------------------------------------------------------------------------------------


def ring(known: Known, given: Mapping[NodeId, tuple[int, ...]], network: str = "") -> list[RankLink | None]:
    """The links of a ring of all, of whom some were given addresses in these networks by their operator."""
    state = state_of(a=20, b=20, c=20)
    nodes = {
        name: msgspec.structs.replace(
            state.nodes[name],
            info=msgspec.structs.replace(
                info,
                addresses=tuple(at(number, name) for number in given.get(name, (0,))),
                candidates=tuple(at(number, name) for number in given.get(name, (0, 1))),
                addresses_given=name in given,
            ),
        )
        for name, info in infos(0, 1).items()
    }
    spec = wish(3, nodes=NAMES, workload_sharding="pipeline", network=network)
    found = decide(spec, State(nodes=nodes), known, model())
    assert isinstance(found, Placement), found
    return [rank.next for rank in found.layout.ranks]


def test_one_node_with_several_given_addresses_leaves_the_links_of_the_ring_to_placement() -> None:
    links = told(A, (C, 1, 9_000.0, 9_000.0), (C, 0, 100.0, 100.0))
    found = ring(Known(links=links), {C: (0, 1)})
    assert [link and (link.own, link.host) for link in found] == [
        ("10.0.0.1", "10.0.0.2"),
        ("10.0.0.2", "10.0.0.3"),
        ("10.1.0.3", "10.1.0.1"),
    ]


def test_a_ring_in_which_every_pair_has_several_given_networks_uses_them_all() -> None:
    every = dict.fromkeys(NAMES, (0, 1))
    assert ring(Known(), every) == [None] * 3
    assert None not in ring(Known(), every, "10.1.0.0/24"), "one network is one link"
    assert None not in ring(Known(), {A: (0, 1), B: (0, 1), C: (0, 2)}), "and so is one in common"


def test_the_interfaces_are_pinned_with_the_addresses() -> None:
    facts = {A: seen(A, i0="ethernet", i1="wifi"), B: seen(B, i0="bridge")}
    found = ring(Known(facts=facts), {})
    assert [link and (link.own_interface, link.host_interface) for link in found] == [
        ("ethernet-0", "bridge-0"),
        ("bridge-0", ""),
        ("", "ethernet-0"),
    ]


def test_whoever_told_first_the_best_links_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.placement.rooms._MOST_RECORDS", 3)
    links = told(A, (B, 0, 100.0, 100.0), (C, 0, 900.0, 900.0)) | told(
        B, (A, 0, 100.0, 100.0), (C, 0, 40_000.0, 40_000.0)
    )
    for order in (links, dict(reversed(links.items()))):
        seen = SeenLinks(infos(0), Known(links=order))
        assert seen.fastest(2) == (B, C)
        assert seen.nearest(C, 5) == (B, A)
        assert seen.nearest(A, 5) == (C,)
