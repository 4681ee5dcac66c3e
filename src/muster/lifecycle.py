"""What the state demands next: pure decisions that the coordinator carries out.

`decide` looks at the state, at what is observed beside the log, and at the time, and answers with the events that
must be logged now. `wake_ns` says when to ask again if nothing happens before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import msgspec

from muster.events import (
    AttemptEnding,
    AttemptStarted,
    Event,
    InstanceDeleted,
    InstanceFailed,
    InstanceFinished,
    InstanceReady,
    NodeHeard,
    NodeLost,
    NodeResumed,
    NodeSetAside,
    NodeSuspected,
)
from muster.placement import Placement, Refusal
from muster.placement.again import place_again, same_refusal
from muster.spec import Failure, InstanceId, NodeId, Phase, RestartOnFailure
from muster.state import (
    FAULTS_NS,
    Aside,
    Broken,
    Deleting,
    Draining,
    Ending,
    Failed,
    Finished,
    Gone,
    Instance,
    Node,
    Rank,
    Ready,
    Running,
    Serving,
    Starting,
    State,
    all_gone,
    counted_failures,
    drain_seconds,
    is_script,
    is_settled,
    phase_of,
    takes_instances,
)
from muster.stranded import stranded, stranded_ns

SECOND = 1_000_000_000
#: `wake_ns` is at least so much later than now: what is due but cannot be logged (a full disk) must not become a spin.
_SHORTEST_NAP_NS = SECOND // 20
#: A backoff that doubled so often is at its limit; a float that doubles 1024 times overflows.
_MOST_DOUBLINGS = 64
#: The first wait for a hub, or the network to it: they take longer to come back than a process.
_OUTSIDE_SECONDS = 2.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Clocks of the coordinator, in seconds."""

    heartbeat_seconds: float = 1.0
    lease_seconds: float = 5.0  #: a node that is silent for so long is lost; for half as long, it is given nothing new
    blame_seconds: float = 1.0  #: how long the echo of a failure waits for the failure itself
    grace_seconds: float = 5.0  #: how long a worker may be late to report a deadline that it enforces
    aside_failures: int = 3  #: so many within ten minutes that are blamed on one node set it aside
    aside_seconds: float = 60.0  #: for so long, then twice as long, and so on
    aside_max_seconds: float = 3600.0
    ended_seconds: float = 24 * 3600.0  #: how long a failed or finished instance stays to be looked at
    ended_kept: int = 200  #: and how many of them at most

    @property
    def suspect_seconds(self) -> float:
        """After so much silence a node is suspect: half its lease."""
        return self.lease_seconds / 2


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """What is not in the log: when each node was last heard and each rank last moved on, and where there is room.

    `place` answers where the next attempt of an instance goes, `None` where that is still being found out. `crowded`:
    nothing is new since there was no room for those that wait for some, so that they are not looked at.
    """

    heard_ns: Mapping[NodeId, int] = {}
    progress_ns: Mapping[tuple[InstanceId, int, int], int] = {}
    place: Callable[[Instance, State], Placement | Refusal | None] = place_again
    crowded: bool = False


class Decision(msgspec.Struct, frozen=True):
    """An event to log, and the sequence of the event that led to it (0: time passed)."""

    event: Event
    cause: int = 0


def decide(state: State, observed: Observed, now_ns: int, settings: Settings) -> list[Decision]:
    """The events that must be logged now; empty when the state is settled. Ask again after logging them.

    `now_ns` is on the clock of the envelopes. At most one event per node and instance.
    """
    decisions: list[Decision] = []
    for name, node in state.nodes.items():
        event = _next_of_node(name, node, state, observed, now_ns, settings)
        if event is not None:
            decisions.append(Decision(event))
        if isinstance(event, NodeSetAside):
            break  # the next one must see that this one is aside: somebody has to be left
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
    times = [time for name, node in state.nodes.items() for time in _node_times(name, node, observed, now_ns, settings)]
    for instance in state.instances.values():
        match instance.status:
            case Broken(failure=last, retry_at_ns=int(retry)) if all_gone(instance):
                if last.phase is not Phase.PLACING:  # room comes with an event
                    times.append(retry)
            case Starting() | Running():
                times.extend(_rank_times(instance, observed, settings))
                if (stranded_at := stranded_ns(instance, state, int(settings.lease_seconds * SECOND))) is not None:
                    times.append(stranded_at)
            case _ if is_over(instance):
                times.append(_expiry_ns(instance, settings))
            case _:
                pass
    return max(min(times), now_ns + _SHORTEST_NAP_NS) if times else None


# --- nodes ----------------------------------------------------------------------------------------------------


def _next_of_node(
    name: NodeId, node: Node, state: State, observed: Observed, now_ns: int, settings: Settings
) -> Event | None:
    if node.lost is not None:
        return None
    silent = (now_ns - observed.heard_ns.get(name, now_ns)) / SECOND
    said = f"no heartbeat for {silent:.1f} s"
    if silent >= settings.lease_seconds:
        return NodeLost(node=name, boot=node.info.boot, reason=f"{said} (lease {settings.lease_seconds:g} s)")
    if silent >= settings.suspect_seconds and node.suspect is None:
        reason = f"{said}; it is lost after {settings.lease_seconds:g} s"
        return NodeSuspected(node=name, boot=node.info.boot, reason=reason)
    if silent < settings.suspect_seconds and node.suspect is not None:
        return NodeHeard(node=name, boot=node.info.boot)
    match node.duty:
        case Aside(until_ns=int(until)) if until <= now_ns:
            return NodeResumed(node=name, reason="it is tried again", trial=True)
        case Serving():
            return _set_aside(name, node, state, now_ns, settings)
        case _:
            return None


def _set_aside(name: NodeId, node: Node, state: State, now_ns: int, settings: Settings) -> NodeSetAside | None:
    """Give a node that keeps failing nothing new, where another one is left."""
    faults = [fault for fault in node.faults_ns if now_ns - fault < FAULTS_NS]
    enough = settings.aside_failures if node.asides == 0 else 1
    if len(faults) < enough or not any(takes_instances(other) for key, other in state.nodes.items() if key != name):
        return None
    wait = min(settings.aside_seconds * 2.0 ** min(node.asides, _MOST_DOUBLINGS), settings.aside_max_seconds)
    blamed = [item for instance in state.instances.values() for item in instance.failures if item.node == name]
    last = f", at last: {blamed[-1].message}" if blamed else ""
    again = " since it was tried again" if node.asides else f" in {FAULTS_NS // SECOND // 60} minutes"
    return NodeSetAside(
        node=name,
        boot=node.info.boot,
        reason=f"{len(faults)} failure(s){again} are blamed on it{last}",
        remedy=f"See: muster events --node {name}. When it is mended: muster resume {name}",
        until_ns=now_ns + int(wait * SECOND),
    )


def _node_times(name: NodeId, node: Node, observed: Observed, now_ns: int, settings: Settings) -> Iterator[int]:
    if node.lost is not None:
        return
    heard = observed.heard_ns.get(name, now_ns)
    yield heard + int(settings.lease_seconds * SECOND)
    if node.suspect is None:
        yield heard + int(settings.suspect_seconds * SECOND)
    if isinstance(node.duty, Aside) and node.duty.until_ns is not None:
        yield node.duty.until_ns


# --- instances ------------------------------------------------------------------------------------------------


def _next(instance: Instance, state: State, observed: Observed, now_ns: int, settings: Settings) -> Event | None:
    match instance.status:
        case Starting() | Running():
            failure = (
                _blame(instance, observed, now_ns, settings)
                or _overdue(instance, observed, now_ns, settings)
                or stranded(instance, state, now_ns, int(settings.lease_seconds * SECOND))
            )
            if failure is not None:
                return fail(instance, failure, now_ns)
            moved = _leave_drained(instance, state)
            if moved is not None:
                return moved
            if is_script(instance) and all_gone(instance) and not _failures_of(instance):
                return InstanceFinished(instance=instance.id, attempt=instance.attempt)
            if isinstance(instance.status, Starting) and all(_up(instance, rank) for rank in instance.ranks):
                return InstanceReady(instance=instance.id, attempt=instance.attempt)
            return None
        case Broken(failure=last, retry_at_ns=int(retry)) if retry <= now_ns and all_gone(instance):
            if last.phase is Phase.PLACING and observed.crowded:
                return None
            return _retry(instance, last, observed.place(instance, state), now_ns)
        case Ending() if all_gone(instance):
            return _retry(instance, None, observed.place(instance, state), now_ns)
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


def _retry(instance: Instance, last: Failure | None, found: Placement | Refusal | None, now_ns: int) -> Event | None:
    """The next attempt. Where it has no place it waits for one, and says so once for each reason."""
    if found is None:
        return None
    if isinstance(found, Refusal):
        failure = Failure(
            kind=found.kind, message=found.message, remedy=found.remedy, phase=Phase.PLACING, retryable=True
        )
        if last is not None and same_refusal(failure, last):
            return None
        return InstanceFailed(instance=instance.id, attempt=instance.attempt, failure=failure, retry_at_ns=now_ns)
    return AttemptStarted(
        instance=instance.id,
        attempt=instance.attempt + 1,
        assignments=found.assignments,
        backend=found.backend,
        layout=found.layout,
    )


def _leave_drained(instance: Instance, state: State) -> AttemptEnding | None:
    """The end of an attempt that has a rank on a node that is to be empty. A script is left to its end if it may be."""
    for rank in instance.ranks:
        node = state.nodes.get(rank.node)
        if node is None or not isinstance(node.duty, Draining) or isinstance(rank.state, Gone):
            continue
        if is_script(instance) and not node.duty.now:
            continue
        return AttemptEnding(
            instance=instance.id,
            attempt=instance.attempt,
            reason=f"node {rank.node} is being drained",
            drain_seconds=0.0 if node.duty.now else drain_seconds(instance),
        )
    return None


def fail(instance: Instance, failure: Failure, now_ns: int) -> InstanceFailed:
    """The end of the current attempt, with the time of the next one as the restart policy has it.

    The budget is the blamed rank's own; the wait grows with every failed attempt, whoever is to blame.
    """
    restart = instance.spec.restart
    retry_at_ns: int | None = None
    counted = counted_failures(instance, failure.rank, now_ns)
    if isinstance(restart, RestartOnFailure) and failure.retryable and counted < restart.maximum:
        doublings = 0 if is_settled(instance, now_ns) else min(instance.failed_attempts, _MOST_DOUBLINGS)
        first = max(restart.backoff_seconds, _OUTSIDE_SECONDS * (failure.kind == "model-unavailable"))
        wait = min(first * 2.0**doublings, restart.backoff_max_seconds)
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
    if now_ns < _blame_due_ns(instance, observed, first_ns, settings):
        return None
    if echo.step is None:
        return echo
    # Ranks that wait for each other are late together: the one at the lowest step is whom the others wait for.
    return min((failure for _, failure in failed if failure.step is not None), key=lambda failure: failure.step or 0)


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
