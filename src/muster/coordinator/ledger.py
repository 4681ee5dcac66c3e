"""The coordinator's books: append to the log, fold into the state, publish, and carry out what follows."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from loguru import logger

from muster.bus import Publisher
from muster.coordinator import logbook
from muster.coordinator.clock import Clock
from muster.errors import LogError
from muster.eventlog.api import EventLog
from muster.events import Envelope, Event, ReportId, Unknown, encode_event, kind_of
from muster.fold import apply
from muster.known import Known
from muster.lifecycle import SECOND, Observed, Settings, decide, wake_ns
from muster.placement import Placement, Refusal
from muster.placement.again import place_again
from muster.spec import COORDINATOR, InstanceId, NodeId
from muster.state import Instance, State

#: Without a look at the state for so many heartbeats, the coordinator itself stood still.
_STANDSTILL_BEATS = 2
#: More decisions in one go are a loop in the rules; it is broken here and said so.
_MAX_ROUNDS = 10_000


class Ledger:
    """Every event goes through `commit`: log before publish, and the state is what the log says."""

    def __init__(self, log: EventLog, publisher: Publisher, settings: Settings) -> None:
        self._log = log
        self._publisher = publisher
        self._settings = settings
        self.state: State = log.load()
        last = log.read(log.head - 1, 1)
        self.clock = Clock(last[0].time_ns if last else 0)
        #: When each node was last heard, and when each rank last moved on, in the clock's time.
        self.heard_ns: dict[NodeId, int] = {}
        self.progress_ns: dict[tuple[InstanceId, int, int], int] = {}
        #: Why nothing can be logged at the moment; `None` while all is well.
        self.trouble: LogError | None = None
        #: Why nothing may be logged now; asked each time, since it may change while this process stands still.
        self.objection: Callable[[], LogError | None] = lambda: None
        self.on_event: Callable[[Envelope, Event | Unknown], None] = lambda envelope, event: None
        #: What nodes tell of themselves beside the log.
        self.known: Callable[[], Known] = Known
        #: Where the next attempt of an instance goes; `None` where that is still being found out.
        self.place: Callable[[Instance, State], Placement | Refusal | None] = lambda instance, state: place_again(
            instance, state, self.known()
        )
        self._settled_ns = self.clock.now_ns()
        #: After which event, and when, it was last seen that those that wait for room have none.
        self._crowded: tuple[int, int] = (-1, 0)
        for node in self.state.nodes:
            self.heard_ns[node] = self._settled_ns

    def commit(
        self, event: Event, *, origin: NodeId = COORDINATOR, cause: int = 0, report: ReportId | None = None
    ) -> Envelope:
        """Log, fold, publish.

        Raises:
            LogError: it could not be logged; nothing has happened.
        """
        return self.record(encode_event(event), event, origin=origin, cause=cause, report=report)

    def record(
        self, body: msgspec.Raw, event: Event | Unknown, *, origin: NodeId, cause: int, report: ReportId | None
    ) -> Envelope:
        """`commit` for an event that came as bytes, which are kept as they are; `event` is what they say."""
        objection = self.objection()
        if objection is not None:
            raise objection
        envelope = Envelope(
            sequence=self.state.sequence + 1,
            time_ns=self.clock.now_ns(),
            origin=origin,
            cause=cause if 0 <= cause <= self.state.sequence else 0,
            body=body,
            report=report,
        )
        state = apply(self.state, envelope)  # first: what cannot be folded must not be in the log
        try:
            self._log.append([envelope])
        except LogError as error:
            if self.trouble is None:
                logger.error("the event log cannot be written: {}", error)
            self.trouble = error
            raise
        if self.trouble is not None:
            logger.info("the event log can be written again")
            self.trouble = None
        self.state = state
        self._publisher.publish(envelope)
        logger.debug("{} {}", envelope.sequence, kind_of(event))
        self.on_event(envelope, event)
        return envelope

    def settle(self) -> None:
        """Carry out what the state demands, until it demands nothing more. A log that is full ends it for now.

        To be called once per heartbeat at least.
        """
        for _ in range(_MAX_ROUNDS):
            now = self.clock.now_ns()
            self._excuse_standstill(now)  # each round: this process may be stopped right after it published something
            crowded = self._is_crowded(now)
            decisions = decide(self.state, self._observed(crowded=crowded), now, self._settings)
            if not decisions:
                if not crowded:
                    self._crowded = (self.state.sequence, now)
                break
            head = self.state.sequence
            for decision in decisions:
                try:
                    self.commit(decision.event, cause=decision.cause or head)
                except LogError:
                    return
        else:
            logger.error("the lifecycle rules do not come to rest; last event {}", self.state.sequence)
        logbook.keep_house(self._log, self.state, self.clock.now_ns())

    def seconds_to_wake(self) -> float:
        """How long until the rules may say something new by themselves."""
        now = self.clock.now_ns()
        wake = wake_ns(self.state, self._observed(), now, self._settings)
        return float("inf") if wake is None else (wake - now) / 1e9

    def _excuse_standstill(self, now: int) -> None:
        """Who was stopped or busy itself heard nobody meanwhile: that time counts against no node and no rank."""
        gap_ns, self._settled_ns = now - self._settled_ns, now
        if gap_ns < _STANDSTILL_BEATS * self._settings.heartbeat_seconds * SECOND:
            return
        logger.warning("this coordinator stood still for {:.1f} s; its nodes get as much more time", gap_ns / SECOND)
        for node, heard in self.heard_ns.items():
            self.heard_ns[node] = min(heard + gap_ns, now)
        for instance in self.state.instances.values():
            for rank in instance.ranks:
                self.progress_ns[instance.id, instance.attempt, rank.rank] = now

    def look_again(self) -> None:
        """There is news for instances that wait for room: the next `settle` looks at them."""
        self._crowded = (-1, 0)

    def _is_crowded(self, now: int) -> bool:
        """Nothing was logged since the last look for room, which was a moment ago: heartbeats come by the thousand."""
        sequence, looked_ns = self._crowded
        return sequence == self.state.sequence and now - looked_ns < self._settings.heartbeat_seconds * SECOND

    def _observed(self, *, crowded: bool = False) -> Observed:
        return Observed(heard_ns=self.heard_ns, progress_ns=self.progress_ns, place=self.place, crowded=crowded)
