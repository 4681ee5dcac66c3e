"""The cells of the fault matrix, and what must come out of each: pure, so that the promises are in one place."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from muster.spec import Deadlines

#: Of the coordinator, in seconds.
HEARTBEAT_SECONDS: Final = 0.2
LEASE_SECONDS: Final = 1.0
#: Of the instances: short.
DEADLINES: Final = Deadlines(
    prepare_seconds=4.0, form_seconds=3.0, load_seconds=3.0, warm_seconds=3.0, step_seconds=2.0, stop_seconds=0.5
)
#: Of models: three cold runners that import mlx-lm at once take their time.
MODEL_DEADLINES: Final = msgspec.structs.replace(DEADLINES, prepare_seconds=30.0)
RANKS: Final = 3


class Fault(StrEnum):
    """What is done to the target."""

    KILL = "SIGKILL"
    STOP = "SIGSTOP"
    FULL = "disk full"
    CUT = "cut off"  #: no packets either way
    DEAF = "hears nothing"  #: packets to the host are lost
    MUTE = "not heard"  #: packets from the host are lost


class Phase(StrEnum):
    """Where all ranks stand when it happens."""

    PREPARING = "preparing"
    LISTENING = "listening"  #: the last rank has not dialled yet
    CONNECTED = "connected"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready idle"
    PREFILLING = "prefilling"
    DECODING = "decoding"

    @property
    def serves(self) -> bool:
        """Whether the instance is ready by then."""
        return self in (Phase.READY, Phase.PREFILLING, Phase.DECODING)

    @property
    def needs_model(self) -> bool:
        """Whether a bare group has no such phase; its runners start in a third of the time."""
        return self not in (Phase.PREPARING, Phase.LISTENING, Phase.CONNECTED)


class Target(StrEnum):
    """Whom it happens to."""

    FIRST = "rank 0"
    MIDDLE = "middle rank"
    LAST = "last rank"
    WORKER = "worker"  #: of the middle rank; where a link is cut, its host
    COORDINATOR = "coordinator"

    @property
    def rank(self) -> int:
        """The rank that is hit, itself or with its worker; -1 for the coordinator."""
        return {Target.FIRST: 0, Target.LAST: RANKS - 1, Target.COORDINATOR: -1}.get(self, 1)

    @property
    def is_rank(self) -> bool:
        """Whether it is a runner's process."""
        return self in _RANK_TARGETS


_RANK_TARGETS: Final = (Target.FIRST, Target.MIDDLE, Target.LAST)


@dataclass(frozen=True, slots=True)
class Cell:
    """One experiment."""

    fault: Fault
    phase: Phase
    target: Target

    def __str__(self) -> str:
        return f"{self.fault}, {self.phase}, {self.target}"

    @property
    def loses_node(self) -> bool:
        """Whether a node is gone for the instance, which then goes on elsewhere."""
        return self.target is Target.WORKER and self.fault is not Fault.FULL

    @property
    def pinned(self) -> bool:
        """Whether the instance may use its own three nodes only; a spare one takes over otherwise."""
        return not self.loses_node


class Outcome(StrEnum):
    """What became of the instance."""

    READY = "ready"  #: the attempt went on as if nothing had been
    RECOVERED = "recovered"  #: it failed with the right cause, and the next one is ready
    FAILED = "failed"  #: with the right cause, for good: trying again would not help
    WRONG = "WRONG"


class Answer(StrEnum):
    """What became of the request that was under way."""

    NONE = "-"
    DONE = "answered"
    REFUSED = "refused"
    LOST = "lost"  #: its coordinator ended after the first token, and that was said
    UNREACHABLE = "no coordinator"
    SILENCE = "SILENCE"


@dataclass(frozen=True, slots=True)
class Expected:
    """What must come out. `seconds` are counted from the fault, on a machine with nothing else to do.

    Where an attempt fails, that is until `InstanceFailed` is published, of one of these `kinds`, blaming the rank and
    node of the target where `blames`, and with `words` in its message. Where none does, it is until the instance serves
    again after the fault is over. `answers` is what may become of the request that was under way.
    """

    outcomes: frozenset[Outcome]
    seconds: float
    kinds: frozenset[str] = frozenset()
    blames: bool = False
    words: str = ""
    answers: frozenset[Answer] = frozenset({Answer.NONE})


_RECOVERED: Final = frozenset({Outcome.RECOVERED})
_READY: Final = frozenset({Outcome.READY})
_EITHER: Final = _READY | _RECOVERED


def cells() -> list[Cell]:
    """Every fault in every phase on every target that it can hit, in an order that restarts little."""
    hits = {
        Fault.KILL: tuple(Target),
        Fault.STOP: tuple(Target),
        Fault.FULL: (Target.WORKER, Target.COORDINATOR),
        Fault.CUT: (Target.WORKER, Target.COORDINATOR),
        Fault.DEAF: (Target.WORKER,),
        Fault.MUTE: (Target.WORKER,),
    }
    found = [Cell(fault, phase, target) for phase in Phase for fault in Fault for target in hits[fault]]
    return sorted(found, key=lambda cell: (cell.phase.needs_model, not cell.pinned))


def expected(cell: Cell) -> Expected:
    """What the issue promises of a cell."""
    match cell.fault, cell.target:
        case _, Target.COORDINATOR:
            return _coordinator(cell)
        case Fault.FULL, _:
            return _full_disk(cell)
        case _, Target.WORKER:
            return _lost_node(cell)
        case Fault.KILL, _:
            # The worker reaps its runner at once; what the neighbours say of it is an echo.
            return Expected(_RECOVERED, 0.3, frozenset({"rank-killed"}), True, "SIGKILL", _answers(cell))
        case _:
            return _stopped_rank(cell)


def _answers(cell: Cell) -> frozenset[Answer]:
    """An answer that has begun is lost with its ranks; a request without a token waits for the next attempt."""
    match cell.phase:
        case Phase.DECODING:
            return frozenset({Answer.REFUSED})
        case Phase.LOADING | Phase.WARMING | Phase.PREFILLING:
            return frozenset({Answer.DONE})
        case _:
            return frozenset({Answer.NONE})


def _stopped_rank(cell: Cell) -> Expected:
    """A stopped process says nothing: its worker looks at it when the phase, or the step, has lasted too long."""
    kinds = frozenset({"step-timeout" if cell.phase.serves else "deadline-passed"})
    match cell.phase:
        case Phase.PREPARING:
            seconds = DEADLINES.prepare_seconds
        case Phase.LISTENING:
            seconds, kinds = DEADLINES.form_seconds, kinds | {"formation-timeout"}
        case Phase.LOADING:
            seconds = DEADLINES.load_seconds
        case Phase.CONNECTED | Phase.WARMING:  # a bare group has nothing to load
            seconds = DEADLINES.warm_seconds
        case Phase.READY:  # nobody waits for it: two looks, one step's time apart
            seconds = 2 * DEADLINES.step_seconds
        case Phase.PREFILLING | Phase.DECODING:
            seconds = DEADLINES.step_seconds
    return Expected(_RECOVERED, seconds + 1.0, kinds, True, "stopped", _answers(cell))


def _lost_node(cell: Cell) -> Expected:
    """A node that is not heard is lost after its lease, whatever its neighbours' links say before that."""
    answers = _answers(cell)
    if cell.phase is Phase.DECODING:  # its runner may bring the answer to an end within the lease
        answers |= {Answer.DONE}
    if cell.phase is Phase.PREFILLING:  # or begin it
        answers |= {Answer.REFUSED}
    return Expected(_RECOVERED, LEASE_SECONDS + 1.0, frozenset({"node-lost"}), True, "", answers)


def _full_disk(cell: Cell) -> Expected:
    """A worker writes no more than the coordination file of a group that is about to form."""
    if cell.phase is Phase.PREPARING:
        return Expected(_RECOVERED, 1.0, frozenset({"scope-unavailable"}), True, "No space left", _answers(cell))
    answers = _answers(cell) - {Answer.REFUSED} or frozenset({Answer.DONE})
    return Expected(_READY, 2.0, answers=answers)


def _coordinator(cell: Cell) -> Expected:
    """The ranks need no coordinator while they work: they report when one is there again."""
    answers = _answers(cell)
    match cell.fault:
        case Fault.KILL:
            # An answer that had begun went through the coordinator that was killed, and ends with it.
            if cell.phase is Phase.DECODING:
                answers = frozenset({Answer.LOST})
            if cell.phase.serves:
                return Expected(_READY, 2.0, answers=answers)
            return Expected(_EITHER, 4.0, answers=answers)  # it also has to go the rest of the way
        case Fault.CUT:  # every other node falls silent at once
            if cell.phase is Phase.DECODING:
                answers |= {Answer.DONE}
            return Expected(_RECOVERED, LEASE_SECONDS + 1.0, frozenset({"node-lost"}), False, "", answers)
        case _:  # stopped for longer than a lease, or its disk is full: nothing is lost by that
            if cell.phase is Phase.DECODING:
                answers = frozenset({Answer.DONE})
            return Expected(_READY, 2.0, answers=answers)


#: Each fault, each phase and each target at least once, with as few models to start as that takes.
SHORT: Final = (
    Cell(Fault.FULL, Phase.PREPARING, Target.WORKER),
    Cell(Fault.MUTE, Phase.PREPARING, Target.WORKER),
    Cell(Fault.CUT, Phase.LISTENING, Target.WORKER),
    Cell(Fault.DEAF, Phase.CONNECTED, Target.WORKER),
    Cell(Fault.KILL, Phase.LOADING, Target.LAST),
    Cell(Fault.KILL, Phase.WARMING, Target.COORDINATOR),
    Cell(Fault.STOP, Phase.READY, Target.COORDINATOR),
    Cell(Fault.KILL, Phase.PREFILLING, Target.FIRST),
    Cell(Fault.STOP, Phase.DECODING, Target.MIDDLE),
)
