"""A minute of `muster bench soak`: ranks, a worker and the coordinator die under load, and nothing is lost or left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from muster.bench.report import Report

pytestmark = [pytest.mark.process, pytest.mark.mlx, pytest.mark.timeout(240)]


def test_nothing_is_lost_and_nothing_is_left(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "muster", "bench", "soak", "--minutes", "0.4", "--json"],
        capture_output=True,
        text=True,
        timeout=230,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    report = msgspec.json.decode(done.stdout, type=Report)
    figures = {one.name: one.muster for one in report.figures}
    assert all(figures[f"kills: {what}"] for what in ("ranks", "workers", "coordinators"))
    assert figures["requests lost without an error"] == 0
    assert figures["requests answered"]
    assert [path.name for path in tmp_path.iterdir() if path.name != "mlx"] == []
