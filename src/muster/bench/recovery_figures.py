"""What the rounds of `muster bench recovery` add up to: medians, worst cases, and whether they hold. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final, Literal

import msgspec

from muster.bench.report import AtLeast, AtMost, Figure, Round, figure
from muster.spec import Failure, NodeId

Part = Literal["rank-kill", "rank-stop", "cut", "coordinator-kill", "worker-kill", "log", "peer"]
PARTS: Final[tuple[Part, ...]] = ("rank-kill", "rank-stop", "cut", "coordinator-kill", "worker-kill", "log", "peer")

#: What a round measures, by the names that its steps have.
KILLED_FAILED: Final = "SIGKILL of a rank while decoding → failed"
KILLED_READY: Final = "SIGKILL of a rank while decoding → next attempt ready"
MODEL_READY: Final = "failed → next attempt ready, demo model"
GROUP_FAILED: Final = "SIGKILL of a rank of a bare group → failed"
GROUP_READY: Final = "failed → next attempt ready, bare group"
STOPPED_FAILED: Final = "SIGSTOP of a rank while decoding → failed"
CUT_FAILED: Final = "node cut off → failed"
CUT_PLACED: Final = "node cut off → placed again"
CUT_READY: Final = "node cut off → ready elsewhere"
SERVING: Final = "coordinator started after kill -9 → a request answered"
RUNNERS_GONE: Final = "kill -9 of a worker → all its runners gone"


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """A bar in seconds. Without `median_seconds` only the worst is judged."""

    worst_seconds: float
    median_seconds: float | None = None

    @property
    def text(self) -> str:
        """As the table shows it."""
        if self.median_seconds is None:
            return f"≤ {self.worst_seconds:g} s"
        return f"≤ {self.median_seconds * 1000:.0f} ms, worst ≤ {self.worst_seconds * 1000:.0f} ms"

    def holds(self, seconds: Sequence[float]) -> bool:
        """Whether these times keep it; there is at least one."""
        return max(seconds) <= self.worst_seconds and (
            self.median_seconds is None or median(seconds) <= self.median_seconds
        )


def limits(lease_seconds: float, step_seconds: float) -> dict[str, Limit | None]:
    """Every time that is measured, in the table's order, with its bar."""
    return {
        KILLED_FAILED: Limit(worst_seconds=0.3, median_seconds=0.1),
        MODEL_READY: Limit(worst_seconds=2.0),
        KILLED_READY: None,
        GROUP_FAILED: None,
        GROUP_READY: Limit(worst_seconds=0.5),
        STOPPED_FAILED: Limit(worst_seconds=step_seconds + 1),
        CUT_FAILED: None,
        CUT_PLACED: Limit(worst_seconds=lease_seconds + 1),
        CUT_READY: None,
        SERVING: Limit(worst_seconds=2.0),
        RUNNERS_GONE: Limit(worst_seconds=1.0),
    }


class Findings:
    """What the rounds found: times by figure, and sentences about what went wrong."""

    def __init__(self) -> None:
        self.rounds: list[Round] = []
        self.wrong: list[str] = []
        self.failed: set[str] = set()  #: figures of which a round gave no time, or a wrong outcome
        self.runners_lost: int | None = None
        self.log: LogCheck | None = None
        self.peer_seconds: float | None = None

    def add(self, name: str, number: int, steps: Mapping[str, float]) -> None:
        """A round that went as it should: seconds by figure."""
        self.rounds.append(Round(name=name, number=number, unit="s", steps=dict(steps)))

    def complain(self, figures: Sequence[str], number: int, sentence: str) -> None:
        """A round of these figures that did not: they do not hold, whatever the others took."""
        self.failed |= set(figures)
        self.wrong.append(f"round {number} of {figures[0]}: {sentence}")

    def seconds(self, name: str) -> list[float]:
        """All times of one figure."""
        return [one.steps[name] for one in self.rounds if name in one.steps]


class LogCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Events that a subscriber saw beside those of the log, over so many kills of the coordinator."""

    kills: int
    seen: int
    logged: int
    missing: int


def check_log(kills: int, seen: Mapping[int, set[bytes]], logged: Mapping[int, bytes]) -> LogCheck:
    """Compare by sequence and bytes: an event that was published twice with different bytes is missing, too."""
    missing = sum(payload != logged.get(sequence) for sequence, payloads in seen.items() for payload in payloads)
    return LogCheck(kills=kills, seen=sum(map(len, seen.values())), logged=len(logged), missing=missing)


def mistake(failure: Failure, *, kind: str, rank: int | None = None, node: NodeId, saying: str = "") -> str:
    """What is wrong with a failure that should have this cause; empty where nothing is."""
    wanted: dict[str, object] = {"kind": kind, "node": node}
    if rank is not None:
        wanted["rank"] = rank
    wrong = [f"{name} is {found!r}" for name, want in wanted.items() if (found := getattr(failure, name)) != want]
    if saying not in failure.message:
        wrong.append(f"it does not say {saying!r}")
    if not wrong:
        return ""
    meant = kind + ("" if rank is None else f" of rank {rank}") + f" on node {node}"
    return f"not {meant}, for {' and '.join(wrong)}: {failure.sentence()}"


def time_figures(findings: Findings, bars: Mapping[str, Limit | None], peer_name: str | None = None) -> list[Figure]:
    """A row for each time that was measured, or should have been."""
    rows: list[Figure] = []
    for name, bar in bars.items():
        seconds = findings.seconds(name)
        if not seconds and name not in findings.failed:
            continue
        peer = findings.peer_seconds if name == KILLED_FAILED else None
        rows.append(
            Figure(
                name=name,
                unit="s",
                muster=median(seconds) if seconds else None,
                worst=max(seconds, default=None),
                count=len(seconds),
                peer=peer,
                peer_name=peer_name if peer is not None else None,
                bar=None if bar is None else bar.text,
                holds=None if bar is None else bool(seconds) and name not in findings.failed and bar.holds(seconds),
            )
        )
    return rows


def count_figures(findings: Findings) -> list[Figure]:
    """The rows that count what must not be."""
    rows: list[Figure] = []
    if findings.runners_lost is not None:
        rows.append(figure("runners lost by kill -9 of the coordinator", "", findings.runners_lost, bar=NONE))
    if findings.log is not None:
        name = f"{findings.log.kills} kills of the coordinator: events"
        rows += [
            figure(f"{name} seen", "", findings.log.seen, bar=AtLeast(limit=1, text="some")),
            figure(f"{name} seen but not in the log", "", findings.log.missing, bar=NONE),
        ]
    return rows


#: The bar of what must not be at all.
NONE: Final = AtMost(limit=0, text="0")


def left_figures(files: int, ports: int, processes: int) -> list[Figure]:
    """The rows of what is left at the end."""
    counts = {"files": files, "ports": ports, "processes": processes}
    return [figure(f"left at the end: {name}", "", count, bar=NONE) for name, count in counts.items()]
