"""Where to put an instance, a pure function of what there is, the links, the model, and the wish."""

from __future__ import annotations

from typing import Final

from muster.facts import without_gpu
from muster.needs import ModelNeeds, on_cpu
from muster.placement.backends import Backed, able, choose_backend, forms_group, wired
from muster.placement.choose import Arrangement, Chooser
from muster.placement.disks import with_room
from muster.placement.layouts import lay_out
from muster.placement.refusing import no_room, unfit
from muster.placement.rings import ring_links
from muster.placement.ways import MOST_RANKS, Way, Ways
from muster.placement.wishes import fault_of
from muster.placement.words import Cluster, Links, Placement, Refusal
from muster.spec import Assignment, InstanceSpec

#: Below this rate, in Mbit/s, a pipeline goes over a link and not a tensor sharding: that one sends the activations of
#: every token twice per layer. At 1 Gbit/s that is some 3 s for 512 tokens of a 40-layer model, at 10 some 0.3 s.
_SLOW_MBPS: Final = 2_000
#: And above this round trip, in µs: 80 of them per token are then longer than reading the weights.
_SLOW_RTT_US: Final = 1_000


def place(
    cluster: Cluster, links: Links, model: ModelNeeds | None, wish: InstanceSpec, *, weights_bytes: int | None = None
) -> Placement | Refusal:
    """Choose the nodes, their order, the backend, and what each rank holds; deterministic.

    Of the numbers of ranks that the wish allows the smallest is taken that fits; of the nodes first those with the
    best backend and links, then the fastest, then those that hold the model. Memory is counted for each rank, with
    headroom, and as on a CPU where one of the nodes has nothing else. `weights_bytes` is all that is known of a model
    that `model` says nothing of.
    """
    fault = fault_of(wish, model)
    if fault is not None:
        return fault
    if model is not None and any(without_gpu(candidate.facts) for candidate in cluster.nodes):
        model = on_cpu(model)
    ways = Ways(model, wish, weights_bytes)
    formers = able(cluster, wish)
    refused: Refusal | None = None
    choosers: dict[bool, Chooser] = {}
    for ranks in _sizes(cluster, wish):
        group = forms_group(wish, ranks)
        if group and isinstance(formers, Refusal):
            return refused or formers
        if group not in choosers:
            nodes = formers if group and isinstance(formers, Cluster) else cluster
            choosers[group] = Chooser(nodes, links, wired(nodes, wish))
        possible = _better(choosers[group], ways, ranks)
        for spread in (False, True):
            for way in possible if not spread or _may_share(cluster, ranks, known=ways.stages is not None) else ():
                found = _placed(choosers[group], ways, way, spread=spread)
                if isinstance(found, Placement):
                    return found
                refused = refused or found
    if refused is not None:
        return refused
    chooser = choosers[max(choosers)]
    return no_room(chooser, next(ways.of(wish.ranks))) if ways.stages is None else unfit(chooser, ways)


def _sizes(cluster: Cluster, wish: InstanceSpec) -> range:
    if not wish.auto_ranks:
        return range(wish.ranks, wish.ranks + 1)
    return range(wish.ranks, max(wish.ranks, min(len(cluster.nodes), MOST_RANKS)) + 1)


def _may_share(cluster: Cluster, ranks: int, *, known: bool) -> bool:
    """Whether a node may get several ranks although another has none: of a model only where there are too few nodes."""
    open_nodes = sum(candidate.free_ranks > 0 for candidate in cluster.nodes)
    return not cluster.named and (not known or ranks > open_nodes)


def _better(chooser: Chooser, ways: Ways, ranks: int) -> list[Way]:
    """The ways for so many ranks that may have room, the better first: over slow links a pipeline comes first."""
    possible = [way for way in ways.of(ranks) if _may_fit(chooser, way, ways.wish)]
    if len(possible) == 2 and ways.wish.backend in ("auto", "ring"):
        found = chooser.arrange(possible[0].demand, spread=False)
        if found is not None and _is_slow(chooser, found) and not _by_jaccl(chooser, ways, possible[0], found):
            possible.reverse()
    return possible


def _by_jaccl(chooser: Chooser, ways: Ways, way: Way, found: Arrangement) -> bool:
    """Whether these ranks do not use the links that were measured: their group goes over RDMA."""
    if not chooser.wired and not ways.wish.devices:
        return False
    backed = choose_backend(chooser, found, way.demand, ways.wish)
    return isinstance(backed, Backed) and backed.backend == "jaccl"


def _may_fit(chooser: Chooser, way: Way, wish: InstanceSpec) -> bool:
    """Whether all nodes together hold so much, as far as each can: cheap, and never wrong about "no"."""
    if not wish.auto_ranks or way.ranks > len(chooser.cluster.nodes):
        return True  # a node may get several ranks
    return chooser.reach(way.demand) >= way.demand.wanted


def _is_slow(chooser: Chooser, found: Arrangement) -> bool:
    for one, other in ring_links(list(dict.fromkeys(found.order))):
        link = chooser.link(one, other)
        if link is None or link.kind == "loopback":
            continue
        if (link.mbps is not None and link.mbps < _SLOW_MBPS) or (
            link.rtt_us is not None and link.rtt_us > _SLOW_RTT_US
        ):
            return True
    return False


def _placed(chooser: Chooser, ways: Ways, way: Way, *, spread: bool) -> Placement | Refusal | None:
    """This way, where it is one; a refusal where nodes were found and the backend cannot be."""
    found = chooser.arrange(way.demand, spread=spread)
    if found is None:
        return None
    if not chooser.cluster.named and (roomy := with_room(chooser.cluster, ways, way, found)) is not None:
        other = Chooser(roomy, chooser.links, wired(roomy, ways.wish))
        if (again := other.arrange(way.demand, spread=spread)) is not None:
            chooser, found = other, again
    backed = choose_backend(chooser, found, way.demand, ways.wish)
    if isinstance(backed, Refusal):
        return backed
    return _written(chooser, ways, way, backed)


def _written(chooser: Chooser, ways: Ways, way: Way, backed: Backed) -> Placement:
    infos = [chooser.cluster.nodes[index].info for index in backed.arrangement.order]
    return Placement(
        assignments=tuple(Assignment(rank=rank, node=info.node, boot=info.boot) for rank, info in enumerate(infos)),
        backend=backed.backend,
        layout=lay_out(chooser, backed, ways.wish, way.sharding, ways.costs(way, backed.arrangement)),
    )
