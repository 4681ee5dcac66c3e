"""Ranks whose node no longer has the addresses that they were given, as when a cable is pulled. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from muster.links import is_loopback
from muster.spec import Failure, ModelWorkload, NodeId
from muster.state import Gone, Instance, Node, Rank, State, phase_of


def gone_addresses(instance: Instance, nodes: Mapping[NodeId, Node]) -> list[tuple[Rank, list[str]]]:
    """The live ranks with the addresses that they use and that their nodes do not have any more."""
    found: list[tuple[Rank, list[str]]] = []
    for rank in instance.ranks:
        node = nodes.get(rank.node)
        if isinstance(rank.state, Gone) or node is None or node.info.boot != rank.boot or not node.info.candidates:
            continue
        link = instance.layout.ranks[rank.rank].next if rank.rank < len(instance.layout.ranks) else None
        pinned = [one.host for one in rank.addresses] + ([link.own] if link is not None else [])
        there = {one.host for one in node.info.candidates}
        gone = sorted({host for host in pinned if host not in there and not is_loopback(host)})
        if gone:
            found.append((rank, gone))
    return found


def stranded_ns(instance: Instance, state: State, patience_ns: int) -> int | None:
    """When a model over TCP is given up for an address that is gone; `None` where none is.

    A cable that is plugged in again soon does no harm: connections outlive that. A script is left alone, it may have
    long pauses of its own; a jaccl group uses its addresses only while it forms.
    """
    first = _first_gone(instance, state)
    return None if first is None else first[0] + patience_ns


def stranded(instance: Instance, state: State, now_ns: int, patience_ns: int) -> Failure | None:
    """Why the attempt cannot go on, once an address has been gone for so long."""
    first = _first_gone(instance, state)
    if first is None or now_ns < first[0] + patience_ns:
        return None
    _, rank, gone = first
    return Failure(
        kind="address-gone",
        message=f"node {rank.node} has not had {', '.join(gone)} for {patience_ns / 1e9:g} s, which the rank uses: a "
        "cable or an interface is gone",
        remedy="Look at that interface; the next attempt takes another link, if there is one: muster links.",
        phase=phase_of(instance, rank),
        rank=rank.rank,
        node=rank.node,
        retryable=True,
    )


def _first_gone(instance: Instance, state: State) -> tuple[int, Rank, list[str]] | None:
    """When addresses of a rank went, the first of them, which rank it is, and which they are: of whoever lost first."""
    if instance.backend != "ring" or not isinstance(instance.spec.workload, ModelWorkload):
        return None
    found = [
        (min(_gone_ns(state.nodes[rank.node], host) for host in gone), rank, gone)
        for rank, gone in gone_addresses(instance, state.nodes)
    ]
    return min(found, key=lambda one: (one[0], one[1].rank), default=None)


def _gone_ns(node: Node, host: str) -> int:
    """When the node lost the address; since it joined, where nobody saw it go."""
    return node.gone_ns.get(host, node.since_ns)
