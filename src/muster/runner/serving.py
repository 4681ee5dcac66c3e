"""Rank 0's loop: takes requests from the coordinator's gateway, one at a time, and answers token by token."""

from __future__ import annotations

import time
from collections import deque

import msgspec
import zmq

from muster.errors import MusterError
from muster.model.generate import Decoder, Generation
from muster.model.load import LoadedModel
from muster.model.prompt import encode
from muster.protocol import Chunk, Done, Refused
from muster.rank_protocol import Ask, Cancel, Piece, Stop, ToRunner
from muster.runner.context import RankContext
from muster.runner.steps import StepSource
from muster.spec import Failure, Phase

#: Requests that may wait in the runner; the gateway refuses before this is reached.
_QUEUE_REQUESTS = 1000
_LINGER_MS = 500
#: A coordinator that is away now is dialled again by ZeroMQ for as long as it takes.
_DIAL_MS = 1_000

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[ToRunner] = msgspec.msgpack.Decoder(ToRunner)


class Serving:
    """Blocks on its sockets while there is nothing to do, and looks at them between two tokens while there is."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        rank: RankContext,
        loaded: LoadedModel,
        steps: StepSource | None,
    ) -> None:
        self._rank = rank
        self._loaded = loaded
        self._steps = steps
        self._waiting: deque[Ask] = deque()
        self._active = 0
        self._cancelled = False
        self._stopped = False
        self._socket = context.socket(zmq.DEALER)
        # The gateway addresses a runner by this name, so that a restarted gateway finds it again by itself.
        self._socket.set(zmq.IDENTITY, f"{rank.prepare.instance}/{rank.prepare.attempt}".encode())
        self._socket.set(zmq.LINGER, _LINGER_MS)
        self._socket.set(zmq.SNDHWM, _QUEUE_REQUESTS)
        self._socket.set(zmq.RCVHWM, _QUEUE_REQUESTS)
        self._dial(rank.prepare.generation)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(rank.channel.fileno(), zmq.POLLIN)
        if steps is not None:
            self._poller.register(steps.socket, zmq.POLLIN)

    def _dial(self, endpoint: str) -> None:
        """Connect, and see the gateway take it: who is told that the instance is ready may ask at once."""
        monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.connect(endpoint)
        monitor.poll(_DIAL_MS)
        self._socket.disable_monitor()

    def run(self) -> int:
        """Serve until told to stop; answers the exit code."""
        while not self._stopped:
            self._look(wait=not self._waiting)
            if self._waiting and not self._stopped:
                self._answer(self._waiting.popleft())
        self._socket.close()
        return 0

    def _look(self, *, wait: bool) -> None:
        """Take what has arrived; `wait` blocks until something has."""
        ready = dict(self._poller.poll(None if wait else 0))
        if self._rank.channel.fileno() in ready:
            frame = self._rank.channel.receive()
            self._stopped = frame is None or isinstance(frame, Stop)
        if self._steps is not None and self._steps.socket in ready:
            self._steps.take_join()
        while self._socket in ready and self._socket.poll(0):
            try:
                message = _decoder.decode(self._socket.recv())
            except msgspec.DecodeError:
                continue
            match message:
                case Ask():
                    self._waiting.append(message)
                case Cancel(request=request):
                    self._cancel(request)

    def _cancel(self, request: int) -> None:
        if request == self._active:
            self._cancelled = True
        self._waiting = deque(ask for ask in self._waiting if ask.request != request)

    def _answer(self, ask: Ask) -> None:
        begin = time.perf_counter()
        generate = ask.generate
        try:
            tokens = encode(self._loaded.tokenizer, generate.prompt, generate.messages or None)
            generation = Generation(self._loaded, tokens, generate.sampling)
        except MusterError as error:
            failure = Failure(kind=error.kind, message=error.message, remedy=error.remedy, phase=Phase.RUNNING)
            self._send(Piece(request=ask.request, reply=Refused(failure=failure)))
            return
        self._active, self._cancelled = ask.request, False
        if self._steps is not None:
            self._steps.insert(ask.request, tokens)
        decoder = Decoder(self._loaded)
        logits = decoder.prefill(tokens)
        first_seconds = 0.0
        reason = "cancelled"
        while True:
            piece = generation.advance(logits)
            first_seconds = first_seconds or time.perf_counter() - begin
            if piece.text or piece.finish is None:
                self._send(Piece(request=ask.request, reply=Chunk(text=piece.text, tokens=(piece.token,))))
            if piece.finish is not None:
                reason = piece.finish
                break
            self._look(wait=False)
            if self._stopped or self._cancelled:
                break
            if self._steps is not None:
                self._steps.advance(ask.request, piece.token)
            logits = decoder.step(piece.token)
        self._active = 0
        if self._steps is not None:
            self._steps.remove(ask.request)
        done = Done(
            reason=reason,
            prompt_tokens=len(tokens),
            completion_tokens=generation.generated_tokens,
            seconds_to_first_token=first_seconds,
            seconds=time.perf_counter() - begin,
        )
        self._send(Piece(request=ask.request, reply=done))

    def _send(self, piece: Piece) -> None:
        try:
            self._socket.send(_encoder.encode(piece), zmq.NOBLOCK)
        except zmq.Again:
            # A coordinator that is away for a thousand pieces has lost the request anyway.
            self._cancelled = True
