"""What the state demands next: pure decisions that the coordinator carries out.

`decide` looks at the state, at what is observed beside the log, and at the time, and answers with the events that
must be logged now. `wake_ns` says when to ask again if nothing happens before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from muster.errors import PlacementError
from muster.events import (
    AttemptStarted,
    Event,
    InstanceDeleted,
    InstanceFailed,
    InstanceFinished,
    InstanceReady,
    NodeLost,
)
from muster.placement import place
from muster.spec import Failure, InstanceId, NodeId, Phase, RestartOnFailure
from muster.state import (
    Broken,
    Deleting,
    Failed,
    Finished,
    Gone,
    Instance,
    Rank,
    Ready,
    Running,
    Starting,
    State,
    all_gone,
    counted_failures,
    is_script,
    phase_of,
)

SECOND = 1_000_000_000
#: `wake_ns` is at least so much later than now: what is due but cannot be logged (a full disk) must not become a spin.
_SHORTEST_NAP_NS = SECOND // 20
#: A backoff that doubled so often is at its limit; a float that doubles 1024 times overflows.
_MOST_DOUBLINGS = 64


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Clocks of the coordinator, in seconds."""

    heartbeat_seconds: float = 1.0
    lease_seconds: float = 5.0  #: a node that is silent for so long is lost
    blame_seconds: float = 1.0  #: how long the echo of a failure waits for the failure itself
    grace_seconds: float = 5.0  #: how long a worker may be late to report a deadline that it enforces
    ended_seconds: float = 24 * 3600.0  #: how long a failed or finished instance stays to be looked at
    ended_kept: int = 200  #: and how many of them at most


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """What is not in the log: when each node was last heard, and when each rank last made progress."""

    heard_ns: Mapping[NodeId, int] = {}
    progress_ns: Mapping[tuple[InstanceId, int, int], int] = {}


class Decision(msgspec.Struct, frozen=True):
    """An event to log, and the sequence of the event that led to it (0: time passed)."""

    event: Event
    cause: int = 0


def decide(state: State, observed: Observed, now_ns: int, settings: Settings) -> list[Decision]:
    """The events that must be logged now; empty when the state is settled. Ask again after logging them.

    `now_ns` is on the clock of the envelopes. At most one event per node and instance.
    """
    decisions = list(_lost_nodes(state, observed, now_ns, settings))
    if decisions:
        return decisions
    for instance in state.instances.values():
        event = _next(instance, state, observed, now_ns, settings)
        if event is not None:
            decisions.append(Decision(event))
        if isinstance(event, AttemptStarted):
            break  # the next placement must see what this one takes
    return decisions or list(_expired(state, now_ns, settings))


def wake_ns(state: State, observed: Observed, now_ns: int, settings: Settings) -> int | None:
    """The next time, after `now_ns`, at which `decide` may say something new by itself; `None` for never."""
    times = [
        observed.heard_ns.get(name, now_ns) + int(settings.lease_seconds * SECOND)
        for name, node in state.nodes.items()
        if node.lost is None
    ]
    for instance in state.instances.values():
        match instance.status:
            case Broken(failure=last, retry_at_ns=int(retry)) if all_gone(instance):
                if last.phase is not Phase.PLACING:  # room comes with an event
                    times.append(retry)
            case Starting() | Running():
                times.extend(_rank_times(instance, observed, settings))
            case _ if is_over(instance):
                times.append(_expiry_ns(instance, settings))
            case _:
                pass
    return max(min(times), now_ns + _SHORTEST_NAP_NS) if times else None


# --- nodes ----------------------------------------------------------------------------------------------------


def _lost_nodes(state: State, observed: Observed, now_ns: int, settings: Settings) -> Iterator[Decision]:
    lease = int(settings.lease_seconds * SECOND)
    for name, node in state.nodes.items():
        silent = now_ns - observed.heard_ns.get(name, now_ns)
        if node.lost is None and silent >= lease:
            reason = f"no heartbeat for {silent / SECOND:.1f} s (lease {settings.lease_seconds:g} s)"
            yield Decision(NodeLost(node=name, boot=node.info.boot, reason=reason))


# --- instances ------------------------------------------------------------------------------------------------


def _next(instance: Instance, state: State, observed: Observed, now_ns: int, settings: Settings) -> Event | None:
    match instance.status:
        case Starting() | Running():
            failure = _blame(instance, observed, now_ns, settings) or _overdue(instance, observed, now_ns, settings)
            if failure is not None:
                return fail(instance, failure, now_ns)
            if is_script(instance) and all_gone(instance):
                return InstanceFinished(instance=instance.id, attempt=instance.attempt)
            if isinstance(instance.status, Starting) and all(_up(instance, rank) for rank in instance.ranks):
                return InstanceReady(instance=instance.id, attempt=instance.attempt)
            return None
        case Broken(failure=last, retry_at_ns=int(retry)) if retry <= now_ns and all_gone(instance):
            return _retry(instance, last, state, now_ns)
        case Deleting() if all_gone(instance):
            return InstanceDeleted(instance=instance.id, attempt=instance.attempt)
        case _:
            return None


def _up(instance: Instance, rank: Rank) -> bool:
    match rank.state:
        case Ready():
            return True
        case Gone(exit_code=0):
            return is_script(instance)
        case _:
            return False


def _retry(instance: Instance, last: Failure, state: State, now_ns: int) -> Event | None:
    """The next attempt. Where it has no place it waits for one, and says so once for each reason."""
    try:
        placement = place(instance.spec, state)
    except PlacementError as error:
        failure = Failure(
            kind=error.kind, message=error.message, remedy=error.remedy, phase=Phase.PLACING, retryable=True
        )
        if failure == last:
            return None
        return InstanceFailed(instance=instance.id, attempt=instance.attempt, failure=failure, retry_at_ns=now_ns)
    return AttemptStarted(
        instance=instance.id,
        attempt=instance.attempt + 1,
        assignments=placement.assignments,
        backend=placement.backend,
    )


def fail(instance: Instance, failure: Failure, now_ns: int) -> InstanceFailed:
    """The end of the current attempt, with the time of the next one as the restart policy has it."""
    restart = instance.spec.restart
    retry_at_ns: int | None = None
    failed = counted_failures(instance, now_ns)
    if isinstance(restart, RestartOnFailure) and failure.retryable and failed < restart.maximum:
        doublings = min(failed, _MOST_DOUBLINGS)
        wait = min(restart.backoff_seconds * 2.0**doublings, restart.backoff_max_seconds)
        retry_at_ns = now_ns + int(wait * SECOND)
    return InstanceFailed(instance=instance.id, attempt=instance.attempt, failure=failure, retry_at_ns=retry_at_ns)


def is_over(instance: Instance) -> bool:
    """Whether the instance has ended for good and left no process."""
    match instance.status:
        case Finished() | Broken(retry_at_ns=None):
            return all_gone(instance)
        case _:
            return False


# --- blame ----------------------------------------------------------------------------------------------------


def _failure_of(rank: Rank) -> Failure | None:
    match rank.state:
        case Failed(failure=failure) | Gone(failure=Failure() as failure):
            return failure
        case _:
            return None


def _failures_of(instance: Instance) -> list[tuple[int, Failure]]:
    """Every rank's failure with the time that it was reported at."""
    return [(rank.since_ns, failure) for rank in instance.ranks if (failure := _failure_of(rank))]


def _blame(instance: Instance, observed: Observed, now_ns: int, settings: Settings) -> Failure | None:
    """The failure that began it: the first primary one; an echo only when nothing better comes in time."""
    failed = _failures_of(instance)
    if not failed:
        return None
    primary = [item for item in failed if not item[1].secondary]
    if primary:
        return min(primary, key=lambda item: item[0])[1]
    first_ns, echo = min(failed, key=lambda item: item[0])
    return echo if now_ns >= _blame_due_ns(instance, observed, first_ns, settings) else None


def _blame_due_ns(instance: Instance, observed: Observed, first_ns: int, settings: Settings) -> int:
    """Until when the failure behind an echo may come in.

    A node that was not heard since the echo may itself be the cause: then the wait is for its lease. A kill of the
    worker ends its runners too, and the neighbours' echo is here long before the silence shows.
    """
    due_ns = first_ns + int(settings.blame_seconds * SECOND)
    for rank in instance.ranks:
        heard_ns = observed.heard_ns.get(rank.node, first_ns + 1)
        if heard_ns <= first_ns and not isinstance(rank.state, Gone | Failed):
            due_ns = max(due_ns, heard_ns + int(settings.lease_seconds * SECOND))
    return due_ns


# --- deadlines ------------------------------------------------------------------------------------------------


def _judged(instance: Instance) -> list[Rank]:
    """The ranks that the others may be waiting for: those in the earliest phase that any rank is in."""
    alive = [rank for rank in instance.ranks if not isinstance(rank.state, Failed | Gone)]
    phases = list(Phase)
    earliest = min((phases.index(phase_of(instance, rank)) for rank in alive), default=0)
    return [rank for rank in alive if phases.index(phase_of(instance, rank)) == earliest]


def _due_ns(instance: Instance, rank: Rank, observed: Observed, settings: Settings) -> int | None:
    """When the coordinator itself calls a rank late; its worker should have done so before."""
    seconds = instance.spec.deadlines.of(phase_of(instance, rank))
    if seconds is None:
        return None
    since = max(other.since_ns for other in instance.ranks)
    moved = observed.progress_ns.get((instance.id, instance.attempt, rank.rank), 0)
    return max(since, moved) + int((seconds + settings.grace_seconds) * SECOND)


def _overdue(instance: Instance, observed: Observed, now_ns: int, settings: Settings) -> Failure | None:
    for rank in _judged(instance):
        due = _due_ns(instance, rank, observed, settings)
        if due is not None and now_ns >= due:
            phase = phase_of(instance, rank)
            return Failure(
                kind="deadline-passed",
                message=f"nothing was heard of the rank for {instance.spec.deadlines.of(phase):g} s "
                f"and {settings.grace_seconds:g} s of grace, while its node sends heartbeats",
                remedy="Look at the worker's log on that node.",
                phase=phase,
                rank=rank.rank,
                node=rank.node,
                retryable=True,
            )
    return None


def _rank_times(instance: Instance, observed: Observed, settings: Settings) -> Iterator[int]:
    for rank in _judged(instance):
        due = _due_ns(instance, rank, observed, settings)
        if due is not None:
            yield due
    failed = _failures_of(instance)
    if failed:
        yield _blame_due_ns(instance, observed, min(failed, key=lambda item: item[0])[0], settings)


# --- what ended long ago ----------------------------------------------------------------------------------------


def _expired(state: State, now_ns: int, settings: Settings) -> Iterator[Decision]:
    """Failed and finished instances go after a day, or when there are too many of them, the oldest first."""
    ended = [instance for instance in state.instances.values() if is_over(instance)]
    ended.sort(key=lambda instance: instance.since_ns)
    surplus = len(ended) - settings.ended_kept
    for position, instance in enumerate(ended):
        if position < surplus or now_ns >= _expiry_ns(instance, settings):
            yield Decision(InstanceDeleted(instance=instance.id, attempt=instance.attempt))


def _expiry_ns(instance: Instance, settings: Settings) -> int:
    return instance.since_ns + int(settings.ended_seconds * SECOND)
