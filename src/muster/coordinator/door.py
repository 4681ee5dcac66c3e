"""The coordinator as the HTTP API sees it: `muster.api.backend.Backend`, on the coordinator's own event loop."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import anyio

from muster.coordinator.calls import Calls, ClientRequest, PlacingRequest
from muster.coordinator.directory import Standing, standing_of, why_over
from muster.coordinator.gateway import Gateway
from muster.coordinator.ledger import Ledger
from muster.coordinator.served import Readiness, ServedModel
from muster.coordinator.streams import AnswerStream
from muster.errors import RequestError
from muster.eventlog.api import EventLog
from muster.events import Envelope
from muster.protocol import Generate, ReadOutput
from muster.replies import AnyPiece, AnyReply, Done, Outputs, Refused
from muster.sampling import SamplingParams
from muster.state import Instance, State

#: Events that a follower reads from the log at a time.
_FOLLOWED_EVENTS = 500
#: How long the token of a probe may take.
_PROBE_SECONDS = 5.0
#: How long what a probe found stands for the next one that asks.
_PROBE_LASTS_SECONDS = 5.0


class _Probe:
    """A token that was asked for only to see whether one comes."""

    def __init__(self) -> None:
        self.ended = anyio.Event()
        self.ended_at: float | None = None
        self.reason = ""

    def take(self, piece: AnyPiece) -> None:
        if not isinstance(piece, Done | Refused):
            return
        self.reason = piece.failure.message if isinstance(piece, Refused) else ""
        self.ended_at = time.monotonic()
        self.ended.set()


class Door:
    """Valid while the coordinator runs. Everything happens on its event loop."""

    def __init__(self, log: EventLog, ledger: Ledger, gateway: Gateway, calls: Calls) -> None:
        self._log = log
        self._ledger = ledger
        self._gateway = gateway
        self._calls = calls
        self._logged = anyio.Event()
        self._probes: dict[str, _Probe] = {}

    def generate(self, request: Generate) -> AnswerStream:
        """Queue a request. It never raises: a request that cannot be taken yields one `Refused`."""
        return AnswerStream(lambda answer: self._gateway.ask(request, answer), self._gateway.cancel)

    def models(self) -> tuple[ServedModel, ...]:
        """Every model that an instance serves or will serve, by name."""
        dispatcher = self._gateway.dispatcher
        found: list[ServedModel] = []
        for name, instances in dispatcher.directory.served().items():
            loads = [load for instance in instances if (load := dispatcher.load_of(instance)) is not None]
            found.append(
                ServedModel(
                    name=name,
                    instances=tuple(instance.id for instance in instances),
                    ready=sum(standing_of(instance) is Standing.READY for instance in instances),
                    created_ns=min(instance.created_ns for instance in instances),
                    waiting_requests=dispatcher.waiting(name),
                    running_requests=sum(len(load.requests) for load in loads),
                )
            )
        return tuple(found)

    def state(self) -> State:
        """The state now."""
        return self._ledger.state

    async def call(self, request: ClientRequest | ReadOutput) -> AnyReply:
        """What the control socket would answer; `ReadOutput` may wait."""
        if isinstance(request, PlacingRequest):
            return await self._calls.place(request)
        if not isinstance(request, ReadOutput):
            return self._calls.answer(request)
        replies: list[Outputs | Refused] = []
        answered = anyio.Event()

        def take(reply: Outputs | Refused) -> None:
            replies.append(reply)
            answered.set()

        self._calls.read_output(request, take)
        await answered.wait()
        return replies[0]

    # --- events -------------------------------------------------------------------------------------------

    def note_logged(self) -> None:
        """An event was logged: whoever follows reads on."""
        self._logged.set()
        self._logged = anyio.Event()

    async def follow(self, after: int) -> AsyncIterator[Envelope]:
        """Logged events after a sequence, those of the past first, then each as it is logged; endless.

        All come from the log, so that a reader that is slow takes no memory. Where the log no longer goes back so
        far, it begins with the oldest event that there is.

        Raises:
            LogError: the log cannot be read.
        """
        while True:
            logged = self._logged
            found = self._log.read(after, _FOLLOWED_EVENTS)
            for envelope in found:
                yield envelope
                after = envelope.sequence
            if not found:
                await logged.wait()

    # --- readiness ----------------------------------------------------------------------------------------

    async def probe(self, model: str) -> Readiness:
        """Whether the model decodes: by its running answers, or where it is idle by a token made for the purpose."""
        try:
            candidates = self._gateway.dispatcher.directory.candidates(model)
        except RequestError as error:
            return Readiness(model=model, ready=False, reason=error.message)
        standings = [standing_of(instance) for instance in candidates]
        if Standing.READY not in standings:
            coming = Standing.COMING in standings
            reason = "no instance is ready yet" if coming else why_over(model, candidates)
            return Readiness(model=model, ready=False, reason=reason)
        seconds = self._seconds_since_token(candidates)
        if seconds is not None:
            return Readiness(model=model, ready=True, seconds_since_token=seconds)
        probe = self._probes.get(model)
        if probe is None or (probe.ended_at or time.monotonic()) + _PROBE_LASTS_SECONDS <= time.monotonic():
            probe = self._probes[model] = _Probe()
            self._gateway.ask(_one_token(model), probe.take)
        await probe.ended.wait()
        seconds = time.monotonic() - (probe.ended_at or 0.0)
        if probe.reason:
            return Readiness(model=model, ready=False, reason=f"a request for one token failed: {probe.reason}")
        return Readiness(model=model, ready=True, seconds_since_token=seconds)

    def _seconds_since_token(self, candidates: tuple[Instance, ...]) -> float | None:
        """Since the last token of an answer that runs; `None` where none runs, or none moves."""
        now = time.monotonic()
        loads = [self._gateway.dispatcher.load_of(instance) for instance in candidates]
        ages = [
            now - load.token_at
            for load in loads
            if load is not None and load.requests and now - load.token_at < load.step_seconds
        ]
        return min(ages, default=None)


def _one_token(model: str) -> Generate:
    return Generate(instance=model, prompt=(0,), sampling=SamplingParams(max_tokens=1), wait_seconds=_PROBE_SECONDS)
