"""The fold of events into the state: `apply(state, envelope) -> state`. Pure: no clock, no socket, no log."""

from __future__ import annotations

from typing import assert_never

import msgspec

from muster.events import (
    AdoptedRank,
    AttemptEnding,
    AttemptStarted,
    CoordinatorStarted,
    Envelope,
    Event,
    InstanceAdopted,
    InstanceCleared,
    InstanceCreated,
    InstanceDeleted,
    InstanceDeleting,
    InstanceFailed,
    InstanceFinished,
    InstanceReady,
    InstanceRetried,
    NodeChanged,
    NodeDraining,
    NodeHeard,
    NodeJoined,
    NodeLost,
    NodeResumed,
    NodeSetAside,
    NodeSuspected,
    RankConnected,
    RankFailed,
    RankFetched,
    RankGone,
    RankListening,
    RankLoaded,
    RankPrepared,
    RankReady,
    Unknown,
)
from muster.fold_nodes import fold_node, lose_node, set_aside, with_fault
from muster.spec import (
    Assignment,
    Failure,
    InstanceId,
    Phase,
)
from muster.state import (
    Aside,
    Assigned,
    Broken,
    Connected,
    Deleting,
    Ending,
    Failed,
    Finished,
    Gone,
    Instance,
    InstanceStatus,
    Listening,
    Loaded,
    Prepared,
    Rank,
    Ready,
    Running,
    Starting,
    State,
    blames_node,
    is_script,
    is_settled,
    phase_of,
    rank_of,
    wants_ranks,
    with_instance,
    with_rank,
)

#: How many failures of earlier attempts an instance remembers.
FAILURES_KEPT = 8


RankEvent = RankPrepared | RankFetched | RankListening | RankConnected | RankLoaded | RankReady | RankFailed | RankGone
InstanceEvent = (
    InstanceCreated
    | InstanceAdopted
    | InstanceCleared
    | AttemptStarted
    | AttemptEnding
    | InstanceRetried
    | InstanceReady
    | InstanceFailed
    | InstanceFinished
    | InstanceDeleting
    | InstanceDeleted
)


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
            return msgspec.structs.replace(state, epoch=event.epoch, term=event.term, coordinator_boot=event.boot)
        case (
            NodeJoined()
            | NodeSuspected()
            | NodeHeard()
            | NodeDraining()
            | NodeSetAside()
            | NodeChanged()
            | NodeResumed()
        ):
            return fold_node(state, event, envelope.time_ns)
        case NodeLost():
            return lose_node(state, event, envelope.time_ns)
        case (
            InstanceCreated()
            | InstanceAdopted()
            | InstanceCleared()
            | AttemptStarted()
            | AttemptEnding()
            | InstanceRetried()
            | InstanceReady()
            | InstanceFailed()
            | InstanceFinished()
            | InstanceDeleting()
            | InstanceDeleted()
        ):
            return _fold_instance(state, event, envelope)
        case (
            RankPrepared()
            | RankFetched()
            | RankListening()
            | RankConnected()
            | RankLoaded()
            | RankReady()
            | RankFailed()
            | RankGone()
        ):
            return _fold_rank(state, event, envelope.time_ns)
    assert_never(event)


def _fold_instance(state: State, event: InstanceEvent, envelope: Envelope) -> State:
    match event:
        case InstanceCreated():
            ranks = _assigned(event.assignments, envelope.time_ns)
            return with_instance(state, _new(event, envelope, Starting(), ranks))
        case InstanceAdopted():
            ranks = _adopted(event.ranks, envelope.time_ns)
            return with_instance(state, _new(event, envelope, Running(), ranks))
        case InstanceCleared():
            return state  # it was never in this log
        case AttemptStarted():
            return _begin_attempt(state, event, envelope)
        case AttemptEnding():
            status = Ending(event.reason, event.drain_seconds)
            return _with_status(state, event.instance, event.attempt, status, envelope.time_ns)
        case InstanceRetried():
            return _retry_instance(state, event, envelope.time_ns)
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
        case _:
            assert_never(event)


def _fold_rank(state: State, event: RankEvent, time_ns: int) -> State:
    rank = rank_of(state, event)
    if rank is None or isinstance(event, RankFetched):
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
            if event.left:
                state = set_aside(state, event.node, Aside(event.left, event.remedy))
        case _:
            assert_never(event)
    instance = state.instances[event.instance]
    return with_instance(state, with_rank(instance, msgspec.structs.replace(rank, since_ns=time_ns)))


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


def _new(
    event: InstanceCreated | InstanceAdopted, envelope: Envelope, status: InstanceStatus, ranks: tuple[Rank, ...]
) -> Instance:
    return Instance(
        id=event.instance,
        spec=event.spec,
        created_ns=envelope.time_ns,
        attempt=event.attempt,
        backend=event.backend,
        status=status,
        since_ns=envelope.time_ns,
        ranks=ranks,
        created_by=envelope.sequence,
        caused_by=envelope.sequence,
        key=event.key,
        layout=event.layout,
        needs=event.needs,
    )


def _adopted(found_ranks: tuple[AdoptedRank, ...], time_ns: int) -> tuple[Rank, ...]:
    return tuple(
        Rank(
            rank=found.rank,
            node=found.node,
            boot=found.boot,
            state=Ready() if found.exit_code is None else Gone(found.exit_code),
            since_ns=time_ns,
            pid=found.pid,
            process_started=found.process_started,
            addresses=found.addresses,
            steps=found.steps,
            layers=found.layers,
            sharding=found.sharding,
            weights_bytes=found.weights_bytes,
        )
        for found in sorted(found_ranks, key=lambda found: found.rank)
    )


def _assigned(assignments: tuple[Assignment, ...], time_ns: int) -> tuple[Rank, ...]:
    return tuple(
        Rank(rank=item.rank, node=item.node, boot=item.boot, state=Assigned(), since_ns=time_ns)
        for item in sorted(assignments, key=lambda item: item.rank)
    )


def _with_status(state: State, instance_id: InstanceId, attempt: int, status: InstanceStatus, time_ns: int) -> State:
    instance = state.instances.get(instance_id)
    if instance is None or instance.attempt != attempt:
        return state
    if not isinstance(status, Deleting) and not wants_ranks(instance):
        return state  # an attempt that has failed, or is being deleted, is not ready any more
    return with_instance(state, msgspec.structs.replace(instance, status=status, since_ns=time_ns))


def _begin_attempt(state: State, event: AttemptStarted, envelope: Envelope) -> State:
    instance = state.instances.get(event.instance)
    if instance is None or event.attempt <= instance.attempt:
        return state
    return with_instance(
        state,
        msgspec.structs.replace(
            instance,
            attempt=event.attempt,
            spec=msgspec.structs.replace(instance.spec, ranks=len(event.assignments)),
            backend=event.backend,
            status=Starting(),
            since_ns=envelope.time_ns,
            ranks=_assigned(event.assignments, envelope.time_ns),
            caused_by=envelope.sequence,
            layout=event.layout,
        ),
    )


def _fail_instance(state: State, event: InstanceFailed, time_ns: int) -> State:
    instance = state.instances.get(event.instance)
    if instance is None or instance.attempt != event.attempt:
        return state
    failure = event.failure
    settled = is_settled(instance, time_ns)
    blamed = {} if settled else instance.blamed
    failed = 0 if settled else instance.failed_attempts
    if failure.phase is not Phase.PLACING:  # a placement that was refused is no attempt: nothing was started
        blamed, failed = {**blamed, failure.rank: blamed.get(failure.rank, 0) + 1}, failed + 1
    lost = state.nodes.get(failure.node) if failure.kind == "node-lost" else None
    counted = lost is not None and any(fault >= lost.since_ns for fault in lost.faults_ns)
    if blames_node(failure) and wants_ranks(instance) and not counted:  # one loss is one fault, however many it hits
        state = with_fault(state, failure.node, time_ns, settled=settled)
    return with_instance(
        state,
        msgspec.structs.replace(
            instance,
            status=Broken(failure, event.retry_at_ns),
            since_ns=time_ns,
            failures=(*instance.failures, failure)[-FAILURES_KEPT:],
            failed_attempts=failed,
            blamed=blamed,
        ),
    )


def _retry_instance(state: State, event: InstanceRetried, time_ns: int) -> State:
    instance = state.instances.get(event.instance)
    if instance is None or instance.attempt != event.attempt or not isinstance(instance.status, Broken):
        return state
    status = Broken(instance.status.failure, time_ns)
    whole = msgspec.structs.replace(instance, status=status, since_ns=time_ns, failed_attempts=0, blamed={})
    return with_instance(state, whole)
