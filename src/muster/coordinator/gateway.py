"""Requests to the rank-0 runners, and their answers back to whoever asked."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio
from loguru import logger

from muster.bus.sockets import Resident, bind_socket, open_socket, receive, send_now
from muster.protocol import Chunk, Done, Generate, Refused
from muster.rank_protocol import Ask, Cancel, Piece, ToRunner
from muster.spec import Failure, InstanceId, Phase

#: Messages that wait for one runner or from one.
_QUEUED = 1_000
_MAXIMUM_BYTES = 1024 * 1024
#: Requests of one instance that may be under way; they are answered one at a time.
MAX_REQUESTS = 64

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Piece)

Answerer = Callable[[Chunk | Done | Refused], None]


class _Route(msgspec.Struct, frozen=True):
    instance: InstanceId
    attempt: int
    client: tuple[bytes, int]
    answer: Answerer


class Gateway(Resident):
    """The generation ROUTER. A runner is addressed by "instance/attempt", so that a coordinator that was started
    again reaches it as soon as it has dialled again."""

    def __init__(self, host: str, port: int = 0) -> None:
        super().__init__()
        self._host = host
        self._port = port
        self._socket: zmq.asyncio.Socket | None = None
        # A runner may still answer what an earlier coordinator asked: the numbers must not meet.
        self._numbers = itertools.count(secrets.randbits(48))
        self._routes: dict[int, _Route] = {}

    @property
    def port(self) -> int:
        """The port that is bound."""
        return self._port

    def ask(
        self, instance: InstanceId, attempt: int, generate: Generate, client: tuple[bytes, int], answer: Answerer
    ) -> None:
        """Hand a request to the instance's rank 0; `client` names it for `cancel`. `answer` gets every reply."""
        open_requests = sum(route.instance == instance for route in self._routes.values())
        if open_requests >= MAX_REQUESTS:
            answer(_refused("queue-full", f"{open_requests} requests wait for {instance}", "Try again in a moment."))
            return
        number = next(self._numbers)
        if not self._send(instance, attempt, Ask(request=number, generate=generate)):
            answer(_refused("not-connected", f"rank 0 of {instance} has not dialled in", "Try again in a moment."))
            return
        self._routes[number] = _Route(instance, attempt, client, answer)

    def cancel(self, client: tuple[bytes, int]) -> None:
        """Nobody waits for this request any more."""
        for number, route in list(self._routes.items()):
            if route.client == client:
                self._send(route.instance, route.attempt, Cancel(request=number))
                del self._routes[number]

    def fail(self, instance: InstanceId, failure: Failure) -> None:
        """The instance is over: whoever waits for it hears why."""
        for number, route in list(self._routes.items()):
            if route.instance == instance:
                del self._routes[number]
                route.answer(Refused(failure=failure))

    async def _open(self) -> None:
        socket = open_socket(zmq.ROUTER, receive_messages=_QUEUED, send_messages=_QUEUED, maximum_bytes=_MAXIMUM_BYTES)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A runner that was cut off dials again under the same name; the new connection is the one that lives.
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._port = await bind_socket(socket, self._host, self._port, "generation")
        self._socket = socket

    async def _serve(self) -> None:
        assert self._socket is not None
        while True:
            frames = await receive(self._socket)
            try:
                message = _decoder.decode(frames[-1])
            except (msgspec.DecodeError, ValueError, RecursionError):
                continue
            if len(frames) == 2:
                self._pass_on(frames[0], message)

    def _pass_on(self, identity: bytes, piece: Piece) -> None:
        route = self._routes.get(piece.request)
        if route is None or identity != f"{route.instance}/{route.attempt}".encode():
            return
        if not isinstance(piece.reply, Chunk):
            del self._routes[piece.request]
        route.answer(piece.reply)

    def _send(self, instance: InstanceId, attempt: int, message: ToRunner) -> bool:
        if self._socket is None:
            return False
        frames = [f"{instance}/{attempt}".encode(), _encoder.encode(message)]
        try:
            return send_now(self._socket, frames)
        except zmq.ZMQError as error:  # EHOSTUNREACH: that runner has not dialled in, or is gone
            logger.debug("nothing sent to {}: {}", instance, error)
            return False

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()


def _refused(kind: str, message: str, remedy: str) -> Refused:
    return Refused(failure=Failure(kind=kind, message=message, remedy=remedy, phase=Phase.RUNNING, retryable=True))
