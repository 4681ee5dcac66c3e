"""What a log must never show: a second reader of it that folds every event and checks that it was allowed."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from muster.events import (
    AttemptStarted,
    Envelope,
    Event,
    InstanceCreated,
    InstanceDeleted,
    InstanceFailed,
    InstanceReady,
    NodeLost,
    RankFact,
    RankFailed,
    RankGone,
    RankPrepared,
    Unknown,
)
from muster.fold import apply
from muster.spec import Failure, InstanceId
from muster.state import (
    Broken,
    Ending,
    Gone,
    Ready,
    Starting,
    State,
    all_gone,
    is_script,
    takes_instances,
)

RankKey = tuple[InstanceId, int, int]


class Runner(msgspec.Struct):
    """A runner that the log tells of. `ended` is how its end was told: "" (not yet), "gone", "left", or "lost"."""

    fact: RankPrepared
    ended: str = ""


class Auditor:
    """Takes the log in order. `state` is what it says so far, `runners` is every runner that it ever told of."""

    def __init__(self) -> None:
        self.state = State()
        self.runners: dict[RankKey, Runner] = {}
        self._logged: dict[int, Envelope] = {}
        self._reports: dict[tuple[str, str], int] = {}
        self._processes: dict[tuple[int, float], RankKey] = {}

    def take(self, envelopes: Iterable[Envelope]) -> None:
        """Check the next events of the log, and fold them."""
        for envelope in envelopes:
            event = envelope.event()
            try:
                self._check(envelope, event)
                self.state = apply(self.state, envelope)
                self._note(event)
            except (AssertionError, ValueError) as error:
                raise AssertionError(f"{error}\nlog: {envelope}\n{event}\n{self._about(event)}") from error
            self._logged[envelope.sequence] = envelope

    def compare(self, seen: Iterable[Envelope]) -> None:
        """What an observer saw is in the log, as it saw it. The log must have been taken as far."""
        for envelope in seen:
            assert self._logged.get(envelope.sequence) == envelope, f"seen, and not in the log: {envelope}"

    def _check(self, envelope: Envelope, event: Event | Unknown) -> None:
        report = envelope.report
        if report is not None:
            before = self._reports.get((report.node, report.boot), 0)
            assert report.n > before, f"report {report.n} was applied after report {before}"
            self._reports[report.node, report.boot] = report.n
        match event:
            case RankFact():
                self._check_rank(event)
            case AttemptStarted() | InstanceReady() | InstanceFailed() | InstanceDeleted():
                self._check_instance(event)
            case InstanceCreated():
                assert event.instance not in self.state.instances, "it is there already"
                self._check_places(event)
            case _:
                pass

    def _check_rank(self, event: RankFact) -> None:
        instance = self.state.instances.get(event.instance)
        assert instance is not None, "a rank event of no instance"
        rank = instance.ranks[event.rank]
        assert (instance.attempt, rank.node, rank.boot) == (event.attempt, event.node, event.boot), "a stale rank event"
        assert self.state.nodes[event.node].info.boot == event.boot, "a rank event of an earlier boot"
        assert not isinstance(rank.state, Gone), "the rank is gone already"
        if isinstance(event, RankFailed):
            _check_cause(event.failure)
        if isinstance(event, RankPrepared):
            key, process = (event.instance, event.attempt, event.rank), (event.pid, event.process_started)
            assert process not in self._processes, f"its runner was that of {self._processes.get(process)}"
            self._processes[process] = key
            mine = {(address.host, address.port) for address in event.addresses}
            for instance in self.state.instances.values():
                for rank in instance.ranks:
                    if not isinstance(rank.state, Gone) and (instance.id, rank.rank) != (event.instance, event.rank):
                        theirs = {(address.host, address.port) for address in rank.addresses}
                        assert not mine & theirs, f"{mine & theirs} is also of {instance.id} rank {rank.rank}"

    def _check_instance(self, event: AttemptStarted | InstanceReady | InstanceFailed | InstanceDeleted) -> None:
        instance = self.state.instances.get(event.instance)
        assert instance is not None, "there is no such instance"
        match event:
            case AttemptStarted():
                assert event.attempt == instance.attempt + 1, f"attempt {event.attempt} follows {instance.attempt}"
                assert all_gone(instance), "ranks of the attempt before are not gone"
                assert isinstance(instance.status, Broken | Ending), "the attempt before is not over"
                self._check_places(event)
            case InstanceReady():
                assert event.attempt == instance.attempt, "not of this attempt"
                assert isinstance(instance.status, Starting), "it was not coming up"
                well = (
                    isinstance(r.state, Ready) or (is_script(instance) and r.state == Gone(0)) for r in instance.ranks
                )
                assert all(well), "a rank is not ready"
            case InstanceFailed():
                assert event.attempt == instance.attempt, "not of this attempt"
                _check_cause(event.failure)
                assert event.retry_at_ns is None or event.failure.retryable, "what cannot pass is tried again"
            case InstanceDeleted():
                assert all_gone(instance), "ranks of it are not gone"

    def _check_places(self, event: InstanceCreated | AttemptStarted) -> None:
        """Only nodes that take instances; one that was asked for by name may be on trial."""
        spec = event.spec if isinstance(event, InstanceCreated) else self.state.instances[event.instance].spec
        assert [item.rank for item in event.assignments] == list(range(spec.ranks)), "not each rank once"
        for item in event.assignments:
            node = self.state.nodes[item.node]
            assert node.info.boot == item.boot, f"another boot of {item.node}"
            assert node.lost is None, f"{item.node} is lost"
            assert node.suspect is None, f"{item.node} is suspect"
            assert takes_instances(node) or item.node in spec.nodes, f"{item.node} takes nothing"

    def _note(self, event: Event | Unknown) -> None:
        match event:
            case RankPrepared():
                self.runners[event.instance, event.attempt, event.rank] = Runner(event)
            case RankGone():
                runner = self.runners.get((event.instance, event.attempt, event.rank))
                if runner is not None:
                    runner.ended = "left" if event.left else "gone"
            case NodeLost():
                for runner in self.runners.values():
                    if (runner.fact.node, runner.fact.boot) == (event.node, event.boot) and not runner.ended:
                        runner.ended = "lost"
            case _:
                pass

    def _about(self, event: Event | Unknown) -> object:
        return self.state.instances.get(getattr(event, "instance", InstanceId("")), self.state.nodes)


def _check_cause(failure: Failure) -> None:
    assert failure.kind, "a failure without a kind"
    assert failure.message, "a failure without a message"
    assert failure.rank < 0 or failure.node, "a failure of a rank without its node"
