"""When logged events happened, which may be a while before they were logged. Pure."""

from __future__ import annotations

import msgspec

from muster.events import Envelope
from muster.spec import BootId, NodeId


class Mark(msgspec.Struct, frozen=True, order=True):
    """When an event happened, and how much later it was logged. What happened at one time has the order of the log."""

    time_ns: int
    sequence: int
    delay_ns: int = 0

    def not_before(self, other: Mark) -> Mark:
        """The same event, but not before another one."""
        late_ns = max(0, other.time_ns - self.time_ns)
        return Mark(self.time_ns + late_ns, self.sequence, max(0, self.delay_ns - late_ns)) if late_ns else self


class Clock:
    """Tells when logged events happened, on the coordinator's clock. Reads them in the order of the log."""

    def __init__(self) -> None:
        self._times_ns: dict[int, int] = {}  #: by sequence
        self._last_ns: dict[tuple[NodeId, BootId], int] = {}  #: of the latest report of a boot

    def mark(self, envelope: Envelope) -> Mark:
        """When it happened: not after it was logged, and not before what led to it, or what its worker reported before.

        Where a report does not say when it happened, and for the coordinator's own events, when it was logged.
        """
        logged_ns, report = envelope.time_ns, envelope.report
        time_ns = logged_ns
        if report is not None and report.happened_ns:
            key = (report.node, report.boot)
            earliest_ns = max(self._times_ns.get(envelope.cause, 0), self._last_ns.get(key, 0))
            time_ns = min(max(report.happened_ns, earliest_ns), logged_ns)
            self._last_ns[key] = time_ns
        self._times_ns[envelope.sequence] = time_ns
        return Mark(time_ns, envelope.sequence, logged_ns - time_ns)
