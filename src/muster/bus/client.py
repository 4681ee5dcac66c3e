"""A worker's or a client's side of the control socket: calls, answers, and what is said when nobody answers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

import anyio
import msgspec
import zmq
import zmq.asyncio

from muster.bus.endpoints import Endpoint, endpoints_of
from muster.bus.sockets import MAXIMUM_ANSWER_BYTES, MAXIMUM_CALL_BYTES, Resident, open_socket, receive, send, send_now
from muster.errors import MusterError, ProtocolError, RequestError, UnreachableError
from muster.protocol import AnyRequest, Call
from muster.replies import Answer, AnyReply, Refused, Reply
from muster.spec import Failure, Shortfall

#: Answers of one call that wait for a slow reader; a generation of this many pieces.
QUEUED_REPLIES = 10_000
_QUEUED_MESSAGES = 1_000

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Answer)

R = TypeVar("R", bound=Reply)


class RefusedError(MusterError):
    """The coordinator refused a request; `failure` is its reason, `shortfalls` what each node was short of."""

    kind = "request-refused"

    def __init__(self, failure: Failure, shortfalls: tuple[Shortfall, ...] = ()) -> None:
        super().__init__(failure.message, remedy=failure.remedy)
        self.failure = failure
        self.shortfalls = shortfalls


class ControlClient(Resident):
    """The DEALER socket. Calls may be made concurrently; each is answered by its own id.

    It connects and reconnects by itself, whether or not a coordinator is there. A request that waits when the
    connection is lost is lost with it: nothing is delivered later than its caller waited.

    Of several addresses ("A,B" or a sequence) it talks to the first, until somebody tells it to `move`.

    Raises (on construction):
        RequestError: an endpoint is no address.
    """

    def __init__(self, endpoint: str | Endpoint | Sequence[Endpoint]) -> None:
        super().__init__()
        self.endpoints = endpoints_of(endpoint)
        self.endpoint = self.endpoints[0]  #: the one that it talks to
        self._socket: zmq.asyncio.Socket | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Callable[[Answer], None]] = {}
        self._streams: dict[int, ReplyStream] = {}
        self._scopes: set[anyio.CancelScope] = set()  #: around what waits for the socket
        self._left: list[zmq.asyncio.Socket] = []  #: sockets to the addresses that were left, until they are closed
        self._garbage = 0

    def move(self, endpoint: Endpoint) -> None:
        """Talk to this address from now on. Calls under way are forgotten; whoever waits for a reply is told at once.

        What waits for a connection is sent to the new address, unless its caller waits for a reply.
        """
        if endpoint == self.endpoint:
            return
        # Another socket: one that was disconnected goes on handing messages to the connection until that is gone.
        self._left.append(self._opened())
        self.endpoint = endpoint
        self._socket = self._connected()
        for scope in self._scopes:
            scope.cancel()
        self._waiting.clear()
        for stream in list(self._streams.values()):
            stream._lose()

    async def call(self, request: AnyRequest, *, timeout_seconds: float) -> AnyReply:
        """Ask, and wait for the first reply. A `Refused` is returned.

        Raises:
            RequestError: the request is too large.
            UnreachableError: no reply within the time.
        """
        async with self.stream(request, timeout_seconds=timeout_seconds) as replies:
            return await replies.receive()

    async def ask(self, request: AnyRequest, timeout_seconds: float, type: type[R]) -> R:
        """Ask, and wait for a reply of this type.

        Raises:
            RefusedError: the coordinator refused.
            UnreachableError: no reply within the time.
            ProtocolError: the reply is of another type.
        """
        reply = await self.call(request, timeout_seconds=timeout_seconds)
        if isinstance(reply, type):
            return reply
        if isinstance(reply, Refused):
            raise RefusedError(reply.failure, reply.shortfalls)
        raise ProtocolError(
            f"the coordinator at {self.endpoint} answered {tag_of(request)} with {tag_of(reply)}",
            remedy="Use the same version of muster on both ends.",
        )

    def stream(self, request: AnyRequest, *, timeout_seconds: float) -> ReplyStream:
        """Ask for several replies: `async with client.stream(...) as replies: async for reply in replies`.

        `timeout_seconds` is the longest silence before the first reply and between two.
        """
        return ReplyStream(self, next(self._numbers), request, timeout_seconds)

    def send(self, request: AnyRequest) -> int:
        """Send a request that has no answer, now or not at all. Returns the id of the call."""
        number = next(self._numbers)
        send_now(self._opened(), [_encode(number, request)])
        return number

    async def submit(self, request: AnyRequest, on_answer: Callable[[Answer], None]) -> int:
        """Send once there is a connection; `on_answer` gets the answers until the last, or `forget(id)`."""
        number = next(self._numbers)
        self._waiting[number] = on_answer
        try:
            await self._deliver(number, request)
        except BaseException:
            self.forget(number)
            raise
        return number

    def forget(self, number: int) -> None:
        """Ignore further answers to this call."""
        self._waiting.pop(number, None)

    async def _deliver(self, number: int, request: AnyRequest) -> None:
        payload = _encode(number, request)
        while not await self._unless_moved(lambda: send(self._opened(), [payload])):
            pass

    async def _unless_moved(self, action: Callable[[], Awaitable[None]]) -> bool:
        """Wait for an action on the socket; `False` where the client moved to another address meanwhile."""
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                await action()
            finally:
                self._scopes.discard(scope)
        return not scope.cancelled_caught

    def _opened(self) -> zmq.asyncio.Socket:
        if self._socket is None:
            raise RuntimeError("the control client is used outside its `async with`")
        return self._socket

    async def _open(self) -> None:
        self._socket = self._connected()

    def _connected(self) -> zmq.asyncio.Socket:
        socket = open_socket(
            zmq.DEALER,
            receive_messages=_QUEUED_MESSAGES,
            send_messages=_QUEUED_MESSAGES,
            maximum_bytes=MAXIMUM_ANSWER_BYTES,
            immediate=True,
        )
        socket.connect(self.endpoint.url)
        return socket

    async def _serve(self) -> None:
        while True:
            await self._unless_moved(self._receive)
            self._close_left()

    def _close_left(self) -> None:
        while self._left:
            self._left.pop().close(linger=0)

    async def _receive(self) -> None:
        socket = self._opened()
        while True:
            frames = await receive(socket)
            try:
                (payload,) = frames
                answer = _decoder.decode(payload)
            except (msgspec.DecodeError, ValueError, RecursionError):
                self._garbage += 1  # a newer coordinator's reply; its caller times out
                continue
            waiting = self._waiting.get(answer.id)
            if answer.last:
                self.forget(answer.id)
            if waiting is not None:
                waiting(answer)

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        self._close_left()
        self._waiting.clear()
        self._streams.clear()


def _encode(number: int, request: AnyRequest) -> bytes:
    """A larger call would only make the coordinator cut the connection, so it is not sent at all."""
    payload = _encoder.encode(Call(id=number, request=request))
    if len(payload) > MAXIMUM_CALL_BYTES:
        raise RequestError(
            f"the request {tag_of(request)} has {len(payload)} bytes; at most {MAXIMUM_CALL_BYTES} are accepted",
            remedy="Send less at once.",
        )
    return payload


class ReplyStream:
    """The replies to one call, in order, up to the last. Leaving it early forgets the call."""

    def __init__(self, client: ControlClient, number: int, request: AnyRequest, timeout_seconds: float) -> None:
        #: The id of the call, as `CancelGenerate` names it.
        self.id = number
        self._client = client
        self._request = request
        self._timeout_seconds = timeout_seconds
        self._endpoint = client.endpoint
        self._sending = anyio.CancelScope()
        self._sent = False
        self._ended = False
        self._overrun = False
        self._lost = False

    async def __aenter__(self) -> Self:
        self._replies_in, self._replies = anyio.create_memory_object_stream[Answer](QUEUED_REPLIES)
        self._deadline = time.monotonic() + self._timeout_seconds
        self._endpoint = self._client.endpoint
        self._client._waiting[self.id] = self._put
        self._client._streams[self.id] = self
        try:
            with anyio.move_on_after(self._timeout_seconds) as self._sending:
                await self._client._deliver(self.id, self._request)
                self._sent = True
            if not self._sent:
                raise self._unreachable()
        except BaseException:
            self._leave()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AnyReply:
        if self._ended:
            raise StopAsyncIteration
        return await self.receive()

    async def receive(self) -> AnyReply:
        """The next reply.

        Raises:
            UnreachableError: none came within the time, or the client moved to another address.
            ProtocolError: more came than were read.
            anyio.EndOfStream: the last one was received already.
        """
        if self._ended:
            raise anyio.EndOfStream
        try:
            answer = self._replies.receive_nowait()
        except (anyio.WouldBlock, anyio.EndOfStream):
            answer = await self._wait()
        self._deadline = time.monotonic() + self._timeout_seconds
        self._ended = answer.last
        return answer.reply

    async def _wait(self) -> Answer:
        if self._overrun:
            raise ProtocolError(
                f"{QUEUED_REPLIES} answers to {tag_of(self._request)} waited unread, further ones were lost",
                remedy="Read the answers faster, or ask for less at once.",
            )
        try:
            with anyio.fail_after(self._deadline - time.monotonic()):
                return await self._replies.receive()
        except (TimeoutError, anyio.EndOfStream):
            raise self._unreachable() from None

    def _put(self, answer: Answer) -> None:
        if self._overrun:
            return
        try:
            self._replies_in.send_nowait(answer)
        except anyio.WouldBlock:
            self._overrun = True
            self._client.forget(self.id)

    def _lose(self) -> None:
        """The client talks to another address now: no reply will come."""
        self._lost = True
        self._sending.cancel()
        self._replies_in.close()

    def _leave(self) -> None:
        self._client.forget(self.id)
        self._client._streams.pop(self.id, None)
        self._replies_in.close()
        self._replies.close()

    def _unreachable(self) -> UnreachableError:
        endpoint, seconds = self._endpoint, f"{self._timeout_seconds:g} s"
        if self._lost:
            return UnreachableError(
                f"the coordinator at {endpoint} was left for the one at {self._client.endpoint} before it answered "
                f"{tag_of(self._request)}",
                remedy="Ask again.",
            )
        if not self._sent:
            return UnreachableError(
                f"no coordinator could be reached at {endpoint} within {seconds}",
                remedy="Start it (`muster up`, `muster coordinator`), or correct the address; is a firewall between?",
            )
        return UnreachableError(
            f"the coordinator at {endpoint} did not answer {tag_of(self._request)} within {seconds}",
            remedy="Look at the coordinator's log; it may be busy, stopped, or of another version.",
        )


def tag_of(message: msgspec.Struct) -> str:
    """The message's name in the protocol: its tag."""
    return str(type(message).__struct_config__.tag)
