"""What is left on the nodes that are there: from the state and from what nodes tell. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

from muster.errors import PlacementError
from muster.facts import HeldModel, NodeFacts, filled_gpu
from muster.known import Known
from muster.links import LAST_RESORTS, LinkMap, Measured, within
from muster.placement.words import Candidate, Cluster
from muster.rdma import taken
from muster.spec import InstanceSpec, ModelWorkload, NodeId, NodeInfo
from muster.state import Aside, Draining, Gone, Node, State, all_gone, reserved_bytes, takes_instances

#: So many measurements are looked through for good neighbours, in a cluster of hundreds of nodes.
_MOST_RECORDS = 50_000
#: More than any rate in Mbit/s: what is added for kinds of links that are a last resort.
_LAST = 1e12


class SeenLinks(LinkMap):
    """The links of these nodes, and which of them each reached best."""

    def __init__(self, nodes: dict[NodeId, NodeInfo], known: Known, network: str = "") -> None:
        super().__init__(nodes, known.links, known.facts, network)
        self._told, self._seen, self._only = known.links, known.facts, network
        self._merits: dict[NodeId, dict[NodeId, float]] | None = None
        self._nearest: dict[NodeId, list[NodeId]] = {}

    def nearest(self, a: NodeId, limit: int) -> tuple[NodeId, ...]:
        """Nodes that `a` reached, at most so many, the best link first."""
        if a not in self._nearest:
            merits = self._all_merits().get(a, {})
            self._nearest[a] = [other for _, other in sorted([(merit, other) for other, merit in merits.items()])]
        return tuple(self._nearest[a][:limit])

    def fastest(self, limit: int) -> tuple[NodeId, ...]:
        """The nodes with the best links of all, at most so many, the best first."""
        best = ((min(merits.values()), name) for name, merits in self._all_merits().items() if merits)
        return tuple(name for _, name in heapq.nsmallest(limit, best))

    def _all_merits(self) -> dict[NodeId, dict[NodeId, float]]:
        if self._merits is None:
            self._merits = self._judged()
        return self._merits

    def _judged(self) -> dict[NodeId, dict[NodeId, float]]:
        """By node, those that it reached: the lower the better. One end of a pair measures the rates for both."""
        merits: dict[NodeId, dict[NodeId, float]] = {}
        weak = {} if self._only else {name: hosts for name, facts in self._seen.items() if (hosts := _weak(facts))}
        each = max(1, _MOST_RECORDS // max(1, len(self._told)))
        for name, told in self._told.items():
            mine = merits.setdefault(name, {})
            measured = told.measured
            for one in measured if len(measured) <= each else heapq.nsmallest(each, measured, key=_slowness):
                out, into, other = one.mbps_out, one.mbps_in, one.other
                if out is None or into is None or not one.reached or not one.dialled_back:
                    continue
                merit = -out if out < into else -into
                if weak and (one.own in weak.get(name, ()) or one.host in weak.get(other, ())):
                    merit += _LAST
                if self._only and not (within(one.own, self._only) and within(one.host, self._only)):
                    continue
                known = mine.get(other)
                if known is None or merit < known:
                    mine[other] = merit
                    merits.setdefault(other, {})[name] = merit
        return merits


def _slowness(one: Measured) -> tuple[float, NodeId]:
    return -(one.mbps_out or 0.0), one.other


def _weak(facts: NodeFacts) -> frozenset[str]:
    """The addresses that are used only where nothing else reaches."""
    return frozenset(at.host for one in facts.interfaces if one.kind in LAST_RESORTS for at in one.addresses)


def why_not(node: Node) -> str:
    """Why a node takes no instances, as in "node a is being drained"; empty where it takes them."""
    if node.lost is not None:
        return f"is lost: {node.lost}"
    if node.suspect is not None:
        return f"is suspect: {node.suspect}"
    match node.duty:
        case Draining():
            return "is being drained"
        case Aside(reason=reason):
            return f"is set aside: {reason}"
        case _:
            return ""


def _may_be_asked_for(node: Node) -> bool:
    """Whether the node may be used where it is named: then also one that is set aside only because it failed."""
    return takes_instances(node) or (node.suspect is None and isinstance(node.duty, Aside) and node.duty.on_trial)


def candidates(spec: InstanceSpec, state: State) -> tuple[NodeId, ...]:
    """The nodes asked for, in that order, or all that take instances, by name.

    Raises:
        PlacementError: there are none, or one that was asked for is not there.
    """
    alive = {name: node for name, node in state.nodes.items() if node.lost is None}
    if not alive:
        lost = "; ".join(f"{name} is lost: {node.lost}" for name, node in sorted(state.nodes.items()))
        missing = f"no node is there ({lost})" if lost else "no node has joined"
        raise PlacementError(missing, remedy="Start one with: muster worker --join ADDRESS")
    names = spec.nodes or tuple(sorted(name for name, node in alive.items() if takes_instances(node)))
    if not names:
        reasons = "; ".join(f"{name} {why_not(node)}" for name, node in sorted(state.nodes.items()))
        raise PlacementError(
            f"no node takes instances: {reasons}", remedy="Wait, start another worker, or: muster resume NODE"
        )
    for name in names:
        if name in alive and _may_be_asked_for(alive[name]):
            continue
        if name in alive:
            how = "wait until it is heard of" if alive[name].suspect is not None else f"muster resume {name}"
            raise PlacementError(f"node {name} {why_not(alive[name])}", remedy=f"Leave it out of --nodes, or: {how}")
        if name in state.nodes:
            reason = f"node {name} is lost: {state.nodes[name].lost}"
            raise PlacementError(reason, remedy="Start its worker again, or leave it out of --nodes.")
        there = ", ".join(sorted(alive))
        raise PlacementError(
            f"node {name} is unknown; the nodes are {there}", remedy="Check --nodes against: muster nodes"
        )
    return names


def cluster_of(spec: InstanceSpec, state: State, known: Known, *, commit: str = "") -> tuple[Cluster, SeenLinks]:
    """What there is to choose from. `commit` is which one of a hub's model is meant where no node holds any.

    A node may be given what its operator allows, less what instances on it have been given. All nodes of a machine
    together get no more than it has available now, less what instances there have been given and do not use yet.

    Raises:
        PlacementError: as `candidates` does.
    """
    names = candidates(spec, state)
    reserved: dict[NodeId, int] = {}
    ranks: dict[NodeId, int] = {}
    for instance in state.instances.values():
        for rank in instance.ranks:
            if not isinstance(rank.state, Gone):
                reserved[rank.node] = reserved.get(rank.node, 0) + reserved_bytes(instance, rank.rank)
                ranks[rank.node] = ranks.get(rank.node, 0) + 1
    infos = {name: node.info for name, node in state.nodes.items() if node.lost is None}
    commit = _commit(spec, names, infos, known, commit)
    held = _held(spec, infos, known, commit)
    sources = {name: (infos[name], one.path) for name, one in held.items() if one.shareable}
    nodes = tuple(
        Candidate(
            info=infos[name],
            free_bytes=infos[name].memory_bytes - reserved.get(name, 0),
            free_ranks=infos[name].max_ranks - ranks.get(name, 0),
            facts=known.facts.get(name),
            holds=name in held and held[name].complete,
        )
        for name in names
    )
    groups = (
        ([rank.node for rank in instance.ranks], instance.layout)
        for instance in state.instances.values()
        if instance.layout.devices and not all_gone(instance)
    )
    # Those of lost nodes too: what runs on them still has its devices.
    machines = {name: node.info.machine or name for name, node in state.nodes.items()}
    cluster = Cluster(
        nodes=nodes,
        named=bool(spec.nodes),
        pools=_pools(infos, known, reserved),
        sources={name: source for name, source in sources.items() if held[name].complete},
        parts={name: source for name, source in sources.items() if not held[name].complete},
        commit=commit,
        known=known,
        in_use=taken(groups, machines),
    )
    return cluster, SeenLinks(infos, known, spec.network)


def _pools(infos: dict[NodeId, NodeInfo], known: Known, reserved: dict[NodeId, int]) -> dict[str, int]:
    """What each machine has left for all its nodes together, where that is known."""
    machines: dict[str, list[NodeId]] = {}
    for name, info in infos.items():
        machines.setdefault(info.machine or name, []).append(name)
    pools: dict[str, int] = {}
    for machine, names in machines.items():
        given = sum(reserved.get(name, 0) for name in names)
        unused, over = (of(names, reserved, known.ranks_bytes) for of in (_unused, _over))
        limits = [known.available_bytes[name] + over - unused for name in names if known.available_bytes.get(name)]
        for name in names:
            facts = known.facts.get(name)
            for limit in (facts.memory_total_bytes, facts.wired_limit_bytes) if facts is not None else ():
                if limit:
                    limits.append(limit - given)
            if (gpu := filled_gpu(facts)) is not None:
                limits.append((gpu.memory_bytes or 0) - given)
                if gpu.free_bytes is not None:
                    # What was free then is less what ranks took since: heartbeats say that sooner than the GPU.
                    used = dict(known.ranks_bytes)
                    if facts is not None and facts.gpu_ranks_bytes is not None:
                        used[name] = facts.gpu_ranks_bytes
                    limits.append(gpu.free_bytes + _over(names, reserved, used) - _unused(names, reserved, used))
        if limits:
            pools[machine] = max(0, min(limits))
    return pools


def _unused(names: list[NodeId], reserved: Mapping[NodeId, int], used: Mapping[NodeId, int]) -> int:
    """What ranks were promised and have not taken yet."""
    return sum(max(0, reserved.get(name, 0) - used.get(name, 0)) for name in names)


def _over(names: list[NodeId], reserved: Mapping[NodeId, int], used: Mapping[NodeId, int]) -> int:
    """What the ranks of a node that has none any more still had when it last told what is available."""
    return sum(used.get(name, 0) for name in names if not reserved.get(name))


def _at(spec: InstanceSpec, models: Iterable[HeldModel], commit: str = "") -> list[HeldModel]:
    """What a node has of the model at that commit, or else at the revision asked for; what is whole first."""
    workload = spec.workload
    if not isinstance(workload, ModelWorkload):
        return []
    found = (held for held in models if held.model == workload.model)
    if commit:
        return sorted((held for held in found if held.revision == commit), key=_goodness)
    return sorted((held for held in found if held.is_at(workload.revision)), key=_goodness)


def _goodness(held: HeldModel) -> tuple[bool, str]:
    return not held.complete, held.path


def _commit(
    spec: InstanceSpec, names: Iterable[NodeId], infos: dict[NodeId, NodeInfo], known: Known, inspected: str
) -> str:
    """The commit that most nodes have whole of the revision asked for: a branch may lead each of them elsewhere.

    The nodes to choose from count before others, of which only those that give it away do. Where nobody has it whole
    it is what was `inspected`, or else what most of them have parts of: the hub may have that no more.
    """
    whole: dict[str, list[int]] = {}
    parts: dict[str, list[int]] = {}
    chosen = set(names)
    for name, info in infos.items():
        facts = known.facts.get(name)
        for held in _at(spec, facts.models if facts is not None else ()):
            if held.revision and (name in chosen or (held.shareable and info.peer_port)):
                count = (whole if held.complete else parts).setdefault(held.revision, [0, 0])
                count[name not in chosen] += 1
    if not whole and inspected:
        return inspected
    votes = whole or parts
    return max(votes, key=lambda commit: (votes[commit], commit), default="")


def held_by_all(spec: InstanceSpec, nodes: Iterable[Candidate]) -> frozenset[str]:
    """The commits of the revision asked for that each of these nodes has whole."""
    found = [
        {held.revision for held in _at(spec, node.facts.models if node.facts is not None else ()) if held.complete}
        for node in nodes
    ]
    return frozenset(set[str].intersection(*found) - {""}) if found else frozenset()


def _held(spec: InstanceSpec, infos: dict[NodeId, NodeInfo], known: Known, commit: str) -> dict[NodeId, HeldModel]:
    """The nodes that hold the model, or some of it."""
    found: dict[NodeId, HeldModel] = {}
    for name in sorted(infos):
        facts = known.facts.get(name)
        there = _at(spec, facts.models if facts is not None else (), commit)
        if there:
            found[name] = there[0]
    return found
