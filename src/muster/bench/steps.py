"""Where the time between a request and `InstanceReady` went."""

from __future__ import annotations

from collections.abc import Sequence

from muster.bench.observer import Seen, Trial
from muster.events import (
    InstanceCreated,
    InstanceFact,
    InstanceReady,
    RankConnected,
    RankListening,
    RankPrepared,
    RankReady,
)

#: In the order in which they come: the step's name, the events that it ends with, and which of them.
_MARKS: tuple[tuple[str, type[InstanceFact], int], ...] = (
    ("placed", InstanceCreated, 0),
    ("prepared", RankPrepared, -1),
    ("first listens", RankListening, 0),
    ("last listens", RankListening, -1),
    ("connected", RankConnected, -1),
    ("all ready", RankReady, -1),
    ("judged", InstanceReady, 0),
)


def steps_of(trial: Trial) -> dict[str, float]:
    """Seconds from each mark to the next, by the coordinator's clock, which on one machine is the client's too.

    The last, "told", is from the coordinator's decision to the arrival of `InstanceReady` at the client.
    """
    steps: dict[str, float] = {}
    before = trial.began_ns
    for name, kind, which in _MARKS:
        at = _logged(trial.seen, kind, which)
        if at is not None:
            steps[name] = (at - before) / 1e9
            before = at
    steps["told"] = trial.seconds - (before - trial.began_ns) / 1e9
    return steps


def _logged(seen: Sequence[Seen], kind: type[InstanceFact], which: int) -> int | None:
    times = [one.logged_ns for one in seen if isinstance(one.event, kind)]
    return times[which] if times else None
