"""The side channel of jaccl over the bus: ranks exchange bytes through the coordinator, within a deadline."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from muster.protocol import Gather
from muster.replies import Gathered, Refused
from muster.spec import Failure, InstanceId, Phase
from muster.state import Instance, State, wants_ranks

#: Bytes of all exchanges together; beyond it new ones are refused. A rank's connection data are a few hundred bytes.
MAX_BYTES: Final = 64 * 2**20
#: Exchanges of an attempt that are remembered, for ranks that ask again: no rank is further behind than this.
_ROUNDS_KEPT: Final = 2

Answer = Callable[[Gathered | Refused], None]


class _Exchange:
    """One round of one attempt."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: dict[int, bytes] = {}
        self.waiting: dict[int, tuple[Answer, float]] = {}  #: by rank, whom to answer, and by when

    @property
    def complete(self) -> bool:
        return len(self.parts) == self.size

    @property
    def bytes(self) -> int:
        return sum(map(len, self.parts.values()))

    def due(self) -> float:
        return min((due for _, due in self.waiting.values()), default=math.inf)

    def answer(self, reply: Gathered | Refused) -> None:
        waiting, self.waiting = self.waiting, {}
        for answer, _ in waiting.values():
            answer(reply)


class Gathering:
    """Exchanges that are under way. Pure but for its own memory: time comes in, in seconds.

    A rank may ask again, after a lost answer or of another coordinator: the last one to ask is answered. A coordinator
    that has taken over knows no earlier part, so that ranks send the part of the round before again as well.
    """

    def __init__(self, state: Callable[[], State]) -> None:
        self._state = state
        self._rounds: dict[tuple[InstanceId, int], dict[int, _Exchange]] = {}

    def take(self, request: Gather, answer: Answer, now: float) -> None:
        """Take a rank's part; `answer` is called when all are in or the time is over, unless the rank asks again."""
        self._forget()
        refused = self._refusal(request)
        if refused is not None:
            answer(refused)
            return
        rounds = self._rounds.setdefault((request.instance, request.attempt), {})
        exchange = rounds.setdefault(request.round, _Exchange(request.world_size))
        exchange.parts[request.rank] = request.data
        exchange.waiting[request.rank] = (answer, now + request.seconds)
        for old in sorted(rounds)[:-_ROUNDS_KEPT]:
            rounds.pop(old).answer(_over(request, "a later exchange of the same attempt has begun"))
        if len({len(part) for part in exchange.parts.values()}) > 1:
            del rounds[request.round]
            exchange.answer(_unequal(request, exchange))
        elif exchange.complete:
            exchange.answer(Gathered(parts=tuple(exchange.parts[rank] for rank in range(exchange.size))))

    def expire(self, now: float) -> None:
        """Refuse what has waited for too long, and forget the attempts that are over."""
        self._forget()
        for (instance, attempt), rounds in self._rounds.items():
            for number, exchange in list(rounds.items()):
                if exchange.due() <= now:
                    del rounds[number]
                    exchange.answer(self._late(instance, attempt, number, exchange))

    def next_due(self) -> float:
        """When something is due by itself; infinity for never."""
        return min(
            (exchange.due() for rounds in self._rounds.values() for exchange in rounds.values()), default=math.inf
        )

    @property
    def bytes(self) -> int:
        """Bytes that are held."""
        return sum(exchange.bytes for rounds in self._rounds.values() for exchange in rounds.values())

    def _forget(self) -> None:
        for key in list(self._rounds):
            if self._attempt(*key) is None:
                for exchange in self._rounds.pop(key).values():
                    exchange.answer(_stale(*key))

    def _attempt(self, instance: InstanceId, attempt: int) -> Instance | None:
        """The instance, where this attempt of it wants its ranks."""
        found = self._state().instances.get(instance)
        return found if found is not None and found.attempt == attempt and wants_ranks(found) else None

    def _refusal(self, request: Gather) -> Refused | None:
        instance = self._attempt(request.instance, request.attempt)
        if instance is None:
            return _stale(request.instance, request.attempt)
        if len(instance.ranks) != request.world_size:
            return _over(request, f"the attempt has {len(instance.ranks)} ranks, not {request.world_size}")
        if self.bytes + len(request.data) > MAX_BYTES:
            return _over(request, f"exchanges hold {self.bytes} bytes already, of {MAX_BYTES} at most")
        return None

    def _late(self, instance: InstanceId, attempt: int, number: int, exchange: _Exchange) -> Refused:
        found = self._attempt(instance, attempt)
        missing = [rank for rank in range(exchange.size) if rank not in exchange.parts]
        named = [f"rank {rank}" + (f" on node {found.ranks[rank].node}" if found else "") for rank in missing]
        return Refused(
            failure=Failure(
                kind="formation-timeout",
                message=f"{', '.join(named)} did not send connection data in time (exchange {number})",
                remedy="See what that rank does: muster logs",
                phase=Phase.FORMING,
                retryable=True,
                secondary=True,  # a rank that is late may say itself why
            )
        )


def _stale(instance: InstanceId, attempt: int) -> Refused:
    message = f"attempt {attempt} of {instance} is over"
    return Refused(failure=Failure(kind="attempt-over", message=message, phase=Phase.FORMING, secondary=True))


def _over(request: Gather, reason: str) -> Refused:
    message = f"exchange {request.round} of attempt {request.attempt} of {request.instance} is not taken: {reason}"
    return Refused(failure=Failure(kind="exchange-refused", message=message, phase=Phase.FORMING, retryable=True))


def _unequal(request: Gather, exchange: _Exchange) -> Refused:
    sizes = ", ".join(f"rank {rank}: {len(part)}" for rank, part in sorted(exchange.parts.items()))
    return Refused(
        failure=Failure(
            kind="members-differ",
            message=f"the ranks exchange parts of different sizes in round {request.round} ({sizes} bytes)",
            remedy="Use the same version of mlx on every node.",
            phase=Phase.FORMING,
        )
    )
