"""Models on the nodes: which commit is meant, who gives it to whom, and whose disk has room for it."""

from __future__ import annotations

import msgspec
import pytest

from muster.bench.random_clusters import GIB, full_mesh, model, node, wish
from muster.facts import Disk, HeldModel, NodeFacts
from muster.known import Known
from muster.layout import Layout
from muster.links import Measured, NodeLinks
from muster.placement import Cluster, Placement, cluster_of, place
from muster.placement.core import place as placed_on
from muster.spec import BootId, NodeAddress, NodeId
from muster.state import Node, State

A, B, C, D = (NodeId(name) for name in "abcd")
OLD, NEW = "1" * 40, "9" * 40


def state_of(*names: NodeId) -> State:
    nodes: dict[NodeId, Node] = {}
    for number, name in enumerate(names, start=1):
        address = NodeAddress(host=f"10.0.0.{number}", network="10.0.0.0/24")
        info = msgspec.structs.replace(node(name, 20 * GIB).info, addresses=(address,), candidates=(address,))
        nodes[name] = Node(info=info, since_ns=0)
    return State(nodes=nodes)


def facts_of(name: NodeId, *models: HeldModel, **fields: object) -> NodeFacts:
    return NodeFacts(node=name, boot=BootId(f"{name}-boot"), models=models, **fields)  # pyright: ignore[reportArgumentType]


def known(**models: tuple[HeldModel, ...]) -> Known:
    return Known(facts={NodeId(name): facts_of(NodeId(name), *held) for name, held in models.items()})


def held(commit: str, *names: str, complete: bool = True, shareable: bool = True) -> HeldModel:
    return HeldModel(
        model="org/model",
        path=f"/cache/snapshots/{commit}",
        revision=commit,
        names=names,
        bytes=GIB,
        complete=complete,
        shareable=shareable,
    )


def cluster(state: State, known: Known, revision: str | None = None, commit: str = "") -> Cluster:
    return cluster_of(wish(1, workload_revision=revision), state, known, commit=commit)[0]


# --- revisions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("revision", "commit"), [(None, NEW), ("main", NEW), ("v1", OLD), (OLD, OLD), ("other", ""), ("9", "")]
)
def test_a_revision_is_what_the_nodes_own_names_lead_to(revision: str | None, commit: str) -> None:
    found = cluster(state_of(A, B), known(a=(held(OLD, "v1"), held(NEW, "main"))), revision)
    expected = {A: f"/cache/snapshots/{commit}"} if commit else {}
    assert {name: path for name, (_, path) in found.sources.items()} == expected
    assert [one.holds for one in found.nodes] == [bool(commit), False]
    assert found.commit == commit


def test_nodes_whose_branch_differs_take_the_commit_that_most_have() -> None:
    state, everyone = state_of(A, B, C), known(a=(held(NEW, "main"),), b=(held(OLD, "main"),), c=(held(OLD, "main"),))
    found = place(wish(3, nodes=(A, B, C)), state, everyone, model())
    assert found.layout.commit == OLD
    assert [bool(rank.sources) for rank in found.layout.ranks] == [True, False, False]
    alone = place(wish(1, nodes=(A,)), state, everyone, model())
    assert (alone.layout.commit, alone.layout.ranks[0].sources) == (NEW, ()), "others do not decide for it"


def test_what_is_whole_counts_before_what_is_not() -> None:
    found = cluster(
        state_of(A, B, C),
        known(a=(held(OLD, "main"),), b=(held(NEW, "main", complete=False),), c=(held(NEW, "main", complete=False),)),
    )
    assert found.commit == OLD


def test_where_no_node_has_the_model_all_take_the_commit_that_was_inspected() -> None:
    inspected = msgspec.structs.replace(model(), commit=NEW)
    assert place(wish(2), state_of(A, B), Known(), inspected).layout.commit == NEW
    assert place(wish(2), state_of(A, B), known(a=(held(OLD, "main"),)), inspected).layout.commit == OLD
    assert Layout().commit == ""
    # Nobody calls it so, but it is there.
    found = cluster(state_of(A, B), known(a=(held(NEW),)), commit=NEW)
    assert list(found.sources) == [A]


def test_a_node_runs_what_it_has_whole_whatever_those_that_cannot_give_have() -> None:
    state, old = state_of(A, B, C), held(OLD, "main", shareable=False)
    few = {name: msgspec.structs.replace(state.nodes[name].info, memory_bytes=GIB) for name in (A, C)}
    nodes = {name: msgspec.structs.replace(node, info=few.get(name, node.info)) for name, node in state.nodes.items()}
    found = place(wish(1), State(nodes=nodes), known(a=(old,), b=(held(NEW, "main"),), c=(old,)), model())
    assert [one.node for one in found.assignments] == [B]
    assert found.layout.commit == NEW
    assert (found.layout.ranks[0].sources, found.layout.ranks[0].sharers) == ((), ())


def test_parts_do_not_decide_against_what_was_inspected() -> None:
    inspected = msgspec.structs.replace(model(), commit=NEW)
    for part in (held(OLD, "main", complete=False), held(OLD, "main", complete=False, shareable=False)):
        assert place(wish(1, nodes=(B,)), state_of(A, B), known(a=(part,)), inspected).layout.commit == NEW
    hidden = known(a=(held(OLD, "main", shareable=False),))
    assert place(wish(1, nodes=(B,)), state_of(A, B), hidden, inspected).layout.commit == NEW
    assert cluster(state_of(A, B), known(a=(held(OLD, "main", complete=False),))).commit == OLD, "nothing else is known"


# --- who gives to whom ----------------------------------------------------------------------------------------


def test_nodes_with_a_part_give_after_those_with_all() -> None:
    part = held(NEW, "main", complete=False)
    state, there = state_of(A, B, C, D), known(a=(part,), b=(held(NEW, "main"),), c=(part,))
    found = place(wish(1, nodes=(D,)), state, there, model())
    assert [one.node for one in found.layout.ranks[0].sources] == [B, A, C]
    lacking = place(wish(1, nodes=(D,)), state, known(a=(part,), c=(part,)), model())
    assert [one.node for one in lacking.layout.ranks[0].sources] == [A, C]
    again = place(wish(2, nodes=(C, D)), state, known(a=(part,), c=(part,)), model())
    assert [[one.node for one in rank.sources] for rank in again.layout.ranks] == [[A], [C, A]]
    assert again.layout.ranks[1].sharers, "parts are no whole: those who lack the rest share what they download"


def test_receivers_take_turns_with_equal_givers() -> None:
    state, there = state_of(A, B, C, D), known(a=(held(NEW, "main"),), b=(held(NEW, "main"),))
    found = place(wish(2, nodes=(C, D)), state, there, model())
    assert [[one.node for one in rank.sources] for rank in found.layout.ranks] == [[A, B], [B, A]]
    links = {C: links_of(C, a=1000.0, b=1100.0), D: links_of(D, a=1000.0, b=9000.0)}
    rated = place(wish(2, nodes=(C, D)), state, msgspec.structs.replace(there, links=links), model())
    assert [[one.node for one in rank.sources] for rank in rated.layout.ranks] == [[B, A], [B, A]]


def links_of(name: NodeId, **rates: float) -> NodeLinks:
    """What a node measured to others, by name."""
    own = f"10.0.0.{'abcd'.index(name) + 1}"
    measured = tuple(
        Measured(
            other=NodeId(other),
            other_boot=BootId(f"{other}-boot"),
            own=own,
            host=f"10.0.0.{'abcd'.index(other) + 1}",
            reached=True,
            dialled_back=True,
            rtt_us=50.0,
            mbps_out=rate,
            mbps_in=rate,
        )
        for other, rate in rates.items()
    )
    return NodeLinks(node=name, boot=BootId(f"{name}-boot"), measured=measured)


def test_a_node_that_shares_nothing_still_holds_its_model() -> None:
    found = cluster(state_of(A, B), known(a=(held(NEW, "main", shareable=False),)))
    assert ([one.holds for one in found.nodes], dict(found.sources)) == ([True, False], {})


# --- disks ----------------------------------------------------------------------------------------------------


def with_disks(**free: float) -> Cluster:
    """Nodes in this order of preference with so many GiB on their disk, and room in memory for the whole model."""
    nodes = []
    for number, (name, gib) in enumerate(free.items()):
        disks = (Disk(path="/", total_bytes=99 * GIB, free_bytes=int(gib * GIB)),)
        facts = facts_of(NodeId(name), disks=disks)
        nodes.append(msgspec.structs.replace(node(name, (40 - number) * GIB), facts=facts))
    return Cluster(nodes=tuple(nodes))


def nodes_of(cluster: Cluster, ranks: int, **fields: object) -> list[str]:
    links = full_mesh([candidate.node for candidate in cluster.nodes])
    found = placed_on(cluster, links, model(), wish(ranks, **fields))
    assert isinstance(found, Placement)
    return sorted(one.node for one in found.assignments)


def test_a_node_whose_disk_has_no_room_is_passed_over() -> None:
    full = with_disks(a=1, b=30, c=30)
    assert nodes_of(with_disks(a=30, b=30, c=30), 1) == ["a"]
    assert nodes_of(full, 1) == ["b"]
    assert nodes_of(full, 2, workload_sharding="pipeline") == ["b", "c"]
    assert nodes_of(with_disks(a=4, b=30, c=30), 2, workload_sharding="pipeline") == ["a", "b"], "its half fits"
    assert nodes_of(with_disks(a=4, b=30, c=30), 2, workload_sharding="tensor") == ["b", "c"], "a slice needs all files"


def test_a_disk_refuses_nobody() -> None:
    full = with_disks(a=1, b=1)
    assert nodes_of(full, 1) == ["a"], "nobody has room"
    assert nodes_of(msgspec.structs.replace(with_disks(a=1, b=30), named=True), 2) == ["a", "b"], "asked for"
    assert nodes_of(with_disks(a=1, b=30), 1, workload_model="/models/m") == ["a"], "a directory may be there"
    assert nodes_of(with_disks(a=1, b=30), 1, environment={"HF_HOME": "/other"}) == ["a"], "another disk"
    holder = msgspec.structs.replace(full.nodes[0], holds=True)
    assert nodes_of(Cluster(nodes=(holder, with_disks(b=30).nodes[0])), 1) == ["a"], "it has all of it"
    facts = facts_of(A, msgspec.structs.replace(held(NEW), bytes=6 * GIB), disks=full.nodes[0].facts.disks)  # pyright: ignore[reportOptionalMemberAccess]
    partly = msgspec.structs.replace(full.nodes[0], facts=facts)
    assert nodes_of(Cluster(nodes=(partly, with_disks(b=30).nodes[0])), 1) == ["a"], "the rest fits"
