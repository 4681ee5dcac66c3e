"""Why nothing fits: for each candidate what was short, and by how much. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from muster.placement.choose import Chooser, Stages
from muster.placement.costs import context_of
from muster.placement.ways import Way, Ways
from muster.placement.words import Refusal, Shortfall
from muster.spec import ModelWorkload

_MORE = "start workers on more nodes, delete an instance (muster ps), or ask for fewer ranks"
#: So many candidates are told of in a message; all are in `Refusal.shortfalls`.
_TOLD = 16


def size(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def no_room(chooser: Chooser, ways: Ways) -> Refusal:
    """Of a workload whose ranks all take the same."""
    wish = ways.wish
    way = next(ways.of(wish.ranks))
    taken, left = chooser.deal(range(len(chooser.cluster.nodes)), way.demand)
    short = _dealt_short(chooser, way, taken, left)
    told = _told(short)
    if sum(taken.values()) < way.ranks:
        return Refusal(
            message=f"{way.ranks} rank(s) of {way.needed_bytes / 2**20:.0f} MiB each do not fit: {told}",
            remedies=(_MORE,),
            shortfalls=short,
        )
    empty = [chooser.cluster.nodes[index].node for index, ranks in taken.items() if not ranks]
    if chooser.cluster.named and empty:
        return Refusal(
            message=f"node {empty[0]} was asked for but has no room for a rank: {told}",
            remedies=("leave the node out of --nodes, or free it",),
            shortfalls=short,
        )
    return unlinked(chooser, way.ranks)


def unlinked(chooser: Chooser, ranks: int) -> Refusal:
    """There is room, and no ring of links."""
    nodes = [candidate.node for candidate in chooser.cluster.nodes]
    missing = [
        (nodes[one], nodes[other])
        for one, other in combinations(range(len(nodes)), 2)
        if chooser.worth(one, other) is None
    ]
    if not missing:
        return _crowded(chooser, ranks)
    reasons = [chooser.links.why_not(one, other) for one, other in missing[:4]]
    more = f"; and {len(missing) - 4} more pairs" if len(missing) > 4 else ""
    return Refusal(
        message=f"no {ranks} of the nodes reach each other in a ring: {'; '.join(reasons)}{more}",
        remedies=("see the links with: muster links --measure", "name nodes that do reach each other: --nodes"),
        shortfalls=tuple(Shortfall(node=one, reason=f"node {one} has no link to {other}") for one, other in missing),
    )


def _crowded(chooser: Chooser, ranks: int) -> Refusal:
    """Each node has room and all are linked, but some share the memory of one machine."""
    short = tuple(
        Shortfall(node=candidate.node, reason=f"node {candidate.node} has a part in {size(pool)} of its machine")
        for candidate in chooser.cluster.nodes
        if (pool := chooser.cluster.pools.get(candidate.machine)) is not None
    )
    return Refusal(
        message=f"{ranks} rank(s) do not fit side by side on nodes that share a machine: {_told(short)}",
        remedies=(_MORE,),
        shortfalls=short,
    )


def unfit(chooser: Chooser, ways: Ways) -> Refusal:
    """Of a model whose needs are known."""
    wish, model, stages = ways.wish, ways.model, ways.stages
    assert model is not None and stages is not None and isinstance(wish.workload, ModelWorkload)
    most = min(len(chooser.cluster.nodes), len(model.layers)) if wish.auto_ranks else wish.ranks
    ranks = max(wish.ranks, most)
    while ranks > wish.ranks and not ways.shardings(ranks):
        ranks -= 1
    found = list(ways.of(ranks))
    if not found:
        return _unsharded(ways, ranks)
    way = found[-1]  # a pipeline, where there is one: it takes the least of each node
    if way.sharding != "pipeline" and wish.memory_bytes is not None:
        return no_room(chooser, ways)
    short = tuple(_shortfalls(chooser, way))
    if not short:
        return unlinked(chooser, ranks)
    tokens = context_of(wish.workload, model)
    cache = f"{wish.workload.concurrency} x {tokens} tokens of context"
    how = {"pipeline": " as a pipeline", "tensor": " with tensor sharding"}.get(way.sharding, "")
    counted = f"1 to {ranks} ranks" if wish.auto_ranks and ranks > 1 else f"{ranks} rank(s)"
    whole = stages.of(0, stages.layers)
    if isinstance(way.demand, Stages):
        holds = sum(sorted((way.demand.units(free) for free in chooser.free), reverse=True)[:ranks])
        least = f"{max(0, stages.layers - holds)} of {stages.layers} layers find no room"
        if holds >= stages.layers:
            least = "the layers find no room in this order and share"
    else:
        least = f"each takes {size(way.needed_bytes)}"
    return Refusal(
        message=f"{model.model} does not fit on {counted}{how} ({size(whole.weights)} of weights, {size(whole.cache)} "
        f"for {cache}): {least}; {_told(short)}",
        shortfalls=short,
    )


def _unsharded(ways: Ways, ranks: int) -> Refusal:
    model = ways.model
    assert model is not None and isinstance(ways.wish.workload, ModelWorkload)
    faults = ways.faults(ranks)
    wished = ways.wish.workload.sharding
    reasons = [f"tensor sharding is impossible: {faults['tensor']}"] if wished != "pipeline" else []
    if wished != "tensor":
        reasons.append(f"a pipeline is impossible: {faults['pipeline']}")
    others = [other for other in range(1, ranks) if ways.shardings(other)]
    remedies = [f"use --ranks {others[-1]}"] if others else []
    if wished == "tensor" and not faults["pipeline"]:
        remedies.append("use --sharding pipeline")
    if wished == "pipeline" and not faults["tensor"]:
        remedies.append("use --sharding tensor")
    return Refusal(
        kind="sharding-unsupported",
        message=f"model type {model.model_type} on {ranks} ranks: {'; '.join(reasons)}",
        remedies=tuple(remedies),
    )


def _shortfalls(chooser: Chooser, way: Way) -> Iterator[Shortfall]:
    """What each candidate was short of: for a pipeline, of an even share of the layers."""
    layers = way.demand.wanted
    share = -(-layers // way.ranks)
    for index, candidate in enumerate(chooser.cluster.nodes):
        name, free = candidate.node, chooser.free[index]
        if candidate.free_ranks <= 0:
            yield Shortfall(node=name, reason=f"node {name} has all its {candidate.info.max_ranks} ranks in use")
        elif isinstance(way.demand, Stages):
            holds = way.demand.units(free)
            if holds < layers:
                missing = max(0, way.demand.share_bytes(min(share, layers)) - free) if holds < share else 0
                short = f", {size(missing)} short of {share}" if missing else ""
                reason = f"node {name} has {size(free)} free, room for {holds} layer(s){short}"
                yield Shortfall(node=name, reason=reason, missing_bytes=missing)
        elif free < way.needed_bytes:
            missing = way.needed_bytes - free
            reason = f"node {name} has {size(free)} free, {size(missing)} short"
            yield Shortfall(node=name, reason=reason, missing_bytes=missing)


def _dealt_short(chooser: Chooser, way: Way, taken: dict[int, int], left: dict[int, int]) -> tuple[Shortfall, ...]:
    found: list[Shortfall] = []
    for index, candidate in enumerate(chooser.cluster.nodes):
        name, ranks = candidate.node, taken[index]
        got = f"takes {ranks} of them, then " if ranks else ""
        if candidate.free_ranks <= ranks:
            reason = f"node {name} {got}has all its {candidate.info.max_ranks} ranks in use"
            found.append(Shortfall(node=name, reason=reason))
        elif left[index] < way.needed_bytes:
            reason = f"node {name} {got}has {max(left[index], 0) / 2**20:.0f} MiB left"
            found.append(Shortfall(node=name, reason=reason, missing_bytes=way.needed_bytes - max(left[index], 0)))
    return tuple(found)


def _told(short: tuple[Shortfall, ...]) -> str:
    reasons = [one.reason for one in short[:_TOLD]]
    if len(short) > _TOLD:
        reasons.append(f"and {len(short) - _TOLD} more nodes")
    return "; ".join(reasons)
