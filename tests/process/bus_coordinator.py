"""A coordinator in memory, a TCP proxy that can be cut, and other helpers for the tests of the bus."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Literal

import anyio
import msgspec
from anyio.abc import SocketAttribute, SocketStream, TaskGroup
from kit import free_ports

from muster.bus import ControlServer, Deduplicator, Incoming, Publisher, Verdict
from muster.errors import PortError
from muster.events import (
    CoordinatorStarted,
    Envelope,
    Event,
    InstanceCreated,
    InstanceDeleted,
    NodeJoined,
    ReportId,
    encode_envelope,
    encode_event,
)
from muster.fold import apply
from muster.protocol import Generate, Get, Hello, Output, Replay, Report, Who
from muster.replies import Acked, Answer, AnyReply, Chunk, Done, Pulse, Refused, Replayed, Role, Snapshot, Welcome
from muster.spec import (
    COORDINATOR,
    Assignment,
    BootId,
    Failure,
    GroupWorkload,
    InstanceId,
    InstanceSpec,
    NodeId,
    NodeInfo,
)
from muster.state import State

HOST = "127.0.0.1"
HEARTBEAT_SECONDS = 0.1


def encoded(state: State) -> bytes:
    return msgspec.msgpack.encode(state)


def node_info(name: str = "a", boot: str = "boot-a") -> NodeInfo:
    return NodeInfo(
        node=NodeId(name),
        boot=BootId(boot),
        hostname=name,
        machine="machine",
        pid=1,
        addresses=(),
        backends=("ring",),
        memory_bytes=1,
        max_ranks=8,
    )


def created(number: int) -> InstanceCreated:
    assignment = Assignment(rank=0, node=NodeId("a"), boot=BootId("boot-a"))
    return InstanceCreated(
        instance=InstanceId(f"i{number}"),
        attempt=1,
        spec=InstanceSpec(workload=GroupWorkload(), name=f"load-{number}"),
        assignments=(assignment,),
        backend="ring",
    )


def load_event(number: int) -> Event:
    """Instances come and go; about fifty are there at any time."""
    half = number // 2
    return created(half) if number % 2 == 0 else InstanceDeleted(instance=InstanceId(f"i{half - 50}"), attempt=1)


async def until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Wait for a condition, with a deadline."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not in {seconds} s: {what}"
        await anyio.sleep(0.005)


class FakeCoordinator:
    """Logs to a list, and answers as the protocol says. `boot` and the log may be carried over to another one."""

    def __init__(
        self,
        boot: str = "c1",
        *,
        epoch: str = "epoch-1",
        log: list[Envelope] | None = None,
        control_port: int = 0,
        events_port: int = 0,
        term: int = 1,
        role: Literal["active", "standby", "fenced"] = "active",
    ) -> None:
        self.boot = BootId(boot)
        self.epoch = epoch
        self.term = term
        self.role: Literal["active", "standby", "fenced"] = role
        self.minds_terms = True
        self.hellos: list[Hello] = []
        self.judging: tuple[InstanceId, ...] = ()
        self.replaying_boot = ""
        self.answering = True  #: generations
        self.log: list[Envelope] = []
        self.state = State()
        for envelope in log or ():
            self._append(envelope)
        first = free_ports(2)
        self.publisher = Publisher(HOST, events_port or first)
        self.server = ControlServer(HOST, control_port or first + 1)
        self.deduplicator = Deduplicator()
        self.announced_events_port: int | None = None
        self.announced_heartbeat_seconds = HEARTBEAT_SECONDS
        self.after_hello: Callable[[], object] = lambda: None
        self.pruned = 0  #: events up to here can no longer be replayed
        self.replay_batch = 100
        self.beating = True
        self.refusal: Failure | None = None
        self.answer_report: Callable[[int, int], int] = lambda _n, _times: 1
        self.requests: Counter[str] = Counter()
        self.outputs: list[tuple[str, ...]] = []
        self.verdicts: Counter[Verdict] = Counter()
        self._times_seen: Counter[int] = Counter()

    @property
    def endpoint(self) -> str:
        return f"{HOST}:{self.server.port}"

    def emit(self, event: Event | msgspec.Raw, *, publish: bool = True, report: ReportId | None = None) -> Envelope:
        envelope = Envelope(
            sequence=self.state.sequence + 1,
            time_ns=time.time_ns(),
            origin=COORDINATOR,
            cause=0,
            body=event if isinstance(event, msgspec.Raw) else encode_event(event),
            report=report,
        )
        self._append(envelope)
        if publish:
            self.publisher.publish(envelope)
        return envelope

    def pulse(self) -> None:
        self.publisher.pulse(
            Pulse(
                epoch=self.epoch,
                coordinator_boot=self.boot,
                head=self.state.sequence,
                time_ns=time.time_ns(),
                term=self.term,
            )
        )

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[FakeCoordinator]:
        async with AsyncExitStack() as stack:
            await _enter(stack, self.publisher)
            await _enter(stack, self.server)
            group = await stack.enter_async_context(anyio.create_task_group())
            if self.role == "active":
                self.pulse()
                self._start()
            group.start_soon(self._beat)
            group.start_soon(self._answer_all)
            yield self
            group.cancel_scope.cancel()

    def _append(self, envelope: Envelope) -> None:
        self.log.append(envelope)
        self.state = apply(self.state, envelope)

    def _start(self) -> None:
        self.emit(CoordinatorStarted(epoch=self.epoch, boot=self.boot, version="0", term=self.term))

    def promote(self, log: list[Envelope]) -> None:
        """Take over, with so much of the log as was copied."""
        for envelope in log:
            self._append(envelope)
        self.role = "active"
        self._start()

    def stop(self) -> None:
        """End as if the process was killed: both sockets close."""
        self.beating = False
        self.publisher.close()
        self.server.close()

    async def _beat(self) -> None:
        while True:
            if self.beating and self.role == "active":
                self.pulse()
            await anyio.sleep(HEARTBEAT_SECONDS)

    async def _answer_all(self) -> None:
        with contextlib.suppress(anyio.ClosedResourceError):
            async for incoming in self.server.incoming:
                self.requests[type(incoming.call.request).__name__] += 1
                self._answer(incoming)

    def _answer(self, incoming: Incoming) -> None:
        match incoming.call.request:
            case Who():
                return self._reply(
                    incoming,
                    Role(
                        role=self.role,
                        epoch=self.epoch,
                        term=self.term,
                        boot=self.boot,
                        head=self.state.sequence,
                        version="0",
                    ),
                )
            case Hello(info=info) as hello:
                self.hellos.append(hello)
                if self.minds_terms and hello.epoch == self.epoch and hello.term > self.term:
                    self.role = "fenced"
                if self.role != "active":
                    failure = Failure(kind=self.role, message="ask the active one", retryable=True)
                    return self._reply(incoming, Refused(failure=failure))
                if self.refusal is not None:
                    return self._reply(incoming, Refused(failure=self.refusal))
                if info is not None:
                    self.emit(NodeJoined(info=info))
                self._reply(incoming, self._welcome())
                self.after_hello()
                return None
            case Replay(after=after):
                if after < self.pruned:
                    return self._reply(incoming, self._welcome())
                envelopes = tuple(map(encode_envelope, self.log[after : after + self.replay_batch]))
                boot, self.replaying_boot = BootId(self.replaying_boot), ""
                replayed = Replayed(envelopes=envelopes, head=self.state.sequence, coordinator_boot=boot)
                return self._reply(incoming, replayed)
            case Report() | Output() as message:
                return self._take(incoming, message)
            case Get():
                return self._reply(incoming, Snapshot(state=msgspec.Raw(encoded(self.state))))
            case Generate(prompt=prompt):
                for word in prompt.split() if isinstance(prompt, str) else ():
                    self._reply(incoming, Chunk(text=word), last=False)
                if not self.answering:
                    return None
                done = Done(
                    reason="stop", prompt_tokens=0, completion_tokens=0, seconds_to_first_token=0.0, seconds=0.0
                )
                return self._reply(incoming, done)
            case _:
                return None

    def _take(self, incoming: Incoming, message: Report | Output) -> None:
        verdict = self.deduplicator.judge(message, self.state)
        self.verdicts[verdict] += 1
        match verdict:
            case Verdict.STRANGER:
                failure = Failure(kind="node-unknown", message="say hello first", retryable=True)
                return self._reply(incoming, Refused(failure=failure))
            case Verdict.MISSING:
                return None
            case Verdict.APPLY:
                self.deduplicator.applied(message)
                if isinstance(message, Report):
                    self.emit(message.event, report=ReportId(node=message.node, boot=message.boot, n=message.n))
                else:
                    self.outputs.append(message.lines)
            case Verdict.REPEATED:
                pass
        self._times_seen[message.n] += 1
        acked = max(self.deduplicator.acknowledged(message.node, message.boot, self.state), message.n)
        for _ in range(self.answer_report(message.n, self._times_seen[message.n])):
            self._reply(incoming, Acked(n=acked))
        return None

    def _welcome(self) -> Welcome:
        return Welcome(
            epoch=self.epoch,
            coordinator_boot=self.boot,
            version="0",
            state=msgspec.Raw(encoded(self.state)),
            events_port=self.announced_events_port or self.publisher.port,
            generation_port=1,
            heartbeat_seconds=self.announced_heartbeat_seconds,
            lease_seconds=1.0,
            term=self.term,
            judging=self.judging,
        )

    def _reply(self, incoming: Incoming, reply: AnyReply, *, last: bool = True) -> None:
        self.server.send(incoming.identity, Answer(id=incoming.call.id, reply=reply, last=last))


async def _enter(stack: AsyncExitStack, part: Publisher | ControlServer) -> None:
    """A port that was just closed in this process is free only after ZeroMQ's own thread has seen it."""
    end = time.monotonic() + 5
    while True:
        try:
            await stack.enter_async_context(part)
            return
        except PortError:
            if time.monotonic() > end:
                raise
            await anyio.sleep(0.01)


class Proxy:
    """Forwards TCP connections to a port; `cut` ends those that are there, `stop` also refuses new ones."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._scopes: set[anyio.CancelScope] = set()
        self.accepted = 0
        self.port = 0

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[Proxy]:
        listener = await anyio.create_tcp_listener(local_host=HOST, local_port=0)
        self.port = int(listener.extra(SocketAttribute.local_port))
        async with listener, anyio.create_task_group() as group:
            group.start_soon(listener.serve, self._forward)
            yield self
            group.cancel_scope.cancel()

    def cut(self) -> int:
        """End all connections; returns how many there were."""
        scopes, self._scopes = self._scopes, set()
        for scope in scopes:
            scope.cancel()
        return len(scopes)

    async def _forward(self, client: SocketStream) -> None:
        self.accepted += 1
        async with (
            client,
            await anyio.connect_tcp(HOST, self._target_port) as target,
            anyio.create_task_group() as group,
        ):
            self._scopes.add(group.cancel_scope)
            group.start_soon(self._pump, client, target, group)
            group.start_soon(self._pump, target, client, group)

    @staticmethod
    async def _pump(source: SocketStream, sink: SocketStream, group: TaskGroup) -> None:
        try:
            async for data in source:
                await sink.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
        group.cancel_scope.cancel()
