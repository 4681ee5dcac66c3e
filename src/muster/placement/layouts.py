"""The plan of an attempt, written out for its ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from muster.layout import Layout, ModelSource, RankLayout, RankLink
from muster.links import offered
from muster.placement.backends import Backed
from muster.placement.choose import Chooser
from muster.placement.costs import RankCost
from muster.placement.rings import Worth, worth
from muster.placement.words import Candidate
from muster.spec import InstanceSpec, ModelWorkload

LayoutSharding = Literal["", "none", "pipeline", "tensor"]

#: So many nodes at most are named to a rank that has to copy the model.
_MOST_SOURCES: Final = 4


def lay_out(
    chooser: Chooser, backed: Backed, wish: InstanceSpec, sharding: LayoutSharding, costs: Sequence[RankCost]
) -> Layout:
    """What each rank is given; `costs` is by rank."""
    nodes = [chooser.cluster.nodes[index] for index in backed.arrangement.order]
    links = _ring(chooser, nodes, wish) if backed.backend == "ring" else [None] * len(nodes)
    split = backed.arrangement.split or (0,) * len(nodes)
    dialled = backed.coordinators or ("",) * len(nodes)
    given: dict[str, tuple[ModelSource, ...]] = {}
    if isinstance(wish.workload, ModelWorkload):
        given = {candidate.node: _sources(chooser, candidate) for candidate in nodes}
    ranks = tuple(
        RankLayout(
            memory_bytes=costs[rank].total,
            weights_bytes=costs[rank].weights,
            cache_bytes=costs[rank].cache,
            layers=split[rank],
            next=links[rank],
            coordinator=dialled[rank],
            sources=given.get(candidate.node, ()),
        )
        for rank, candidate in enumerate(nodes)
    )
    return Layout(
        sharding=sharding,
        ranks=ranks,
        devices=backed.devices,
        jaccl_ring=backed.jaccl_ring,
        steps_down=backed.steps_down,
    )


def _ring(chooser: Chooser, nodes: Sequence[Candidate], wish: InstanceSpec) -> list[RankLink | None]:
    """The link from each rank to the next; none where the operator's addresses decide, or one is missing."""
    none: list[RankLink | None] = [None] * len(nodes)
    operators = any(node.info.addresses_given and len(node.info.addresses) > 1 for node in nodes)
    if len(nodes) < 2 or operators or wish.addresses:
        return none
    found = [_next(chooser, node, nodes[(rank + 1) % len(nodes)]) for rank, node in enumerate(nodes)]
    return none if any(link is None for link in found) else found


def _next(chooser: Chooser, node: Candidate, other: Candidate) -> RankLink | None:
    if node.node == other.node:
        # Not 127.0.0.1: in a group over several machines that would be another rank's address too.
        own = offered(node.info) or node.info.addresses
        return RankLink(own=own[0].host, host=own[0].host, kind="loopback") if own else None
    link = chooser.links.between(node.node, other.node)
    if link is None:
        return None
    return RankLink(own=link.a_host, host=link.b_host, kind=link.kind, mbps=link.mbps, rtt_us=link.rtt_us)


def _sources(chooser: Chooser, candidate: Candidate) -> tuple[ModelSource, ...]:
    """Where a node that is not known to hold the model may copy it from, the best link first."""
    if candidate.holds:
        return ()
    found: list[tuple[tuple[Worth, str], ModelSource]] = []
    for name, (info, path) in chooser.cluster.sources.items():
        link = chooser.links.between(candidate.node, name) if name != candidate.node else None
        if link is not None and info.peer_port:
            source = ModelSource(node=name, host=link.b_host, port=info.peer_port, path=path)
            found.append(((worth(link), name), source))
    return tuple(source for _, source in sorted(found, key=lambda one: one[0]))[:_MOST_SOURCES]
