"""The queues of the models: which request goes to which instance, and what becomes of it when the instance fails.

No socket and no clock: messages leave through a callable, and times are seconds of the monotonic clock, given in.
Everything happens in answer to an event: a request, a piece, a new state of the cluster, or a time that has come.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

import msgspec
from loguru import logger

from muster.coordinator import refusals
from muster.coordinator.admissible import fault_of
from muster.coordinator.directory import Directory, Standing, standing_of
from muster.coordinator.requests import Answerer, Load, Request
from muster.errors import RequestError
from muster.protocol import Generate
from muster.rank_protocol import Ask, Cancel, Piece, ToRunner
from muster.replies import Done, Refused
from muster.spec import Failure, InstanceId, ModelWorkload
from muster.state import Deleting, Ending, Failed, Gone, Instance, Running, State

#: A runner that has not dialled in (again) yet is tried again after this: a ROUTER does not say when a peer appears.
_RETRY_SECONDS = 0.1
#: How long the last pieces of a runner that has drained may be behind the news of its end.
_LAST_WORDS_SECONDS = 0.3
#: A request whose instances failed so often may be the cause: it gets no further one.
MAX_LOSSES = 2
#: Numbers of ended requests that are remembered, so that late pieces of them are not answered one by one.
_REMEMBERED = 4096

_NEVER = float("inf")


class QueueSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the queues."""

    max_waiting: int = 512  #: requests of one model that no instance has taken yet

    def __post_init__(self) -> None:
        if self.max_waiting < 1:
            raise ValueError(f"max_waiting is {self.max_waiting}; it must be at least 1")


class Dispatcher:
    """Every request from its arrival to its end.

    `send` hands a message to the runner with that identity, and says whether it could be reached. `due` is when
    `expire` has something to do; it only ever gets earlier outside of `expire`.
    """

    def __init__(self, send: Callable[[bytes, ToRunner], bool], settings: QueueSettings, first_number: int = 1) -> None:
        self._send = send
        self._settings = settings
        self._numbers = itertools.count(first_number)
        self._orders = itertools.count()
        self._queues: dict[str, list[Request]] = {}  #: by model, in the order of arrival
        self._loads: dict[InstanceId, Load] = {}
        self._underway: dict[int, Request] = {}
        self._forgotten: dict[int, None] = {}
        self._shut: Failure | None = None
        self.directory = Directory(State())
        self.due = _NEVER

    # --- what others see ----------------------------------------------------------------------------------

    def waiting(self, model: str) -> int:
        """How many requests of the model no instance has taken yet."""
        return len(self._queues.get(model, ()))

    def load_of(self, instance: Instance) -> Load | None:
        """What the current attempt of an instance has been given, if anything."""
        load = self._loads.get(instance.id)
        return load if load is not None and load.attempt == instance.attempt else None

    def open_requests(self) -> Iterable[Request]:
        """Every request that has not ended."""
        yield from self._underway.values()
        for queue in self._queues.values():
            yield from queue

    # --- events -------------------------------------------------------------------------------------------

    def submit(self, generate: Generate, answer: Answerer, now: float) -> Request:
        """Take a request; `answer` gets every piece of it. One that cannot be taken is answered with `Refused`."""
        request = Request(generate, "", next(self._orders), now, answer)
        fault = self._shut or fault_of(generate)
        if fault is not None:
            self._refuse(request, fault)
            return request
        try:
            candidates = self.directory.candidates(generate.instance)
        except RequestError as error:
            self._refuse(request, refusals.of_error(error))
            return request
        workload = candidates[0].spec.workload
        assert isinstance(workload, ModelWorkload)
        request.model = workload.public_name
        queue = self._queues.get(request.model, [])
        if len(queue) >= self._settings.max_waiting:
            self._refuse(request, refusals.queue_full(request.model, len(queue)))
            return request
        self._enqueue(request)
        self._dispatch(request.model, now)
        return request

    def cancel(self, request: Request, now: float) -> None:
        """Nobody waits for the request any more; it gets no further piece."""
        if not request.ended:
            request.ended = True
            self._withdraw(request)
            self._dispatch(request.model, now)

    def receive(self, identity: bytes, pieces: Sequence[Piece], now: float) -> None:
        """Pass on what one step of a runner brought."""
        freed: set[str] = set()
        for piece in pieces:
            request = self._underway.get(piece.request)
            load = request.load if request is not None else None
            if request is None or load is None or load.identity != identity:
                self._disown(identity, piece)
                continue
            reply = piece.reply
            if not isinstance(reply, Done | Refused):
                request.take(reply, load, now)
                continue
            freed.add(request.model)
            self._forget(request)
            request.refused_by |= {identity}
            if isinstance(reply, Refused) and reply.failure.retryable and not request.answered:
                self._enqueue(request)
            elif isinstance(reply, Done) and reply.reason == "cancelled":  # not by us: its runner was told to stop
                self._take_back(request, load)
            elif isinstance(reply, Done) and request.has_hole(reply):
                self._refuse(request, refusals.hole(load, request, reply))
            else:
                request.ended = True
                request.answer(reply)
        for model in freed:
            self._dispatch(model, now)

    def update(self, state: State, now: float) -> None:
        """The cluster has changed: take requests back from what failed, and send on those that waited for this."""
        self.directory = Directory(state)
        for load in list(self._loads.values()):
            match _prospect(load, state):
                case Prospect.ANSWERS:
                    pass
                case Prospect.DRAINS:
                    self._move(load)
                case Prospect.ENDS if load.requests:
                    load.end_at = min(load.end_at, now + _LAST_WORDS_SECONDS)
                    self.due = min(self.due, load.end_at)
                case Prospect.ENDS | Prospect.OVER:
                    self._close(load)
        for model in list(self._queues):
            self._dispatch(model, now)

    def shut(self, failure: Failure) -> None:
        """Take no request any more. What has no token yet is refused, since it can be asked elsewhere."""
        self._shut = failure
        for request in [request for request in self.open_requests() if not request.answered]:
            self._withdraw(request)
            self._refuse(request, failure)

    def expire(self, now: float) -> None:
        """Give up what has waited long enough, and try again what was to be tried again."""
        self.due = _NEVER
        changed: set[str] = set()
        for request in list(self.open_requests()):
            due = self._due_of(request)
            if due > now:
                self.due = min(self.due, due)
                continue
            changed.add(request.model)
            failure = refusals.too_late(request)
            self._withdraw(request)
            self._refuse(request, failure)
        for load in list(self._loads.values()):
            if load.end_at <= now:
                changed |= {request.model for request in load.requests.values()}
                self._close(load)
                continue
            self.due = min(self.due, load.end_at, load.retry_at if load.retry_at > now else _NEVER)
        for model in list(changed | self._queues.keys()):
            self._dispatch(model, now)

    # --- choosing -----------------------------------------------------------------------------------------

    def _dispatch(self, model: str, now: float) -> None:
        """Send on whatever the instances have room for, the oldest first, and refuse what none will ever answer."""
        queue = self._queues.get(model)
        if queue is None:
            return
        full: set[str] = set()
        for request in list(queue):
            wanted = request.generate.instance
            if wanted in full:
                continue
            try:
                candidates = self.directory.candidates(wanted)
            except RequestError:
                candidates = ()
            if not any(self._may_answer(request, instance) for instance in candidates):
                queue.remove(request)
                self._refuse(request, refusals.unavailable(wanted, candidates))
            elif self._handed_over(request, candidates, now):
                queue.remove(request)
            elif not request.refused_by:
                full.add(wanted)
        if not queue:
            del self._queues[model]

    def _may_answer(self, request: Request, instance: Instance) -> bool:
        match standing_of(instance):
            case Standing.COMING:
                return True
            case Standing.READY:
                return _identity(instance) not in request.refused_by
            case Standing.OVER:
                return False

    def _handed_over(self, request: Request, candidates: tuple[Instance, ...], now: float) -> bool:
        """Whether the request has left the queue: one that cannot be handed over at all must not hold up the others."""
        try:
            return self._hand_over(request, candidates, now)
        except Exception as error:
            logger.exception("a request for {!r} cannot be handed over", request.model)
            self._refuse(request, refusals.internal(error))
            return True

    def _hand_over(self, request: Request, candidates: tuple[Instance, ...], now: float) -> bool:
        """Send it to the ready instance with the least to do; `False` where none has room."""
        ready = [
            self._load(instance)
            for instance in candidates
            if standing_of(instance) is Standing.READY and _identity(instance) not in request.refused_by
        ]
        for load in sorted(ready, key=lambda load: (load.outstanding_tokens, len(load.requests))):
            if len(load.requests) >= load.limit or load.retry_at > now:
                continue
            number = next(self._numbers)
            if self._send(load.identity, Ask(request=number, generate=request.generate)):
                load.add(number, request, now)
                self._underway[number] = request
                self._note_due(request)
                return True
            load.retry_at = now + _RETRY_SECONDS
            self.due = min(self.due, load.retry_at)
        return False

    def _load(self, instance: Instance) -> Load:
        load = self.load_of(instance)
        if load is None:
            load = self._loads[instance.id] = Load(instance)
        return load

    # --- books --------------------------------------------------------------------------------------------

    def _enqueue(self, request: Request) -> None:
        """Put a request where it belongs by its arrival: one that comes back is before those that came later."""
        queue = self._queues.setdefault(request.model, [])
        bisect.insort(queue, request, key=lambda other: other.order)
        self._note_due(request)

    def _note_due(self, request: Request) -> None:
        self.due = min(self.due, self._due_of(request))

    def _due_of(self, request: Request) -> float:
        """When the request is given up unless something comes."""
        if request.load is None or not request.answered:
            return request.deadline
        return request.heard_at + request.load.silence_seconds

    def _forget(self, request: Request, *, known: bool = True) -> None:
        """The runner has ended the request, or has ended itself; or it does not know yet that it should."""
        load = request.load
        if load is None:
            return
        del self._underway[request.number]
        if known:
            self._remember(request.number)
        load.drop(request)

    def _remember(self, number: int) -> None:
        self._forgotten[number] = None
        if len(self._forgotten) > _REMEMBERED:
            del self._forgotten[next(iter(self._forgotten))]

    def _withdraw(self, request: Request) -> None:
        """Take the request from its queue or from its runner."""
        if request.load is not None:
            told = self._send(request.load.identity, Cancel(request=request.number))
            self._forget(request, known=told)
            return
        queue = self._queues.get(request.model)
        if queue is not None and request in queue:
            queue.remove(request)
            if not queue:
                del self._queues[request.model]

    def _disown(self, identity: bytes, piece: Piece) -> None:
        """A piece that nobody waits for: of a request that ended, or that an earlier coordinator sent."""
        if piece.request in self._forgotten or isinstance(piece.reply, Done | Refused):
            return
        logger.debug("runner {} answers the unknown request {}; it is told to stop", identity, piece.request)
        if self._send(identity, Cancel(request=piece.request)):
            self._remember(piece.request)

    def _refuse(self, request: Request, failure: Failure) -> None:
        request.ended = True
        request.answer(Refused(failure=failure))

    def _move(self, load: Load) -> None:
        """An instance that drains keeps what it has begun; what it has not begun goes elsewhere, where it can."""
        for request in list(load.requests.values()):
            if not request.begun and self._has_other(request):
                self._withdraw(request)
                self._enqueue(request)

    def _has_other(self, request: Request) -> bool:
        try:
            candidates = self.directory.candidates(request.generate.instance)
        except RequestError:
            return False
        return any(self._may_answer(request, instance) for instance in candidates)

    def _close(self, load: Load) -> None:
        """The attempt is over."""
        del self._loads[load.instance]
        for request in list(load.requests.values()):
            self._forget(request)
            self._take_back(request, load)

    def _take_back(self, request: Request, load: Load) -> None:
        """The attempt is over for this request: it waits for another one, unless it has begun to answer."""
        request.losses += 1
        if request.answered or request.losses > MAX_LOSSES:
            self._refuse(request, refusals.lost(load, self.directory.state, answered=request.answered))
        else:
            self._enqueue(request)


class Prospect(Enum):
    """What the requests that an attempt was given may expect of it."""

    ANSWERS = "answers"
    DRAINS = "drains"  #: it finishes what it has begun
    ENDS = "ends"  #: it has drained, or was cut off in that: only what is on its way still comes
    OVER = "over"


def _prospect(load: Load, state: State) -> Prospect:
    instance = state.instances.get(load.instance)
    if instance is None:
        return Prospect.ENDS
    if instance.attempt != load.attempt:
        return Prospect.OVER
    match instance.status:
        case Running():
            return Prospect.ANSWERS
        case Deleting(drain_seconds=seconds) | Ending(drain_seconds=seconds) if seconds > 0:
            ended = any(isinstance(rank.state, Failed | Gone) for rank in instance.ranks)
            return Prospect.ENDS if ended else Prospect.DRAINS
        case _:
            return Prospect.OVER


def _identity(instance: Instance) -> bytes:
    return f"{instance.id}/{instance.attempt}".encode()
