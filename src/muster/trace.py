"""The timeline of an attempt, from its events: per rank, phase by phase, and what each phase waited for. Pure.

An event of a worker counts from when it happened, as far as that is known, and else from when it was logged.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from muster.errors import RequestError
from muster.events import (
    AttemptEnding,
    AttemptStarted,
    Envelope,
    Fact,
    InstanceAdopted,
    InstanceCreated,
    InstanceDeleted,
    InstanceDeleting,
    InstanceFact,
    InstanceFailed,
    InstanceFinished,
    InstanceReady,
    NodeLost,
    RankConnected,
    RankFact,
    RankFailed,
    RankGone,
    RankListening,
    RankLoaded,
    RankPrepared,
    RankReady,
)
from muster.spec import Backend, Failure, InstanceId, ModelWorkload, NodeId
from muster.trace_clock import Clock, Mark


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A phase of a rank, or, with rank -1, of the whole instance.

    `end_ns` is `None` while it lasts. Before `start_ns` it waited `waited_ns` for `waited_for`; a phase that still
    waits, or waited in vain, has no length. An instance's phase waited for its slowest rank, counted from the fastest.
    `delay_ns` is how long after `end_ns` the coordinator heard of the end: 0 where that cannot be told.
    """

    rank: int
    node: NodeId
    name: str
    start_ns: int
    end_ns: int | None = None
    waited_for: str | None = None
    waited_ns: int = 0
    delay_ns: int = 0
    failure: Failure | None = None

    @property
    def began(self) -> bool:
        """Whether it did more than wait."""
        return self.waited_ns == 0 or self.rank < 0 or (self.end_ns is not None and self.end_ns > self.start_ns)

    @property
    def duration_ns(self) -> int | None:
        """How long it took, without the waiting; `None` while it lasts."""
        return None if self.end_ns is None else self.end_ns - self.start_ns


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """What happened in one attempt. `ended_ns` is the time of its last event so far.

    `outcome` is "starting", "ready", "ending", "failed", "finished", "deleting" or "deleted".
    """

    instance: InstanceId
    attempt: int
    started_ns: int
    ended_ns: int
    outcome: str
    spans: tuple[Span, ...]
    failure: Failure | None = None


def timeline(envelopes: Sequence[Envelope], instance: InstanceId, attempt: int | None = None) -> Timeline:
    """The timeline of an attempt of `instance`; `None` for its last one. Other events in `envelopes` are skipped.

    Where the log no longer holds the beginning, the timeline begins with what is there.

    Raises:
        RequestError: `envelopes` hold nothing of that attempt.
    """
    events = [(item, item.event()) for item in envelopes]
    ours = [event for _, event in events if isinstance(event, InstanceFact) and event.instance == instance]
    chosen = max((event.attempt for event in ours), default=0) if attempt is None else attempt
    story = _Story(instance, chosen)
    clock = Clock()
    for item, event in events:
        mark = clock.mark(item)
        if isinstance(event, InstanceCreated | InstanceAdopted) and event.instance == instance:
            story.is_model = isinstance(event.spec.workload, ModelWorkload)
        if isinstance(event, NodeLost):
            story.lose(mark, event)
        elif isinstance(event, InstanceFact) and event.instance == instance and event.attempt == chosen:
            story.add(mark, event)
    if not story.times_ns:
        raise RequestError(
            f"the event log holds nothing of attempt {chosen} of instance {instance}"
            if ours
            else f"the event log holds nothing of instance {instance}",
            remedy="Look at `muster events` for what it holds; old events are forgotten after a while.",
        )
    return story.tell()


class _Member(msgspec.Struct):
    """What is known of one rank while its events are read."""

    rank: int
    node: NodeId
    boot: str
    marks: dict[type[Fact], Mark]
    failure: Failure | None = None
    gone: Mark | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} on node {self.node}"


class _Gate(msgspec.Struct, frozen=True):
    """A moment that several ranks wait for, and the rank that is last. `time_ns` is `None` while it has not come."""

    time_ns: int | None
    last: _Member
    others: int = 0  #: how many more are missing

    def __str__(self) -> str:
        return str(self.last) + (f" and {self.others} more" if self.others else "")


class _Step(msgspec.Struct, frozen=True):
    """A phase of a rank: the event that ends it, and the gate that it starts at."""

    name: str
    end: type[Fact]
    gate: _Gate | None = None


class _Story:
    """Collects the events of one attempt, and tells them as spans."""

    def __init__(self, instance: InstanceId, attempt: int) -> None:
        self.instance = instance
        self.attempt = attempt
        self.is_model = False
        self.backend: Backend | None = None
        self.times_ns: list[int] = []
        self.began: Mark | None = None  #: where the log still has the beginning
        self.members: dict[int, _Member] = {}
        self.marks: dict[type[Fact], Mark] = {}
        self.failure: Failure | None = None

    # --- collect ------------------------------------------------------------------------------------------------

    def add(self, mark: Mark, event: InstanceFact) -> None:
        if self.began is not None:
            mark = mark.not_before(self.began)
        if isinstance(event, RankFact):
            self._add_of_rank(mark, event)
            return
        if isinstance(event, InstanceReady) and self._stopped():
            return
        self.times_ns.append(mark.time_ns)
        self.marks.setdefault(type(event), mark)
        if isinstance(event, InstanceCreated | AttemptStarted | InstanceAdopted):
            self.began = mark
        match event:
            case InstanceCreated() | AttemptStarted():
                self.backend = event.backend
                for item in event.assignments:
                    self.members[item.rank] = _Member(item.rank, item.node, item.boot, {})
            case InstanceAdopted():
                self.backend = event.backend
                for item in event.ranks:
                    self.members[item.rank] = _Member(item.rank, item.node, item.boot, {RankReady: mark})
                self.marks.setdefault(InstanceReady, mark)
            case InstanceFailed():
                self.failure = event.failure
            case _:
                pass

    def _add_of_rank(self, mark: Mark, event: RankFact) -> None:
        member = self.members.setdefault(event.rank, _Member(event.rank, event.node, event.boot, {}))
        if (member.node, member.boot) != (event.node, event.boot) or member.gone is not None:
            return
        ending = RankFailed in member.marks or self._stopped() is not None
        if ending and not isinstance(event, RankFailed | RankGone):
            return  # progress that crossed the end on its way
        self.times_ns.append(mark.time_ns)
        member.marks.setdefault(type(event), mark)
        match event:
            case RankFailed():
                member.failure = member.failure or event.failure
            case RankGone():
                member.gone = mark
            case _:
                pass

    def lose(self, mark: Mark, event: NodeLost) -> None:
        """A lost node takes its ranks along without a word from them."""
        for member in self.members.values():
            if member.gone is None and (member.node, member.boot) == (event.node, event.boot):
                member.gone = member.marks[RankGone] = mark
                self.times_ns.append(mark.time_ns)

    # --- tell ---------------------------------------------------------------------------------------------------

    def tell(self) -> Timeline:
        members = [self.members[rank] for rank in sorted(self.members)]
        prepared, listening, loaded = self._gates(members)
        spans = self._instance_spans(members)
        for member in members:
            steps = [_Step("preparing", RankPrepared)]
            if listening is not None and (member is not members[-1] or RankListening in member.marks):
                steps.append(_Step("listening", RankListening, prepared))
            dialling = listening if prepared is not None and prepared.time_ns is not None else None
            steps.append(_Step("forming", RankConnected, dialling or prepared))
            if self.is_model or RankLoaded in member.marks:
                steps.append(_Step("loading", RankLoaded))
            steps.append(_Step("warming", RankReady, loaded))
            spans += self._rank_spans(member, steps)
        return Timeline(
            instance=self.instance,
            attempt=self.attempt,
            started_ns=self._began_ns(),
            ended_ns=max(self.times_ns),
            outcome=self._outcome(),
            spans=tuple(spans),
            failure=self.failure,
        )

    def _gates(self, members: list[_Member]) -> tuple[_Gate | None, _Gate | None, _Gate | None]:
        """When all were prepared; when all that the dialling (last) rank waits for listened; when all were loaded."""
        if self.backend == "ring":
            listeners = members[:-1]
        else:
            listeners = [member for member in members if RankListening in member.marks]
        loaders = members if self.is_model else []
        return _gate(members, RankPrepared), _gate(listeners, RankListening), _gate(loaders, RankLoaded)

    def _began_ns(self) -> int:
        return min(self.times_ns)

    def _outcome(self) -> str:
        for kind, name in (
            (InstanceFailed, "failed"),
            (InstanceFinished, "finished"),
            (InstanceDeleted, "deleted"),
            (InstanceDeleting, "deleting"),
            (AttemptEnding, "ending"),
            (InstanceReady, "ready"),
        ):
            if kind in self.marks:
                return name
        return "starting"

    def _stopped(self) -> Mark | None:
        """When the end of the attempt began for every rank."""
        kinds = (InstanceFailed, InstanceFinished, InstanceDeleting, AttemptEnding)
        return min((self.marks[kind] for kind in kinds if kind in self.marks), default=None)

    def _instance_spans(self, members: list[_Member]) -> list[Span]:
        ready, stopped = self.marks.get(InstanceReady), self._stopped()
        reached = ready or stopped
        up = _Gap.between(members, RankReady) if ready else _Gap()
        failure = None if ready else self.failure
        spans = [_of_instance("starting", self._began_ns(), reached, gap=up, failure=failure)]
        if stopped is None:
            return spans
        if ready:
            spans.append(_of_instance("running", ready.time_ns, stopped, failure=self.failure))
        gone = [member.gone for member in members if member.gone]
        end = max(stopped, *gone) if gone and len(gone) == len(members) else None
        spans.append(_of_instance("stopping", stopped.time_ns, end, gap=_Gap.between(members, RankGone)))
        return spans

    def _rank_spans(self, member: _Member, steps: list[_Step]) -> list[Span]:
        stops = [member.marks.get(RankFailed), member.gone, self._stopped()]
        stop = min((mark for mark in stops if mark is not None), default=None)
        spans: list[Span] = []
        cursor_ns, reached_end = self._began_ns(), True
        for position, step in enumerate(steps):
            mark = member.marks.get(step.end)
            if mark is None and any(later.end in member.marks for later in steps[position + 1 :]):
                continue  # a later phase shows that this one did not happen, or was forgotten
            span = self._step_span(member, step, cursor_ns, mark, stop)
            spans.append(span)
            if mark is None or span.end_ns is None:
                reached_end = False
                break
            cursor_ns = span.end_ns
        if stop is None:
            return spans
        if reached_end:
            running = Span(
                rank=member.rank,
                node=member.node,
                name="running",
                start_ns=cursor_ns,
                end_ns=max(stop.time_ns, cursor_ns),
                delay_ns=stop.delay_ns,
                failure=member.failure,
            )
            spans.append(running)
        if member.gone is None or member.gone > stop:
            spans.append(
                Span(
                    rank=member.rank,
                    node=member.node,
                    name="stopping",
                    start_ns=max(cursor_ns, stop.time_ns),
                    end_ns=max(cursor_ns, stop.time_ns, member.gone.time_ns) if member.gone else None,
                    delay_ns=member.gone.delay_ns if member.gone else 0,
                )
            )
        return spans

    def _step_span(self, member: _Member, step: _Step, cursor_ns: int, mark: Mark | None, stop: Mark | None) -> Span:
        end = mark or stop
        end_ns = max(cursor_ns, end.time_ns) if end else None
        latest_ns = end_ns if end_ns is not None else max(self.times_ns)
        start_ns, waited_for = cursor_ns, None
        if step.gate is not None and step.gate.last is not member:
            opened_ns = step.gate.time_ns
            if opened_ns is None and mark is None:
                start_ns, waited_for = latest_ns, str(step.gate)
            elif opened_ns is not None and cursor_ns < opened_ns <= latest_ns:
                start_ns, waited_for = opened_ns, str(step.gate)
        return Span(
            rank=member.rank,
            node=member.node,
            name=step.name,
            start_ns=start_ns,
            end_ns=end_ns,
            waited_for=waited_for,
            waited_ns=max(0, start_ns - cursor_ns),
            delay_ns=end.delay_ns if end else 0,
            failure=None if mark else member.failure,
        )


def _gate(members: list[_Member], kind: type[Fact]) -> _Gate | None:
    """The moment when each of `members` had reported `kind`; `None` where nobody waits for anybody."""
    if not members:
        return None
    missing = [member for member in members if kind not in member.marks]
    if missing:
        return _Gate(None, missing[0], len(missing) - 1)
    last = max(members, key=lambda member: member.marks[kind])
    return _Gate(last.marks[kind].time_ns, last)


class _Gap(msgspec.Struct, frozen=True):
    """How long the fastest of several ranks was ahead of the slowest."""

    waited_for: str | None = None
    waited_ns: int = 0

    @classmethod
    def between(cls, members: list[_Member], kind: type[Fact]) -> _Gap:
        there = sorted((member for member in members if kind in member.marks), key=lambda item: item.marks[kind])
        if len(there) < 2 or len(there) < len(members):
            return cls()
        first, last = there[0], there[-1]
        return cls(str(last), max(0, last.marks[kind].time_ns - first.marks[kind].time_ns))


def _of_instance(
    name: str, start_ns: int, end: Mark | None, *, gap: _Gap | None = None, failure: Failure | None = None
) -> Span:
    gap = gap or _Gap()
    return Span(
        rank=-1,
        node=NodeId(""),
        name=name,
        start_ns=start_ns,
        end_ns=end.time_ns if end else None,
        waited_for=gap.waited_for,
        waited_ns=gap.waited_ns,
        failure=failure,
    )
