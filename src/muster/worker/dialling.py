"""The order of dialling: which ranks listen, and keeping one from dialling too early."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Final

import anyio

from muster.group.listening import is_listening
from muster.state import Assigned, Connected, Listening, Loaded, Ready, State
from muster.worker.condition import watch
from muster.worker.line import Line
from muster.worker.waiting import CATCH_UP_SECONDS, LateError, awaited
from muster.worker.watch import Place

#: How often a rank that should listen is looked at; the kernel has no event for it.
_LISTEN_POLL_SECONDS: Final = 0.001
#: How long a rank is held from dialling the last one: as long as the retry that this saves it.
_HOLD_SECONDS: Final = 1.0


def all_prepared(place: Place, state: State) -> bool:
    """Whether every rank of the attempt has its ports."""
    ranks = place.ranks(state)
    return bool(ranks) and not any(isinstance(rank.state, Assigned) for rank in ranks)


def listening(place: Place, state: State, which: Sequence[int]) -> bool:
    """Whether these ranks listen, or have done so and are further."""
    ranks = place.ranks(state)
    return bool(ranks) and all(
        isinstance(ranks[number].state, Listening | Connected | Loaded | Ready) for number in which
    )


def listens_first(place: Place) -> Sequence[int]:
    """The ranks that must listen before this one forms: a ring's last rank dials first, jaccl's all dial rank 0."""
    if place.backend == "jaccl":
        return (0,) if place.rank and place.spec.side_channel == "tcp" else ()
    last = place.world_size - 1
    return range(last) if place.rank == last else ()


async def wait_listening(
    line: Line, place: Place, addresses: Sequence[tuple[str, int]], links: int, on_listening: Callable[[], None]
) -> None:
    """See the rank listen, say so, and keep it from dialling too early.

    The last rank dials before it listens. The rank before it is woken by that, could dial it within the same
    millisecond, be refused, and then sleep MLX's whole second: it is held until the last one listens. With more
    than one link the last rank listens only after dials that take a second each, so that holding is no use.

    Returns early where the rank failed or is connected already: the next frame tells. And where it has no address to
    listen on, as all ranks of jaccl but the first.

    Raises:
        LateError: it does not listen by the deadline, or is halted while others are late. Never because of the hold.
    """
    runner, last = line.runner, place.world_size - 1
    ring = place.backend == "ring"
    if not addresses or (ring and place.rank == last and links > 1):
        return
    watched, looked = watch(runner.pid, runner.started), False
    # As late as `expect`: the rank before this one may see who is to blame, as long as this one is there.
    due = anyio.current_time() + place.spec.deadlines.form_seconds + CATCH_UP_SECONDS
    while not is_listening(runner.pid, addresses):
        if runner.ended or runner.frames.statistics().current_buffer_used:
            return
        alarm = not looked and awaited(place, line.state)
        if alarm or anyio.current_time() >= due:
            looked = True
            condition = await watched.condition()
            if alarm and condition.kind == "gone":
                return  # it has said why, or ended without a word: the line tells which
            if condition.halted or not alarm:
                raise LateError(condition, alarmed=alarm)
        await anyio.sleep(_LISTEN_POLL_SECONDS)
    hold = ring and place.rank == last - 1 and links == 1
    if hold:
        runner.signal(signal.SIGSTOP)
    try:
        on_listening()
        if hold:
            with anyio.move_on_after(_HOLD_SECONDS):
                await line.until(lambda state: listening(place, state, (last,)))
    finally:
        if hold:
            runner.signal(signal.SIGCONT)
