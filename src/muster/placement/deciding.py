"""Placement of an instance on the cluster that is there: the core, asked with the state and with what nodes tell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from muster.errors import PlacementError, ShardingError
from muster.known import Known
from muster.needs import ModelNeeds
from muster.placement import core
from muster.placement.backends import forms_group, without_backend
from muster.placement.nearest import nearest
from muster.placement.openings import USE_RING, closed, openings
from muster.placement.rooms import cluster_of
from muster.placement.wishes import fault_of
from muster.placement.words import Cluster, Placement, Refusal, told
from muster.spec import InstanceSpec, ModelWorkload
from muster.state import State

_NOTHING = Known()
#: So many nodes that cannot be chosen from are told of in a message.
_TOLD: Final = 8


def decide(
    spec: InstanceSpec,
    state: State,
    known: Known = _NOTHING,
    needs: ModelNeeds | None = None,
    *,
    weights_bytes: int | None = None,
    advise: bool = True,
) -> Placement | Refusal:
    """Choose a node for every rank of `spec`, and what it holds, or say what is missing.

    What is not known counts for nothing: without `needs`, every rank takes `spec.memory_bytes`, or an estimate from
    `weights_bytes` where there are any. With `advise`, a refusal has the nearest thing that fits.
    """

    def fits(wish: InstanceSpec, then: State) -> bool:
        other = decide(wish, then, known, needs, weights_bytes=weights_bytes, advise=False)
        return isinstance(other, Placement)

    try:
        cluster, links = cluster_of(spec, state, known, commit=needs.commit if needs is not None else "")
    except PlacementError as error:
        short = closed(spec, state)
        other = tuple(openings(spec, state, short, fits)) if advise else ()
        remedies = other if short and other else (error.remedy, *other)
        if advise and short and not other and any(node.lost is None for node in state.nodes.values()):
            remedies = ("start another worker: with these nodes alone it would not fit",)
        return Refusal(message=error.message, remedies=remedies, shortfalls=short)
    found = core.place(cluster, links, needs, spec, weights_bytes=weights_bytes)
    if isinstance(found, Placement) or found.kind != "placement-refused" or fault_of(spec, needs) is not None:
        return found
    found = _whole(found, cluster, spec, state)
    if not advise:
        return msgspec.structs.replace(found, remedies=found.remedies or _whatever(spec))
    # What keeps the backend that was asked for comes first.
    keeping = found.remedies[: found.remedies.index(USE_RING)] if USE_RING in found.remedies else ()
    remedies = [*keeping, *openings(spec, state, found.shortfalls, fits)]
    if needs is not None:
        remedies += nearest(cluster, links, needs, spec)
        if spec.nodes and not remedies and not spec.addresses:
            anywhere = msgspec.structs.replace(spec, nodes=())
            wider, all_links = cluster_of(anywhere, state, known, commit=needs.commit)
            remedies += [f"leave --nodes out, and {one}" for one in nearest(wider, all_links, needs, anywhere)]
    remedies += [one for one in found.remedies if one != USE_RING or USE_RING in remedies]
    return msgspec.structs.replace(found, remedies=tuple(dict.fromkeys(remedies)) or _whatever(spec))


def _whatever(spec: InstanceSpec) -> tuple[str, ...]:
    """What makes room, where nothing is known to be enough."""
    if spec.nodes:
        return "delete an instance there (muster ps)", "name others with --nodes"
    return "delete an instance (muster ps)", "start workers on more nodes"


def _whole(found: Refusal, cluster: Cluster, spec: InstanceSpec, state: State) -> Refusal:
    """The refusal with the nodes that could not be chosen from: by their MLX, or because they take no instances."""
    told_of = {one.node for one in found.shortfalls}
    lacking = without_backend(cluster, spec) if forms_group(spec, 2 if spec.auto_ranks else spec.ranks) else ()
    more = [one for one in (*lacking, *closed(spec, state)) if one.node not in told_of]
    if not more:
        return found
    return msgspec.structs.replace(
        found, message=f"{found.message}; {told(more, _TOLD)}", shortfalls=(*found.shortfalls, *more)
    )


def place(
    spec: InstanceSpec,
    state: State,
    known: Known = _NOTHING,
    needs: ModelNeeds | None = None,
    *,
    weights_bytes: int | None = None,
) -> Placement:
    """`decide`, for those who want nothing but the placement.

    Raises:
        PlacementError: it does not fit; the message says for each node what is missing.
        ShardingError: the model cannot be shared out over so many ranks, or not as it was asked for.
    """
    found = decide(spec, state, known, needs, weights_bytes=weights_bytes)
    if isinstance(found, Placement):
        return found
    raise error_of(found)


def error_of(refusal: Refusal) -> PlacementError | ShardingError:
    """The refusal as an error."""
    kind = ShardingError if refusal.kind == "sharding-unsupported" else PlacementError
    return kind(refusal.message, remedy=refusal.remedy)


def alternatives(
    spec: InstanceSpec, state: State, known: Known, needs: ModelNeeds | None, *, weights_bytes: int | None = None
) -> Iterator[tuple[InstanceSpec, Placement | Refusal]]:
    """Other wishes near this one and what becomes of them: backends, shardings, and numbers of ranks."""
    seen: set[tuple[object, ...]] = set()
    for wish in _near(spec, len(state.nodes), needs):
        found = decide(wish, state, known, needs, weights_bytes=weights_bytes, advise=False)
        if isinstance(found, Refusal) and wish.backend == "jaccl-ring" and spec.backend == "auto":
            continue  # the refusal of jaccl says as much
        key: tuple[object, ...] = (found.message,) if isinstance(found, Refusal) else _what(found)
        if key not in seen:
            seen.add(key)
            yield wish, found


def _what(placement: Placement) -> tuple[object, ...]:
    nodes = tuple(one.node for one in placement.assignments)
    return (placement.backend, placement.layout.jaccl_ring, placement.layout.sharding, placement.layout.split, nodes)


def _near(spec: InstanceSpec, nodes: int, needs: ModelNeeds | None) -> Iterator[InstanceSpec]:
    yield spec
    sizes = [spec.ranks] if not spec.auto_ranks else []
    if not spec.split and not spec.addresses and not spec.devices:
        least = max(1, len(spec.nodes))
        sizes += [size for size in (1, 2, 3, 4, 6, 8) if least <= size <= max(nodes, least)]
    for size in dict.fromkeys(sizes):
        sized = msgspec.structs.replace(spec, ranks=size, auto_ranks=False)
        workload = spec.workload
        wishes = [sized]
        if isinstance(workload, ModelWorkload) and size > 1 and needs is not None and not spec.split:
            wishes += [
                msgspec.structs.replace(sized, workload=msgspec.structs.replace(workload, sharding=sharding))
                for sharding in ("tensor", "pipeline")
                if sharding != workload.sharding and workload.sharding == "auto"
            ]
        yield from wishes
        if size > 1 and spec.backend == "auto":
            for backend in ("jaccl", "jaccl-ring", "ring"):
                yield msgspec.structs.replace(sized, backend=backend)
