"""What the serving benchmark makes of its samples: medians of rounds, ratios and the bars of the issue."""

from __future__ import annotations

import pytest

from muster.bench.samples import (
    PARTS,
    PEER_NAMES,
    Contender,
    Metric,
    Sample,
    comparisons,
    figures,
    legend,
    median_of_rounds,
    percentile,
    rounds,
)
from muster.bench.shapes import SMALL, TINY, prompt


def samples(contender: Contender, metric: Metric, *by_round: list[float]) -> list[Sample]:
    return [
        Sample(contender=contender, shape=TINY.name, metric=metric, round=number, value=value)
        for number, values in enumerate(by_round, 1)
        for value in values
    ]


def test_a_figure_is_the_median_of_the_medians_of_the_rounds() -> None:
    # The last round has more values, which must not weigh more.
    assert median_of_rounds(samples("muster 1", "stream", [1, 2, 3], [10], [4, 4, 4, 4, 100])) == 4
    assert median_of_rounds([]) is None


@pytest.mark.parametrize(
    ("metric", "name", "muster", "peer", "expected"),
    [
        ("streams", "8 streams, 1 rank, 1 M, beside server", 130.0, 100.0, True),
        ("streams", "8 streams, 1 rank, 1 M, beside server", 129.0, 100.0, False),
        ("first", "first token, 1 rank, 1 M, beside server", 0.04, 0.05, True),
        ("first", "first token, 1 rank, 1 M, beside server", 0.041, 0.05, False),
    ],
)
def test_the_bars_are_those_of_the_issue(metric: Metric, name: str, muster: float, peer: float, expected: bool) -> None:
    found = figures([*samples("muster 1", metric, [muster]), *samples("server 1", metric, [peer])], PARTS, (TINY,))
    (one,) = [figure for figure in found if figure.name == name]
    assert one.holds is expected
    assert one.ratio == pytest.approx(muster / peer)


def test_start_and_idle_are_shares_of_the_peer() -> None:
    made = [
        *samples("muster 2", "start", [0.5]),
        *samples("server 2", "start", [2.1]),
        *samples("muster 2", "idle", [0.5]),
        *samples("server 2", "idle", [100.0]),
    ]
    assert [one.holds for one in figures(made, ("start", "idle"), (TINY,))] == [True, True]


def test_the_worst_is_over_all_rounds() -> None:
    made = samples("muster 2", "first of 8", [0.1] * 8, [0.1] * 7 + [0.9])
    (worst,) = [one for one in figures(made, ("latency",), (TINY,)) if "p99, 2 ranks" in one.name]
    assert worst.muster == pytest.approx(0.9, rel=0.2) and worst.holds is None


def test_the_second_turn_is_compared_with_the_first_of_the_same_server() -> None:
    made = [
        *samples("muster 1", "first turn", [1.0]),
        *samples("muster 1", "second turn", [0.1]),
        *samples("server 1", "first turn", [1.0]),
        *samples("server 1", "second turn", [0.5]),
    ]
    (one,) = figures(made, ("prefix",), (TINY,))
    assert (one.muster, one.peer, one.holds) == (0.1, 0.5, True)


def test_what_was_not_measured_is_open() -> None:
    assert {one.holds for one in figures([], PARTS, (TINY, SMALL)) if one.bar} == {None}


def test_rounds_carry_both_values() -> None:
    made = [*samples("muster 2", "stream", [1.0], [2.0]), *samples("server 2", "stream", [3.0])]
    found = [one for one in rounds(made, ("throughput",), (TINY,)) if one.name.startswith("1 stream, 2 ranks")]
    assert [(one.number, one.muster, one.peer) for one in found] == [(1, 1.0, 3.0), (2, 2.0, None)]


def test_every_row_has_a_name_of_its_own_and_a_known_peer() -> None:
    rows = comparisons(PARTS, (TINY, SMALL))
    assert len({row.name for row in rows}) == len(rows)
    assert {row.peer for row in rows} <= set(PEER_NAMES)
    assert all(name in legend() for name in PEER_NAMES.values())


def test_a_percentile_is_never_beyond_what_was_measured() -> None:
    assert percentile([], 99) is None
    assert percentile([3.0], 99) == 3.0
    assert percentile([1.0] * 99 + [5.0], 99) == pytest.approx(1.04)
    assert percentile([1.0, 2.0], 99) == pytest.approx(1.99)


def test_prompts_are_the_same_each_time_and_differ_from_their_first_word_on() -> None:
    assert prompt(7) == prompt(7)
    assert len({prompt(number).split()[0] for number in range(100)}) == 100
    assert len(prompt(1, 400).split()) == 401
