"""What clients may ask, whichever way they reach the coordinator: the control socket or the HTTP API."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import msgspec
import psutil

from muster.coordinator import intake, logbook
from muster.coordinator.comparing import Clocks
from muster.coordinator.find import find, refusal
from muster.coordinator.ledger import Ledger
from muster.coordinator.outputs import OutputStore, Reader
from muster.errors import LogError, MusterError, RequestError
from muster.eventlog.api import EventLog
from muster.protocol import Beat, Create, Delete, Drain, Get, Query, ReadOutput, Resume, Retry
from muster.replies import Accepted, Created, Found, Noted, Outputs, Refused, Snapshot
from muster.spec import NodeId, Phase
from muster.state import Broken, Deleting, Finished

#: The longest that one `ReadOutput` may wait, in seconds.
_MAX_OUTPUT_WAIT_SECONDS = 30.0


ClientRequest = Create | Delete | Drain | Resume | Retry | Get | Query


class Calls:
    """Answers calls from the books. `wake` is called after one that may have changed what is due."""

    def __init__(
        self,
        log: EventLog,
        ledger: Ledger,
        outputs: OutputStore,
        beats: Mapping[NodeId, Beat],
        wake: Callable[[], None],
        clocks: Clocks,
        fenced: Mapping[str, int],
    ) -> None:
        self._log = log
        self._ledger = ledger
        self._outputs = outputs
        self._beats = beats
        self._wake = wake
        self._clocks = clocks
        self._fenced = fenced

    def answer(self, request: ClientRequest) -> Created | Accepted | Noted | Snapshot | Found | Refused:
        """What the request is answered with; what follows from it is under way."""
        match request:
            case Get():
                return self._snapshot()
            case Query():
                return self._query(request)
            case Create() | Delete() | Drain() | Resume() | Retry():
                try:
                    reply = intake.change(self._ledger, request)
                    self._ledger.settle()
                except LogError as error:
                    reply = refusal(error, Phase.PLACING)
                self._wake()
                return reply

    def encoded_state(self) -> msgspec.Raw:
        """The state as msgpack."""
        return msgspec.Raw(msgspec.msgpack.encode(self._ledger.state))

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            state=self.encoded_state(),
            beats=tuple(self._beats[name] for name in sorted(self._beats)),
            memory_bytes=psutil.Process().memory_info().rss,
            log_bytes=self._log.bytes_used,
            clocks=self._clocks.all(),
            fenced=dict(self._fenced),
        )

    def _query(self, query: Query) -> Found | Refused:
        try:
            return logbook.search(self._log, query)
        except MusterError as error:
            return refusal(error, Phase.PLACING)

    def read_output(self, request: ReadOutput, answer: Callable[[Outputs | Refused], None]) -> None:
        """Answer with what the ranks printed: at once, or when there is a line or the waiting is over."""
        try:
            instance = find(self._ledger.state, request.instance)
        except RequestError as error:
            answer(refusal(error, Phase.RUNNING))
            return
        found = self._outputs.read(instance.id, request.after, request.rank)
        over = isinstance(instance.status, Broken | Finished | Deleting)
        if found.lines or over or not request.wait_seconds > 0:  # not: NaN is no time to wait
            answer(found)
            return
        until = time.monotonic() + min(request.wait_seconds, _MAX_OUTPUT_WAIT_SECONDS)
        self._outputs.wait(instance.id, Reader(found.position, request.rank, until, answer))
