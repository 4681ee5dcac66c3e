"""A copy of the coordinator's state that stays equal to it, whatever the events socket loses."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable

import anyio
import msgspec
import zmq
import zmq.asyncio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from loguru import logger

from muster.bus.changes import Applied, Change, Disconnected, FollowerStatistics, Synchronised
from muster.bus.client import ControlClient, RefusedError
from muster.bus.seeking import Terms, seek
from muster.bus.sockets import MAXIMUM_ANSWER_BYTES, Resident, Throttle, open_socket, receive
from muster.errors import RequestError, UnreachableError
from muster.events import Envelope, decode_envelope
from muster.fold import apply
from muster.protocol import Held, Hello, Replay
from muster.replies import TOPIC_BEAT, TOPIC_EVENT, AnyReply, Pulse, Refused, Replayed, Welcome
from muster.spec import Failure, NodeInfo
from muster.state import State

#: Further behind than this, a snapshot is cheaper than a replay.
MAXIMUM_REPLAY_EVENTS = 10_000
#: Heartbeats that may be missing before the coordinator counts as gone.
MISSED_HEARTBEATS = 3
#: The same where there are other addresses to look at: a new coordinator must hear of a node before it suspects it.
MISSED_BEFORE_SEEKING = 2
_QUEUED_CHANGES = 256
_QUEUED_MESSAGES = 1_000
_REPLAY_SECONDS = 5.0
_HELLO_SECONDS = 2.0  #: it may be lost with a connection that ZeroMQ does not yet know to be dead
_PAUSE_SECONDS = 0.2  #: between two hellos of which the first did not help
_GRACE_SECONDS = 0.1

_pulse_decoder = msgspec.msgpack.Decoder(Pulse)
_state_decoder = msgspec.msgpack.Decoder(State)


class _Message(msgspec.Struct, frozen=True):
    topic: bytes
    payload: bytes
    boot: str | None
    heard_ns: int  #: when it arrived, on the monotonic clock


_WAKE = _Message(b"", b"", None, 0)


class _AgainError(Exception):
    """The copy cannot be continued: say hello and begin with a snapshot."""


class Follower(Resident):
    """Follows the coordinator that `client` talks to; its events socket is on `host`, or where the control socket is.

    `info` is `None` for an observer, which is no node; `holds` are a node's live ranks, given the newest state. There
    is one consumer, of `changes()`. It may be slow: nothing is dropped, the socket stops being read, and what it then
    misses is replayed later. Where the client has several addresses, silence and a refusal make the follower look for
    the active coordinator with the highest term, and move the client there; an observer makes do with a standby.
    """

    def __init__(
        self,
        client: ControlClient,
        host: str | None = None,
        *,
        info: NodeInfo | None = None,
        holds: Callable[[State], tuple[Held, ...]] = lambda state: (),
    ) -> None:
        super().__init__()
        self._client = client
        self._host = host
        self._info = info
        self._holds = holds
        self._terms = Terms()
        self._seeking = len(client.endpoints) > 1  #: look for the active coordinator before the next hello
        self.pulse: Pulse | None = None  #: the last one that counts
        self._pulse_ns = 0  #: when it came, on the monotonic clock
        self._socket: zmq.asyncio.Socket | None = None
        self._address: str | None = None
        self._state = State()
        self._welcome: Welcome | None = None
        self._former_boots: tuple[str, ...] = ()
        self._connected = False
        self._heard = 0.0  #: when the coordinator was last heard of, on the monotonic clock
        self._hello_wanted = False
        self._proof = ""
        self._refusal: Failure | None = None
        self._garbage_line = Throttle()
        self._events = self._gaps = self._replayed = self._snapshots = self._garbage = 0
        self._open_streams()

    @property
    def state(self) -> State:
        """The newest state; the consumer of `changes()` may still be behind it."""
        return self._state

    @property
    def welcome(self) -> Welcome | None:
        """The last answer to a hello; `None` before the first."""
        return self._welcome

    @property
    def connected(self) -> bool:
        """Whether the coordinator was heard of within the last heartbeats."""
        return self._connected

    async def changes(self) -> AsyncIterator[Change]:
        """Every change, in order.

        Raises:
            RefusedError: the coordinator refused the hello, and asking again will not help.
        """
        while True:
            try:
                change = await self._changes_out.receive()
            except (anyio.EndOfStream, anyio.ClosedResourceError):
                break
            yield change
        if self._refusal is not None:
            raise RefusedError(self._refusal)

    def pulse_age(self) -> tuple[int, int]:
        """The `time_ns` of the coordinator's last pulse, and how many ns ago it came; zeros before the first."""
        return (0, 0) if self.pulse is None else (self.pulse.time_ns, time.monotonic_ns() - self._pulse_ns)

    def introduce(self, info: NodeInfo) -> None:
        """What the next hello says of this node."""
        self._info = info

    def say_hello(self) -> None:
        """Say hello again now, for example when the coordinator counts this boot as lost."""
        self._hello_wanted = True
        with contextlib.suppress(anyio.WouldBlock, anyio.ClosedResourceError):
            self._messages_in.send_nowait(_WAKE)

    def statistics(self) -> FollowerStatistics:
        """Counts since the start."""
        return FollowerStatistics(
            events=self._events,
            gaps=self._gaps,
            replayed=self._replayed,
            snapshots=self._snapshots,
            garbage=self._garbage,
            fenced=self._terms.fenced,
        )

    # --- sockets and streams --------------------------------------------------------------------------------

    def _open_streams(self) -> None:
        self._changes_in: MemoryObjectSendStream[Change]
        self._changes_out: MemoryObjectReceiveStream[Change]
        self._changes_in, self._changes_out = anyio.create_memory_object_stream[Change](_QUEUED_CHANGES)
        self._messages_in, self._messages = anyio.create_memory_object_stream[_Message](_QUEUED_MESSAGES)

    async def _open(self) -> None:
        socket = open_socket(
            zmq.SUB,
            receive_messages=_QUEUED_MESSAGES,
            send_messages=_QUEUED_MESSAGES,
            maximum_bytes=MAXIMUM_ANSWER_BYTES,
        )
        socket.subscribe(TOPIC_EVENT)
        socket.subscribe(TOPIC_BEAT)
        self._socket = socket
        self._heard = time.monotonic()

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        for stream in (self._changes_in, self._changes_out, self._messages_in, self._messages):
            stream.close()

    def _connect(self, port: int, *, afresh: bool) -> None:
        """Connect the events socket; `afresh` also where the address is the same, since the line may be dead."""
        assert self._socket is not None
        address = f"tcp://{self._host or self._client.endpoint.host}:{port}"
        if self._address == address and not afresh:
            return
        if self._address is not None:
            self._socket.disconnect(self._address)
        self._socket.connect(address)
        self._address = address

    async def _read(self) -> None:
        """Own the socket's receive. While the queue is full nothing is read, and the publisher drops."""
        assert self._socket is not None
        while True:
            frames = await receive(self._socket)
            if len(frames) not in (2, 3) or frames[0] not in (TOPIC_EVENT, TOPIC_BEAT):
                self._count_garbage(f"{len(frames)} frames")
                continue
            self._heard = time.monotonic()
            boot = frames[2].decode(errors="replace") if len(frames) == 3 else None
            await self._messages_in.send(_Message(frames[0], frames[1], boot, time.monotonic_ns()))

    def _count_garbage(self, reason: str) -> None:
        self._garbage += 1
        if count := self._garbage_line.count():
            logger.warning("dropped {} messages on the events socket that are no events; the last: {}", count, reason)

    # --- following ---------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._read)
            try:
                await self._follow()
            except RefusedError as error:
                self._refusal = error.failure
            group.cancel_scope.cancel()
        self._connected = False
        self._changes_in.close()

    async def _follow(self) -> None:
        while True:
            former = self._welcome
            asked, self._hello_wanted = self._hello_wanted, False
            welcome = await self._hello()
            silent = not self._connected
            await self._adopt(welcome, afresh=silent)
            if former is not None and former.coordinator_boot == self._boot and not silent and not asked:
                await anyio.sleep(_PAUSE_SECONDS)  # the same answer as before: whatever is wrong needs time
            try:
                while True:
                    await self._step()
            except _AgainError:
                continue

    async def _hello(self) -> Welcome:
        """Say hello until there is an answer. Raises `RefusedError` where that is the answer for good."""
        while True:
            if self._seeking and not await self._seek():
                continue
            self._seeking = len(self._client.endpoints) > 1
            try:
                reply = await self._greet()
            except UnreachableError:
                await self._lose()
                continue
            match reply:
                case Welcome() if not self._terms.fences(reply.epoch, reply.term):
                    self._seeking = False
                    return reply
                case Refused(failure=failure) if not failure.retryable or self._in_vain(failure):
                    raise RefusedError(failure)
                case Refused(proof=proof) if proof and proof != self._proof:
                    self._proof = proof  # it was heard: say hello again with it, at once
                case _:
                    await anyio.sleep(_PAUSE_SECONDS)

    def _in_vain(self, failure: Failure) -> bool:
        """Whether an observer begins at a coordinator that tells it nothing, and has nobody else to ask."""
        begins = self._info is None and self._welcome is None and len(self._client.endpoints) == 1
        return begins and failure.kind in ("fenced", "no-quorum")

    async def _greet(self) -> AnyReply:
        hello = Hello(info=self._info, epoch=self._terms.epoch, term=self._terms.term, proof=self._proof)
        if self._info is not None:
            hello = msgspec.structs.replace(hello, holds=self._holds(self._state))
        try:
            return await self._client.call(hello, timeout_seconds=_HELLO_SECONDS)
        except RequestError as error:
            logger.error("what this node holds is too much to tell: {}", error.message)
            return await self._client.call(msgspec.structs.replace(hello, holds=()), timeout_seconds=_HELLO_SECONDS)

    async def _seek(self) -> bool:
        """Find the address of the coordinator to follow, and move there. `False` if there is none for now."""
        found = await seek(self._client.endpoints, self._terms, _HELLO_SECONDS, standby=self._info is None)
        if found is None:
            await self._lose()
            return False
        self._client.move(found)
        return True

    async def _adopt(self, welcome: Welcome, *, afresh: bool = False) -> None:
        """Begin again from a snapshot."""
        if self._welcome is not None and self._welcome.coordinator_boot != welcome.coordinator_boot:
            self._former_boots = (*self._former_boots, self._welcome.coordinator_boot)[-16:]
        self._welcome = welcome
        self._terms.note(welcome.epoch, welcome.term)
        self._state = _decode_state(welcome)
        self._connect(welcome.events_port, afresh=afresh)
        self._heard = time.monotonic()
        self._connected = True
        self._snapshots += 1
        await self._changes_in.send(Synchronised(self._state, welcome, self._client.endpoint))

    @property
    def _boot(self) -> str:
        return "" if self._welcome is None else self._welcome.coordinator_boot

    async def _step(self) -> None:
        """Take one message. Raises `_AgainError` where a hello has to follow."""
        message = await self._next_message()
        if self._hello_wanted:
            raise _AgainError
        try:
            if message is _WAKE:
                return
            if message.topic == TOPIC_BEAT:
                await self._take_pulse(_pulse_decoder.decode(message.payload), message.heard_ns)
            else:
                await self._take_event(decode_envelope(message.payload), message.boot)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            self._count_garbage(str(error))

    async def _next_message(self) -> _Message:
        try:
            return self._messages.receive_nowait()
        except anyio.WouldBlock:
            pass
        assert self._welcome is not None
        missed = MISSED_HEARTBEATS if len(self._client.endpoints) == 1 else MISSED_BEFORE_SEEKING
        limit_seconds = missed * self._welcome.heartbeat_seconds
        heard = None
        while heard != self._heard:
            heard = self._heard
            # After this task or the whole process stood still, the reader needs a moment to hear what is there.
            with anyio.move_on_after(max(heard + limit_seconds - time.monotonic(), _GRACE_SECONDS)):
                return await self._messages.receive()
        await self._lose()
        raise _AgainError

    async def _lose(self) -> None:
        self._connected = False
        self._seeking = len(self._client.endpoints) > 1
        await self._changes_in.send(Disconnected(time.monotonic() - self._heard))

    def _check_boot(self, boot: str) -> bool:
        """Whether a message is from the coordinator that the snapshot is from; one from a newer asks for a hello."""
        if boot == self._boot:
            return True
        if boot in self._former_boots:
            return False
        raise _AgainError

    async def _take_pulse(self, pulse: Pulse, heard_ns: int) -> None:
        fenced = self._terms.fences(pulse.epoch, pulse.term)
        if not self._check_boot(pulse.coordinator_boot) or fenced:
            return
        assert self._welcome is not None
        self.pulse, self._pulse_ns = pulse, heard_ns
        if pulse.epoch != self._welcome.epoch:
            raise _AgainError
        if pulse.head > self._state.sequence:
            await self._catch_up(pulse.head)

    async def _take_event(self, envelope: Envelope, boot: str | None) -> None:
        if boot is not None and not self._check_boot(boot):
            return
        if envelope.sequence == self._state.sequence + 1:
            await self._apply(envelope)
        elif envelope.sequence > self._state.sequence:
            await self._catch_up(envelope.sequence)

    async def _apply(self, envelope: Envelope) -> None:
        try:
            event = envelope.event()
            state = apply(self._state, envelope)
        except (msgspec.DecodeError, ValueError) as error:
            # The coordinator folded it all the same; its snapshot leads past an event that cannot be read here.
            logger.error("event {} cannot be applied: {}", envelope.sequence, error)
            raise _AgainError from error
        self._state = state
        self._events += 1
        await self._changes_in.send(Applied(envelope, event, state))

    async def _catch_up(self, head: int) -> None:
        """Ask for what is missing up to `head`, in as many batches as the coordinator makes of it."""
        self._gaps += 1
        while self._state.sequence < head:
            if head - self._state.sequence > MAXIMUM_REPLAY_EVENTS:
                raise _AgainError
            before = self._state.sequence
            try:
                reply = await self._client.call(Replay(after=before), timeout_seconds=_REPLAY_SECONDS)
            except UnreachableError:
                raise _AgainError from None
            match reply:
                case Replayed(coordinator_boot=boot) if boot not in ("", self._boot):
                    raise _AgainError  # another log may have the same numbers
                case Replayed():
                    await self._apply_all(map(decode_envelope, reply.envelopes))
                    head = max(head, reply.head)
                case Welcome() if self._info is None and reply.coordinator_boot == self._boot:
                    await self._adopt(reply)
                case _:  # a node says hello itself: that tells the coordinator what it holds
                    raise _AgainError
            if self._state.sequence <= before:  # another log, or none: asking again would not end
                raise _AgainError

    async def _apply_all(self, envelopes: Iterable[Envelope]) -> None:
        for envelope in envelopes:
            if envelope.sequence <= self._state.sequence:
                continue
            if envelope.sequence > self._state.sequence + 1:
                raise _AgainError
            await self._apply(envelope)
            self._replayed += 1


def _decode_state(welcome: Welcome) -> State:
    try:
        return _state_decoder.decode(welcome.state)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RefusedError(
            Failure(
                kind="protocol-violation",
                message=f"the state of the coordinator (version {welcome.version}) cannot be read: {error}",
                remedy="Use the same version of muster on both ends.",
            )
        ) from error
