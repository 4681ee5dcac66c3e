"""The generation socket: requests to the rank-0 runners, and their answers back to whoever asked."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import cast

import anyio
import msgspec
import zmq
from loguru import logger

from muster.bus.sockets import Resident, bind_socket, open_plain_socket
from muster.coordinator.dispatcher import Dispatcher, QueueSettings
from muster.coordinator.requests import Answerer, Request
from muster.protocol import Generate
from muster.rank_protocol import Pieces, ToRunner
from muster.state import State

#: Messages that wait for one runner or from one: a runner sends one per step.
_QUEUED = 2_000
#: A step of a batch with log probabilities, or the text of a prompt that was given as token ids.
_MAXIMUM_BYTES = 64 * 1024 * 1024
#: Messages that are taken in one go before the other tasks get their turn.
_AT_ONCE = 32

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Pieces] = msgspec.msgpack.Decoder(Pieces)


class Gateway(Resident):
    """The generation ROUTER. A runner is addressed by "instance/attempt", so that a coordinator that was started
    again reaches it as soon as it has dialled again."""

    def __init__(self, host: str, port: int = 0, settings: QueueSettings | None = None) -> None:
        super().__init__()
        self._host = host
        self._port = port
        self._socket: zmq.Socket[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._looking = False
        self._earlier = anyio.Event()
        self._planned = float("inf")
        # A runner may still answer what an earlier coordinator asked: the numbers must not meet.
        self.dispatcher = Dispatcher(self._send, settings or QueueSettings(), secrets.randbits(48))

    @property
    def port(self) -> int:
        """The port that is bound."""
        return self._port

    def ask(self, generate: Generate, answer: Answerer) -> Request:
        """Queue a request. `answer` gets every piece; the last, `Done` or `Refused`, perhaps before this returns."""
        request = self.dispatcher.submit(generate, answer, time.monotonic())
        self._plan()
        return request

    def cancel(self, request: Request) -> None:
        """Nobody waits for this request any more. Does nothing after its end."""
        self.dispatcher.cancel(request, time.monotonic())
        self._plan()

    def update(self, state: State) -> None:
        """The cluster has changed."""
        self.dispatcher.update(state, time.monotonic())
        self._plan()

    async def _open(self) -> None:
        socket = open_plain_socket(
            zmq.ROUTER, receive_messages=_QUEUED, send_messages=_QUEUED, maximum_bytes=_MAXIMUM_BYTES
        )
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A runner that was cut off dials again under the same name; the new connection is the one that lives.
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._port = await bind_socket(socket, self._host, self._port, "generation")
        self._socket = socket

    async def _serve(self) -> None:
        assert self._socket is not None
        self._loop = asyncio.get_running_loop()
        descriptor = cast(int, self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(descriptor, self._read)
        try:
            self._look_soon()
            await self._keep_time()
        finally:
            self._loop.remove_reader(descriptor)

    # --- receiving ----------------------------------------------------------------------------------------

    def _look_soon(self) -> None:
        """Look for messages in the next turn of the loop.

        The descriptor tells of a change once. Whatever else uses the socket may have taken that news, so that a look
        is due after it.
        """
        if not self._looking and self._loop is not None:
            self._looking = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        """Take what has arrived; in turns, so that a flood does not starve the other tasks."""
        self._looking = False
        socket = self._socket
        if socket is None or socket.closed:
            return
        for _ in range(_AT_ONCE):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(frames)
        self._look_soon()

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            return
        try:
            pieces = _decoder.decode(frames[1])
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            logger.warning("runner {} sent what is no answer: {}", frames[0], error)
            return
        try:
            self.dispatcher.receive(frames[0], pieces, time.monotonic())
        except Exception:  # the outermost edge of one message: the other runners' go on
            logger.exception("pieces of runner {} failed", frames[0])
        self._plan()

    async def _keep_time(self) -> None:
        while True:
            self._planned = self.dispatcher.due
            earlier = self._earlier
            with anyio.move_on_after(self._planned - time.monotonic()):
                await earlier.wait()
            if self.dispatcher.due <= time.monotonic():
                try:
                    self.dispatcher.expire(time.monotonic())
                except Exception:  # the outermost edge of one look: the requests of all the others go on
                    logger.exception("giving up requests that are late failed")

    def _plan(self) -> None:
        """Wake the clock if something is due before it would wake by itself."""
        if self.dispatcher.due < self._planned:
            self._planned = self.dispatcher.due
            self._earlier.set()
            self._earlier = anyio.Event()

    def _send(self, identity: bytes, message: ToRunner) -> bool:
        if self._socket is None:
            return False
        try:
            self._socket.send_multipart((identity, _encoder.encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError:  # EHOSTUNREACH: that runner has not dialled in, or is gone; EAGAIN: it reads nothing
            return False
        finally:
            self._look_soon()
        return True

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
