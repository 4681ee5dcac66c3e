"""What workers report: applied once, logged if it still matters, counted if it is too late."""

from __future__ import annotations

import msgspec
from loguru import logger

from muster.bus import Deduplicator, Verdict
from muster.coordinator.comparing import Clocks
from muster.coordinator.ledger import Ledger
from muster.coordinator.nodes import bad_addresses
from muster.coordinator.outputs import OutputStore
from muster.errors import RequestError
from muster.events import (
    Event,
    NodeChanged,
    NodeLost,
    NodeResumed,
    NodeSetAside,
    RankFact,
    ReportId,
    Unknown,
    decode_event,
    kind_of,
)
from muster.protocol import Output, Report
from muster.replies import Acked, Refused
from muster.spec import Failure
from muster.state import rank_of


class Reports:
    """Takes reports and outputs, and says what to answer. `fenced` counts those of an older attempt or boot."""

    def __init__(self, ledger: Ledger, outputs: OutputStore, clocks: Clocks, fenced: dict[str, int]) -> None:
        self._ledger = ledger
        self._outputs = outputs
        self._clocks = clocks
        self._fenced = fenced
        self._seen = Deduplicator()

    def take(self, message: Report | Output) -> Acked | Refused | None:
        """The answer; `None` where one before it is missing and its worker will send all of them again.

        Raises:
            LogError: the log cannot be written; nothing has happened, and the worker sends it again.
        """
        verdict = self._seen.judge(message, self._ledger.state)
        if verdict is Verdict.STRANGER:
            self._fenced["boot"] += message.node in self._ledger.state.nodes
            failure = Failure(
                kind="node-unknown",
                message=f"node {message.node} has not said hello with boot {message.boot}",
                node=message.node,
                retryable=True,
            )
            return Refused(failure=failure)
        if verdict is Verdict.MISSING:
            return None
        if verdict is Verdict.APPLY:
            if isinstance(message, Output):
                if message.instance in self._ledger.state.instances:
                    self._outputs.add(message)
            else:
                refused = self._apply(message)
                if refused is not None:
                    return refused
            self._seen.applied(message)
        safe = self._seen.acknowledged(message.node, message.boot, self._ledger.state)
        return Acked(n=max(safe, message.n))

    def _apply(self, report: Report) -> Refused | None:
        """Log a worker's event, unless it is too late to matter."""
        try:
            event = decode_event(report.event)
            _check_authority(event, report)
        except (RequestError, msgspec.DecodeError, RecursionError) as error:
            failure = Failure(kind="request-invalid", message=f"report {report.n}: {error}", node=report.node)
            return Refused(failure=failure)
        if isinstance(event, RankFact) and rank_of(self._ledger.state, event) is None:
            self._fenced["attempt"] += 1
            logger.debug("stale {} of {} attempt {}", type(event).__name__, event.instance, event.attempt)
            return None
        self._ledger.heard_ns[report.node] = self._ledger.clock.now_ns()
        happened_ns = self._clocks.here_ns(report.node, report.boot, report.happened_ns)
        identity = ReportId(node=report.node, boot=report.boot, n=report.n, happened_ns=happened_ns)
        self._ledger.record(report.event, event, origin=report.node, cause=report.cause, report=identity)
        return None


def _check_authority(event: Event | Unknown, report: Report) -> None:
    """A worker speaks of its own ranks and of its own end; a kind that is not known here is only kept."""
    if isinstance(event, Unknown):
        return
    own = (report.node, report.boot)
    if isinstance(event, NodeChanged) and bad_addresses(event.candidates):
        raise RequestError(f"node {report.node} has an address that is not IPv4, or too many")
    match event:
        case RankFact() | NodeLost() | NodeSetAside() | NodeChanged() if (event.node, event.boot) == own:
            return
        case NodeResumed() if event.node == report.node:
            return
        case _:
            pass
    raise RequestError(f"node {report.node} may not report {kind_of(event)} of another")
