"""The nearest thing that would fit, where what was asked for does not. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from muster.needs import LayerNeeds, ModelNeeds
from muster.placement.core import place
from muster.placement.costs import context_of
from muster.placement.lacking import Everywhere
from muster.placement.words import Candidate, Cluster, Links, Placement
from muster.spec import InstanceSpec, ModelWorkload, NodeId

#: Bits of a weight in the usual quantisations, with the scales.
_QUANTISED: Final = ((8, 8.5), (4, 4.5))
_SHORTEST_CONTEXT: Final = 1024
#: What a further node is thought to have at most, in GiB.
_MOST_GIB: Final = 1024
#: In clusters larger than this no further node is thought up: it takes several placements.
_MOST_NODES: Final = 64
_GIB: Final = 2**30


def nearest(cluster: Cluster, links: Links, model: ModelNeeds, wish: InstanceSpec) -> tuple[str, ...]:
    """What to ask for instead, or to add; each is known to fit. The smallest change first."""
    workload = wish.workload
    if not isinstance(workload, ModelWorkload):
        return ()
    found = [*_smaller(cluster, links, model, wish, workload), *_otherwise(cluster, links, model, wish, workload)]
    if len(cluster.nodes) <= _MOST_NODES and (more := _one_more(cluster, model, wish)):
        found.append(more)
    return tuple(found)


def _fits(cluster: Cluster, links: Links, model: ModelNeeds, wish: InstanceSpec) -> Placement | None:
    found = place(cluster, links, model, wish)
    return found if isinstance(found, Placement) else None


def _smaller(
    cluster: Cluster, links: Links, model: ModelNeeds, wish: InstanceSpec, workload: ModelWorkload
) -> Iterator[str]:
    context = context_of(workload, model)
    shorter = 1 << max(context - 1, 1).bit_length() - 1
    while shorter >= _SHORTEST_CONTEXT:
        changed = msgspec.structs.replace(workload, context_tokens=shorter)
        if _fits(cluster, links, model, msgspec.structs.replace(wish, workload=changed)):
            yield f"use --context {shorter} instead of {context}"
            break
        shorter //= 2
    if workload.concurrency > 1:
        changed = msgspec.structs.replace(workload, concurrency=1)
        if _fits(cluster, links, model, msgspec.structs.replace(wish, workload=changed)):
            yield f"use --concurrency 1 instead of {workload.concurrency}"
    for bits, counted in _QUANTISED:
        if model.bits > counted + 1 and _fits(cluster, links, _quantised(model, counted), wish):
            yield f"use {'an' if bits == 8 else 'a'} {bits}-bit version of this model"
            break


def _quantised(model: ModelNeeds, bits: float) -> ModelNeeds:
    def less(count: int) -> int:
        return int(count * bits / model.bits)

    layers = tuple(
        LayerNeeds(
            less(layer.weights_bytes),
            less(layer.tensor_bytes),
            layer.kv_token_bytes,
            layer.kv_divides,
            layer.window,
            layer.state_bytes,
            layer.kv_whole_bytes,
        )
        for layer in model.layers
    )
    return msgspec.structs.replace(
        model,
        layers=layers,
        bits=bits,
        **{
            name: less(getattr(model, name))
            for name in ("outside_bytes", "outside_tensor_bytes", "embedding_bytes", "head_bytes")
        },
    )


def _otherwise(
    cluster: Cluster, links: Links, model: ModelNeeds, wish: InstanceSpec, workload: ModelWorkload
) -> Iterator[str]:
    if workload.sharding != "auto" and not wish.split:
        changed = msgspec.structs.replace(workload, sharding="auto")
        if found := _fits(cluster, links, model, msgspec.structs.replace(wish, workload=changed)):
            yield f"use --sharding {found.layout.sharding}"
    if wish.memory_bytes is not None:
        predicted = msgspec.structs.replace(wish, memory_bytes=None)
        if _fits(cluster, links, model, predicted):
            yield "leave --memory out"
    if wish.split:
        even = msgspec.structs.replace(wish, split=())
        if _fits(cluster, links, model, even):
            yield "leave --split out"
    if not wish.auto_ranks and not cluster.named and not wish.split:
        any_size = msgspec.structs.replace(wish, ranks=1, auto_ranks=True)
        if found := _fits(cluster, links, model, any_size):
            yield f"use --ranks {len(found.assignments)}"


def _one_more(cluster: Cluster, model: ModelNeeds, wish: InstanceSpec) -> str:
    """How much a further node must have free; empty where none would help."""
    if cluster.named or not cluster.nodes:
        return ""
    asked = msgspec.structs.replace(wish, auto_ranks=not wish.split, split=wish.split, backend="ring", devices=())
    like = cluster.nodes[0]
    new = NodeId("~")
    info = msgspec.structs.replace(like.info, node=new, machine=new, backends=("ring",))

    def found(gib: int) -> Placement | None:
        more = Candidate(info=info, free_bytes=gib * _GIB, free_ranks=max(1, info.max_ranks))
        larger = msgspec.structs.replace(cluster, nodes=(*cluster.nodes, more))
        return _fits(larger, Everywhere(), model, asked)

    if found(_MOST_GIB) is None:
        return ""
    low, high = 1, _MOST_GIB
    while low < high:
        middle = (low + high) // 2
        if found(middle):
            high = middle
        else:
            low = middle + 1
    least = found(low)
    ranks = len(least.assignments) if least is not None else wish.ranks
    also = "" if wish.auto_ranks or ranks == wish.ranks else f" and use --ranks {ranks}"
    return f"start one more node with at least {low} GiB free{also}"
