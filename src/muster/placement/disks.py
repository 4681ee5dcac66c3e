"""Which nodes have room on their disks for what they would have to bring of a hub's model. Pure."""

from __future__ import annotations

from collections import Counter

import msgspec

from muster.placement.choose import Arrangement
from muster.placement.ways import Way, Ways
from muster.placement.words import Candidate, Cluster
from muster.spec import CACHE_VARIABLES, ModelWorkload, NodeId, is_hub_id


def with_room(cluster: Cluster, ways: Ways, way: Way, found: Arrangement) -> Cluster | None:
    """The cluster without the nodes that lack it; `None` where no node of `found` does.

    A node's disks are known as it told them last, and what it holds perhaps not yet: this is to choose among nodes, and
    never to refuse one.
    """
    workload = ways.wish.workload
    if not isinstance(workload, ModelWorkload) or ways.stages is None or not is_hub_id(workload.model):
        return None
    if not CACHE_VARIABLES.isdisjoint(ways.wish.environment):
        return None  # on a disk that is not told of
    needed: Counter[NodeId] = Counter()
    whole = ways.stages.of(0, ways.stages.layers).weights
    for index, cost in zip(found.order, ways.costs(way, found), strict=True):
        name = cluster.nodes[index].node
        # A slice of all layers is read from all files.
        needed[name] = min(whole, needed[name] + cost.weights) if way.sharding == "pipeline" else whole
    if not any(_lacks(cluster.nodes[index], workload.model, needed) for index in found.order):
        return None
    most = max(needed.values())
    nodes = (one for one in cluster.nodes if not _lacks(one, workload.model, needed, most))
    return msgspec.structs.replace(cluster, nodes=tuple(nodes))


def _lacks(candidate: Candidate, model: str, needed: Counter[NodeId], other: int = 0) -> bool:
    """Whether it has no disk with room for its part, or for `other` bytes where it has none."""
    facts = candidate.facts
    if candidate.holds or facts is None or not facts.disks:
        return False
    held = max((one.bytes for one in facts.models if one.model == model), default=0)
    wanted = (needed[candidate.node] or other) - held
    return max(disk.free_bytes for disk in facts.disks) < wanted
