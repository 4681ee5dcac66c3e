"""Figures are judged by their bars, and every benchmark prints the same shape."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from muster.bench.machine import Machine, cpu_model
from muster.bench.report import (
    AtLeast,
    AtLeastTimesPeer,
    AtMost,
    AtMostTimesPeer,
    Bar,
    Report,
    Round,
    ShareOfPeer,
    amount,
    figure,
    holds,
    median_or_none,
    median_steps,
    render,
    share,
)

MACHINE = Machine(
    cores=2,
    cpu="a cpu",
    memory_bytes=2**32,
    system="Linux 6 x86_64",
    python="3.11.7",
    mlx="0.32.4",
    mlx_lm="0.32.2",
    muster="0.1.0",
    load_average=0.5,
)


@pytest.mark.parametrize(
    ("bar", "muster", "ratio", "expected"),
    [
        (AtMost(limit=0.3, text="≤ 0.3 %"), 0.3, None, True),
        (AtMost(limit=0.3, text="≤ 0.3 %"), 0.31, None, False),
        (AtMost(limit=0.3, text="≤ 0.3 %"), None, None, None),
        (AtLeast(limit=20, text="all ready"), 20, None, True),
        (AtLeast(limit=20, text="all ready"), 19, None, False),
        (AtLeast(limit=20, text="all ready"), None, None, None),
        (ShareOfPeer(divisor=10), 0.1, 0.1, True),
        (ShareOfPeer(divisor=10), 0.1, 0.11, False),
        (ShareOfPeer(divisor=10), 0.1, None, None),
        (AtLeastTimesPeer(factor=1.2), 12.0, 1.2, True),
        (AtLeastTimesPeer(factor=1.2), 12.0, 1.19, False),
        (AtLeastTimesPeer(factor=1.2), 12.0, None, None),
        (AtMostTimesPeer(factor=0.8), 0.1, 0.8, True),
        (AtMostTimesPeer(factor=0.8), 0.1, 0.81, False),
        (AtMostTimesPeer(factor=0.8), 0.1, None, None),
    ],
)
def test_a_bar_holds_up_to_its_limit_and_is_open_without_a_value(
    bar: Bar, muster: float | None, ratio: float | None, expected: bool | None
) -> None:
    assert holds(bar, muster, ratio) is expected


def test_a_figure_has_its_ratio_and_the_bar_as_the_issue_states_it() -> None:
    one = figure("f", "s", 0.05, peer=1.25, peer_name="p", bar=ShareOfPeer(divisor=10))
    assert (one.ratio, one.bar, one.holds) == (pytest.approx(0.04), "≤ 1/10", True)


def test_a_figure_without_a_peer_has_no_ratio_and_one_without_a_bar_no_judgement() -> None:
    assert figure("f", "s", 0.05, bar=ShareOfPeer(divisor=10)).holds is None
    assert (figure("f", "s", 0.05).bar, figure("f", "s", 0.05).holds) == (None, None)


def test_the_json_has_the_shape_that_every_benchmark_prints() -> None:
    report = Report(machine=MACHINE, figures=(figure("f", "s", 1.0),), rounds=(Round(name="r", number=1, unit="s"),))
    shape = json.loads(report.to_json())
    assert list(shape) == ["machine", "figures", "rounds", "notes"]
    fields = ["name", "unit", "muster", "peer", "peer_name", "ratio", "bar", "holds", "worst", "count"]
    assert list(shape["figures"][0]) == fields
    assert shape["figures"][0]["peer"] is None
    assert shape["machine"]["cores"] == 2
    assert shape["rounds"][0]["number"] == 1


def test_a_median_passes_over_what_was_not_measured() -> None:
    assert median_or_none([3.0, None, 1.0, 2.0]) == 2.0
    assert median_or_none([None]) is None


def test_the_median_of_each_step_is_of_the_rounds_that_have_it() -> None:
    rounds = [
        Round(name="r", number=1, unit="s", steps={"a": 1.0, "b": 5.0}),
        Round(name="r", number=2, unit="s", steps={"a": 3.0}),
    ]
    assert median_steps(rounds) == {"a": 2.0, "b": 5.0}


def test_amounts_and_shares_read_as_a_person_would_say_them() -> None:
    assert [amount(0.0512, "s"), amount(1.253, "s"), amount(None, "s")] == ["51.2 ms", "1.25 s", "-"]
    assert [amount(20, ""), amount(0.1, "%")] == ["20", "0.10 %"]
    assert [share(0.05), share(2.0), share(None), share(0.0)] == ["1/20.0", "2.00", "", "0.00"]


def test_the_table_tells_held_bars_from_missed_and_open_ones() -> None:
    report = Report(
        machine=MACHINE,
        figures=(
            figure("held", "s", 0.05, peer=1.0, peer_name="the peer", bar=ShareOfPeer(divisor=10)),
            figure("missed", "s", 0.5, peer=1.0, peer_name="the peer", bar=ShareOfPeer(divisor=10)),
            figure("open", "s", 0.5, bar=ShareOfPeer(divisor=10)),
        ),
        rounds=(Round(name="r", number=1, unit="s", steps={"placed": 0.001}),),
    )
    console = Console(file=io.StringIO(), width=100)
    console.print(render(report))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    last = {line.split()[0]: line.split()[-1] for line in lines if line.strip()}
    assert (last["held"], last["missed"], last["open"]) == ("yes", "NO", "?")
    assert any("placed 1.0 ms" in line for line in lines)
    assert any("peer of held: the peer" in line for line in lines)


def test_the_cpu_is_the_first_that_the_list_names() -> None:
    assert cpu_model("processor\t: 0\nmodel name\t: A: B\nmodel name\t: C\n") == "A: B"
    assert cpu_model("processor : 0\n") is None


def test_speeds_are_compared_in_times_and_a_peer_that_the_name_tells_is_not_told_again() -> None:
    rows = (
        figure("8 streams, beside server", "tokens/s", 600, peer=400, peer_name="s", bar=AtLeastTimesPeer(factor=1.3)),
        figure("first token, beside server", "s", 0.04, peer=0.05, peer_name="s", bar=AtMostTimesPeer(factor=0.8)),
    )
    text = io.StringIO()
    report = Report(machine=MACHINE, figures=rows, rounds=(), notes=("server: one",))
    Console(file=text, width=200).print(render(report))
    shown = text.getvalue()
    assert "1.50x" in shown and "≥ 1.3x" in shown and "0.80x" in shown
    assert "server: one" in shown and "peer of" not in shown


def test_a_peer_that_all_figures_have_is_told_once() -> None:
    rows = tuple(figure(f"rank {rank}", "MB", 1, peer=2, peer_name="the highest") for rank in range(3))
    text = io.StringIO()
    Console(file=text, width=200).print(render(Report(machine=MACHINE, figures=rows, rounds=(), notes=())))
    assert [line for line in text.getvalue().splitlines() if "peer of" in line] == ["peer of each: the highest"]
