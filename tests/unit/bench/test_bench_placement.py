"""`muster bench placement` measures what it says, and its clusters are what it says."""

from __future__ import annotations

from pathlib import Path

import anyio

from muster.bench.placement import PlacementSettings, cluster, measure


def test_every_figure_is_there_and_brute_force_agrees(tmp_path: Path) -> None:
    said: list[str] = []
    report = anyio.run(measure, PlacementSettings(rounds=1, clusters=5), tmp_path, said.append)
    bars = ["≤ 5 ms"] * 3 + ["≤ 100 ms"] + ["≤ 15 ms"] * 2 + ["≤ 50 ms"] * 2 + ["all"]
    assert [figure.bar for figure in report.figures] == bars
    assert len(said) == len(report.figures)
    quality = report.figures[-1]
    assert (quality.muster, quality.holds, quality.count) == (1.0, True, 5)


def test_a_full_mesh_has_every_link_measured_from_both_ends() -> None:
    state, known = cluster(8, 7)
    assert len(state.nodes) == 8
    assert all(
        {one.other for one in links.measured} == set(state.nodes) - {name} for name, links in known.links.items()
    )
