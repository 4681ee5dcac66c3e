"""What `muster bench soak` makes of its requests and of what its processes held. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Final

import msgspec

from muster.bench.report import AtLeast, AtMost, Bar, Figure, figure

_MEGABYTE = 1e6
#: A shorter run says nothing about growth: processes are still finding their size.
JUDGED_SECONDS: Final = 300.0
#: What the log's retention lets it have.
LOG_BYTES: Final = 64 * 2**20
#: Kills fall on cycles by chance, and each takes some more events.
_EVENTS_GROWTH = 1.25
_NONE = AtMost(limit=0, text="0")
_CODE = re.compile(r"""['"]code['"]: ?['"]([\w-]+)['"]""")
#: A hang-up is seen a moment before the kill that caused it is noted, or after the coordinator is up again.
_MARGIN_SECONDS = 1.0


class Outage(msgspec.Struct):
    """When the coordinator was killed, and when the next one was up; infinity until it is. Monotonic clock."""

    began: float
    ended: float = float("inf")


class Outcomes(msgspec.Struct):
    """What came of all requests. `lost` are sentences about those without an answer and without a cause."""

    answers: int = 0
    errors: Counter[str] = msgspec.field(default_factory=Counter)
    lost: list[str] = []
    longest_seconds: float = 0.0

    def add(self, error: str | None, began: float, ended: float, outages: Sequence[Outage]) -> None:
        """Count one request.

        Args:
            error: `None` for a whole answer; else an error's kind, or `Silent`'s.
            began: On the monotonic clock.
            ended: The same.
            outages: So far; only they excuse a client that was left without an answer.
        """
        self.longest_seconds = max(self.longest_seconds, ended - began)
        if error is None:
            self.answers += 1
        elif not error.startswith(SILENT):
            self.errors[error] += 1
        elif any(began <= one.ended + _MARGIN_SECONDS and ended >= one.began - _MARGIN_SECONDS for one in outages):
            self.errors[UNREACHABLE] += 1
        else:
            self.lost.append(error)


#: Begins the error of a client that was told nothing, and only saw that nobody is there.
SILENT: Final = "silent: "
UNREACHABLE: Final = "unreachable"


def kind_of_error(text: str) -> str:
    """The kind of a streamed HTTP answer's error, as `muster.bench.load` tells it."""
    status = re.match(r"status (\d+)", text)
    code = _CODE.search(text)
    if status is not None:
        return f"{status[1]} {code[1]}" if code is not None else status[1]
    if text.startswith("error event"):
        return f"error event {code[1]}" if code is not None else "error event"
    return SILENT + text


class Vitals(msgspec.Struct, frozen=True, kw_only=True):
    """What the processes of one role hold together."""

    memory_bytes: int
    descriptors: int
    threads: int


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """One look. `roles` has those of which every process was there."""

    seconds: float  #: since the beginning
    roles: Mapping[str, Vitals]
    cycles: int  #: of churn that were done
    events: int  #: in the log so far
    log_bytes: int


class Churned(msgspec.Struct, kw_only=True):
    """All that a run found."""

    seconds: float
    outcomes: Outcomes
    cycles: int = 0
    stuck: list[str] = []  #: what did not converge
    kills: Counter[str] = msgspec.field(default_factory=Counter)
    asides: int = 0  #: nodes set aside, and resumed by the operator
    answers_in_the_end: bool = False
    moments: list[Moment] = []


def churn_figures(found: Churned) -> list[Figure]:
    """The rows, in the table's order."""
    outcomes = found.outcomes
    internal = sum(count for kind, count in outcomes.errors.items() if "internal" in kind or kind.startswith("500"))
    return [
        figure("churn cycles", "", found.cycles, bar=AtLeast(limit=1, text="some")),
        figure("what did not converge", "", len(found.stuck), bar=_NONE),
        *(figure(f"kills: {what}", "", count) for what, count in sorted(found.kills.items())),
        figure("nodes set aside, and resumed", "", found.asides),
        figure("requests answered", "", outcomes.answers, bar=AtLeast(limit=1, text="some")),
        *(figure(f"requests with the error {kind}", "", count) for kind, count in sorted(outcomes.errors.items())),
        figure("requests lost without an error", "", len(outcomes.lost), bar=_NONE),
        figure("requests with an internal error", "", internal, bar=_NONE),
        figure("longest request", "s", outcomes.longest_seconds),
        figure("the model answers in the end", "", int(found.answers_in_the_end), bar=AtLeast(limit=1, text="yes")),
        *growth_figures(found.moments, judged=found.seconds >= JUDGED_SECONDS),
    ]


_WHAT: tuple[tuple[str, str, float, Callable[[Vitals], float]], ...] = (
    ("memory", "MB", 8.0, lambda vitals: vitals.memory_bytes / _MEGABYTE),
    ("descriptors", "", 8.0, lambda vitals: vitals.descriptors),
    ("threads", "", 3.0, lambda vitals: vitals.threads),
)


def growth_figures(moments: Sequence[Moment], *, judged: bool) -> list[Figure]:
    """How the last third of the run compares with its first: medians may grow by a tenth, or by a small amount."""
    first, last = _thirds(moments)
    rows: list[Figure] = []
    for role in dict.fromkeys(role for moment in moments for role in moment.roles):
        for what, unit, allowance, value in _WHAT:
            before, after = (
                [value(moment.roles[role]) for moment in third if role in moment.roles] for third in (first, last)
            )
            if not before or not after:
                continue
            limit = max(0.1 * median(before), allowance)
            bar = AtMost(limit=limit, text=f"≤ {limit:.0f} {unit}".rstrip())
            name = f"growth of {what}, {role}, from {median(before):.0f} {unit}".rstrip()
            rows.append(figure(name, unit, median(after) - median(before), bar=bar if judged else None))
    return [*rows, *_log_figures(moments, first, last, judged=judged)]


def _log_figures(
    moments: Sequence[Moment], first: Sequence[Moment], last: Sequence[Moment], *, judged: bool
) -> list[Figure]:
    if not moments:
        return []
    rows = [
        figure("the log in the end", "bytes", moments[-1].log_bytes, bar=AtMost(limit=LOG_BYTES, text="≤ 64 MiB")),
    ]
    before, after = (_events_per_cycle(third) for third in (first, last))
    if before is not None and after is not None:
        limit = _EVENTS_GROWTH * before
        bar: Bar | None = AtMost(limit=limit, text=f"≤ {limit:.0f}") if judged else None
        rows.append(figure(f"events logged per churn cycle, after {before:.0f} at first", "", after, bar=bar))
    return rows


def _thirds(moments: Sequence[Moment]) -> tuple[Sequence[Moment], Sequence[Moment]]:
    third = len(moments) // 3
    return moments[:third], moments[len(moments) - third :]


def _events_per_cycle(moments: Sequence[Moment]) -> float | None:
    if len(moments) < 2 or moments[-1].cycles == moments[0].cycles:
        return None
    return (moments[-1].events - moments[0].events) / (moments[-1].cycles - moments[0].cycles)
