"""The coordinator: answers on the control socket, applies reports, and keeps the heartbeat."""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import anyio
import anyio.abc
import msgspec
from loguru import logger

from muster import __version__
from muster.bus import ControlServer, Incoming, Publisher
from muster.coordinator import logbook
from muster.coordinator.adoption import Adoption
from muster.coordinator.authority import Authority
from muster.coordinator.calls import Calls, PlacingRequest
from muster.coordinator.comparing import Clocks
from muster.coordinator.dispatcher import QueueSettings
from muster.coordinator.door import Door
from muster.coordinator.find import refusal
from muster.coordinator.gateway import Gateway
from muster.coordinator.gathering import Gathering
from muster.coordinator.generations import Generations
from muster.coordinator.hearing import Hearing
from muster.coordinator.knowledge import Knowledge
from muster.coordinator.ledger import Ledger
from muster.coordinator.nodes import Registrar
from muster.coordinator.outputs import OutputStore
from muster.coordinator.reports import Reports
from muster.errors import LogError, RequestError
from muster.eventlog import Retention
from muster.eventlog.api import EventLog
from muster.events import (
    CoordinatorStarted,
    Envelope,
    Event,
    InstanceCleared,
    InstanceDeleted,
    InstanceFact,
    InstanceFailed,
    InstanceFinished,
    NodeJoined,
    NodeLost,
    Unknown,
    kind_of,
)
from muster.lifecycle import SECOND, Settings
from muster.protocol import (
    AnyRequest,
    Beat,
    CancelGenerate,
    Claim,
    Create,
    Delete,
    Drain,
    Gather,
    Generate,
    Get,
    Held,
    Hello,
    Inspect,
    Measure,
    Output,
    Preview,
    Promote,
    Query,
    ReadOutput,
    Replay,
    Report,
    Resume,
    Retry,
    TellFacts,
    TellLinks,
    Who,
)
from muster.replies import Answer, AnyReply, Pulse, Refused, Role, Vote, Welcome
from muster.spec import BootId, Failure, InstanceId, NodeId, Phase

#: Events in one answer to a replay; its reader asks again for the rest.
_REPLAY_EVENTS = 1_000
#: What a coordinator that may not write still takes: it reads, or changes nothing that is logged.
_READS = Get | Query | Replay | ReadOutput | Who | Claim | Beat | TellFacts | TellLinks | Generate | CancelGenerate


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
    """The active coordinator on one log. `lead` serves until it is cancelled, also after it was fenced.

    `publisher`, `server` and `gateway` are open while it does; whoever opened them may have used them before.
    """

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        self._boot = BootId(secrets.token_hex(8))
        self.publisher = Publisher(settings.host, settings.events_port, boot=self._boot)
        self.server = ControlServer(settings.host, settings.control_port)
        self.gateway = Gateway(settings.host, settings.generation_port, QueueSettings(max_waiting=settings.max_waiting))
        self._registrar = Registrar(settings.clocks)
        self._outputs = OutputStore()
        self._knowledge = Knowledge()
        self._gathering = Gathering(lambda: self._ledger.state)
        self._greeted: dict[NodeId, BootId] = {}  #: who has said hello to this run of the coordinator
        self._generations = Generations(self.gateway)
        self._nudge = anyio.Event()
        self.http_port: int | None = None  #: of the HTTP API beside it, told to whoever says hello
        self._clocks = Clocks()
        self._adoption = Adoption(settings.clocks)
        self._fenced = {"attempt": 0, "boot": 0}  #: messages that came too late to matter, by what they are too old in

    @property
    def control_port(self) -> int:
        """The port that workers and clients are given."""
        return self.server.port

    @property
    def generation_port(self) -> int:
        """The port that rank-0 runners dial."""
        return self.gateway.port

    @property
    def door(self) -> Door:
        """What the HTTP API talks to. There is one once `lead` has started, and it is of use while that runs."""
        return self._door

    async def lead(
        self, log: EventLog, authority: Authority, *, task_status: anyio.abc.TaskStatus[int] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve on the log, as far as the authority allows; started with the control port.

        Raises:
            LogError: the log cannot be read, or not even its first event be written.
        """
        self._log = log
        self._authority = authority
        self._ledger = Ledger(log, self.publisher, self._settings.clocks)
        self._ledger.objection = authority.objection
        self._reports = Reports(self._ledger, self._outputs, self._clocks, self._fenced)
        self._ledger.known = lambda: self._knowledge.known(self._ledger.state)
        self._hearing = Hearing(self._ledger, self._knowledge, self._clocks, self._fenced, self._settings.clocks)
        self._calls = Calls(
            log,
            self._ledger,
            self._outputs,
            self._knowledge,
            self._wake,
            self._clocks,
            self._fenced,
            self._pulse,
        )
        self._calls.placing.on_found = self._found
        self._ledger.place = self._calls.placing.next_attempt
        self._door = Door(log, self._ledger, self.gateway, self._calls)
        self.gateway.update(self._ledger.state)
        self._ledger.on_event = self._after
        self._ledger.commit(
            CoordinatorStarted(epoch=log.epoch, boot=self._boot, version=__version__, term=authority.term)
        )
        self._pulse()
        async with anyio.create_task_group() as self._tasks:
            self._tasks.start_soon(self._keep_time)
            self._tasks.start_soon(self._calls.placing.run)
            task_status.started(self.control_port)
            await self._serve()

    def shut(self) -> None:
        """This coordinator is fenced: what waits for a token has to be asked elsewhere."""
        objection = self._authority.objection()
        if objection is not None:
            self.publisher.hush()
            self.gateway.dispatcher.shut(refusal(objection, Phase.RUNNING).failure)

    # --- the loop -----------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        async for incoming in self.server.incoming:
            try:
                self._handle(incoming)
                self._settle()
            except LogError as error:
                self._answer(incoming, refusal(error, Phase.PLACING))
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
            self._settle_all()
            self._outputs.expire(now)
            self._gathering.expire(now)
            due = min(next_beat, self._gathering.next_due())
            nudge = self._nudge
            with anyio.move_on_after(min(due - time.monotonic(), self._seconds_to_wake())):
                await nudge.wait()

    def _settle_all(self) -> None:
        try:
            self._settle()
        except Exception:
            # A rule that fails on one instance must not end the coordinator of all the others.
            logger.exception("the lifecycle rules failed")

    def _found(self) -> None:
        """It is known where an instance goes next, or that it has no place."""
        self._ledger.look_again()
        self._settle_all()
        self._wake()

    def _settle(self) -> None:
        """Carry out what the state demands, and what follows from instances that were found."""
        if self._authority.objection() is not None:
            return  # the time until it may write again counts against no node: the ledger sees that it stood still
        self._ledger.settle()
        while events := self._adoption.due(self._ledger.state, self._ledger.clock.now_ns()):
            for event in events:
                told = event.reason if isinstance(event, InstanceCleared) else "every rank of it was found ready"
                logger.warning("{} {}: {}", kind_of(event), event.instance, told)
                self._ledger.commit(event)
            self._ledger.settle()

    def _seconds_to_wake(self) -> float:
        if self._authority.objection() is not None:
            return float("inf")
        judged = self._adoption.wake_ns()
        seconds = float("inf") if judged is None else max(0.05, (judged - self._ledger.clock.now_ns()) / SECOND)
        return min(self._ledger.seconds_to_wake(), seconds)

    def _wake(self) -> None:
        self._nudge.set()
        self._nudge = anyio.Event()

    def _pulse(self) -> None:
        if self._authority.objection() is not None:
            self.publisher.hush()
            return
        self.publisher.pulse(
            Pulse(
                epoch=self._log.epoch,
                coordinator_boot=self._boot,
                head=self._ledger.state.sequence,
                time_ns=self._ledger.clock.now_ns(),
                term=self._ledger.state.term,
                measure_round=self._knowledge.measure_round,
            )
        )

    def _after(self, envelope: Envelope, event: Event | Unknown) -> None:
        """What follows from an event beside the state: waiting clients hear of it."""
        del envelope
        self._door.note_logged()
        if isinstance(event, InstanceFact | NodeLost):  # a lost node's ranks are gone with it
            try:
                self.gateway.update(self._ledger.state)
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
        self.server.send(incoming.identity, Answer(id=incoming.call.id, reply=reply, last=last))

    def _handle(self, incoming: Incoming) -> None:
        request = incoming.call.request
        if isinstance(request, Hello):
            self._authority.hear(request.epoch, request.term)
        objection = self._authority.objection()
        if objection is not None and not isinstance(request, _READS):
            self._answer(incoming, refusal(objection, Phase.PLACING))
            return
        self._carry_out(incoming, request)

    def _carry_out(self, incoming: Incoming, request: AnyRequest) -> None:
        match request:
            case Beat() | TellFacts() | TellLinks():
                self._hearing.take(request)
            case Report() | Output():
                reply = self._reports.take(request)
                if reply is not None:
                    self._answer(incoming, reply)
            case Hello():
                self._hello(incoming, request)
            case Replay():
                self._answer(incoming, logbook.replay(self._log, request.after, self._boot) or self._welcome())
            case Who():
                self._answer(incoming, self.role())
            case Promote():
                error = RequestError("this coordinator is active: it follows nobody", remedy="Promote its standby.")
                self._answer(incoming, refusal(error, Phase.PLACING))
            case Claim():
                mine = request.epoch == self._log.epoch
                self._answer(incoming, Vote(granted=False, term=self._authority.term if mine else 0))
            case Delete() | Drain() | Resume() | Retry() | Get() | Query() | Measure():
                self._answer(incoming, self._calls.answer(request))
            case Create() | Preview() | Inspect():
                self._tasks.start_soon(self._place, incoming, request)
            case Gather():
                self._gathering.take(request, lambda reply: self._answer(incoming, reply), time.monotonic())
            case ReadOutput():
                self._calls.read_output(request, lambda reply: self._answer(incoming, reply))
            case Generate() | CancelGenerate():
                answer = functools.partial(self._answer, incoming)
                self._generations.take(incoming.identity, incoming.call.id, request, answer)

    async def _place(self, incoming: Incoming, request: PlacingRequest) -> None:
        """Answer what has to know the model first; that may take a moment, and others go on meanwhile."""
        try:
            self._answer(incoming, await self._calls.place(request))
        except Exception:  # as in `_serve`
            logger.exception("request {} failed", type(request).__name__)
            failure = Failure(kind="internal", message="the request failed in the coordinator; see its log")
            self._answer(incoming, Refused(failure=failure))

    def _hello(self, incoming: Incoming, hello: Hello) -> None:
        info = hello.info
        judging: tuple[InstanceId, ...] = ()
        if info is not None:
            now = self._ledger.clock.now_ns()
            verdict = self._registrar.admit(hello, self._ledger.state, self._ledger.heard_ns.get(info.node), now)
            if isinstance(verdict, Failure):
                self._answer(incoming, Refused(failure=verdict))
                return
            if verdict.proof:
                failure = Failure(kind="node-lost", message=f"node {info.node} was lost; say so again", retryable=True)
                self._answer(incoming, Refused(failure=failure, proof=verdict.proof))
                return
            if verdict.lost is not None:
                old = self._ledger.state.nodes[info.node].info.boot
                self._ledger.commit(NodeLost(node=info.node, boot=old, reason=verdict.lost))
            if verdict.joins or self._greeted.get(info.node) != info.boot:  # a deaf one says hello again and again
                self._greeted[info.node] = info.boot
                self._ledger.heard_ns[info.node] = now
            if verdict.joins:
                logger.info("node {} joined from {} (pid {})", info.node, info.hostname, info.pid)
                self._knowledge.forget(info.node)
                self._ledger.commit(NodeJoined(info=info), origin=info.node)
            own = [held for held in hello.holds if (held.rank.node, held.rank.boot) == (info.node, info.boot)]
            judging = self._judge(own, now)
        self._answer(incoming, self._welcome(judging))

    def _judge(self, holds: Sequence[Held], now_ns: int) -> tuple[InstanceId, ...]:
        """Which of the instances that a worker holds this log has never heard of."""
        unknown = [held for held in holds if held.instance not in self._ledger.state.instances]
        logged = {
            held.instance for held in unknown if self._log.query(Query(instance=held.instance, limit=1, newest=True))
        }
        return self._adoption.note([held for held in unknown if held.instance not in logged], now_ns)

    def role(self) -> Role:
        """What this coordinator is to somebody who looks for the active one."""
        objection = self._authority.objection()
        return Role(
            role="active" if objection is None else "fenced",
            epoch=self._log.epoch,
            term=self._authority.term,
            boot=self._boot,
            head=self._ledger.state.sequence,
            version=__version__,
            reason="" if objection is None else objection.message,
        )

    def _welcome(self, judging: tuple[InstanceId, ...] = ()) -> Welcome:
        return Welcome(
            epoch=self._log.epoch,
            coordinator_boot=self._boot,
            version=__version__,
            state=self._calls.encoded_state(),
            events_port=self.publisher.port,
            generation_port=self.gateway.port,
            http_port=self.http_port,
            heartbeat_seconds=self._settings.clocks.heartbeat_seconds,
            lease_seconds=self._settings.clocks.lease_seconds,
            term=self._ledger.state.term,
            judging=judging,
        )
