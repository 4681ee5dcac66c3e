"""Hosts of a hostfile: which node each is, what is wished of an instance, and the way back from an instance."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muster.bench.random_clusters import full_mesh
from muster.errors import PayloadError, RequestError
from muster.facts import Interface, NodeFacts
from muster.group.hostfile import Host, Hostfile, parse, write
from muster.group.hosts import Wish, hostfile_of, resolve
from muster.group.payload import PreparedRank, build_given_ring
from muster.layout import Layout, RankLayout, RankLink
from muster.placement import Candidate, Cluster, Placement
from muster.placement.core import place
from muster.spec import (
    Address,
    BootId,
    GroupWorkload,
    InstanceId,
    InstanceSpec,
    NodeAddress,
    NodeId,
    NodeInfo,
    ScriptWorkload,
)
from muster.state import Instance, Rank, Ready, Running

BOOT = BootId("boot")
A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def info(name: str, *hosts: str, hostname: str = "", candidates: tuple[str, ...] = ()) -> NodeInfo:
    def addresses(found: tuple[str, ...]) -> tuple[NodeAddress, ...]:
        return tuple(NodeAddress(host=host, network=host.rpartition(".")[0] + ".0/24") for host in found)

    return NodeInfo(
        node=NodeId(name),
        boot=BOOT,
        hostname=hostname or f"mac-{name}.local",
        machine=name,
        pid=1,
        addresses=addresses(hosts),
        backends=("ring",),
        memory_bytes=2**30,
        max_ranks=32,
        candidates=addresses(candidates),
    )


NODES = (
    info("a", "10.0.0.1", candidates=("10.0.9.1",)),
    info("b", "10.0.0.2", candidates=("10.0.9.2",)),
    info("c", "10.0.0.3"),
    info("d", "10.0.0.4"),
)


def hostfile(*hosts: tuple[str, str], backend: str = "ring") -> Hostfile:
    return Hostfile(hosts=tuple(Host(ssh=ssh, ips=(ip,)) for ssh, ip in hosts), backend=backend)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "ssh", ["b", "B", "mac-b.local", "MAC-B", "mac-b", "me@mac-b.local", "10.0.0.2", "10.0.9.2", "an-alias-of-ssh"]
)
def test_a_host_is_found_by_whatever_its_node_answers_to(ssh: str) -> None:
    assert resolve(hostfile((ssh, "10.0.9.2")), NODES).nodes == (B,)


def test_a_host_is_found_by_an_address_that_only_its_facts_have() -> None:
    address = NodeAddress(host="169.254.7.7", network="169.254.0.0/16")
    facts = NodeFacts(
        node=C, boot=BOOT, interfaces=(Interface(name="en2", kind="thunderbolt", up=True, addresses=(address,)),)
    )
    assert resolve(hostfile(("169.254.7.7", "169.254.7.7")), NODES, {C: facts}).nodes == (C,)


def test_the_wish_is_in_the_order_of_the_file_with_its_addresses_devices_and_variables() -> None:
    rows = ((None, "x", "y"), ("x", None, "z"), ("y", "z", None))
    found = Hostfile(
        hosts=tuple(
            Host(ssh=node, ips=(f"10.0.0.{n}",), rdma=rows[n - 1]) for n, node in ((1, "a"), (2, "b"), (3, "c"))
        ),
        backend="jaccl",
        environment={"A": "1", "B": "2"},
    )
    spec = resolve(found, NODES).upon(InstanceSpec(workload=GroupWorkload(), environment={"B": "3"}))
    assert (spec.nodes, spec.ranks, spec.backend, spec.devices) == ((A, B, C), 3, "jaccl", rows)
    assert spec.addresses == (("10.0.0.1",), ("10.0.0.2",), ("10.0.0.3",))
    assert spec.environment == {"A": "1", "B": "3"}


def test_a_ring_of_wires_keeps_only_what_a_ring_needs() -> None:
    row = ("w", "x", "y", "z")
    hosts = tuple(Host(ssh=f"m{r}", ips=(f"10.0.1.{r}",), rdma=(*row[:r], None, *row[r + 1 :])) for r in range(4))
    nodes = [info(f"m{r}", f"10.0.1.{r}") for r in range(4)]
    wish = resolve(Hostfile(hosts=hosts, backend="jaccl-ring"), nodes)
    assert wish.backend == "jaccl-ring"
    assert wish.devices[0] == (None, "x", None, "z")
    assert wish.devices[1] == ("w", None, "y", None)


def test_devices_are_passed_over_for_a_ring_over_tcp() -> None:
    hosts = (Host(ssh="a", ips=("10.0.0.1",), rdma=(None, "x")), Host(ssh="b", ips=("10.0.0.2",), rdma=("x", None)))
    assert resolve(Hostfile(hosts=hosts, backend="ring"), NODES).devices == ()
    assert resolve(Hostfile(hosts=hosts), NODES).devices == ((None, "x"), ("x", None))


def test_a_host_that_no_node_answers_to_is_named_with_the_nodes_that_are_there() -> None:
    with pytest.raises(RequestError) as caught:
        resolve(hostfile(("a", "10.0.0.1"), ("mac7", "10.0.7.7")), NODES)
    assert caught.value.field == "hosts[1].ssh"
    assert "'mac7'" in caught.value.message
    assert "c (mac-c.local: 10.0.0.3)" in caught.value.message


def test_several_nodes_behind_one_name_are_told_apart_by_address_or_by_id() -> None:
    nodes = (info("a", "10.0.0.1", hostname="mac"), info("b", "10.0.0.2", hostname="mac"))
    assert resolve(hostfile(("mac", "10.0.0.2")), nodes).nodes == (B,)
    local = (info("a", "127.0.0.1", hostname="mac"), info("b", "127.0.0.1", hostname="mac"))
    with pytest.raises(RequestError, match="nodes a, b all answer to 'mac'"):
        resolve(hostfile(("mac", "127.0.0.1")), local)
    named = Hostfile(hosts=(Host(ssh="127.0.0.1", ips=("127.0.0.1",), node="b"),))
    assert resolve(named, local).nodes == (B,)


def test_an_address_of_another_node_is_refused() -> None:
    with pytest.raises(RequestError, match=r"10\.0\.0\.3 is no address of b") as caught:
        resolve(hostfile(("a", "10.0.0.1"), ("b", "10.0.0.3")), NODES)
    assert caught.value.field == "hosts[1].ips[0]"


def test_ranks_are_dealt_evenly_or_refused() -> None:
    even = hostfile(("a", "10.0.0.1"), ("a", "10.0.0.1"), ("b", "10.0.0.2"), ("b", "10.0.0.2"))
    spec = resolve(even, NODES).upon(InstanceSpec(workload=GroupWorkload()))
    assert (spec.nodes, spec.ranks) == ((A, B), 4)
    for hosts in (even.hosts[:3], even.hosts[1:] + even.hosts[:1], even.hosts[::2] + even.hosts[::2]):
        with pytest.raises(RequestError, match="gives the ranks to"):
            resolve(msgspec.structs.replace(even, hosts=hosts), NODES)


# --- back from an instance --------------------------------------------------------------------------------------


def instance(
    spec: InstanceSpec, nodes: tuple[NodeId, ...], layout: Layout | None = None, prepared: bool = True
) -> Instance:
    by_id = {node.node: node for node in NODES}
    ranks = tuple(
        Rank(
            rank=number,
            node=node,
            boot=BOOT,
            state=Ready(),
            since_ns=1,
            addresses=tuple(Address(one.host, 5000 + number, one.network) for one in by_id[node].addresses)
            if prepared
            else (),
        )
        for number, node in enumerate(nodes)
    )
    return Instance(
        id=InstanceId("one-1"),
        spec=spec,
        created_ns=1,
        attempt=1,
        backend="jaccl" if spec.backend == "jaccl" else "ring",
        status=Running(),
        since_ns=1,
        ranks=ranks,
        created_by=1,
        caused_by=1,
        layout=layout or Layout(),
    )


def as_placed(wish: Wish) -> Instance:
    """An instance that placement made of the wish."""
    spec = msgspec.structs.replace(wish.upon(InstanceSpec(workload=GroupWorkload())), memory_bytes=0)
    by_id = {node.node: msgspec.structs.replace(node, backends=("ring", "jaccl")) for node in NODES}
    there = tuple(Candidate(info=by_id[node], free_bytes=2**30, free_ranks=32) for node in wish.nodes)
    found = place(Cluster(nodes=there, named=True), full_mesh([one.node for one in NODES]), None, spec)
    assert isinstance(found, Placement), found
    made = instance(spec, tuple(one.node for one in found.assignments), found.layout)
    return msgspec.structs.replace(made, backend=found.backend)


orders = st.permutations(NODES).flatmap(lambda nodes: st.integers(2, 4).map(lambda count: tuple(nodes[:count])))


@st.composite
def wishes(draw: st.DrawFn) -> Wish:
    """Over TCP; a mesh; a ring of some wires, which of four nodes is cabled to neighbours alone."""
    nodes = draw(orders)
    size, backend = len(nodes), draw(st.sampled_from(("ring", "jaccl", "jaccl-ring")))
    wires = draw(st.integers(1, 3))
    names = tuple(f"rdma_en{number}" for number in range(draw(st.integers(0, 3)), 9))[:wires]
    entry = names[0] if wires == 1 else names

    def cell(one: int, other: int) -> str | tuple[str, ...] | None:
        joined = one != other and (backend == "jaccl" or (one - other) % size in (1, size - 1))
        return entry if joined else None

    devices = tuple(tuple(cell(i, j) for j in range(size)) for i in range(size)) if backend != "ring" else ()
    return Wish(
        nodes=tuple(node.node for node in nodes),
        backend=backend,
        addresses=tuple((node.addresses[0].host,) for node in nodes),
        devices=devices,
        environment=draw(st.dictionaries(st.sampled_from(("A", "B")), st.text("xy =", max_size=3), max_size=2)),
    )


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(wishes())
def test_a_wish_comes_back_from_the_instance_that_was_made_of_it(wish: Wish) -> None:
    assert resolve(parse(write(hostfile_of(as_placed(wish), NODES))), NODES) == wish


@pytest.mark.parametrize("backend", ["jaccl", "jaccl-ring"])
def test_a_single_rank_is_written_as_a_ring_whatever_was_asked_for(backend: str) -> None:
    """It forms no group: the file would need a row of devices otherwise, and there are none."""
    made = instance(InstanceSpec(workload=ScriptWorkload(path="/x.py"), backend=backend), (A,))  # type: ignore[arg-type]
    found = hostfile_of(msgspec.structs.replace(made, backend="jaccl"), NODES)
    assert (found.backend, found.devices) == ("ring", ())
    assert parse(write(found)).hosts == found.hosts


def test_an_instance_that_was_placed_by_itself_is_written_with_what_its_ranks_prepared() -> None:
    workload = ScriptWorkload(path="/x.py", environment={"OWN": "1"})
    made = instance(InstanceSpec(workload=workload, ranks=3, environment={"E": "2"}), (B, C, A))
    found = hostfile_of(made, NODES)
    assert [(host.ssh, host.ips, host.node) for host in found.hosts] == [
        ("mac-b.local", ("10.0.0.2",), ""),
        ("mac-c.local", ("10.0.0.3",), ""),
        ("mac-a.local", ("10.0.0.1",), ""),
    ]
    assert (found.backend, found.environment) == ("ring", {"E": "2", "OWN": "1"})


def test_the_addresses_that_placement_chose_are_the_ones_that_are_written() -> None:
    links = [RankLink(own=f"10.0.9.{rank}", host=f"10.0.9.{(rank + 1) % 2}") for rank in range(2)]
    layout = Layout(ranks=tuple(RankLayout(next=link) for link in links))
    made = instance(InstanceSpec(workload=GroupWorkload(), ranks=2), (A, B), layout)
    ranks = tuple(
        msgspec.structs.replace(rank, addresses=(*rank.addresses, Address(f"10.0.9.{rank.rank}", 5000, "10.0.9.0/24")))
        for rank in made.ranks
    )
    found = hostfile_of(msgspec.structs.replace(made, ranks=ranks), NODES)
    assert [host.ips for host in found.hosts] == [("10.0.9.0",), ("10.0.9.1",)]


def test_a_ring_of_given_addresses_has_a_connection_for_each() -> None:
    prepared = [
        PreparedRank(rank, (Address(f"10.0.0.{rank}", 5000, "n"), Address(f"10.0.1.{rank}", 5001, "m")))
        for rank in range(2)
    ]
    payload = build_given_ring("one", 1, 1, prepared)
    assert payload.hosts == (("10.0.0.0:5000", "10.0.1.0:5001"), ("10.0.0.1:5000", "10.0.1.1:5001"))
    with pytest.raises(PayloadError, match="rank 2 is out of range"):
        build_given_ring("one", 1, 2, prepared)


def test_a_matrix_with_gaps_or_a_preferred_ring_is_written_as_one() -> None:
    devices = ((None, ("x", "y")), (("x", "y"), None))
    layout = Layout(devices=devices, jaccl_ring=True, ranks=(RankLayout(), RankLayout(coordinator="10.0.9.1:7000")))
    found = hostfile_of(
        instance(InstanceSpec(workload=GroupWorkload(), ranks=2, backend="jaccl"), (A, B), layout), NODES
    )
    assert (found.backend, found.devices) == ("jaccl-ring", devices)
    assert [host.ips for host in found.hosts] == [("10.0.9.1",), ("10.0.0.2",)]


def test_ranks_without_addresses_cannot_be_written_yet() -> None:
    made = instance(InstanceSpec(workload=GroupWorkload(), ranks=2), (A, B), prepared=False)
    with pytest.raises(RequestError, match="rank 0 of one-1 has prepared no address"):
        hostfile_of(made, NODES)
    with pytest.raises(RequestError, match="node b of rank 1 is not there"):
        hostfile_of(made, NODES[:1])


def test_workers_of_one_machine_are_written_with_their_ids() -> None:
    local = (info("a", "127.0.0.1", hostname="mac"), info("b", "127.0.0.1", hostname="mac"))
    made = instance(InstanceSpec(workload=GroupWorkload(), ranks=2), (A, B))
    ranks = tuple(
        msgspec.structs.replace(rank, addresses=(Address("127.0.0.1", 5000 + rank.rank, "127.0.0.0/8"),))
        for rank in made.ranks
    )
    found = hostfile_of(msgspec.structs.replace(made, ranks=ranks), local)
    assert [(host.ssh, host.node) for host in found.hosts] == [("127.0.0.1", "a"), ("127.0.0.1", "b")]
    assert resolve(found, local).nodes == (A, B)
