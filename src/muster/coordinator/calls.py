"""What clients may ask, whichever way they reach the coordinator: the control socket or the HTTP API."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import anyio.to_thread
import msgspec
import psutil

from muster.coordinator import intake, logbook, previews
from muster.coordinator.comparing import Clocks
from muster.coordinator.find import find, refusal
from muster.coordinator.inspection import Inspection
from muster.coordinator.knowledge import Knowledge
from muster.coordinator.ledger import Ledger
from muster.coordinator.outputs import OutputStore, Reader
from muster.coordinator.placing import Placing
from muster.errors import LogError, MusterError, RequestError
from muster.eventlog.api import EventLog
from muster.known import Known
from muster.needs import ModelNeeds
from muster.placement import Placement, Refusal, decide
from muster.protocol import (
    Create,
    Delete,
    Drain,
    Get,
    Inspect,
    Measure,
    Preview,
    Query,
    ReadOutput,
    Resume,
    Retry,
)
from muster.replies import Accepted, Created, Found, Measuring, Needs, Noted, Outputs, Previewed, Refused, Snapshot
from muster.spec import Failure, ModelWorkload, Phase
from muster.state import Broken, Deleting, Finished, State

#: The longest that one `ReadOutput` may wait, in seconds.
_MAX_OUTPUT_WAIT_SECONDS = 30.0


PlainRequest = Delete | Drain | Resume | Retry | Get | Query | Measure
#: What has to know the model first.
PlacingRequest = Create | Preview | Inspect
ClientRequest = PlainRequest | PlacingRequest

R = TypeVar("R", bound=Created | Accepted | Noted | Refused)


class Calls:
    """Answers calls from the books. `wake` is called after one that may have changed what is due."""

    def __init__(
        self,
        log: EventLog,
        ledger: Ledger,
        outputs: OutputStore,
        knowledge: Knowledge,
        wake: Callable[[], None],
        clocks: Clocks,
        fenced: Mapping[str, int],
        pulse: Callable[[], None],
    ) -> None:
        self._log = log
        self._ledger = ledger
        self._outputs = outputs
        self._knowledge = knowledge
        self._inspection = Inspection(knowledge)
        self._wake = wake
        self._clocks = clocks
        self._fenced = fenced
        self._pulse = pulse
        self.placing = Placing(ledger)

    def answer(self, request: PlainRequest) -> Created | Accepted | Noted | Snapshot | Found | Measuring | Refused:
        """What the request is answered with; what follows from it is under way."""
        match request:
            case Get(links=links):
                return self._snapshot(links=links)
            case Query():
                return self._query(request)
            case Measure():
                self._knowledge.measure_round += 1
                self._pulse()
                return Measuring(round=self._knowledge.measure_round)
            case Delete() | Drain() | Resume() | Retry():
                return self._change(lambda: intake.change(self._ledger, request))

    async def place(self, request: PlacingRequest) -> Created | Accepted | Noted | Previewed | Needs | Refused:
        """What the request is answered with, once it is known what the model needs, or that nobody knows."""
        if isinstance(request, Inspect):
            found = await self._inspection.needs(request.model, request.revision or None, self._ledger.state)
            return Refused(failure=found) if isinstance(found, Failure) else found
        needs, weights_bytes, unknown = None, 0, ""
        workload = request.spec.workload
        created = isinstance(request, Create) and intake.find_created(self._ledger.state, request.key) is not None
        if isinstance(workload, ModelWorkload) and not created:
            found = await self._inspection.needs(workload.model, workload.revision, self._ledger.state)
            if isinstance(found, Needs):
                needs = found.needs
            elif isinstance(request, Preview) and not found.retryable:
                return Refused(failure=found)
            else:
                unknown = found.message
                weights_bytes = await self._inspection.weights_bytes(workload.model)
        if isinstance(request, Preview):
            state, known = self._ledger.state, self._ledger.known()
            reply = await anyio.to_thread.run_sync(
                previews.preview, state, known, request, needs, weights_bytes, abandon_on_cancel=True
            )
            return msgspec.structs.replace(reply, unknown=unknown) if isinstance(reply, Previewed) else reply
        return await self._create(request, needs, weights_bytes)

    async def _create(self, request: Create, needs: ModelNeeds | None, weights_bytes: int) -> Created | Refused:
        if (answer := intake.refused(self._ledger, request)) is not None:
            return answer

        def look(state: State, known: Known, *, advise: bool = False) -> Placement | Refusal:
            return decide(request.spec, state, known, needs, weights_bytes=weights_bytes, advise=advise)

        found = await self.placing.search(request.spec, look)
        if isinstance(found, Refusal):
            advised = functools.partial(look, self._ledger.state, self._ledger.known(), advise=True)
            better = await anyio.to_thread.run_sync(advised, abandon_on_cancel=True)
            # Where room has appeared meanwhile, it must be there still when the instance is logged.
            found = better if isinstance(better, Refusal) else await self.placing.search(request.spec, look)
        return self._change(lambda: intake.create(self._ledger, request, found, needs))

    def _change(self, carry_out: Callable[[], R]) -> R | Refused:
        try:
            reply = carry_out()
            self._ledger.settle()
        except LogError as error:
            reply = refusal(error, Phase.PLACING)
        self._wake()
        return reply

    def encoded_state(self) -> msgspec.Raw:
        """The state as msgpack."""
        return msgspec.Raw(msgspec.msgpack.encode(self._ledger.state))

    def _snapshot(self, *, links: bool) -> Snapshot:
        return Snapshot(
            state=self.encoded_state(),
            beats=tuple(beat for _, beat in sorted(self._knowledge.beats.items())),
            facts=tuple(facts for _, facts in sorted(self._knowledge.facts.items())),
            links=tuple(told for _, told in sorted(self._knowledge.links.items())) if links else (),
            measure_round=self._knowledge.measure_round,
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
