"""How the long-lived processes end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, anyio, anyio.to_thread
from muster.cli.processes import configure_logs, run_process
from muster.errors import PortError

async def hang(path, fails):
    with anyio.move_on_after(0.1):
        await anyio.to_thread.run_sync(lambda: open(path), abandon_on_cancel=True)
    print("torn down")
    if fails:
        raise PortError("no port")

configure_logs("info")
run_process(hang, sys.argv[1], sys.argv[2] == "fails")
"""


@pytest.mark.parametrize(("ends", "code", "shown"), [("well", 0, "a thread hangs"), ("fails", 1, "muster: no port")])
def test_a_thread_that_hangs_in_a_file_system_does_not_keep_a_process(
    tmp_path: Path, ends: str, code: int, shown: str
) -> None:
    os.mkfifo(tmp_path / "hangs")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "hangs"), ends]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (code, "torn down\n")
    assert shown in done.stderr
