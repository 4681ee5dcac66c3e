"""Which link two nodes use, by what both measured."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.facts import Interface, InterfaceKind, NodeFacts
from muster.links import EQUAL_SHARE, LAST_RESORTS, Link, LinkMap, Measured, NodeLinks, is_host, is_network, within
from muster.spec import BootId, NodeAddress, NodeId, NodeInfo

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
BOOTS = {A: BootId("1"), B: BootId("2"), C: BootId("3")}


def at(host: str, network: str | None = None) -> NodeAddress:
    return NodeAddress(host=host, network=network or host.rpartition(".")[0] + ".0/24")


def info(node: NodeId, *hosts: str, candidates: tuple[str, ...] = (), network_id: str | None = None) -> NodeInfo:
    return NodeInfo(
        node=node,
        boot=BOOTS[node],
        hostname=node,
        machine=node,
        pid=1,
        addresses=tuple(map(at, hosts)),
        candidates=tuple(map(at, candidates or hosts)),
        backends=("ring",),
        memory_bytes=2**30,
        max_ranks=4,
        peer_port=7,
        network_id=node if network_id is None else network_id,
    )


def measured(other: NodeId, own: str, host: str, **more: object) -> Measured:
    one = Measured(
        other=other, other_boot=BOOTS[other], own=own, host=host, reached=True, dialled_back=True, rtt_us=100.0
    )
    return msgspec.structs.replace(one, **more)


def told(node: NodeId, *some: Measured, boot: str | None = None) -> dict[NodeId, NodeLinks]:
    return {node: NodeLinks(node=node, boot=BootId(boot) if boot else BOOTS[node], measured=some)}


def facts(node: NodeId, **kinds: InterfaceKind) -> NodeFacts:
    """`kinds` by interface "i<third part of its address>", whose address is 10.0.<that>.<1 or 2>."""
    last = 1 if node == A else 2
    interfaces = tuple(
        Interface(name=name, kind=kind, up=True, addresses=(at(f"10.0.{name[1:]}.{last}"),))
        for name, kind in kinds.items()
    )
    return NodeFacts(node=node, boot=BOOTS[node], interfaces=interfaces)


def two(count: int) -> dict[NodeId, NodeInfo]:
    """Two nodes that joined over network 0 and have `count` networks in common."""
    return {
        name: info(name, f"10.0.0.{last}", candidates=tuple(f"10.0.{number}.{last}" for number in range(count)))
        for name, last in ((A, 1), (B, 2))
    }


def pair(number: int, **more: object) -> Measured:
    return measured(B, f"10.0.{number}.1", f"10.0.{number}.2", **more)


def rated(*mbps: float | None) -> dict[NodeId, NodeLinks]:
    return told(A, *(pair(number, mbps_out=rate, mbps_in=rate) for number, rate in enumerate(mbps)))


def hosts(link: Link | None) -> tuple[str, str] | None:
    return None if link is None else (link.a_host, link.b_host)


# --- which one ------------------------------------------------------------------------------------------------------


def test_what_was_not_measured_goes_over_the_network_that_both_joined_by() -> None:
    assert LinkMap(two(2)).between(A, B) == Link(a=A, b=B, a_host="10.0.0.1", b_host="10.0.0.2")


def test_the_fastest_measured_link_is_taken() -> None:
    link = LinkMap(two(3), rated(100, 9_000, 1_000)).between(A, B)
    assert hosts(link) == ("10.0.1.1", "10.0.1.2")
    assert link is not None
    assert (link.mbps, link.rtt_us) == (9_000, 100.0)


def test_the_slower_direction_is_the_rate() -> None:
    links = told(A, pair(0, mbps_out=500, mbps_in=500), pair(1, mbps_out=9_000, mbps_in=10))
    assert hosts(LinkMap(two(2), links).between(A, B)) == ("10.0.0.1", "10.0.0.2")


def test_a_cut_link_is_not_taken_and_what_was_measured_comes_before_what_was_not() -> None:
    links = told(A, pair(0, reached=False, dialled_back=False, error="10.0.0.2:7 does not answer"), pair(1))
    assert hosts(LinkMap(two(2), links).between(A, B)) == ("10.0.1.1", "10.0.1.2")


@pytest.mark.parametrize("kind", LAST_RESORTS)
def test_wifi_and_vpn_are_used_only_where_nothing_better_reaches_or_the_operator_says_so(kind: InterfaceKind) -> None:
    known = {A: facts(A, i0="ethernet", i1=kind), B: facts(B, i0="ethernet", i1="ethernet")}
    fast = rated(10, 5_000)
    assert hosts(LinkMap(two(2), fast, known).between(A, B)) == ("10.0.0.1", "10.0.0.2")
    assert hosts(LinkMap(two(2), fast, known, "10.0.1.0/24").between(A, B)) == ("10.0.1.1", "10.0.1.2")
    alone = told(A, pair(0, reached=False, dialled_back=False), pair(1))
    link = LinkMap(two(2), alone, known).between(A, B)
    assert link is not None
    assert (hosts(link), link.kind) == (("10.0.1.1", "10.0.1.2"), kind)


def test_within_the_network_that_the_operator_names_only_the_rate_counts() -> None:
    known = {A: facts(A, i0="ethernet", i1="wifi"), B: facts(B, i0="ethernet", i1="wifi")}
    assert hosts(LinkMap(two(2), rated(10, 5_000), known, "10.0.0.0/16").between(A, B)) == ("10.0.1.1", "10.0.1.2")


def test_what_was_measured_comes_before_what_may_work_although_of_a_better_kind() -> None:
    known = {A: facts(A, i0="ethernet", i1="wifi"), B: facts(B, i0="ethernet", i1="wifi")}
    links = told(A, pair(1, mbps_out=10, mbps_in=10))
    assert hosts(LinkMap(two(2), links, known).between(A, B)) == ("10.0.1.1", "10.0.1.2")


def test_of_what_both_ends_measured_the_burst_that_was_disturbed_less_counts() -> None:
    links = told(A, pair(0, mbps_out=100, mbps_in=9_000)) | told(
        B, measured(A, "10.0.0.2", "10.0.0.1", mbps_out=700, mbps_in=800, rtt_us=50.0)
    )
    link = LinkMap(two(1), links).between(A, B)
    assert link is not None
    assert (link.mbps, link.rtt_us) == (700, 50.0)


def test_links_about_as_fast_are_told_apart_by_kind_and_round_trip() -> None:
    links = told(
        A, pair(0, mbps_out=900, mbps_in=900, rtt_us=2_000.0), pair(1, mbps_out=1_000, mbps_in=1_000, rtt_us=5_000.0)
    )
    assert hosts(LinkMap(two(2), links).between(A, B)) == ("10.0.0.1", "10.0.0.2")
    known = {A: facts(A, i0="ethernet", i1="thunderbolt"), B: facts(B, i0="ethernet", i1="thunderbolt")}
    assert hosts(LinkMap(two(2), rated(1_000, 900), known).between(A, B)) == ("10.0.1.1", "10.0.1.2")


def test_workers_of_one_network_stack_use_loopback_at_addresses_of_their_own() -> None:
    nodes = {A: info(A, "10.0.0.1", network_id="x"), B: info(B, "10.0.0.1", network_id="x")}
    link = LinkMap(nodes).between(A, B)
    assert link == Link(a=A, b=B, a_host="10.0.0.1", b_host="10.0.0.1", kind="loopback")


def test_loopback_is_no_link_between_machines() -> None:
    nodes = {A: info(A, "127.0.0.1"), B: info(B, "127.0.0.1")}
    assert LinkMap(nodes).between(A, B) is None
    assert "no network in common" in LinkMap(nodes).why_not(A, B)


def test_without_a_common_network_routing_may_help_until_it_was_measured_that_it_does_not() -> None:
    nodes = {A: info(A, "10.0.0.1"), B: info(B, "10.1.0.2")}
    assert hosts(LinkMap(nodes).between(A, B)) == ("10.0.0.1", "10.1.0.2")
    links = told(A, measured(B, "10.0.0.1", "10.1.0.2", reached=False, dialled_back=False, error="no route"))
    assert LinkMap(nodes, links).between(A, B) is None
    assert LinkMap(nodes, links).why_not(A, B) == "a does not reach b by 10.0.0.1 → 10.1.0.2: no route"


def test_within_a_network_that_the_operator_names_addresses_without_neighbours_are_tried() -> None:
    nodes = {
        name: msgspec.structs.replace(
            info(name, "192.168.1.5"), candidates=(at("192.168.1.5"), at(f"100.64.0.{last}", f"100.64.0.{last}/32"))
        )
        for name, last in ((A, 1), (B, 2))
    }
    assert hosts(LinkMap(nodes, network="100.64.0.0/10").between(A, B)) == ("100.64.0.1", "100.64.0.2")
    assert LinkMap(nodes, network="100.96.0.0/12").between(A, B) is None
    known = told(A, measured(B, "100.64.0.1", "100.64.0.2", mbps_out=80.0, mbps_in=90.0))
    link = LinkMap(nodes, known).between(A, B)
    assert (hosts(link), link and link.mbps) == (("100.64.0.1", "100.64.0.2"), 80.0)


def test_a_routed_wired_link_comes_before_a_wifi_in_common() -> None:
    nodes = {
        name: info(name, f"10.{last}.0.5", candidates=(f"10.{last}.0.5", f"192.168.1.{last}"))
        for name, last in ((A, 1), (B, 2))
    }
    wifi = Interface(name="wlan0", kind="wifi", up=True)
    seen = {
        name: NodeFacts(
            node=name,
            boot=BOOTS[name],
            interfaces=(msgspec.structs.replace(wifi, addresses=(at(f"192.168.1.{last}"),)),),
        )
        for name, last in ((A, 1), (B, 2))
    }
    known = told(
        A,
        measured(B, "192.168.1.1", "192.168.1.2", mbps_out=600.0, mbps_in=600.0),
        measured(B, "10.1.0.5", "10.2.0.5", mbps_out=900.0, mbps_in=900.0),
    )
    assert hosts(LinkMap(nodes, known, seen).between(A, B)) == ("10.1.0.5", "10.2.0.5")


def test_a_node_that_saw_only_loopback_before_it_had_joined_is_reached_where_it_joined() -> None:
    nodes = {A: info(A, "10.0.0.1", candidates=("127.0.0.1",)), B: info(B, "10.0.0.2")}
    assert hosts(LinkMap(nodes).between(A, B)) == ("10.0.0.1", "10.0.0.2")


def test_an_address_that_is_gone_is_not_offered_although_the_node_joined_by_it() -> None:
    nodes = {A: info(A, "10.0.0.1", candidates=("10.0.1.1",)), B: info(B, "10.0.0.2", candidates=("10.0.1.2",))}
    assert LinkMap(nodes).between(A, B) is None
    assert hosts(LinkMap(nodes, told(A, pair(1))).between(A, B)) == ("10.0.1.1", "10.0.1.2")


# --- why not --------------------------------------------------------------------------------------------------------


def test_a_directed_link_is_named_by_whichever_end_sees_it() -> None:
    back = told(A, pair(0, dialled_back=False, error="10.0.0.1:7 cannot be reached"))
    expected = "a reaches b by 10.0.0.1 → 10.0.0.2, but b does not reach a back"
    assert LinkMap(two(1), back).why_not(A, B) == f"{expected} (10.0.0.1:7 cannot be reached)"
    both = told(A, pair(0)) | told(
        B, measured(A, "10.0.0.2", "10.0.0.1", reached=False, dialled_back=False, error="refused")
    )
    assert LinkMap(two(1), both).why_not(A, B) == f"{expected} (refused)"
    assert LinkMap(two(1), both).why_not(B, A) == f"{expected} (refused)"


def test_what_another_boot_measured_or_was_measured_of_does_not_count() -> None:
    lost = pair(0, reached=False, dialled_back=False)
    assert LinkMap(two(1), told(A, lost)).between(A, B) is None
    assert LinkMap(two(1), told(A, lost, boot="0")).between(A, B) is not None
    former = msgspec.structs.replace(lost, other_boot=BootId("0"))
    assert LinkMap(two(1), told(A, former)).between(A, B) is not None


def test_an_unknown_node_is_named() -> None:
    assert LinkMap(two(1)).why_not(A, C) == "there is no node c"
    assert LinkMap(two(1)).between(A, C) is None


def test_what_is_a_network_and_what_an_address() -> None:
    assert all(map(is_network, ("10.0.0.0/8", "10.0.0.5/24", "100.64.0.1/32", "0.0.0.0/0")))
    assert not any(map(is_network, ("banana", "", "10.0.0.0", "10.0.0.0/33", "10.0.0.0/", "10.0/8", "::/0", "/8")))
    assert not is_network("10.0.0.0/" + "9" * 5000)
    assert is_host("10.0.0.5")
    assert not any(map(is_host, ("banana", "", "10.0.0", "10.0.0.256", "10.0.0.5:80", "::1", "localhost")))


def test_within_reads_networks() -> None:
    assert within("10.91.1.7", "10.91.1.0/24")
    assert not within("10.91.2.7", "10.91.1.0/24")
    assert within("1.2.3.4", "0.0.0.0/0")
    assert not any(within("10.0.0.1", text) for text in ("", "10.0.0.1", "10.0.0.1/x", "x/8", "10.0.0.0/33"))


# --- properties -----------------------------------------------------------------------------------------------------

rates = st.one_of(st.none(), st.floats(1, 100_000))
KINDS: tuple[InterfaceKind, ...] = ("thunderbolt", "ethernet", "wifi", "vpn", "other")
kinds: st.SearchStrategy[InterfaceKind] = st.sampled_from(KINDS)


@st.composite
def maps(draw: st.DrawFn) -> LinkMap:
    count = draw(st.integers(1, 4))

    def record(number: int, back: bool) -> Measured:
        reached = draw(st.booleans() | st.just(True))
        rate, trip = draw(rates), draw(st.floats(10, 5_000))
        own, host = (f"10.0.{number}.{last}" for last in ((2, 1) if back else (1, 2)))
        dialled = reached and draw(st.booleans() | st.just(True))
        return measured(
            A if back else B, own, host, reached=reached, dialled_back=dialled, mbps_out=rate, mbps_in=rate, rtt_us=trip
        )

    there = [record(number, False) for number in draw(st.sets(st.integers(0, count - 1)))]
    back = [record(number, True) for number in draw(st.sets(st.integers(0, count - 1)))]
    known: dict[NodeId, NodeFacts] = {}
    for name in draw(st.sets(st.sampled_from((A, B)))):
        found: dict[str, InterfaceKind] = {f"i{number}": draw(kinds) for number in range(count)}
        known[name] = facts(name, **found)
    return LinkMap(two(count), told(A, *there) | told(B, *back), known, draw(st.sampled_from(("", "10.0.1.0/24"))))


@given(maps())
def test_both_ends_choose_the_same_link_and_say_why_there_is_none(links: LinkMap) -> None:
    there, back = links.between(A, B), links.between(B, A)
    assert (there is None) == (back is None) == bool(links.why_not(A, B)) == bool(links.why_not(B, A))
    if there is not None and back is not None:
        assert there.reversed() == back
        assert links.pairs(A, B)[0] == there
        assert tuple(link.reversed() for link in links.pairs(A, B)) == links.pairs(B, A)


@given(maps())
def test_the_choice_is_ranked(links: LinkMap) -> None:
    """Usable before not, measured before not; of the same class none after is faster by more than the tolerance."""
    trials = links.trials(A, B)
    classes = [(bool(trial.fault), not trial.fault and not trial.measured) for trial in trials]
    assert classes == sorted(classes)
    usable = [trial for trial in trials if not trial.fault]
    for before, after in itertools.combinations(usable, 2):
        resort = before.link.kind in LAST_RESORTS, after.link.kind in LAST_RESORTS
        if before.measured == after.measured and resort[0] == resort[1]:
            assert (before.link.mbps or 0) >= EQUAL_SHARE * (after.link.mbps or 0)
    allowed = {(link.a_host, link.b_host) for link in links.pairs(A, B)}
    assert all(left.rpartition(".")[0] == right.rpartition(".")[0] for left, right in allowed)
