"""`muster bench copy` copies by both ways and says what it measured."""

from __future__ import annotations

from pathlib import Path

import anyio

from muster.bench.copy import CopySettings, measure


def test_both_ways_copy(tmp_path: Path) -> None:
    said: list[str] = []
    report = anyio.run(measure, CopySettings(file_bytes=2**20, rounds=2), tmp_path, said.append)
    assert [figure.bar for figure in report.figures] == ["≥ 0.7x", None]
    assert all(figure.muster and figure.peer for figure in report.figures)
    assert [one.number for one in report.rounds] == [1, 2]
    assert said[-1] == "round 2 of 2"
    assert [one.name for one in tmp_path.rglob("*.safetensors")] == ["model.safetensors"]  # the copies are gone
