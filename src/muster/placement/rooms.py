"""What is left on the nodes that are there: from the state and from what nodes tell. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from muster.errors import PlacementError
from muster.facts import HeldModel
from muster.known import Known
from muster.links import LinkMap
from muster.placement.words import Candidate, Cluster
from muster.rdma import taken
from muster.spec import InstanceSpec, ModelWorkload, NodeId, NodeInfo
from muster.state import Aside, Draining, Gone, Node, State, all_gone, reserved_bytes, takes_instances

#: So many measurements are looked through for good neighbours, in a cluster of hundreds of nodes.
_MOST_RECORDS = 50_000


class SeenLinks(LinkMap):
    """The links of these nodes, and which of them each reached best."""

    def __init__(self, nodes: dict[NodeId, NodeInfo], known: Known, network: str = "") -> None:
        super().__init__(nodes, known.links, known.facts, network)
        self._told = known.links
        self._nearest: dict[NodeId, list[NodeId]] | None = None

    def nearest(self, a: NodeId, limit: int) -> tuple[NodeId, ...]:
        """Nodes that `a` reached, at most so many, the best rate first."""
        if self._nearest is None:
            self._nearest = self._ranked()
        return tuple(self._nearest.get(a, ())[:limit])

    def _ranked(self) -> dict[NodeId, list[NodeId]]:
        """By node, those that it reached, the best rate first. One end of a pair measures the rate for both."""
        rates: dict[NodeId, dict[NodeId, float]] = {}
        left = _MOST_RECORDS
        for name, told in self._told.items():
            for one in told.measured[: max(0, left)]:
                if one.mbps_out is not None and one.reached and one.dialled_back:
                    rates.setdefault(name, {})[one.other] = one.mbps_out
                    rates.setdefault(one.other, {})[name] = one.mbps_out
            left -= len(told.measured)
        return {
            name: [other for _, other in sorted([(-rate, other) for other, rate in found.items()])]
            for name, found in rates.items()
        }


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
            raise PlacementError(
                f"node {name} {why_not(alive[name])}", remedy=f"Leave it out of --nodes, or: muster resume {name}"
            )
        if name in state.nodes:
            reason = f"node {name} is lost: {state.nodes[name].lost}"
            raise PlacementError(reason, remedy="Start its worker again, or leave it out of --nodes.")
        there = ", ".join(sorted(alive))
        raise PlacementError(
            f"node {name} is unknown; the nodes are {there}", remedy="Check --nodes against: muster nodes"
        )
    return names


def cluster_of(spec: InstanceSpec, state: State, known: Known) -> tuple[Cluster, SeenLinks]:
    """What there is to choose from.

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
    sources = _sources(spec, infos, known)
    nodes = tuple(
        Candidate(
            info=infos[name],
            free_bytes=infos[name].memory_bytes - reserved.get(name, 0),
            free_ranks=infos[name].max_ranks - ranks.get(name, 0),
            facts=known.facts.get(name),
            holds=name in sources,
        )
        for name in names
    )
    groups = (
        ([rank.node for rank in instance.ranks], instance.layout)
        for instance in state.instances.values()
        if instance.layout.devices and not all_gone(instance)
    )
    cluster = Cluster(
        nodes=nodes,
        named=bool(spec.nodes),
        pools=_pools(infos, known, reserved),
        sources=sources,
        known=known,
        in_use=taken(groups),
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
        unused = sum(max(0, reserved.get(name, 0) - known.ranks_bytes.get(name, 0)) for name in names)
        # The ranks of a node that has none any more were still there when it last told what is available.
        over = sum(known.ranks_bytes.get(name, 0) for name in names if not reserved.get(name))
        limits = [known.available_bytes[name] + over - unused for name in names if known.available_bytes.get(name)]
        for name in names:
            facts = known.facts.get(name)
            for limit in (facts.memory_total_bytes, facts.wired_limit_bytes) if facts is not None else ():
                if limit:
                    limits.append(limit - given)
        if limits:
            pools[machine] = max(0, min(limits))
    return pools


def _sources(spec: InstanceSpec, infos: dict[NodeId, NodeInfo], known: Known) -> dict[NodeId, tuple[NodeInfo, str]]:
    """The nodes that hold the model, whole, with the directory there."""
    if not isinstance(spec.workload, ModelWorkload):
        return {}
    found: dict[NodeId, tuple[NodeInfo, str]] = {}
    for name, info in sorted(infos.items()):
        facts = known.facts.get(name)
        held = _held(spec.workload, facts.models if facts is not None else ())
        if held is not None:
            found[name] = (info, held.path)
    return found


def _held(workload: ModelWorkload, models: Iterable[HeldModel]) -> HeldModel | None:
    for held in models:
        same = held.model == workload.model and (not workload.revision or held.revision.startswith(workload.revision))
        if same and held.complete and held.shareable:
            return held
    return None
