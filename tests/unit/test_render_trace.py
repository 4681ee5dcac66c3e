"""How a timeline looks in a terminal."""

from __future__ import annotations

import io
from typing import Literal

import pytest
from rich.console import Console
from stories import MODEL, ONE, created, failure, logged, rank_event

from muster.events import Event, InstanceDeleted, InstanceDeleting, InstanceFailed, InstanceReady
from muster.render_trace import render
from muster.spec import Failure, NodeId, Phase
from muster.trace import Span, Timeline, timeline

GOOD: list[tuple[float, Event]] = [
    (0, created(2, MODEL)),
    (2.1, rank_event("prepared", 0)),
    (14.3, rank_event("prepared", 1)),
    (19.2, rank_event("listening", 0)),
    (41, rank_event("connected", 1)),
    (42, rank_event("connected", 0)),
    (131, rank_event("loaded", 0)),
    (170, rank_event("loaded", 1)),
    (201, rank_event("ready", 1)),
    (203.4, rank_event("ready", 0)),
    (203.5, InstanceReady(instance=ONE, attempt=1)),
]
BAD: list[tuple[float, Event]] = [
    (0, created(2)),
    (2.1, rank_event("prepared", 0)),
    (60_002, InstanceFailed(instance=ONE, attempt=1, failure=failure(1, "deadline", Phase.PREPARING))),
    (60_010, rank_event("gone", 0)),
]

EIGHTY = """
instance one, attempt 1: ready after 204 ms
            0 ms               204 ms
instance
  starting  ━━━━━━━━━━━━━━━━━━━━━━━━━ 204 ms  waited 2.4 ms for rank 0 on node a
rank 0 on node a
  preparing ╸                         2.1 ms
  listening ··╸                       4.9 ms  waited 12 ms for rank 1 on node b
  forming     ╺━━                      23 ms
  loading        ━━━━━━━━━━━           89 ms
  warming                   ·····━━━━  33 ms  waited 39 ms for rank 1 on node b
rank 1 on node b
  preparing ━━                         14 ms
  forming     ╺━━                      22 ms  waited 4.9 ms for rank 0 on node a
  loading        ━━━━━━━━━━━━━━━━     129 ms
  warming                        ━━━╸  31 ms
"""


def show(told: Timeline, width: int, *, color: Literal["standard"] | None = None, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    Console(file=file, width=width, color_system=color, force_terminal=color is not None).print(render(told))
    file.flush()
    return raw.getvalue().decode(encoding)


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]


def test_ready_at_80_columns() -> None:
    assert lines(show(timeline(logged(*GOOD), ONE), 80)) == EIGHTY.strip("\n").splitlines()


def test_wider_terminal_gives_longer_bars() -> None:
    narrow, wide = (show(timeline(logged(*GOOD), ONE), width) for width in (80, 120))
    assert wide.count("━") - narrow.count("━") > 100
    assert len(lines(wide)) == len(lines(narrow))


def test_failure_says_why_and_what_was_waited_for() -> None:
    text = show(timeline(logged(*BAD), ONE), 100)
    assert "rank 1 on node b, while preparing: the ring broke. Mend it." in text
    waiting = next(line for line in text.splitlines() if line.startswith("  listening"))
    assert "·····" in waiting
    assert "━" not in waiting
    assert waiting.rstrip().endswith("-  waited 60,000 ms for rank 1 on node b")
    assert "✗ deadline" in text
    assert "≥ 8.0 ms" in text  # rank 1 has not been seen to stop


@pytest.mark.parametrize(
    ("delay_ms", "words"), [(50, ""), (51, "reported 51 ms late"), (2000, "reported 2,000 ms late")]
)
def test_a_late_report_is_remarked(delay_ms: int, words: str) -> None:
    span = Span(rank=0, node=NodeId("a"), name="loading", start_ns=0, end_ns=10**9, delay_ns=delay_ms * 10**6)
    told = Timeline(instance=ONE, attempt=1, started_ns=0, ended_ns=10**9, outcome="starting", spans=(span,))
    text = show(told, 100)
    assert words in text
    assert ("late" in text) == bool(words)


def test_long_running_does_not_squeeze_the_start() -> None:
    day_ms = 86_400_000.0
    end: list[tuple[float, Event]] = [
        (day_ms, InstanceDeleting(instance=ONE, attempt=1)),
        (day_ms + 12, rank_event("gone", 1)),
        (day_ms + 44, rank_event("gone", 0)),
        (day_ms + 44.2, InstanceDeleted(instance=ONE, attempt=1)),
    ]
    text = show(timeline(logged(*GOOD, *end), ONE), 120)
    rows = {line[2:11].strip(): line for line in text.splitlines() if line.startswith("  ")}
    assert rows["loading"].count("━") > 10
    assert rows["running"].count("╌") > 5
    assert "24 h 0 min" in rows["running"]


@pytest.mark.parametrize("width", [40, 60, 79, 80, 81, 100, 120, 200])
@pytest.mark.parametrize("story", [GOOD, GOOD[:3], GOOD[:7], BAD, BAD[:2]])
def test_no_row_is_wider_than_the_terminal(width: int, story: list[tuple[float, Event]]) -> None:
    told = timeline(logged(*story), ONE)
    text = lines(show(told, width))
    assert max(map(len, text)) <= width
    phases = [line[2:11].strip() for line in text if line.startswith("  ") and line[2] != " "]
    assert phases == [span.name for span in told.spans], "every row stays one row"


def test_narrow_terminal_keeps_its_bars() -> None:
    text = lines(show(timeline(logged(BAD[0], BAD[2]), ONE), 40))
    assert max(line.count("━") for line in text) >= 16
    assert "✗ deadline" in [line.strip() for line in text]


def test_terminal_without_unicode_gets_ascii() -> None:
    text = show(timeline(logged(*GOOD), ONE), 80, encoding="ascii")
    assert "=====" in text
    assert "..." in text


def test_colour_changes_no_column() -> None:
    told = timeline(logged(*GOOD), ONE)
    coloured = Console(file=io.StringIO(), width=80, color_system="standard", force_terminal=True, record=True)
    coloured.print(render(told))
    assert lines(coloured.export_text(styles=False)) == lines(show(told, 80))
    assert "\x1b[" in show(told, 80, color="standard")


def test_hostile_names_cannot_move_the_cursor() -> None:
    node = NodeId("a\x1b[2J\nb[red]")
    broken = Failure(kind="x", message="\x1b]0;title\x07", rank=0, node=node)
    span = Span(rank=0, node=node, name="forming", start_ns=5, end_ns=9, waited_for=str(node), waited_ns=5)
    told = Timeline(instance=ONE, attempt=1, started_ns=0, ended_ns=9, outcome="failed", spans=(span,), failure=broken)
    text = show(told, 80)
    assert "\x1b" not in text
    assert "b[red]" in text


@pytest.mark.parametrize(
    ("duration_ns", "words"),
    [
        (0, "0.0 ms"),
        (9_900_000, "9.9 ms"),
        (9_960_000, "10 ms"),
        (12_345_000_000, "12,345 ms"),
        (184_000_000_000, "3 min 4 s"),
        (7_500_000_000_000, "2 h 5 min"),
        (400_000_000_000_000, "4 d 15 h"),
    ],
)
def test_durations_are_short(duration_ns: int, words: str) -> None:
    span = Span(rank=-1, node=NodeId(""), name="starting", start_ns=0, end_ns=duration_ns)
    told = Timeline(instance=ONE, attempt=1, started_ns=0, ended_ns=duration_ns, outcome="ready", spans=(span,))
    assert lines(show(told, 80))[-1].endswith(f" {words}")
