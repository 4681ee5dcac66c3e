"""Why nothing fits: for each candidate what was short, and by how much. Pure."""

from __future__ import annotations

from itertools import combinations
from typing import Final

from muster.placement.choose import Chooser
from muster.placement.costs import context_of
from muster.placement.demands import Stages
from muster.placement.lacking import crowded, dealt_short, shortfalls, unhindered
from muster.placement.ways import Way, Ways
from muster.placement.words import Refusal, size, told
from muster.spec import ModelWorkload, NodeId, Shortfall

#: So many pairs without a link are told of in a message, and so many neighbours in what a node lacks.
_PAIRS: Final = 4
#: After so many pairs without a link, or as many as there are nodes, no more are looked for.
_MOST_PAIRS: Final = 64


def no_room(chooser: Chooser, way: Way) -> Refusal:
    """Of ranks that all take the same."""
    taken, left = chooser.deal(range(len(chooser.cluster.nodes)), way.demand)
    short = dealt_short(chooser, way, taken, left)
    if sum(taken.values()) < way.ranks:
        return Refusal(
            message=f"{way.ranks} rank(s) of {way.needed_bytes / 2**20:.0f} MiB each do not fit: {told(short)}",
            shortfalls=short,
        )
    empty = [chooser.cluster.nodes[index].node for index, ranks in taken.items() if not ranks]
    if chooser.cluster.named and empty:
        return Refusal(
            message=f"node {empty[0]} was asked for but has no room for a rank: {told(short)}", shortfalls=short
        )
    return unlinked(chooser, way)


def unlinked(chooser: Chooser, way: Way) -> Refusal:
    """There is room, and no ring of links."""
    nodes = [candidate.node for candidate in chooser.cluster.nodes]
    missing: dict[NodeId, list[NodeId]] = {}
    reasons: list[str] = []
    pairs = 0
    most = max(_MOST_PAIRS, len(nodes))
    for one, other in combinations(range(len(nodes)), 2):
        if chooser.worth(one, other) is None:
            missing.setdefault(nodes[one], []).append(nodes[other])
            missing.setdefault(nodes[other], []).append(nodes[one])
            pairs += 1
            if len(reasons) < _PAIRS:
                reasons.append(chooser.links.why_not(nodes[one], nodes[other]))
            if pairs > most:  # where one node reaches nobody, all others are among these
                break
    if not pairs or not unhindered(chooser, way):
        return crowded(chooser, way)
    counted = "many" if pairs > most else str(pairs - _PAIRS)
    more = f"; and {counted} more pairs" if pairs > _PAIRS else ""
    return Refusal(
        message=f"no {way.ranks} of the nodes reach each other in a ring: {'; '.join(reasons)}{more}",
        remedies=("see the links with: muster links --measure", "name nodes that do reach each other: --nodes"),
        shortfalls=tuple(_without_link(node, missing[node]) for node in nodes if node in missing),
    )


def _without_link(node: NodeId, others: list[NodeId]) -> Shortfall:
    more = f" and {len(others) - _PAIRS} more nodes" if len(others) > _PAIRS else ""
    return Shortfall(node=node, what="link", reason=f"node {node} has no link to {', '.join(others[:_PAIRS])}{more}")


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
        return no_room(chooser, way)
    short = shortfalls(chooser, way)
    holds = chooser.reach(way.demand)
    enough = not any(one.missing_bytes or one.what != "memory" for one in short)
    if not short or (enough and holds >= way.demand.wanted):
        return unlinked(chooser, way)
    tokens = context_of(wish.workload, model)
    cache = f"{wish.workload.concurrency} x {tokens} tokens of context"
    how = {"pipeline": " as a pipeline", "tensor": " with tensor sharding"}.get(way.sharding, "")
    counted = f"{wish.ranks} to {ranks} ranks" if ranks > wish.ranks else f"{ranks} rank(s)"
    whole = stages.of(0, stages.layers)
    if isinstance(way.demand, Stages):
        least = f"{max(0, stages.layers - holds)} of {stages.layers} layers find no room"
        if holds >= stages.layers:
            least = "the layers find no room in this order and share"
    else:
        least = f"each takes {size(way.needed_bytes)}"
    return Refusal(
        message=f"{model.model} does not fit on {counted}{how} ({size(whole.weights)} of weights, {size(whole.cache)} "
        f"for {cache}): {least}; {told(short)}",
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
