"""Rank 0's loop: requests from the gateway enter the batch at step boundaries, and every step's tokens go back."""

from __future__ import annotations

import contextlib
import time
from typing import Final

import zmq

from muster.errors import ProtocolError
from muster.model.answer import Answer
from muster.model.batch import Batch, BatchStep, BatchToken
from muster.model.guard import Choice
from muster.model.load import LoadedModel
from muster.model.request import PreparedRequest
from muster.rank_protocol import Admission, Ask, Cancel, Leave, Piece, Redial, Step, Stop, ToRank
from muster.replies import AnyPiece, Chunk, Refused, Started
from muster.runner.context import RankContext
from muster.runner.line import GenerationLine
from muster.runner.preparing import Preparer, failure_of
from muster.runner.pulse import Pulse
from muster.runner.requests import Request, Requests
from muster.runner.steps import AGAIN, StepSource
from muster.spec import Failure, Phase

_NOTHING: Final = Chunk()
#: Text waits so long for more of it, as long as a screen shows one picture: a message for each token of a small model
#: would cost more than the token.
_FLUSH_SECONDS: Final = 0.015
#: A step holds passes for so long at most, and what arrives meanwhile waits: a message for each pass of a small model
#: would wake threads that the ranks' own exchanges need.
_STEP_SECONDS: Final = 0.016
_MOST_PASSES: Final = 8


class Serving:
    """Blocks on its sockets while there is nothing to do, and looks at them between two steps while there is.

    A step is decided and sent as soon as the one before has returned: its pass is being computed by then on every
    rank. Only after that do the tokens of the step before become text, so that the message waits at the other ranks
    when they want it, and text costs no time of the model's.
    """

    def __init__(
        self,
        rank: RankContext,
        loaded: LoadedModel,
        batch: Batch,
        line: GenerationLine,
        steps: StepSource | None,
        *,
        chunk_tokens: int,
        preparer: Preparer | None = None,
    ) -> None:
        self._rank = rank
        self._loaded = loaded
        self._batch = batch
        self._line = line
        self._steps = steps
        self._chunk_tokens = chunk_tokens
        self._preparer = preparer or Preparer(loaded)
        self._pulse = Pulse(rank.channel, rank.counter)
        self._requests = Requests()
        self._pieces: list[Piece] = []
        self._removals: list[int] = []
        self._sequences = 0
        self._step = steps.sent if steps is not None else 0
        self._passes = 0  #: that the last step still has to give
        self._pass_seconds = 1.0
        self._urgent = False
        self._flushed = 0.0
        self._deadline: float | None = None
        self._orphaned = False
        self._poller = zmq.Poller()
        self._poller.register(line.socket, zmq.POLLIN)
        self._poller.register(rank.channel.fileno(), zmq.POLLIN)
        self._poller.register(self._preparer.fileno(), zmq.POLLIN)
        if steps is not None:
            self._poller.register(steps.socket, zmq.POLLIN)

    def run(self) -> int:
        """Serve until told to stop; answers the exit code.

        Raises:
            RuntimeError: from MLX, when another rank is gone.
            ProtocolError: a rank is gone, as the steps show.
        """
        brought: BatchStep | None = None
        while not self._expired():
            step = self._decide()
            if step is not None:
                self._pulse.busy(self._step, len(self._batch) + len(step.admit))
                if self._steps is not None and step is not AGAIN:
                    self._steps.send(step)
            if brought is not None:
                self._hear(brought)
            if step is None or step.admit or not self._batch.steady:
                self._urgent = True  # what comes now may take long
            self._flush()
            brought = self._run(step) if step is not None else None
            if step is None:
                self._pulse.idle(self._step)
                if self._drained():
                    break
            self._look(wait=step is None)
        if brought is not None:
            self._hear(brought)
        return self._leave()

    def _run(self, step: Step) -> BatchStep:
        begin = time.perf_counter()
        brought = self._batch.run(step)
        self._pass_seconds += (time.perf_counter() - begin - self._pass_seconds) / 2
        return brought

    # --- what comes in ---------------------------------------------------------------------------------------

    def _look(self, *, wait: bool) -> None:
        """Take what has arrived; `wait` blocks until something has."""
        ready = dict(self._poller.poll(None if wait else 0))
        if self._line.socket in ready:
            for message in self._line.receive():
                match message:
                    case Ask():
                        self._ask(message)
                    case Cancel(request=number):
                        self._cancel(number)
        if self._preparer.fileno() in ready:
            for number, outcome in self._preparer.take():
                self._prepared(number, outcome)
        if self._steps is not None and self._steps.socket in ready:
            self._steps.take_join()
        if self._rank.channel.fileno() in ready:
            self._told(self._rank.channel.receive())

    def _ask(self, ask: Ask) -> None:
        if self._deadline is not None:
            self._refuse(ask.request, _deleted())
            return
        self._requests.preparing[ask.request] = Request(ask.request, ask.generate)
        self._preparer.submit(ask.request, ask.generate)

    def _cancel(self, number: int) -> None:
        if number in self._requests.preparing:
            self._preparer.drop(number)
        request = self._requests.drop(number)
        if request is not None:
            self._remove(request)
            self._say(number, request.done("cancelled"))

    def _prepared(self, number: int, outcome: PreparedRequest | Failure) -> None:
        request = self._requests.preparing.pop(number, None)
        if request is None:  # cancelled meanwhile
            return
        if isinstance(outcome, Failure):
            self._refuse(number, outcome)
            return
        request.prepared = outcome
        if outcome.limit == 0:
            self._say(number, Started(prompt_tokens=len(outcome.tokens), prompt=outcome.prompt_text))
            self._say(number, request.done("length"))
        else:
            self._requests.waiting.append(request)

    def _told(self, frame: ToRank | None) -> None:
        """What the worker wants; `None`: it is gone."""
        match frame:
            case Redial(generation=endpoint):
                for number in self._requests.numbers():
                    self._cancel(number)  # whoever asked for it is gone with the old gateway
                self._line.dial_instead(endpoint)
            case Stop(drain_seconds=seconds):
                self._stop(seconds)
            case None:
                self._orphaned = True
                self._stop(0.0)
            case _:
                pass

    def _stop(self, drain_seconds: float) -> None:
        """The worker wants the end: what has not begun is for another instance."""
        self._deadline = time.monotonic() + drain_seconds
        for request in [*self._requests.preparing.values(), *self._requests.waiting]:
            self._requests.drop(request.number)
            self._refuse(request.number, _deleted())

    # --- what is decided -------------------------------------------------------------------------------------

    def _decide(self) -> Step | None:
        """The next step, or a further pass of the last; `None` where there is nothing to do."""
        if self._passes and len(self._batch):
            self._passes -= 1
            return AGAIN
        remove = tuple(sequence for sequence in self._removals if sequence in self._batch)
        self._removals.clear()
        entries = self._batch.prefix.excess()
        room = self._batch.max_sequences - len(self._batch) + len(remove)
        admit: list[Admission] = []
        while self._requests.waiting and len(admit) < room:
            admission = self._admit(self._requests.waiting.popleft())
            if admission is not None:
                admit.append(admission)
        if not (remove or admit or entries is not None or len(self._batch)):
            return None
        self._step += 1
        passes = 1 if admit else self._passes_ahead()
        self._passes = passes - 1
        return Step(step=self._step, remove=remove, admit=tuple(admit), cache_entries=entries, passes=passes)

    def _passes_ahead(self) -> int:
        """How many passes the next step holds: several where the others must hear of each and nothing is to come in."""
        requests = self._requests
        if self._steps is None or requests.waiting or requests.preparing or not self._batch.steady:
            return 1
        return min(_MOST_PASSES, max(1, int(_STEP_SECONDS / self._pass_seconds)))

    def _admit(self, request: Request) -> Admission | None:
        prepared = request.prepared
        assert prepared is not None
        try:
            answer = Answer(self._loaded, prepared, request.generate.sampling)
        except Exception as error:  # the outermost edge of one request: its schema, its tools
            self._refuse(request.number, failure_of(error))
            return None
        self._sequences += 1
        request.answer, request.sequence = answer, self._sequences
        admission = self._batch.admission(
            request.sequence,
            prepared.tokens,
            keep=prepared.keep,
            max_tokens=prepared.limit,
            choice=Choice(request.sequence, answer.sampler, answer.processors),
        )
        request.cached_tokens = admission.cached_tokens
        self._requests.running[request.sequence] = request
        started = Started(
            prompt_tokens=len(prepared.tokens), cached_tokens=admission.cached_tokens, prompt=prepared.prompt_text
        )
        self._say(request.number, started)
        return admission

    def _remove(self, request: Request) -> None:
        if request.sequence:
            self._removals.append(request.sequence)

    # --- what goes out ---------------------------------------------------------------------------------------

    def _hear(self, brought: BatchStep) -> None:
        """Turn what a step brought into pieces."""
        running = self._requests.running
        for sequence, error in brought.failed:
            if (request := running.get(sequence)) is not None:
                self._fail(request, error)
        for sequence, done in brought.prefilled:
            request = running.get(sequence)
            piece = request.progress(done, chunk_tokens=self._chunk_tokens) if request is not None else None
            if request is not None and piece is not None:
                self._say(request.number, piece)
        for token in brought.tokens:
            if (request := running.get(token.sequence)) is not None:
                self._take(request, token)

    def _take(self, request: Request, token: BatchToken) -> None:
        answer = request.answer
        assert answer is not None
        first = not request.first_seconds
        request.heard()
        try:
            logprobs = token.logprobs if answer.needs_logprobs else None
            chunk = answer.take(token.token, logprobs, at_limit=token.last == "length")
        except Exception as error:  # the outermost edge of one request: its tool calls, its text
            self._fail(request, error)
            return
        if chunk != _NOTHING:
            self._say(request.number, chunk, urgent=first)
        if answer.finish is not None:
            del self._requests.running[request.sequence]
            if token.last is None:
                self._remove(request)
            self._say(request.number, request.done(answer.finish))
        elif token.last is not None:
            message = f"the batch ended the answer ({token.last}), but its text goes on"
            self._fail(request, RuntimeError(message))

    def _fail(self, request: Request, error: Exception) -> None:
        """End one request for an error that is its own."""
        self._requests.drop(request.number)
        self._remove(request)
        self._refuse(request.number, failure_of(error))

    def _refuse(self, number: int, failure: Failure) -> None:
        self._say(number, Refused(failure=failure))

    def _say(self, number: int, reply: AnyPiece, *, urgent: bool = True) -> None:
        self._pieces.append(Piece(request=number, reply=reply))
        self._urgent = self._urgent or urgent

    def _flush(self) -> None:
        """Send what has come together, unless it is only text that more will follow in a moment."""
        now = time.monotonic()
        if not self._pieces or (not self._urgent and now - self._flushed < _FLUSH_SECONDS):
            return
        self._urgent, self._flushed = False, now
        pieces = tuple(self._pieces)
        self._pieces.clear()
        if not self._line.send(pieces):
            # A coordinator that is away for a thousand messages has lost the requests anyway.
            for piece in pieces:
                if (request := self._requests.drop(piece.request)) is not None:
                    self._remove(request)

    # --- the end ---------------------------------------------------------------------------------------------

    def _expired(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _drained(self) -> bool:
        return self._deadline is not None and not len(self._requests)

    def _leave(self) -> int:
        for request in self._requests.drop_all():
            self._refuse(request.number, _cut_off())
        self._urgent = True
        self._flush()
        self._preparer.close()
        if not self._orphaned:  # the others are still there: they wait for `Leave` where anything runs
            for _ in range(self._passes):
                self._batch.run(AGAIN)
            self._batch.settle()
        if self._steps is not None:
            with contextlib.suppress(ProtocolError):  # an idle rank may have ended already
                self._steps.send(Leave(step=self._steps.sent + 1))
            self._steps.close()
        self._line.close()
        return 0


def _deleted() -> Failure:
    return Failure(
        kind="instance-deleted",
        message="the instance is being ended and takes nothing new",
        remedy="Ask again: another instance of the model may serve it.",
        phase=Phase.RUNNING,
        retryable=True,
    )


def _cut_off() -> Failure:
    return Failure(
        kind="answer-lost",
        message="the instance was ended before the answer was complete",
        remedy="Ask again, or give the instance more drain_seconds.",
        phase=Phase.RUNNING,
        retryable=True,
    )
