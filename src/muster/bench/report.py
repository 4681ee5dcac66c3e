"""What every benchmark prints: figures with a peer and a bar, as JSON and as a table. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import assert_never

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from muster.bench.machine import Machine

# --- bars ---------------------------------------------------------------------------------------------------


class AtMost(msgspec.Struct, frozen=True, kw_only=True):
    """Holds where muster's value is `limit` or less, in the figure's unit. `text` is the bar as the issue states it."""

    limit: float
    text: str


class AtLeast(msgspec.Struct, frozen=True, kw_only=True):
    """Holds where muster's value is `limit` or more."""

    limit: float
    text: str


class ShareOfPeer(msgspec.Struct, frozen=True, kw_only=True):
    """Holds where muster's value is at most a `divisor`-th of the peer's."""

    divisor: float

    @property
    def text(self) -> str:
        """The bar as the issue states it: "≤ 1/10"."""
        return f"≤ 1/{self.divisor:g}"


class AtLeastTimesPeer(msgspec.Struct, frozen=True, kw_only=True):
    """Holds where muster's value is at least `factor` times the peer's: for speeds."""

    factor: float

    @property
    def text(self) -> str:
        """The bar as the issue states it: "≥ 1.2x"."""
        return f"≥ {self.factor:g}x"


class AtMostTimesPeer(msgspec.Struct, frozen=True, kw_only=True):
    """Holds where muster's value is at most `factor` times the peer's: for times."""

    factor: float

    @property
    def text(self) -> str:
        """The bar as the issue states it: "≤ 0.8x"."""
        return f"≤ {self.factor:g}x"


Bar = AtMost | AtLeast | ShareOfPeer | AtLeastTimesPeer | AtMostTimesPeer


def holds(bar: Bar, muster: float | None, ratio: float | None) -> bool | None:
    """Whether the bar holds; `None` where the value or the ratio that it speaks of was not measured."""
    match bar:
        case AtMost(limit=limit):
            return None if muster is None else muster <= limit
        case AtLeast(limit=limit):
            return None if muster is None else muster >= limit
        case ShareOfPeer(divisor=divisor):
            return None if ratio is None else ratio <= 1 / divisor
        case AtLeastTimesPeer(factor=factor):
            return None if ratio is None else ratio >= factor
        case AtMostTimesPeer(factor=factor):
            return None if ratio is None else ratio <= factor
        case _:
            assert_never(bar)


# --- the shape ----------------------------------------------------------------------------------------------

#: In a figure's name, what it stands beside comes after this.
BESIDE = ", beside "


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One measured value. `ratio` is muster / peer; `holds` is `None` where there is no bar, or nothing to judge.

    Where `worst` is one, `muster` is the median of `count` values.
    """

    name: str
    unit: str
    muster: float | None
    peer: float | None = None
    peer_name: str | None = None
    ratio: float | None = None
    bar: str | None = None
    holds: bool | None = None
    worst: float | None = None
    count: int | None = None


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One round of one measurement. `steps` says where muster's time went: seconds by step, in order."""

    name: str
    number: int
    unit: str
    muster: float | None = None
    peer: float | None = None
    steps: dict[str, float] = {}


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All that a benchmark found. `notes` are sentences about how."""

    machine: Machine
    figures: tuple[Figure, ...]
    rounds: tuple[Round, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The report as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()


def figure(
    name: str,
    unit: str,
    muster: float | None,
    *,
    peer: float | None = None,
    peer_name: str | None = None,
    bar: Bar | None = None,
) -> Figure:
    """A figure with its ratio and its judgement filled in."""
    ratio = muster / peer if muster is not None and peer else None
    return Figure(
        name=name,
        unit=unit,
        muster=muster,
        peer=peer,
        peer_name=peer_name,
        ratio=ratio,
        bar=None if bar is None else bar.text,
        holds=None if bar is None else holds(bar, muster, ratio),
    )


def median_or_none(values: Sequence[float | None]) -> float | None:
    """The median of the values that were measured; `None` where none was."""
    measured = [value for value in values if value is not None]
    return median(measured) if measured else None


def median_steps(rounds: Sequence[Round]) -> dict[str, float]:
    """The median of each step over the rounds that have it, in the order of the first round."""
    names = dict.fromkeys(name for one in rounds for name in one.steps)
    return {name: median([one.steps[name] for one in rounds if name in one.steps]) for name in names}


# --- the table ----------------------------------------------------------------------------------------------


def render(report: Report) -> RenderableType:
    """The machine, the figures as a table, and where the time of each measurement went."""
    spread = any(one.worst is not None for one in report.figures)
    table = Table(show_edge=False, pad_edge=False)
    for heading in ("figure", *(("median", "worst", "rounds") if spread else ("muster", "peer", "ratio"))):
        table.add_column(heading, justify="left" if heading == "figure" else "right")
    for heading in ("bar", "holds"):
        table.add_column(heading)
    for one in report.figures:
        cells = _spread(one) if spread else _beside(one)
        table.add_row(one.name, amount(one.muster, one.unit), *cells, one.bar or "", _verdict(one))
    notes = [Text(note, style="dim") for note in report.notes]
    head = Text(report.machine.sentence(), style="dim")
    budgets = [] if spread else _budgets(report.rounds)
    return Group(head, *notes, table, *_peers(report.figures), *budgets)


def _beside(one: Figure) -> tuple[str, str]:
    """The peer's value, and the ratio."""
    ratio = times(one.ratio) if one.unit == "tokens/s" or (one.bar or "").endswith("x") else share(one.ratio)
    return "" if one.peer is None else amount(one.peer, one.unit), ratio


def _spread(one: Figure) -> tuple[str, str]:
    """The worst value, and of how many."""
    return "" if one.worst is None else amount(one.worst, one.unit), "" if one.count is None else str(one.count)


def amount(value: float | None, unit: str) -> str:
    """A value with its unit, as a person reads it: below one second in milliseconds."""
    if value is None:
        return "-"
    if unit == "s":
        return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"
    number = f"{value:.0f}" if value == int(value) or value >= 100 else f"{value:.2f}"
    return f"{number} {unit}".rstrip()


def share(ratio: float | None) -> str:
    """A ratio as "1/18", or as "2.1" where muster is slower."""
    if ratio is None:
        return ""
    return f"1/{1 / ratio:.1f}" if 0 < ratio < 1 else f"{ratio:.2f}"


def times(ratio: float | None) -> str:
    """A ratio as the bars in times have it: "1.24x"."""
    return "" if ratio is None else f"{ratio:.2f}x"


def _verdict(one: Figure) -> Text:
    match one.holds:
        case True:
            return Text("yes", style="green")
        case False:
            return Text("NO", style="bold red")
        case None:
            return Text("" if one.bar is None else "?", style="dim")


def _peers(figures: Sequence[Figure]) -> list[RenderableType]:
    """A line for each figure whose name does not say what it stands beside; one for many that have the same."""
    told = [one for one in figures if one.peer_name is not None and BESIDE not in one.name]
    names = {f"{one.peer_name}{_value(one)}" for one in told}
    if len(told) > 2 and len(names) == 1:
        return [Text(f"peer of each: {names.pop()}", style="dim")]
    return [Text(f"peer of {one.name}: {one.peer_name}{_value(one)}", style="dim") for one in told]


def _value(one: Figure) -> str:
    """The peer's value, where the table has no column for it."""
    return "" if one.worst is None or one.peer is None else f": {amount(one.peer, one.unit)}"


def _budgets(rounds: Sequence[Round]) -> list[RenderableType]:
    """One line for each measurement with steps: the medians, which need not add up to the median of the whole."""
    lines: list[RenderableType] = []
    for name in dict.fromkeys(one.name for one in rounds if one.steps):
        steps = median_steps([one for one in rounds if one.name == name])
        text = ", ".join(f"{step} {amount(seconds, 's')}" for step, seconds in steps.items())
        lines.append(Text(f"{name}, median of each step: {text}", style="dim"))
    return lines
