"""The demo, as `make demo` runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.process
@pytest.mark.mlx
@pytest.mark.timeout(180)
def test_the_demo_shows_what_it_promises_and_leaves_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
    command = [sys.executable, "-m", "muster", "demo"]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "It brings MLX groups up across machines and keeps them up." in shown.stdout
    assert "0 of 4 runner processes" in shown.stdout
    assert "0 coordination files" in shown.stdout
    # MLX keeps the kernels that it compiled in the temporary directory.
    assert {path.name for path in tmp_path.iterdir()} <= {"mlx"}
