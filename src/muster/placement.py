"""Where to put an instance: a pure function of the spec and the state."""

from __future__ import annotations

import msgspec

from muster.errors import PlacementError
from muster.spec import Assignment, Backend, GroupWorkload, InstanceSpec, ModelWorkload, NodeId
from muster.state import Aside, Draining, Gone, Node, State, takes_instances

#: What a rank takes before any weight: the interpreter, MLX and, for a model, mlx-lm (measured: 115 and 330 MB).
RANK_BYTES = 128 * 2**20
MODEL_RANK_BYTES = 400 * 2**20


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a wish: one assignment per rank, in rank order, and the backend of the group."""

    assignments: tuple[Assignment, ...]
    backend: Backend


class _Room(msgspec.Struct):
    """What is left on a node while ranks are dealt out."""

    node: Node
    free_bytes: int
    free_ranks: int
    taken: int = 0


def rank_memory_bytes(spec: InstanceSpec, weights_bytes: int) -> int:
    """Bytes that each rank of `spec` needs when the model's weights take `weights_bytes` in all.

    Every rank gets an equal part plus a tenth: the clever split belongs to the measured placement.
    """
    if spec.memory_bytes is not None:
        return spec.memory_bytes
    if isinstance(spec.workload, ModelWorkload):
        return MODEL_RANK_BYTES + int(weights_bytes * 1.1) // spec.ranks
    return RANK_BYTES


def place(spec: InstanceSpec, state: State) -> Placement:
    """Choose a node for every rank of `spec`, over the nodes that are there now.

    Ranks are spread evenly; neighbours in rank order share a node where they can. What other instances have been
    given counts as used, whether they use it yet or not. `spec.memory_bytes` must be set by the caller.

    Raises:
        PlacementError: it does not fit; the message says for each node what is missing.
    """
    rooms = _rooms(spec, state)
    needed = spec.memory_bytes or 0
    backend = _backend(spec, rooms)
    for _ in range(spec.ranks):
        able = [room for room in rooms if room.free_ranks > 0 and room.free_bytes >= needed]
        if not able:
            raise PlacementError(
                f"{spec.ranks} rank(s) of {needed / 2**20:.0f} MiB each do not fit: {_shortage(rooms, needed)}",
                remedy="Start workers on more nodes, delete an instance (muster ps), or ask for fewer ranks.",
            )
        room = min(able, key=lambda room: (room.taken, -room.free_bytes, room.node.info.node))
        room.taken += 1
        room.free_ranks -= 1
        room.free_bytes -= needed
    empty = [room.node.info.node for room in rooms if room.taken == 0]
    if spec.nodes and empty:
        raise PlacementError(
            f"node {empty[0]} was asked for but has no room for a rank: {_shortage(rooms, needed)}",
            remedy="Leave the node out of --nodes, or free it.",
        )
    chosen = [room.node.info for room in rooms for _ in range(room.taken)]
    assignments = tuple(Assignment(rank=rank, node=info.node, boot=info.boot) for rank, info in enumerate(chosen))
    return Placement(assignments=assignments, backend=backend)


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


def _rooms(spec: InstanceSpec, state: State) -> list[_Room]:
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
        known = ", ".join(sorted(alive))
        raise PlacementError(
            f"node {name} is unknown; the nodes are {known}", remedy="Check --nodes against: muster nodes"
        )
    used_bytes: dict[NodeId, int] = {}
    used_ranks: dict[NodeId, int] = {}
    for instance in state.instances.values():
        for rank in instance.ranks:
            if not isinstance(rank.state, Gone):
                used_bytes[rank.node] = used_bytes.get(rank.node, 0) + (instance.spec.memory_bytes or 0)
                used_ranks[rank.node] = used_ranks.get(rank.node, 0) + 1
    return [
        _Room(
            node=alive[name],
            free_bytes=alive[name].info.memory_bytes - used_bytes.get(name, 0),
            free_ranks=alive[name].info.max_ranks - used_ranks.get(name, 0),
        )
        for name in names
    ]


def _backend(spec: InstanceSpec, rooms: list[_Room]) -> Backend:
    """Choose the backend; `auto` is the ring, which every MLX build has."""
    backend: Backend = "ring" if spec.backend == "auto" else spec.backend
    if spec.ranks == 1 and not isinstance(spec.workload, GroupWorkload):
        return backend
    if isinstance(spec.workload, GroupWorkload) and spec.ranks < 2:
        raise PlacementError("a group needs at least 2 ranks, and 1 was asked for", remedy="Use --ranks 2 or more.")
    missing = [room.node.info for room in rooms if backend not in room.node.info.backends]
    if missing:
        raise PlacementError(
            f"MLX on node {missing[0].node} has no {backend} backend "
            f"(it has: {', '.join(missing[0].backends) or 'none'})",
            remedy="Use --backend ring, or nodes whose MLX has it (jaccl: macOS 26.2, Thunderbolt 5, RDMA on).",
        )
    if backend == "jaccl":
        raise PlacementError(
            "a jaccl group needs the RDMA devices between every pair of nodes, and the nodes do not report them yet",
            remedy="Use --backend ring.",
        )
    return backend


def _shortage(rooms: list[_Room], needed: int) -> str:
    parts: list[str] = []
    for room in rooms:
        name = room.node.info.node
        got = f"takes {room.taken} of them, then " if room.taken else ""
        if room.free_ranks <= 0:
            parts.append(f"node {name} {got}has all its {room.node.info.max_ranks} ranks in use")
        elif room.free_bytes < needed:
            parts.append(f"node {name} {got}has {max(room.free_bytes, 0) / 2**20:.0f} MiB left")
    return "; ".join(parts)
