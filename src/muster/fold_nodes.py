"""The part of the fold that is about nodes: who is there, who takes instances, and what goes with a lost one."""

from __future__ import annotations

from typing import assert_never

import msgspec

from muster.events import (
    NodeChanged,
    NodeDraining,
    NodeHeard,
    NodeJoined,
    NodeLost,
    NodeResumed,
    NodeSetAside,
    NodeSuspected,
)
from muster.spec import Failure, NodeAddress, NodeId
from muster.state import (
    FAULTS_NS,
    Aside,
    Draining,
    Failed,
    Gone,
    Node,
    Serving,
    State,
    phase_of,
    with_instance,
    with_rank,
)

#: How many failures a node is remembered for.
_FAULTS_KEPT = 8
#: How many addresses that it lost.
_GONE_KEPT = 64

NodeEvent = NodeJoined | NodeSuspected | NodeHeard | NodeDraining | NodeSetAside | NodeChanged | NodeResumed


def fold_node(state: State, event: NodeEvent, time_ns: int) -> State:
    """Fold an event about a node's standing; one about another boot of it changes nothing."""
    name = event.info.node if isinstance(event, NodeJoined) else event.node
    node = state.nodes.get(name)
    if isinstance(event, NodeJoined):
        return _with_node(state, _joined(node, event, time_ns))
    if node is None or (not isinstance(event, NodeDraining | NodeResumed) and node.info.boot != event.boot):
        return state
    match event:
        case NodeSuspected():
            return _with_node(state, msgspec.structs.replace(node, suspect=event.reason))
        case NodeHeard():
            return _with_node(state, msgspec.structs.replace(node, suspect=None))
        case NodeDraining():
            return _with_node(state, msgspec.structs.replace(node, duty=Draining(event.reason, event.now)))
        case NodeSetAside():
            return set_aside(state, name, Aside(event.reason, event.remedy, event.until_ns))
        case NodeChanged():
            return _with_node(state, _moved(node, event.candidates, time_ns))
        case NodeResumed():
            asides = node.asides if event.trial else 0
            resumed = msgspec.structs.replace(node, duty=Serving(), faults_ns=(), asides=asides, tried_ns=time_ns)
            return _with_node(state, resumed)
        case _:
            assert_never(event)


def _joined(node: Node | None, event: NodeJoined, time_ns: int) -> Node:
    """An operator's wish outlives the worker; what the worker itself did wrong does not."""
    if node is None:
        return Node(info=event.info, since_ns=time_ns)
    if node.info.boot == event.info.boot:
        moved = _moved(node, event.info.candidates, time_ns)
        return msgspec.structs.replace(moved, info=event.info, since_ns=time_ns, lost=None, suspect=None)
    duty = node.duty if isinstance(node.duty, Draining) else Serving()
    return Node(info=event.info, since_ns=time_ns, duty=duty)


def _moved(node: Node, candidates: tuple[NodeAddress, ...], time_ns: int) -> Node:
    """The node with these addresses; of each that it had before it is noted when it went."""
    there = {one.host for one in candidates}
    gone = {one.host: time_ns for one in node.info.candidates} | node.gone_ns
    latest = sorted(((host, since) for host, since in gone.items() if host not in there), key=lambda one: one[1])
    info = msgspec.structs.replace(node.info, candidates=candidates)
    return msgspec.structs.replace(node, info=info, gone_ns=dict(latest[-_GONE_KEPT:]))


def set_aside(state: State, name: NodeId, aside: Aside) -> State:
    """Give the node nothing new; an operator who drains it has said so already."""
    node = state.nodes.get(name)
    if node is None or isinstance(node.duty, Draining):
        return state
    return _with_node(state, msgspec.structs.replace(node, duty=aside, asides=node.asides + 1))


def _with_node(state: State, node: Node) -> State:
    return msgspec.structs.replace(state, nodes={**state.nodes, node.info.node: node})


def with_fault(state: State, name: NodeId, time_ns: int, *, settled: bool) -> State:
    """Remember a failure that is blamed on a node, and forget those that are no sign of anything any more."""
    node = state.nodes.get(name)
    if node is None:
        return state
    recent = () if settled else tuple(fault for fault in node.faults_ns if time_ns - fault < FAULTS_NS)
    behaved = settled or time_ns - node.tried_ns >= FAULTS_NS
    faults = (*recent, time_ns)[-_FAULTS_KEPT:]
    return _with_node(state, msgspec.structs.replace(node, faults_ns=faults, asides=0 if behaved else node.asides))


def lose_node(state: State, event: NodeLost, time_ns: int) -> State:
    """Every process of a lost boot counts as gone: a worker's runners die with it."""
    node = state.nodes.get(event.node)
    if node is None or node.info.boot != event.boot:
        return state
    lost = msgspec.structs.replace(node, lost=event.reason, suspect=None, since_ns=time_ns)
    state = _with_node(state, lost)
    for instance in state.instances.values():
        for rank in instance.ranks:
            if rank.node != event.node or rank.boot != event.boot or isinstance(rank.state, Gone):
                continue
            failure = rank.state.failure if isinstance(rank.state, Failed) else None
            cause = failure or Failure(
                kind="node-lost",
                message=f"node {event.node} was lost: {event.reason}",
                remedy="Start its worker again, or create the instance on other nodes.",
                phase=phase_of(instance, rank),
                rank=rank.rank,
                node=event.node,
                retryable=True,
            )
            gone = msgspec.structs.replace(rank, state=Gone(None, cause), since_ns=time_ns)
            instance = with_rank(instance, gone)
        state = with_instance(state, instance)
    return state
