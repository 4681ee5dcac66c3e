"""Placement of an instance on the cluster that is there: the core, asked with the state and with what nodes tell."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from muster.errors import PlacementError, ShardingError
from muster.known import Known
from muster.needs import ModelNeeds
from muster.placement import core
from muster.placement.nearest import nearest
from muster.placement.rooms import cluster_of
from muster.placement.words import Placement, Refusal
from muster.spec import InstanceSpec, ModelWorkload
from muster.state import State

_NOTHING = Known()


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
    try:
        cluster, links = cluster_of(spec, state, known)
    except PlacementError as error:
        return Refusal(message=error.message, remedies=(error.remedy,))
    found = core.place(cluster, links, needs, spec, weights_bytes=weights_bytes)
    if isinstance(found, Placement) or found.remedies:
        return found
    remedies = nearest(cluster, links, needs, spec) if advise and needs is not None else ()
    return msgspec.structs.replace(
        found, remedies=remedies or ("start workers on more nodes, or delete an instance (muster ps)",)
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
            yield msgspec.structs.replace(sized, backend="jaccl")
            yield msgspec.structs.replace(sized, backend="ring")
