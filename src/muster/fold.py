"""The fold of events into the state: `apply(state, envelope) -> state`. Pure: no clock, no socket, no log."""

from __future__ import annotations

from typing import assert_never

import msgspec

from muster.events import (
    AttemptStarted,
    CoordinatorStarted,
    Envelope,
    Event,
    InstanceCreated,
    InstanceDeleted,
    InstanceDeleting,
    InstanceFailed,
    InstanceFinished,
    InstanceReady,
    NodeJoined,
    NodeLost,
    RankConnected,
    RankFailed,
    RankGone,
    RankListening,
    RankLoaded,
    RankPrepared,
    RankReady,
    Unknown,
)
from muster.spec import (
    Assignment,
    Failure,
    InstanceId,
    Phase,
)
from muster.state import (
    Assigned,
    Broken,
    Connected,
    Deleting,
    Failed,
    Finished,
    Gone,
    Instance,
    InstanceStatus,
    Listening,
    Loaded,
    Node,
    Prepared,
    Rank,
    Ready,
    Running,
    Starting,
    State,
    counted_failures,
    is_script,
    phase_of,
    rank_of,
    wants_ranks,
)

#: How many failures of earlier attempts an instance remembers.
FAILURES_KEPT = 8


def apply(state: State, envelope: Envelope) -> State:
    """Fold one logged event into the state. Pure: no clock, no socket, no log.

    A stale rank event and an event of an unknown kind advance the sequence and change nothing else.

    Raises:
        ValueError: the envelope is not the next one in sequence; the caller asks for a replay.
    """
    if envelope.sequence != state.sequence + 1:
        raise ValueError(f"event {envelope.sequence} does not follow {state.sequence}")
    state = msgspec.structs.replace(state, sequence=envelope.sequence)
    if envelope.report is not None:
        reports = {**state.reports, envelope.report.node: envelope.report}
        state = msgspec.structs.replace(state, reports=reports)
    event = envelope.event()
    return state if isinstance(event, Unknown) else _fold(state, event, envelope)


def _fold(state: State, event: Event, envelope: Envelope) -> State:
    match event:
        case CoordinatorStarted():
            return msgspec.structs.replace(state, epoch=event.epoch, coordinator_boot=event.boot)
        case NodeJoined():
            node = Node(info=event.info, since_ns=envelope.time_ns)
            return msgspec.structs.replace(state, nodes={**state.nodes, event.info.node: node})
        case NodeLost():
            return _lose_node(state, event, envelope.time_ns)
        case InstanceCreated():
            instance = Instance(
                id=event.instance,
                spec=event.spec,
                created_ns=envelope.time_ns,
                attempt=event.attempt,
                backend=event.backend,
                status=Starting(),
                since_ns=envelope.time_ns,
                ranks=_assigned(event.assignments, envelope.time_ns),
                created_by=envelope.sequence,
                caused_by=envelope.sequence,
                key=event.key,
            )
            return _with_instance(state, instance)
        case AttemptStarted():
            return _begin_attempt(state, event, envelope)
        case InstanceReady():
            return _with_status(state, event.instance, event.attempt, Running(), envelope.time_ns)
        case InstanceFailed():
            return _fail_instance(state, event, envelope.time_ns)
        case InstanceFinished():
            return _with_status(state, event.instance, event.attempt, Finished(), envelope.time_ns)
        case InstanceDeleting():
            status = Deleting(event.drain_seconds)
            return _with_status(state, event.instance, event.attempt, status, envelope.time_ns)
        case InstanceDeleted():
            instances = {key: value for key, value in state.instances.items() if key != event.instance}
            return msgspec.structs.replace(state, instances=instances)
        case (
            RankPrepared() | RankListening() | RankConnected() | RankLoaded() | RankReady() | RankFailed() | RankGone()
        ):
            return _fold_rank(state, event, envelope.time_ns)
    assert_never(event)


RankEvent = RankPrepared | RankListening | RankConnected | RankLoaded | RankReady | RankFailed | RankGone


def _fold_rank(state: State, event: RankEvent, time_ns: int) -> State:
    rank = rank_of(state, event)
    if rank is None:
        return state
    match event:
        case RankPrepared():
            rank = msgspec.structs.replace(
                rank,
                state=Prepared(),
                pid=event.pid,
                process_started=event.process_started,
                addresses=event.addresses,
                steps=event.steps,
            )
        case RankListening():
            rank = msgspec.structs.replace(rank, state=Listening())
        case RankConnected():
            rank = msgspec.structs.replace(rank, state=Connected())
        case RankLoaded():
            rank = msgspec.structs.replace(
                rank,
                state=Loaded(),
                layers=event.layers,
                sharding=event.sharding,
                weights_bytes=event.weights_bytes,
            )
        case RankReady():
            rank = msgspec.structs.replace(rank, state=Ready())
        case RankFailed():
            rank = msgspec.structs.replace(rank, state=Failed(event.failure))
        case RankGone():
            failure = _end_of(state.instances[event.instance], rank, event.exit_code)
            rank = msgspec.structs.replace(rank, state=Gone(event.exit_code, failure))
        case _:
            assert_never(event)
    instance = state.instances[event.instance]
    return _with_instance(state, _with_rank(instance, msgspec.structs.replace(rank, since_ns=time_ns)))


def _end_of(instance: Instance, rank: Rank, exit_code: int | None) -> Failure | None:
    """Why a rank is gone; `None` where it was asked to go, or is a script that ended well."""
    if isinstance(rank.state, Failed):
        return rank.state.failure
    if not wants_ranks(instance) or (exit_code == 0 and is_script(instance)):
        return None
    how = f"was ended by signal {-exit_code}" if exit_code is not None and exit_code < 0 else f"exited with {exit_code}"
    return Failure(
        kind="rank-exited",
        message=f"the runner {how}",
        remedy=f"See its output: muster logs {instance.id}",
        phase=phase_of(instance, rank),
        rank=rank.rank,
        node=rank.node,
        exit_code=exit_code,
        retryable=True,
    )


def _assigned(assignments: tuple[Assignment, ...], time_ns: int) -> tuple[Rank, ...]:
    return tuple(
        Rank(rank=item.rank, node=item.node, boot=item.boot, state=Assigned(), since_ns=time_ns)
        for item in sorted(assignments, key=lambda item: item.rank)
    )


def _with_rank(instance: Instance, rank: Rank) -> Instance:
    ranks = (*instance.ranks[: rank.rank], rank, *instance.ranks[rank.rank + 1 :])
    return msgspec.structs.replace(instance, ranks=ranks)


def _with_instance(state: State, instance: Instance) -> State:
    return msgspec.structs.replace(state, instances={**state.instances, instance.id: instance})


def _with_status(state: State, instance_id: InstanceId, attempt: int, status: InstanceStatus, time_ns: int) -> State:
    instance = state.instances.get(instance_id)
    if instance is None or instance.attempt != attempt:
        return state
    if not isinstance(status, Deleting) and not wants_ranks(instance):
        return state  # an attempt that has failed, or is being deleted, is not ready any more
    return _with_instance(state, msgspec.structs.replace(instance, status=status, since_ns=time_ns))


def _begin_attempt(state: State, event: AttemptStarted, envelope: Envelope) -> State:
    instance = state.instances.get(event.instance)
    if instance is None or event.attempt <= instance.attempt:
        return state
    return _with_instance(
        state,
        msgspec.structs.replace(
            instance,
            attempt=event.attempt,
            backend=event.backend,
            status=Starting(),
            since_ns=envelope.time_ns,
            ranks=_assigned(event.assignments, envelope.time_ns),
            caused_by=envelope.sequence,
        ),
    )


def _fail_instance(state: State, event: InstanceFailed, time_ns: int) -> State:
    instance = state.instances.get(event.instance)
    if instance is None or instance.attempt != event.attempt:
        return state
    return _with_instance(
        state,
        msgspec.structs.replace(
            instance,
            status=Broken(event.failure, event.retry_at_ns),
            since_ns=time_ns,
            failures=(*instance.failures, event.failure)[-FAILURES_KEPT:],
            # A placement that was refused is no attempt: nothing was started.
            failed_attempts=counted_failures(instance, time_ns) + (event.failure.phase is not Phase.PLACING),
        ),
    )


def _lose_node(state: State, event: NodeLost, time_ns: int) -> State:
    """Every process of a lost boot counts as gone: a worker's runners die with it."""
    node = state.nodes.get(event.node)
    if node is None or node.info.boot != event.boot:
        return state
    nodes = {**state.nodes, event.node: msgspec.structs.replace(node, lost=event.reason, since_ns=time_ns)}
    state = msgspec.structs.replace(state, nodes=nodes)
    for instance in state.instances.values():
        for rank in instance.ranks:
            if rank.node != event.node or rank.boot != event.boot or isinstance(rank.state, Gone):
                continue
            failure = rank.state.failure if isinstance(rank.state, Failed) else None
            lost = failure or Failure(
                kind="node-lost",
                message=f"node {event.node} was lost: {event.reason}",
                remedy="Start its worker again, or create the instance on other nodes.",
                phase=phase_of(instance, rank),
                rank=rank.rank,
                node=event.node,
                retryable=True,
            )
            gone = msgspec.structs.replace(rank, state=Gone(None, lost), since_ns=time_ns)
            instance = _with_rank(instance, gone)
        state = _with_instance(state, instance)
    return state
