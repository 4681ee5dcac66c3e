"""What would let a refused wish in without asking for less: nodes that are left out, or a narrow wish. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from muster.placement.rooms import why_not
from muster.spec import BackendWish, GroupWorkload, InstanceSpec, ModelWorkload, NodeId, Shortfall
from muster.state import Aside, Draining, Node, NodeDuty, Serving, State

#: So many nodes that take no instances are thought of: the largest.
_MOST: Final = 8
USE_RING: Final = "use --backend ring"

#: Whether a wish would fit in a state.
Fits = Callable[[InstanceSpec, State], bool]


def closed(spec: InstanceSpec, state: State) -> tuple[Shortfall, ...]:
    """The nodes that the wish allows and that take no instances."""
    names = spec.nodes or sorted(state.nodes)
    return tuple(
        Shortfall(node=name, what="duty", reason=f"node {name} {reason}")
        for name in names
        if name in state.nodes and (reason := why_not(state.nodes[name]))
    )


def openings(spec: InstanceSpec, state: State, short: Sequence[Shortfall], fits: Fits) -> Iterator[str]:
    """What to do instead; each is known to fit. `short` is what the wish was refused for."""
    yield from _opened(spec, state, fits)
    if spec.nodes:
        yield from _elsewhere(spec, state, short, fits)
    others: tuple[BackendWish, ...] = ("ring", "jaccl")
    for backend in others if any(one.what != "memory" for one in short) or spec.backend.startswith("jaccl") else ():
        changed = msgspec.structs.replace(spec, backend=backend, devices=() if backend == "ring" else spec.devices)
        if backend != spec.backend and fits(changed, state):
            yield f"use --backend {backend}"
            break
    if not isinstance(spec.workload, ModelWorkload) and not spec.addresses and not spec.devices:
        yield from _fewer(spec, state, fits)


def _elsewhere(spec: InstanceSpec, state: State, short: Sequence[Shortfall], fits: Fits) -> Iterator[str]:
    if spec.addresses or spec.devices:  # they belong to these nodes
        return
    lacking = {one.node for one in short}
    rest = tuple(name for name in spec.nodes if name not in lacking)
    if rest and rest != spec.nodes and fits(msgspec.structs.replace(spec, nodes=rest), state):
        yield f"use --nodes {','.join(rest)} --ranks {spec.ranks}"
    anywhere = msgspec.structs.replace(spec, nodes=())
    if fits(anywhere, state):
        yield "leave --nodes out"
        return
    may_choose = isinstance(spec.workload, ModelWorkload) and not spec.auto_ranks and not spec.split
    if may_choose and fits(msgspec.structs.replace(anywhere, ranks=1, auto_ranks=True), state):
        yield "leave --nodes out and use --ranks auto"


def _opened(spec: InstanceSpec, state: State, fits: Fits) -> Iterator[str]:
    """Nodes that take no instances now and would be enough, beside those that do."""
    nodes = [(name, node) for name, node in state.nodes.items() if (not spec.nodes or name in spec.nodes)]
    drained = [name for name, node in nodes if not _is_away(node) and _resumable(node.duty)]
    if found := _enough(spec, state, drained, fits):
        yield f"let {_named(found)} take instances again: muster resume {' '.join(found)}"
    away = [name for name, node in nodes if _is_away(node)]
    if found := _enough(spec, state, away, fits):
        yield f"bring {_named(found)} back: start its worker again, or wait for it"
    aside = [(name, node.duty) for name, node in nodes if not _is_away(node) and isinstance(node.duty, Aside)]
    held = [name for name, duty in aside if not duty.on_trial]
    if found := _enough(spec, state, held, fits):
        remedies = [duty.remedy for name, duty in aside if name in found]
        cleared = "; ".join(remedy.rstrip(".") for remedy in dict.fromkeys(remedies) if remedy)
        yield f"clear {_named(found)} ({cleared or 'see: muster nodes'})"


def _named(names: Sequence[NodeId]) -> str:
    return f"node{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _is_away(node: Node) -> bool:
    return node.lost is not None or node.suspect is not None


def _resumable(duty: NodeDuty) -> bool:
    return isinstance(duty, Draining) or (isinstance(duty, Aside) and duty.on_trial)


def _enough(spec: InstanceSpec, state: State, names: Sequence[NodeId], fits: Fits) -> list[NodeId]:
    """Of these nodes some with which it fits and none of which could be missing; empty where all are too few."""
    found = sorted(names, key=lambda name: (-state.nodes[name].info.memory_bytes, name))[:_MOST]
    if not found or not fits(spec, _serving(state, found)):
        return []
    for name in reversed(found):
        fewer = [one for one in found if one != name]
        if fewer and fits(spec, _serving(state, fewer)):
            found = fewer
    return sorted(found)


def _serving(state: State, names: Sequence[NodeId]) -> State:
    nodes = dict(state.nodes)
    for name in names:
        nodes[name] = msgspec.structs.replace(nodes[name], lost=None, suspect=None, duty=Serving())
    return msgspec.structs.replace(state, nodes=nodes)


def _fewer(spec: InstanceSpec, state: State, fits: Fits) -> Iterator[str]:
    """The most ranks that do fit, where they all take the same."""
    least = max(len(spec.nodes), 2 if isinstance(spec.workload, GroupWorkload) else 1)
    low, high = least - 1, spec.ranks - 1
    while low < high:
        middle = (low + high + 1) // 2
        if fits(msgspec.structs.replace(spec, ranks=middle), state):
            low = middle
        else:
            high = middle - 1
    if low >= least:
        yield f"use --ranks {low}"
