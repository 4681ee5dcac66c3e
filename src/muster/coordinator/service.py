"""The coordinator: answers on the control socket, applies reports, and keeps the heartbeat."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import anyio
import anyio.abc
import msgspec
from loguru import logger

from muster import __version__
from muster.bus import ControlServer, Deduplicator, Incoming, Publisher, Verdict
from muster.coordinator import intake
from muster.coordinator.calls import Calls
from muster.coordinator.dispatcher import QueueSettings
from muster.coordinator.door import Door
from muster.coordinator.gateway import Gateway
from muster.coordinator.ledger import Ledger
from muster.coordinator.nodes import Registrar
from muster.coordinator.outputs import OutputStore
from muster.coordinator.requests import Request
from muster.errors import LogError, RequestError
from muster.eventlog import Retention, SqliteEventLog
from muster.eventlog.api import EventLog
from muster.events import (
    CoordinatorStarted,
    Envelope,
    Event,
    InstanceDeleted,
    InstanceFact,
    InstanceFailed,
    InstanceFinished,
    NodeJoined,
    NodeLost,
    RankFact,
    ReportId,
    Unknown,
    decode_event,
    encode_envelope,
    kind_of,
)
from muster.lifecycle import Settings
from muster.protocol import (
    Acked,
    Answer,
    AnyPiece,
    AnyReply,
    Beat,
    CancelGenerate,
    Create,
    Delete,
    Done,
    Generate,
    Get,
    Hello,
    Output,
    Pulse,
    Query,
    ReadOutput,
    Refused,
    Replay,
    Replayed,
    Report,
    Welcome,
)
from muster.spec import BootId, Failure, NodeId, NodeInfo, Phase
from muster.state import rank_of

#: Events in one answer to a replay; its reader asks again for the rest.
_REPLAY_EVENTS = 1_000


class CoordinatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where a coordinator listens and keeps its log. Port 0 takes a free one."""

    directory: Path
    host: str = "127.0.0.1"
    control_port: int = 0
    events_port: int = 0
    generation_port: int = 0
    clocks: Settings = Settings()
    retention: Retention = Retention()
    max_waiting: int = 512  #: requests of one model that may wait for room; further ones are refused


class Coordinator:
    """One coordinator on one log. `run` serves until it is cancelled."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        self._boot = BootId(secrets.token_hex(8))
        self._publisher = Publisher(settings.host, settings.events_port, boot=self._boot)
        self._server = ControlServer(settings.host, settings.control_port)
        self._gateway = Gateway(
            settings.host, settings.generation_port, QueueSettings(max_waiting=settings.max_waiting)
        )
        self._reports = Deduplicator()
        self._registrar = Registrar(settings.clocks)
        self._outputs = OutputStore()
        self._beats: dict[NodeId, Beat] = {}
        self._generations: dict[tuple[bytes, int], Request] = {}  #: of the control socket, by connection and call
        self._nudge = anyio.Event()
        self.http_port: int | None = None  #: of the HTTP API beside it, told to whoever says hello
        self.stale = 0  #: rank events that came too late to matter

    @property
    def control_port(self) -> int:
        """The port that workers and clients are given."""
        return self._server.port

    @property
    def generation_port(self) -> int:
        """The port that rank-0 runners dial."""
        return self._gateway.port

    @property
    def door(self) -> Door:
        """What the HTTP API talks to. There is one once `run` has started, and it is of use while that runs."""
        return self._door

    async def run(self, *, task_status: anyio.abc.TaskStatus[int] = anyio.TASK_STATUS_IGNORED) -> None:
        """Open the log and serve; started with the control port.

        Raises:
            LogError: the log cannot be opened.
            LockError: another coordinator has it.
            PortError: a port is taken, or the host is no address of this machine.
        """
        log = SqliteEventLog(self._settings.directory / "events.db", retention=self._settings.retention)
        try:
            async with self._publisher, self._server, self._gateway:
                self._log: EventLog = log
                self._ledger = Ledger(log, self._publisher, self._settings.clocks)
                self._calls = Calls(log, self._ledger, self._outputs, self._beats, self._wake)
                self._door = Door(log, self._ledger, self._gateway, self._calls)
                self._gateway.update(self._ledger.state)
                self._ledger.on_event = self._after
                self._ledger.commit(CoordinatorStarted(epoch=log.epoch, boot=self._boot, version=__version__))
                self._pulse()
                async with anyio.create_task_group() as group:
                    group.start_soon(self._keep_time)
                    task_status.started(self.control_port)
                    await self._serve()
        finally:
            log.close()

    # --- the loop -----------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        async for incoming in self._server.incoming:
            try:
                self._handle(incoming)
                self._ledger.settle()
            except LogError as error:
                self._answer(incoming, intake.refusal(error, Phase.PLACING))
            except Exception:
                # One bad request must not end the coordinator of everybody else.
                logger.exception("request {} failed", type(incoming.call.request).__name__)
                failure = Failure(kind="internal", message="the request failed in the coordinator; see its log")
                self._answer(incoming, Refused(failure=failure))
            self._wake()

    async def _keep_time(self) -> None:
        """Heartbeat, leases, deadlines: decide again whenever time alone may have changed something."""
        beat_seconds = self._settings.clocks.heartbeat_seconds
        next_beat = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= next_beat:
                self._pulse()
                next_beat = now + beat_seconds
            try:
                self._ledger.settle()
            except Exception:
                # A rule that fails on one instance must not end the coordinator of all the others.
                logger.exception("the lifecycle rules failed")
            self._outputs.expire(now)
            nudge = self._nudge
            with anyio.move_on_after(min(next_beat - time.monotonic(), self._ledger.seconds_to_wake())):
                await nudge.wait()

    def _wake(self) -> None:
        self._nudge.set()
        self._nudge = anyio.Event()

    def _pulse(self) -> None:
        self._publisher.pulse(
            Pulse(
                epoch=self._log.epoch,
                coordinator_boot=self._boot,
                head=self._ledger.state.sequence,
                time_ns=self._ledger.clock.now_ns(),
            )
        )

    def _after(self, envelope: Envelope, event: Event | Unknown) -> None:
        """What follows from an event beside the state: waiting clients hear of it."""
        del envelope
        self._door.note_logged()
        if isinstance(event, InstanceFact | NodeLost):  # a lost node's ranks are gone with it
            try:
                self._gateway.update(self._ledger.state)
            except Exception:  # the log and the instances go on, whatever became of a request
                logger.exception("the gateway failed on {}", type(event).__name__)
        match event:
            case InstanceFailed(instance=instance) | InstanceFinished(instance=instance):
                self._outputs.wake(instance)
            case InstanceDeleted(instance=instance):
                self._outputs.drop(instance)
                for key in [key for key in self._ledger.progress_ns if key[0] == instance]:
                    del self._ledger.progress_ns[key]
            case _:
                pass

    # --- requests -----------------------------------------------------------------------------------------

    def _answer(self, incoming: Incoming, reply: AnyReply, *, last: bool = True) -> None:
        self._server.send(incoming.identity, Answer(id=incoming.call.id, reply=reply, last=last))

    def _handle(self, incoming: Incoming) -> None:
        request = incoming.call.request
        match request:
            case Beat():
                self._beat(request)
            case Report() | Output():
                self._report(incoming, request)
            case Hello():
                self._hello(incoming, request.info)
            case Replay():
                self._answer(incoming, self._replay(request))
            case Create() | Delete() | Get() | Query():
                self._answer(incoming, self._calls.answer(request))
            case ReadOutput():
                self._calls.read_output(request, lambda reply: self._answer(incoming, reply))
            case Generate():
                self._generate(incoming, request)
            case CancelGenerate():
                asked = self._generations.pop((incoming.identity, request.id), None)
                if asked is not None:
                    self._gateway.cancel(asked)

    def _beat(self, beat: Beat) -> None:
        node = self._ledger.state.nodes.get(beat.node)
        if node is None or node.info.boot != beat.boot or node.lost is not None:
            return
        now = self._ledger.clock.now_ns()
        self._ledger.heard_ns[beat.node] = now
        before = self._beats.get(beat.node)
        known = set(before.progress) if before is not None else set()
        for progress in beat.progress:
            instance = self._ledger.state.instances.get(progress.instance)
            if progress not in known and instance is not None and 0 <= progress.rank < len(instance.ranks):
                self._ledger.progress_ns[progress.instance, progress.attempt, progress.rank] = now
        self._beats[beat.node] = beat

    def _hello(self, incoming: Incoming, info: NodeInfo | None) -> None:
        if info is not None:
            now = self._ledger.clock.now_ns()
            verdict = self._registrar.admit(info, self._ledger.state, self._ledger.heard_ns.get(info.node), now)
            if isinstance(verdict, Failure):
                self._answer(incoming, Refused(failure=verdict))
                return
            if verdict.lost is not None:
                old = self._ledger.state.nodes[info.node].info.boot
                self._ledger.commit(NodeLost(node=info.node, boot=old, reason=verdict.lost))
            self._ledger.heard_ns[info.node] = now
            if verdict.joins:
                logger.info("node {} joined from {} (pid {})", info.node, info.hostname, info.pid)
                self._beats.pop(info.node, None)
                self._ledger.commit(NodeJoined(info=info), origin=info.node)
        self._answer(incoming, self._welcome())

    def _welcome(self) -> Welcome:
        return Welcome(
            epoch=self._log.epoch,
            coordinator_boot=self._boot,
            version=__version__,
            state=self._calls.encoded_state(),
            events_port=self._publisher.port,
            generation_port=self._gateway.port,
            http_port=self.http_port,
            heartbeat_seconds=self._settings.clocks.heartbeat_seconds,
            lease_seconds=self._settings.clocks.lease_seconds,
        )

    def _replay(self, request: Replay) -> Replayed | Welcome:
        if request.after + 1 < self._log.oldest or request.after > self._ledger.state.sequence:
            return self._welcome()
        envelopes = self._log.read(request.after, _REPLAY_EVENTS)
        return Replayed(
            envelopes=tuple(encode_envelope(envelope) for envelope in envelopes), head=self._ledger.state.sequence
        )

    # --- reports ------------------------------------------------------------------------------------------

    def _report(self, incoming: Incoming, message: Report | Output) -> None:
        verdict = self._reports.judge(message, self._ledger.state)
        if verdict is Verdict.STRANGER:
            failure = Failure(
                kind="node-unknown",
                message=f"node {message.node} has not said hello with boot {message.boot}",
                node=message.node,
                retryable=True,
            )
            self._answer(incoming, Refused(failure=failure))
            return
        if verdict is Verdict.MISSING:
            return
        if verdict is Verdict.APPLY:
            if isinstance(message, Output):
                if message.instance in self._ledger.state.instances:
                    self._outputs.add(message)
            elif not self._apply_report(incoming, message):
                return
            self._reports.applied(message)
        safe = self._reports.acknowledged(message.node, message.boot, self._ledger.state)
        self._answer(incoming, Acked(n=max(safe, message.n)))

    def _apply_report(self, incoming: Incoming, report: Report) -> bool:
        """Log a worker's event, unless it is too late to matter. `False` if it was refused."""
        try:
            event = decode_event(report.event)
            self._check_authority(event, report)
        except (RequestError, msgspec.DecodeError, RecursionError) as error:
            failure = Failure(kind="request-invalid", message=f"report {report.n}: {error}", node=report.node)
            self._answer(incoming, Refused(failure=failure))
            return False
        if isinstance(event, RankFact) and rank_of(self._ledger.state, event) is None:
            self.stale += 1
            logger.debug("stale {} of {} attempt {}", type(event).__name__, event.instance, event.attempt)
            return True
        self._ledger.heard_ns[report.node] = self._ledger.clock.now_ns()
        identity = ReportId(node=report.node, boot=report.boot, n=report.n)
        self._ledger.record(report.event, event, origin=report.node, cause=report.cause, report=identity)
        return True

    def _check_authority(self, event: Event | Unknown, report: Report) -> None:
        """A worker speaks of its own ranks and of its own end; a kind that is not known here is only kept."""
        if isinstance(event, Unknown):
            return
        if isinstance(event, RankFact | NodeLost) and (event.node, event.boot) == (report.node, report.boot):
            return
        raise RequestError(f"node {report.node} may not report {kind_of(event)} of another")

    # --- generation ---------------------------------------------------------------------------------------

    def _generate(self, incoming: Incoming, request: Generate) -> None:
        key = (incoming.identity, incoming.call.id)
        ended = False

        def answer(piece: AnyPiece) -> None:
            nonlocal ended
            ended = isinstance(piece, Done | Refused)
            if ended:
                self._generations.pop(key, None)
            self._answer(incoming, piece, last=ended)

        asked = self._gateway.ask(request, answer)
        if not ended:
            self._generations[key] = asked
