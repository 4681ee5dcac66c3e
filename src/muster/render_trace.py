"""A timeline as text: per rank a block of rows, with bars in proportion to time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import msgspec
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from muster.trace import Span, Timeline

#: The longest that running is drawn, as a share of the time of everything else: it would squeeze the rest to nothing.
_RUNNING_SHARE = 0.25

#: Columns of "  preparing " at the left of every bar.
_LABEL_COLUMNS = 12

#: What the remarks at the right of the bars may take of a line; longer ones go beneath.
_REMARK_SHARE = 0.45

#: A report that came later than this is worth a remark.
_LATE_NS = 50_000_000

_STYLES = {
    "starting": "bold",
    "preparing": "blue",
    "listening": "cyan",
    "forming": "cyan",
    "loading": "magenta",
    "warming": "yellow",
    "running": "green",
    "stopping": "bright_black",
}


class _Marks(msgspec.Struct, frozen=True):
    """The characters that bars are made of. A cell is filled whole, or in its left or right half."""

    whole: str
    left: str
    right: str
    waiting: str
    cut: str
    failed: str
    at_least: str


_UNICODE = _Marks("━", "╸", "╺", "·", "╌", "✗", "≥ ")
_ASCII = _Marks("=", "=", "=", ".", "-", "x", ">= ")


def render(timeline: Timeline) -> RenderableType:
    """The timeline for a terminal, from 60 columns on.

    A bar is a phase, and the dots before it the wait for another rank. A long time of running is drawn, dashed, shorter
    than it was. A duration with a "≥" is of a phase that is not over; "-" of one that only waited.
    """
    return _Chart(timeline)


class _Chart:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        marks = _ASCII if options.ascii_only else _UNICODE
        yield from _headline(self._timeline)
        if not self._timeline.spans:
            return
        layout = _Layout.of(self._timeline, marks, options.max_width)
        scale = _Scale.of(self._timeline)
        total = _milliseconds(self._timeline.ended_ns - self._timeline.started_ns)
        yield Text(" " * _LABEL_COLUMNS + "0 ms" + total.rjust(layout.bar_columns - 4), style="dim", no_wrap=True)
        for (rank, node), spans in groupby(self._timeline.spans, key=lambda span: (span.rank, span.node)):
            yield Text(f"rank {rank} on node {_printable(node)}" if rank >= 0 else "instance", style="bold")
            for span in spans:
                yield from _rows(span, scale, layout, marks)


class _Layout(msgspec.Struct, frozen=True):
    """How many columns each part of a line takes; the label's are fixed."""

    bar_columns: int
    duration_columns: int
    remark_columns: int

    @classmethod
    def of(cls, timeline: Timeline, marks: _Marks, width: int) -> _Layout:
        ended_ns = timeline.ended_ns
        durations = max(cell_len(_duration(span, ended_ns, marks)) for span in timeline.spans)
        remarks = max(cell_len(_remark(span, marks)) for span in timeline.spans)
        room = width - _LABEL_COLUMNS - durations - 1
        remark_columns = remarks if remarks <= width * _REMARK_SHARE else 0
        bar_columns = room - (remark_columns + 2 if remark_columns else 0)
        if bar_columns < 16:  # a narrow terminal: bars first
            bar_columns, remark_columns = max(10, room), 0
        return cls(bar_columns, durations, remark_columns)


class _Scale(msgspec.Struct, frozen=True):
    """Where a time is drawn, from 0 to 1. The time between `cut_ns` and `resume_ns` is drawn `cut_drawn_ns` long."""

    start_ns: int
    ended_ns: int
    drawn_ns: float
    cut_ns: int
    resume_ns: int
    cut_drawn_ns: float

    @classmethod
    def of(cls, timeline: Timeline) -> _Scale:
        ended_ns = timeline.ended_ns
        total_ns = max(1, ended_ns - timeline.started_ns)
        for span in timeline.spans:
            if span.rank < 0 and span.name == "running" and span.duration_ns:
                rest_ns = total_ns - span.duration_ns
                drawn_ns = min(float(span.duration_ns), max(1.0, rest_ns * _RUNNING_SHARE))
                end_ns = span.start_ns + span.duration_ns
                return cls(timeline.started_ns, ended_ns, rest_ns + drawn_ns, span.start_ns, end_ns, drawn_ns)
        return cls(timeline.started_ns, ended_ns, float(total_ns), ended_ns, ended_ns, 0.0)

    @property
    def is_cut(self) -> bool:
        return self.cut_drawn_ns < self.resume_ns - self.cut_ns

    def position(self, time_ns: int) -> float:
        within = min(max(time_ns - self.cut_ns, 0), self.resume_ns - self.cut_ns)
        drawn = time_ns - self.start_ns - within
        if within:
            drawn += self.cut_drawn_ns * within / (self.resume_ns - self.cut_ns)
        return min(1.0, max(0.0, drawn / self.drawn_ns))


def _headline(timeline: Timeline) -> Iterator[Text]:
    took = _milliseconds(timeline.ended_ns - timeline.started_ns)
    text = Text(f"instance {_printable(timeline.instance)}, attempt {timeline.attempt}: ")
    text.append(timeline.outcome, style="bold red" if timeline.failure else "bold")
    text.append(f" after {took}")
    yield text
    if timeline.failure is not None:
        yield Text(_printable(timeline.failure.sentence()), style="red")


def _rows(span: Span, scale: _Scale, layout: _Layout, marks: _Marks) -> Iterator[Text]:
    remark = _remark(span, marks)
    row = Text(f"  {span.name}".ljust(_LABEL_COLUMNS), no_wrap=True, overflow="ellipsis")
    row.append_text(_bar(span, scale, layout.bar_columns, marks))
    duration = _duration(span, scale.ended_ns, marks)
    row.append(" " + duration.rjust(layout.duration_columns))
    inline = cell_len(remark) <= layout.remark_columns
    style = "red" if span.failure else "dim"
    if remark and inline:
        row.append(f"  {remark}", style=style)
    row.rstrip()
    yield row
    if remark and not inline:
        yield Text(" " * _LABEL_COLUMNS + remark, style=style, no_wrap=True, overflow="ellipsis")


def _bar(span: Span, scale: _Scale, columns: int, marks: _Marks) -> Text:
    """The bar in half cells: never shorter than one, so that a short phase is still seen."""
    halves = columns * 2
    wait_ns = span.waited_ns if span.rank >= 0 else 0  # an instance's wait lies within its phase
    end = 1.0 if span.end_ns is None else scale.position(span.end_ns)
    first = min(round(scale.position(span.start_ns) * halves), halves - 1 if span.began else halves)
    last = max(first + 1, round(end * halves)) if span.began else first
    waits = round(scale.position(span.start_ns - wait_ns) * halves) // 2
    whole = marks.cut if span.name == "running" and scale.is_cut else marks.whole
    style = "red" if span.failure else _STYLES.get(span.name, "")
    bar = Text()
    for cell in range(columns):
        left, right = first <= 2 * cell < last, first <= 2 * cell + 1 < last
        if left and right:
            bar.append(whole, style=style)
        elif left or right:
            bar.append(marks.left if left else marks.right, style=style)
        elif waits <= cell and 2 * cell < first:
            bar.append(marks.waiting, style="dim")
        else:
            bar.append(" ")
    return bar


def _remark(span: Span, marks: _Marks) -> str:
    parts: list[str] = []
    if span.waited_for is not None and span.waited_ns > 0:
        parts.append(f"waited {_milliseconds(span.waited_ns)} for {_printable(span.waited_for)}")
    if span.delay_ns > _LATE_NS:
        parts.append(f"reported {_milliseconds(span.delay_ns)} late")
    if span.failure is not None:
        parts.append(f"{marks.failed} {span.failure.kind}")
    return ", ".join(parts)


def _duration(span: Span, ended_ns: int, marks: _Marks) -> str:
    if not span.began:
        return "-"
    if span.duration_ns is not None:
        return _milliseconds(span.duration_ns)
    return marks.at_least + _milliseconds(max(0, ended_ns - span.start_ns))


def _milliseconds(duration_ns: int) -> str:
    """Short for people: "4.2 ms", "61 ms", "12,345 ms", and beyond a minute "3 min 4 s" or "2 h 5 min"."""
    seconds = duration_ns / 1e9
    if seconds < 0.00995:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:
        return f"{seconds * 1e3:,.0f} ms"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _printable(text: str) -> str:
    """What others named or wrote must not move the cursor."""
    return "".join(character if character.isprintable() else "�" for character in text)
