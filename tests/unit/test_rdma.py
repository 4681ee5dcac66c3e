"""From facts to JACCL's device matrix, or to the reason why there is none, which names machines and ports."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from macs import End, cabled, mac, meshed, ringed

from muster.device_matrix import MAX_RING_WIRES, Topology, Use, cables, names, topology, usage
from muster.doctor.rdma_checks import check_cables
from muster.facts import Interface, InterfaceKind, NodeFacts
from muster.group.payload import build_jaccl
from muster.group.scope import coordination_scope
from muster.known import Known
from muster.layout import Devices, Layout
from muster.lead import coordinators
from muster.links import Measured, NodeLinks
from muster.rdma import InUse, check_devices, node_fault, ring_order, taken, wire
from muster.rdma import cabled as cables_of
from muster.spec import BootId, NodeAddress, NodeId, NodeInfo
from muster.testing.jaccl_rules import read_config


@st.composite
def clusters(draw: st.DrawFn) -> list[NodeFacts]:
    """Two to eight Macs with cables anywhere: nothing, a part, a ring, a mesh, several wires, a cable to itself."""
    size = draw(st.integers(2, 8))
    nodes = [mac(chr(ord("a") + number), draw(st.integers(1, 7))) for number in range(size)]
    ends: list[End] = [(number, port) for number, facts in enumerate(nodes) for port in range(len(facts.thunderbolt))]
    mixed = draw(st.permutations(ends))
    count = draw(st.integers(0, len(mixed) // 2))
    return cabled(nodes, *((mixed[2 * number], mixed[2 * number + 1]) for number in range(count)))


def wirings() -> st.SearchStrategy[list[NodeFacts]]:
    """Random ones, and those that are sure to work."""
    return st.one_of(
        clusters(),
        st.builds(meshed, st.integers(2, 8)),
        st.builds(ringed, st.integers(2, 8), st.integers(1, 5)),
    )


def matrices(nodes: list[NodeFacts]) -> list[tuple[list[NodeFacts], Devices, bool]]:
    """What placement may take of these nodes: in their own order, and in the order of a ring."""
    order = ring_order(nodes)
    turned = [nodes[number] for number in order]
    found = [(nodes, wire(nodes).mesh, False), (nodes, wire(nodes).ring, True)]
    if order:
        found.append((turned, wire(turned).ring, True))
        assert found[-1][1], "an order of the ring makes a ring"
    return [each for each in found if each[1]]


@settings(max_examples=100, deadline=None)
@given(wirings(), st.sampled_from(["tcp", "bus"]))
def test_every_matrix_is_taken_by_mlx_and_joins_the_two_ends_of_a_cable(nodes: list[NodeFacts], side: str) -> None:
    for ranks, devices, ring in matrices(nodes):
        assert topology(devices, prefer_ring=ring) is (Topology.RING if ring else Topology.MESH)
        assert check_devices(devices, ranks, ring=ring) == ""
        for rank in range(len(ranks)):
            payload = build_jaccl("one", 1, rank, devices, ["10.0.0.1:5000"] * len(ranks), ring, side)  # type: ignore[arg-type]
            environ: dict[str, str] = {}
            with coordination_scope(payload, directory=_scratch(), environ=environ):
                config = read_config(environ, lambda file: Path(file).read_text(), has_factory=side == "bus")
                assert ("MLX_JACCL_COORDINATOR" in environ) == (side == "tcp"), "the bus needs no port"
            assert config.rank == rank
            assert config.topology == ("ring" if ring else "mesh")
            for peer, device in config.connections:
                assert _peer_of(ranks[rank], device) == ranks[peer].node
        _assert_paired(ranks, devices)


def _scratch() -> Path:
    return _SCRATCH[0]


_SCRATCH: list[Path] = []


@pytest.fixture(autouse=True, scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> None:
    _SCRATCH[:] = [tmp_path_factory.mktemp("groups")]


def _peer_of(facts: NodeFacts, device: str) -> str:
    (interface,) = [one.interface for one in facts.rdma.devices if one.name == device]
    (port,) = [one for one in facts.thunderbolt if one.interface == interface]
    return port.peer_name


def _domains(facts: NodeFacts, device: str) -> tuple[str, str]:
    (interface,) = [one.interface for one in facts.rdma.devices if one.name == device]
    (port,) = [one for one in facts.thunderbolt if one.interface == interface]
    return port.domain, port.peer_domain


def _assert_paired(nodes: list[NodeFacts], devices: Devices) -> None:
    """The k-th device of i for j and the k-th of j for i are on one cable: MLX pairs queue pairs by their place."""
    for low, high in itertools.combinations(range(len(nodes)), 2):
        near, far = names(devices[low][high]), names(devices[high][low])
        assert len(near) == len(far)
        for mine, theirs in zip(near, far, strict=True):
            assert _domains(nodes[low], mine) == _domains(nodes[high], theirs)[::-1]


@settings(max_examples=100, deadline=None)
@given(clusters())
def test_the_order_of_a_ring_is_found_where_there_is_one(nodes: list[NodeFacts]) -> None:
    counts = cables_of(nodes)
    size = len(nodes)

    def thinnest(order: tuple[int, ...]) -> int:
        pairs = zip(order, (*order[1:], order[0]), strict=True)
        return min(min(counts.get((min(pair), max(pair)), 0), MAX_RING_WIRES) for pair in pairs)

    found = ring_order(nodes)
    best = max(thinnest((0, *rest)) for rest in itertools.permutations(range(1, min(size, 7)))) if size <= 7 else None
    if found:
        assert sorted(found) == list(range(size))
        assert found[0] == 0
    if best is not None:
        assert (thinnest(found) if found else 0) == best


@settings(max_examples=40, deadline=None)
@given(wirings(), st.randoms(use_true_random=False))
def test_the_order_in_which_a_system_prints_its_ports_changes_nothing(nodes: list[NodeFacts], random: Random) -> None:
    """Every rank of an attempt, and every coordinator, must come to the same matrix."""
    mixed = [
        msgspec.structs.replace(
            node,
            thunderbolt=tuple(random.sample(node.thunderbolt, len(node.thunderbolt))),
            rdma=msgspec.structs.replace(node.rdma, devices=node.rdma.devices[::-1]),
        )
        for node in nodes
    ]
    assert wire(mixed) == wire(nodes)
    assert ring_order(mixed) == ring_order(nodes)


@pytest.mark.parametrize(("size", "wires"), [(2, 1), (2, 4), (3, 1), (4, 3), (8, 2)])
def test_a_ring_uses_every_wire(size: int, wires: int) -> None:
    found = wire(ringed(size, wires))
    assert found.wires == wires
    assert found.ring
    assert found.ring_fault == ""


def test_a_ring_has_four_wires_at_most_and_as_many_everywhere() -> None:
    assert wire(ringed(2, 5)).wires == 4
    uneven = cabled([*ringed(3, 2)[:2], mac("c", 4)], ((0, 2), (2, 0)), ((1, 0), (2, 1)))
    found = wire(uneven)
    assert found.wires == 1
    assert all(isinstance(entry, str) for row in found.ring for entry in row if entry is not None)


def test_eight_are_a_mesh_and_nine_are_not() -> None:
    assert wire(meshed(8)).mesh
    assert wire(meshed(9)).mesh_fault == "a mesh takes at most 8 ranks, not 9"
    assert wire(meshed(9)).ring


def test_a_missing_cable_is_named_with_the_ports_that_are_free() -> None:
    nodes = cabled([mac("a"), mac("b"), mac("c")], ((0, 0), (1, 0)), ((1, 1), (2, 2)))
    found = wire(nodes)
    assert found.mesh_fault == "no cable between a (port 2, 3 free) and c (port 1, 2 free)"
    assert found.ring_fault == found.mesh_fault
    assert ring_order(nodes) == ()


FAULTS = {
    "Thunderbolt 4": (mac("b", generation=4), "b has Thunderbolt 4, which can never do RDMA (it takes Thunderbolt 5)"),
    "RDMA off": (mac("b", rdma=False), "RDMA is disabled on b: start it into Recovery, and run there: rdma_ctl enable"),
    "no GID": (mac("b", gid=False), "rdma_en2 of b has no IPv4-mapped GID: give en2 an IPv4 address"),
    "no Thunderbolt": (mac("b", 0), "b has no Thunderbolt port"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_why_a_machine_cannot(case: str) -> None:
    other, fault = FAULTS[case]
    nodes = cabled([mac("a"), other], ((0, 0), (1, 0))) if other.thunderbolt else [mac("a"), other]
    found = wire(nodes)
    assert found.mesh == found.ring == ()
    assert found.mesh_fault == found.ring_fault == fault


def test_thunderbolt_4_is_not_sent_to_recovery() -> None:
    """`rdma_ctl` says disabled there as well, and to enable it would help nobody."""
    facts = mac("b", generation=4, rdma=False)
    assert "never" in node_fault(facts)
    assert "Recovery" not in node_fault(facts)


def test_a_device_in_a_bridge_or_down_is_of_no_use() -> None:
    nodes = ringed(2)
    bridge = Interface(name="bridge0", kind="bridge", up=True, members=("en2", "en3"))
    bridged = msgspec.structs.replace(nodes[0], interfaces=(*nodes[0].interfaces, bridge))
    assert wire([bridged, nodes[1]]).mesh_fault == "en2 of a is in bridge0: take it out of the Thunderbolt bridge"
    down = msgspec.structs.replace(
        nodes[1],
        rdma=msgspec.structs.replace(
            nodes[1].rdma,
            devices=tuple(msgspec.structs.replace(device, active=False) for device in nodes[1].rdma.devices),
        ),
    )
    assert "rdma_en3 of b is not active" in wire([nodes[0], down]).mesh_fault


def test_a_cable_that_one_end_sees_is_none() -> None:
    nodes = ringed(2)
    blind = [msgspec.structs.replace(port, peer_domain="") for port in nodes[1].thunderbolt]
    for pair in ([nodes[0], msgspec.structs.replace(nodes[1], thunderbolt=tuple(blind))],):
        for order in (pair, pair[::-1]):
            assert "port 1 of a sees port 2 of b, which does not see it" in wire(order).mesh_fault


def test_two_ranks_of_one_machine_have_no_rdma_between_them() -> None:
    facts = mac("a")
    assert wire([facts, facts]).mesh_fault == "ranks 0 and 1 are both on node a: RDMA joins different machines"
    twin = msgspec.structs.replace(facts, node=NodeId("twin"))
    assert "ranks 0 and 1 are both on the machine of a and twin" in wire([facts, twin]).ring_fault


# --- limits ---------------------------------------------------------------------------------------------------


def held_by(
    nodes: list[NodeFacts], devices: Devices, *, ring: bool = False, machines: dict[NodeId, str] | None = None
) -> InUse:
    """What is in use while these nodes form a group with these devices."""
    layout = Layout(devices=devices, jaccl_ring=ring)
    return taken([([node.node for node in nodes], layout)], machines or {})


def test_what_other_instances_take_of_a_device_counts() -> None:
    nodes = meshed(2)
    held = held_by(nodes, wire(nodes).mesh)
    assert held.devices == {("a", "rdma_en2"): Use(1, 96), ("b", "rdma_en2"): Use(1, 96)}
    fault = wire(nodes, held).mesh_fault
    assert "rdma_en2 of a: 192 memory regions are needed; a device has 100" in fault
    assert "taken by other instances" in fault
    assert wire(nodes, InUse()).mesh


def test_the_second_instance_takes_the_cable_that_is_free() -> None:
    nodes = ringed(2, 2)
    held = held_by(nodes, wire(nodes).mesh)
    found = wire(nodes, held)
    assert found.mesh == ((None, "rdma_en3"), ("rdma_en5", None))
    assert (found.ring, found.wires) == (found.mesh, 1), "the ring takes what is free, and no more"
    assert wire(nodes, held_by(nodes, wire(nodes).ring, ring=True)).mesh == (), "no cable is free"


def test_a_device_in_use_at_the_far_end_counts_as_well() -> None:
    nodes = ringed(2, 2)
    held = InUse(devices={("b", "rdma_en4"): Use(1, 96)})
    assert wire(nodes, held).mesh == ((None, "rdma_en3"), ("rdma_en5", None))


def test_a_cable_with_room_left_is_shared_where_none_is_free() -> None:
    nodes = ringed(3)
    found = wire(nodes, held_by(nodes, wire(nodes).ring, ring=True))
    assert (found.ring, found.wires) == (wire(nodes).ring, 1)
    fuller = wire(nodes, held_by(nodes, wire(nodes).mesh))
    assert (fuller.ring, fuller.mesh) == (found.ring, ()), "a ring takes less than a mesh of three"


def test_a_ring_goes_where_cables_are_free() -> None:
    four, five = meshed(4), meshed(5)
    held = held_by(four, wire(four).ring, ring=True)
    assert list(cables_of(four, held)) == [(0, 2), (1, 3)], "those across"
    assert ring_order(four, held) == (0, 1, 2, 3), "no ring has free cables all around"
    assert ring_order(five, held_by(five, wire(five).ring, ring=True)) == (0, 2, 4, 1, 3)


def test_the_nodes_of_one_machine_share_its_devices() -> None:
    nodes = meshed(2)
    twins = [msgspec.structs.replace(node, node=NodeId(f"{node.node}2")) for node in nodes]
    machines = {node.node: f"mac-{node.node[0]}" for node in (*nodes, *twins)}
    held = held_by(nodes, wire(nodes).mesh, machines=machines)
    found = wire(twins, held)
    assert found.mesh == ()
    assert "rdma_en2 of a2: 192 memory regions are needed" in found.mesh_fault
    given = check_devices(wire(nodes).mesh, twins, in_use=held)
    assert "rdma_en2 of a2" in given and "taken by other instances" in given
    # Both nodes of a machine in one group: 4 connections of a ring of 32 regions each.
    devices: Devices = (
        (None, "rdma_en2", None, "rdma_en2"),
        ("rdma_en2", None, "rdma_en2", None),
    ) * 2
    group = [nodes[0], nodes[1], twins[0], twins[1]]
    fault = check_devices(devices, group, ring=True, in_use=InUse(machines=held.machines))
    assert "rdma_en2 of a: 128 memory regions are needed" in fault


def test_a_device_has_ten_queue_pairs() -> None:
    row = ["rdma_en2"] * 8
    devices = tuple(tuple(None if peer == rank else name for peer, name in enumerate(row)) for rank in range(8))
    assert usage(devices, ring=False)[0] == {"rdma_en2": Use(7, 16 * (2 * 7 + 4))}
    assert Use(10, 100).excess == ""
    assert Use(11, 0).excess == "11 queue pairs are needed; a device has 10"


# --- an operator's own matrix -----------------------------------------------------------------------------------


def test_an_operators_matrix_is_held_against_the_facts() -> None:
    nodes = ringed(2, 2)
    good: Devices = ((None, ("rdma_en2", "rdma_en3")), (("rdma_en4", "rdma_en5"), None))
    assert check_devices(good, nodes) == ""
    assert check_devices(good, []) == ""
    crossed: Devices = ((None, ("rdma_en2", "rdma_en3")), (("rdma_en5", "rdma_en4"), None))
    assert "rdma_en2 of a is cabled to rdma_en4 of b, not to rdma_en5" in check_devices(crossed, nodes)
    unknown: Devices = ((None, "rdma_en9"), ("rdma_en4", None))
    assert "a has no RDMA device rdma_en9; it has rdma_en2" in check_devices(unknown, nodes)
    assert "no mesh" in check_devices(((None, None), ("rdma_en4", None)), nodes)
    assert "2 rows for 3 ranks" in check_devices(good, [*nodes, mac("c")])
    silent = [msgspec.structs.replace(node, rdma=type(node.rdma)()) for node in nodes]
    assert check_devices(unknown, silent) == ""


def test_a_device_without_its_cable_is_refused_with_the_reason() -> None:
    down: Devices = ((None, "rdma_en2"), ("rdma_en2", None))
    assert "rdma_en2 of b is not active" in check_devices(down, ringed(2))


def test_the_doctor_tells_macs_with_several_cables_of_the_backend_that_uses_all() -> None:
    (check,) = check_cables({one.node: one for one in ringed(2, 2)})
    assert check.evidence == "a, b: each is cabled to each other; --backend jaccl-ring uses 2 cables to each neighbour"


def test_people_see_both_ends_of_each_cable() -> None:
    assert cables(wire(ringed(2, 2)).ring) == ("0-1 rdma_en2 ↔ rdma_en4", "0-1 rdma_en3 ↔ rdma_en5")
    assert cables(wire(ringed(4)).ring)[1] == "0-3 rdma_en3 ↔ rdma_en2"
    assert cables(()) == ()


def test_the_matrix_is_what_mlx_reads() -> None:
    """As `mlx.launch` would write it: names, lists of names, null."""
    assert json.loads(msgspec.json.encode(wire(ringed(2, 2)).ring)) == [
        [None, ["rdma_en2", "rdma_en3"]],
        [["rdma_en4", "rdma_en5"], None],
    ]
    assert json.loads(msgspec.json.encode(wire(meshed(3)).mesh)) == [
        [None, "rdma_en2", "rdma_en3"],
        ["rdma_en2", None, "rdma_en3"],
        ["rdma_en2", "rdma_en3", None],
    ]


# --- rank 0's address for the side channel ----------------------------------------------------------------------


def info(node: str, **fields: Any) -> NodeInfo:
    made = NodeInfo(
        node=NodeId(node),
        boot=BootId(f"{node}-boot-1"),
        hostname=node,
        machine=node,
        pid=1,
        addresses=(NodeAddress(host=f"10.0.0.{ord(node)}", network="10.0.0.0/24"),),
        backends=("jaccl",),
        memory_bytes=1,
        max_ranks=1,
    )
    return msgspec.structs.replace(made, **fields)


def reached(own: str, host: str, rtt_us: float = 100.0, **fields: Any) -> Measured:
    made = Measured(
        other=NodeId("a"),
        other_boot=BootId("a-boot-1"),
        own=own,
        host=host,
        reached=True,
        dialled_back=True,
        rtt_us=rtt_us,
    )
    return msgspec.structs.replace(made, **fields)


def facts_of(node: str, **kinds: InterfaceKind) -> NodeFacts:
    """Interfaces by kind, each with one address: `x10_0_0_1="ethernet"`."""
    interfaces = tuple(
        Interface(
            name=f"en{number}",
            kind=kind,
            up=True,
            addresses=(NodeAddress(host=name[1:].replace("_", "."), network="10.0.0.0/8"),),
        )
        for number, (name, kind) in enumerate(kinds.items())
    )
    return NodeFacts(node=NodeId(node), boot=BootId(node), interfaces=interfaces)


def known(*facts: NodeFacts, **measured: tuple[Measured, ...]) -> Known:
    links = {NodeId(node): NodeLinks(node=NodeId(node), boot=BootId(node), measured=m) for node, m in measured.items()}
    return Known(facts={one.node: one for one in facts}, links=links)


A_FACTS = facts_of("a", x10_0_0_1="ethernet", x10_1_0_1="wifi", x169_254_0_1="thunderbolt", x10_2_0_1="ethernet")


def test_without_measurements_rank_0s_first_address_is_dialled() -> None:
    assert coordinators([info("a"), info("b")], Known()).hosts == ("10.0.0.97", "10.0.0.97")


def test_the_side_channel_goes_around_thunderbolt_and_prefers_cables() -> None:
    seen = known(
        A_FACTS,
        b=(
            reached("169.254.0.2", "169.254.0.1", 10),
            reached("10.1.0.2", "10.1.0.1", 50),
            reached("10.0.0.2", "10.0.0.1", 200),
        ),
    )
    assert coordinators([info("a"), info("b")], seen).hosts == ("10.0.0.1", "10.0.0.1")


def test_one_address_for_all_is_taken_before_the_best_of_each() -> None:
    b = (reached("x", "10.2.0.1", 10), reached("x", "10.0.0.1", 90))
    nodes = [info("a"), info("b"), info("c")]
    assert coordinators(nodes, known(A_FACTS, b=b, c=(reached("y", "10.0.0.1"),))).hosts == ("10.0.0.1",) * 3
    apart = known(A_FACTS, b=b[:1], c=(reached("y", "10.0.0.1"),))
    assert coordinators(nodes, apart).hosts == ("0.0.0.0", "10.2.0.1", "10.0.0.1")


def test_two_ranks_of_one_node_have_no_address_in_a_network_that_it_is_not_in() -> None:
    fault = coordinators([info("a"), info("a")], Known(), "10.9.0.0/16").fault
    assert fault.startswith("rank 1 on a dials rank 0 on a")


def test_a_rank_that_reaches_rank_0_over_thunderbolt_alone_is_named() -> None:
    seen = known(A_FACTS, b=(reached("169.254.0.2", "169.254.0.1"), reached("x", "10.0.0.1", reached=False)))
    assert coordinators([info("a"), info("b")], seen).fault == (
        "rank 1 on b dials rank 0 on a for jaccl's side channel, but no address of a outside Thunderbolt was reached "
        "from there"
    )


def test_given_addresses_and_a_given_network_win() -> None:
    seen = known(A_FACTS, b=(reached("x", "10.2.0.1", 10), reached("x", "10.0.0.1", 90)))
    own = (NodeAddress(host="10.0.0.1", network="10.0.0.0/24"),)
    assert coordinators([info("a", addresses=own, addresses_given=True), info("b")], seen).hosts[1] == "10.0.0.1"
    more = (NodeAddress(host="10.2.0.1", network="10.2.0.0/24"),)
    nodes = [info("a", candidates=(*own, *more)), info("b")]
    assert coordinators(nodes, seen, "10.2.0.0/24").hosts == ("10.2.0.1", "10.2.0.1")
    assert coordinators(nodes, seen, "10.2.0.0/16").hosts == ("10.2.0.1", "10.2.0.1")
    assert coordinators(nodes, seen, "10.0.0.0/24").hosts == ("10.0.0.1", "10.0.0.1")


def test_a_bridge_of_thunderbolt_ports_is_thunderbolt() -> None:
    ports = facts_of("a", x10_0_0_1="ethernet", x169_254_0_1="bridge")
    bridge = msgspec.structs.replace(ports.interfaces[1], members=("en9",))
    lane = Interface(name="en9", kind="thunderbolt", up=True)
    facts = msgspec.structs.replace(ports, interfaces=(ports.interfaces[0], bridge, lane))
    seen = known(facts, b=(reached("x", "169.254.0.1", 1), reached("x", "10.0.0.1", 900)))
    assert coordinators([info("a"), info("b")], seen).hosts == ("10.0.0.1", "10.0.0.1")
