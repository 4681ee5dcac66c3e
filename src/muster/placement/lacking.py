"""What each candidate was short of, and by how much. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Final

import msgspec

from muster.links import Link
from muster.placement.choose import Chooser
from muster.placement.costs import with_headroom
from muster.placement.demands import Stages
from muster.placement.searching import lowest
from muster.placement.ways import Way
from muster.placement.words import Refusal, size, told
from muster.spec import NodeId, Shortfall

#: What is missing where everything depends on everything is found by trying, in steps of so many bytes.
_STEP_BYTES: Final = 64 * 2**20
#: And not for more nodes than this.
_MOST_NODES: Final = 64


class Everywhere:
    """Links as if every node reached every other."""

    def between(self, a: NodeId, b: NodeId) -> Link | None:
        """A link of which nothing is known."""
        return Link(a=a, b=b, a_host="", b_host="")

    def why_not(self, a: NodeId, b: NodeId) -> str:
        """Nothing."""
        del a, b
        return ""

    def nearest(self, a: NodeId, limit: int) -> tuple[NodeId, ...]:
        """None: all are alike."""
        del a, limit
        return ()

    def fastest(self, limit: int) -> tuple[NodeId, ...]:
        """None, either."""
        del limit
        return ()


def shortfalls(chooser: Chooser, way: Way) -> tuple[Shortfall, ...]:
    """Of ranks on nodes of their own: for a pipeline, of the split asked for or else of an even share of the layers."""
    if isinstance(way.demand, Stages) and way.demand.fixed:
        return tuple(_of_split(chooser, way.demand))
    return tuple(_of_share(chooser, way))


def _lacks(node: NodeId, needed: int, free: int, reason: str) -> Shortfall:
    return Shortfall(
        node=node,
        reason=reason,
        needed_bytes=needed,
        available_bytes=max(0, free),
        missing_bytes=max(0, needed - max(0, free)),
    )


def _full(chooser: Chooser, index: int, got: str = "") -> Shortfall:
    candidate = chooser.cluster.nodes[index]
    reason = f"node {candidate.node} {got}has all its {candidate.info.max_ranks} ranks in use"
    return Shortfall(node=candidate.node, what="ranks", reason=reason)


def _of_share(chooser: Chooser, way: Way) -> Iterator[Shortfall]:
    layers = way.demand.wanted
    share = -(-layers // way.ranks)
    for index, candidate in enumerate(chooser.cluster.nodes):
        name, free = candidate.node, chooser.free[index]
        if candidate.free_ranks <= 0:
            yield _full(chooser, index)
        elif isinstance(way.demand, Stages):
            holds = way.demand.units(free)
            if holds < layers:
                needed = way.demand.share_bytes(min(share, layers))
                short = f", {size(needed - free)} short of {share}" if holds < share and needed > free else ""
                reason = f"node {name} has {size(free)} free, room for {holds} layer(s){short}"
                yield _lacks(name, needed, free if short else max(free, needed), reason)
        elif free < way.needed_bytes:
            reason = f"node {name} has {size(free)} free, {size(way.needed_bytes - free)} short"
            yield _lacks(name, way.needed_bytes, free, reason)


def _of_split(chooser: Chooser, demand: Stages) -> Iterator[Shortfall]:
    """Ranks and nodes as they are named; or the largest rank beside the node with the most room, and so on down."""
    nodes = chooser.cluster.nodes
    yield from (_full(chooser, index) for index, candidate in enumerate(nodes) if candidate.free_ranks <= 0)
    usable = [index for index, candidate in enumerate(nodes) if candidate.free_ranks > 0]
    if not usable:
        return
    needs = _needs(demand)
    ranks = range(len(needs))
    if chooser.cluster.named or len(ranks) > len(usable):
        pairs = [(usable[rank * len(usable) // len(ranks)], rank) for rank in ranks]
        room = dict(zip(ranks, chooser.shares([index for index, _ in pairs]), strict=True))
    else:
        by_need = sorted(ranks, key=lambda rank: (-needs[rank], rank))
        by_room = sorted(usable, key=lambda index: (-chooser.free[index], index))
        pairs = sorted(zip(by_room, by_need, strict=False))
        room = {rank: chooser.free[index] for index, rank in pairs}
    for index, rank in pairs:
        name, needed = nodes[index].node, needs[rank]
        if room[rank] < needed:
            reason = (
                f"node {name} has {size(room[rank])} free, {size(needed - room[rank])} short of the "
                f"{demand.fixed[rank]} layer(s) of rank {rank}"
            )
            yield _lacks(name, needed, room[rank], reason)


def _needs(demand: Stages) -> list[int]:
    """What must be free for each rank of the split that was asked for."""
    stops = [demand.costs.layers - before for before in accumulate(demand.fixed, initial=0)]
    return [with_headroom(demand.costs.of(start, stop).total) for stop, start in pairwise(stops)]


def _ends(demand: Stages, free: int) -> tuple[int, int]:
    """So many of the first, and of the last layers fit into so much."""
    layers = demand.costs.layers
    return demand.costs.furthest(0, free, layers), layers - demand.costs.earliest(layers, free, 0)


def dealt_short(chooser: Chooser, way: Way, taken: dict[int, int], left: dict[int, int]) -> tuple[Shortfall, ...]:
    """Of ranks that all take the same and may be several on a node, once each node has got what it can hold."""
    found: list[Shortfall] = []
    for index, candidate in enumerate(chooser.cluster.nodes):
        name, ranks, room = candidate.node, taken[index], max(left[index], 0)
        got = f"takes {ranks} of them, then " if ranks else ""
        if candidate.free_ranks <= ranks:
            found.append(_full(chooser, index, got))
        elif room < way.needed_bytes:
            reason = f"node {name} {got}has {room / 2**20:.0f} MiB left, {size(way.needed_bytes - room)} short"
            found.append(_lacks(name, way.needed_bytes, room, reason))
    return tuple(found)


def crowded(chooser: Chooser, way: Way) -> Refusal:
    """Each node by itself has room and all are linked, and yet not all ranks find a place at the same time."""
    nodes = chooser.cluster.nodes
    count = Counter(candidate.machine for candidate in nodes)
    more = _more(chooser, way)
    by = f", each about {size(more)} short" if more else ""
    short: list[Shortfall] = []
    for candidate in nodes:
        pool = chooser.cluster.pools.get(candidate.machine)
        if pool is not None and count[candidate.machine] > 1:
            reason = f"node {candidate.node} has a part in {size(pool)} of its machine"
            short.append(_lacks(candidate.node, pool + more, pool, reason))
    if short:
        message = f"{way.ranks} rank(s) do not fit side by side on nodes that share a machine{by}: {told(short)}"
        return Refusal(message=message, shortfalls=tuple(short))
    if not isinstance(way.demand, Stages):
        return _one_each(chooser, way)
    each = -(-way.ranks // max(1, len(nodes)))
    for index, candidate in enumerate(nodes):
        free = chooser.free[index] // each
        first, last = _ends(way.demand, free)
        reason = (
            f"node {candidate.node} has {size(free)} free{' per rank' if each > 1 else ''}, room for {first} of the "
            f"first layers, {last} of the last, {way.demand.units(free)} of others"
        )
        short.append(_lacks(candidate.node, free + more, free, reason))
    message = (
        f"{way.demand.wanted} layers do not fit on {way.ranks} rank(s) with the embedding beside the first of them and "
        f"the head beside the last{by}: {told(short)}"
    )
    return Refusal(message=message, shortfalls=tuple(short))


def _one_each(chooser: Chooser, way: Way) -> Refusal:
    short: list[Shortfall] = []
    for index, candidate in enumerate(chooser.cluster.nodes):
        free = chooser.free[index]
        if candidate.free_ranks <= 0:
            short.append(_full(chooser, index))
        elif free < way.needed_bytes:
            reason = f"node {candidate.node} has {size(free)} free, {size(way.needed_bytes - free)} short"
            short.append(_lacks(candidate.node, way.needed_bytes, free, reason))
    how = ", each on a node of its own" if short else ""
    if not short:  # there are more ranks than nodes
        short = [*dealt_short(chooser, way, *chooser.deal(range(len(chooser.cluster.nodes)), way.demand))]
    message = f"{way.ranks} rank(s) of {size(way.needed_bytes)} do not fit{how}: {told(short)}"
    return Refusal(message=message, shortfalls=tuple(short))


def unhindered(chooser: Chooser, way: Way) -> bool:
    """Whether the ranks would fit if every node reached every other; taken for granted among many nodes."""
    if len(chooser.cluster.nodes) > _MOST_NODES:
        return True
    return Chooser(chooser.cluster, Everywhere()).arrange(way.demand, spread=_spreads(chooser, way)) is not None


def _spreads(chooser: Chooser, way: Way) -> bool:
    """Whether a node may get several of these ranks although another has none."""
    return way.sharding == "" or way.ranks > sum(candidate.free_ranks > 0 for candidate in chooser.cluster.nodes)


def _more(chooser: Chooser, way: Way) -> int:
    """So many bytes more on every node, and the ranks fit; 0 where that is not known."""
    cluster = chooser.cluster
    if len(cluster.nodes) > _MOST_NODES:
        return 0
    count = Counter(candidate.machine for candidate in cluster.nodes)

    def fits(steps: int) -> bool:
        extra = steps * _STEP_BYTES
        larger = msgspec.structs.replace(
            cluster,
            nodes=tuple(msgspec.structs.replace(one, free_bytes=one.free_bytes + extra) for one in cluster.nodes),
            pools={machine: pool + extra * count[machine] for machine, pool in cluster.pools.items()},
        )
        return Chooser(larger, chooser.links).arrange(way.demand, spread=_spreads(chooser, way)) is not None

    whole = with_headroom(way.demand.costs.of(0, way.demand.wanted).total) if isinstance(way.demand, Stages) else 0
    high = 1 + max(whole, way.needed_bytes) * way.ranks // _STEP_BYTES
    if not fits(high):
        return 0
    return (1 + lowest(high - 1, lambda steps: fits(1 + steps))) * _STEP_BYTES
