"""The plan of an attempt, written out for its ranks. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal

from muster.layout import Layout, ModelSource, RankLayout, RankLink, Sharer
from muster.links import offered, within
from muster.placement.backends import Backed
from muster.placement.choose import Chooser
from muster.placement.costs import RankCost
from muster.placement.rings import Worth, worth
from muster.placement.rooms import held_by_all
from muster.placement.words import Candidate
from muster.spec import InstanceSpec, ModelWorkload, NodeId, is_hub_id

LayoutSharding = Literal["", "none", "pipeline", "tensor"]

#: Rates of links count as equal up to some such factor.
_SAME_RATE: Final = 1.3
#: So many nodes at most are named to a rank that has to copy the model.
_MOST_SOURCES: Final = 4
#: And so many that lack it too: a layout of many ranks would grow with their square.
_MOST_SHARERS: Final = 8


def lay_out(
    chooser: Chooser, backed: Backed, wish: InstanceSpec, sharding: LayoutSharding, costs: Sequence[RankCost]
) -> Layout:
    """What each rank is given; `costs` is by rank."""
    nodes = [chooser.cluster.nodes[index] for index in backed.arrangement.order]
    links = _ring(chooser, nodes, wish) if backed.backend == "ring" else [None] * len(nodes)
    split = backed.arrangement.split or (0,) * len(nodes)
    dialled = backed.coordinators or ("",) * len(nodes)
    given: dict[str, tuple[ModelSource, ...]] = {}
    commit, shared = chooser.cluster.commit, held_by_all(wish, nodes)
    if commit and shared and commit not in shared:
        commit = max(shared)  # what others have most of need not come where all have the same already
    elif isinstance(wish.workload, ModelWorkload):
        lacking = dict.fromkeys(candidate.node for candidate in nodes if not candidate.holds)
        given = {name: _sources(chooser, name, turn) for turn, name in enumerate(lacking)}
    sharers = _sharers(chooser, nodes, wish) if commit == chooser.cluster.commit else [()] * len(nodes)
    ranks = tuple(
        RankLayout(
            memory_bytes=costs[rank].total,
            weights_bytes=costs[rank].weights,
            cache_bytes=costs[rank].cache,
            layers=split[rank],
            next=links[rank],
            coordinator=dialled[rank],
            sources=given.get(candidate.node, ()),
            sharers=sharers[rank],
        )
        for rank, candidate in enumerate(nodes)
    )
    return Layout(
        sharding=sharding,
        ranks=ranks,
        devices=backed.devices,
        jaccl_ring=backed.jaccl_ring,
        steps_down=backed.steps_down,
        commit=commit,
    )


def _ring(chooser: Chooser, nodes: Sequence[Candidate], wish: InstanceSpec) -> list[RankLink | None]:
    """The link from each rank to the next; none where the operator's addresses decide, or one is missing."""
    none: list[RankLink | None] = [None] * len(nodes)
    pairs = [(node, nodes[(rank + 1) % len(nodes)]) for rank, node in enumerate(nodes)]
    # MLX has equally many connections between all neighbours: one, where one pair has no more.
    several = all(len(_given_networks(node, wish) & _given_networks(other, wish)) > 1 for node, other in pairs)
    if len(nodes) < 2 or several or wish.addresses:
        return none
    found = [_next(chooser, node, other) for node, other in pairs]
    return none if any(link is None for link in found) else found


def _given_networks(node: Candidate, wish: InstanceSpec) -> set[str]:
    """The networks of the addresses that its operator gave; none of a node that has all it finds."""
    given = node.info.addresses if node.info.addresses_given else ()
    return {one.network for one in given if not wish.network or within(one.host, wish.network)}


def _next(chooser: Chooser, node: Candidate, other: Candidate) -> RankLink | None:
    if node.node == other.node:
        # Not 127.0.0.1: in a group over several machines that would be another rank's address too.
        own = offered(node.info) or node.info.addresses
        return RankLink(own=own[0].host, host=own[0].host, kind="loopback") if own else None
    link = chooser.links.between(node.node, other.node)
    if link is None:
        return None
    return RankLink(
        own=link.a_host,
        host=link.b_host,
        kind=link.kind,
        mbps=link.mbps,
        rtt_us=link.rtt_us,
        own_interface=_interface(node, link.a_host),
        host_interface=_interface(other, link.b_host),
    )


def _interface(candidate: Candidate, host: str) -> str:
    there = candidate.facts.interfaces if candidate.facts is not None else ()
    return next((one.name for one in there if one.up and any(each.host == host for each in one.addresses)), "")


def _sources(chooser: Chooser, own: NodeId, turn: int) -> tuple[ModelSource, ...]:
    """Where a node that is not known to hold the model may copy it from: the whole before parts, then the best link.

    Among those with links about as fast, each `turn` begins with another: not all are to copy from the same one.
    """
    equal: dict[tuple[bool, float], list[tuple[Worth, ModelSource]]] = {}
    cluster = chooser.cluster
    for partly, there in ((False, cluster.sources), (True, cluster.parts)):
        for name, (info, path) in sorted(there.items()):
            link = chooser.links.between(own, name) if name != own else None
            if link is not None and info.peer_port:
                source = ModelSource(node=name, host=link.b_host, port=info.peer_port, path=path)
                equal.setdefault((partly, _step(worth(link))), []).append((worth(link), source))
    found: list[ModelSource] = []
    for key in sorted(equal):
        ordered = [source for _, source in sorted(equal[key], key=lambda one: (one[0], one[1].node))]
        ahead = turn % len(ordered)
        found += ordered[ahead:] + ordered[:ahead]
    return tuple(found[:_MOST_SOURCES])


def _step(link: Worth) -> float:
    """The same for rates that are about equal, the lower the faster."""
    return -float(round(math.log(-link.rate, _SAME_RATE))) if 0 < -link.rate < math.inf else link.rate


def _sharers(chooser: Chooser, nodes: Sequence[Candidate], wish: InstanceSpec) -> list[tuple[Sharer, ...]]:
    """By rank the nodes of lower ranks that give what they download; none where some node has all of the model.

    Two nodes of one machine count as well: each may have a cache of its own.
    """
    model = wish.workload.model if isinstance(wish.workload, ModelWorkload) else ""
    if not is_hub_id(model) or chooser.cluster.sources:
        return [()] * len(nodes)
    return [_sharers_of(chooser, nodes, rank) for rank in range(len(nodes))]


def _sharers_of(chooser: Chooser, nodes: Sequence[Candidate], rank: int) -> tuple[Sharer, ...]:
    own = nodes[rank].node
    # What all ranks need is rank 0's; of the rest, ranks with neighbouring layers have most in common.
    likely = dict.fromkeys(nodes[lower].node for lower in (0, *range(rank - 1, 0, -1)) if lower < rank)
    there: dict[NodeId, list[int]] = {}
    for lower, candidate in enumerate(nodes[:rank]):
        there.setdefault(candidate.node, []).append(lower)
    found: list[Sharer] = []
    for name in likely:
        port = nodes[there[name][0]].info.peer_port
        link = chooser.links.between(own, name) if name != own and port else None
        if link is not None:
            found.append(Sharer(node=name, host=link.b_host, port=port, ranks=tuple(there[name])))
            if len(found) == _MOST_SHARERS:
                break
    return tuple(sorted(found, key=lambda sharer: sharer.ranks))
