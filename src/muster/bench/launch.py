"""The peer: MLX's own launcher, running a script that only initialises, or one of which a rank is killed."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import psutil

from muster.errors import PortError
from muster.group.ports import reserve_at

#: A launch that takes longer has hung, as a ring does when a stranger took an accept; it gives no figure.
LAUNCH_SECONDS = 40.0
#: Marks all processes of one launch: those that it leaves behind are found by it.
LAUNCH_MARK = "MUSTER_BENCH_LAUNCH"
#: The launcher ends with 0 although its ranks failed: each that is a member of the whole group leaves a mark.
_SCRIPT = """\
import sys

import mlx.core as mx

group = mx.distributed.init(backend="ring", strict=True)
open(f"{sys.argv[1]}.{group.rank()}-of-{group.size()}", "w").close()
"""
#: Ranks that work together for ever; each says which process it is once the first step is done.
_WORKING_SCRIPT = """\
import os
import sys

import mlx.core as mx

group = mx.distributed.init(backend="ring", strict=True)
while True:
    mx.eval(mx.distributed.all_sum(mx.ones(16), group=group))
    mark = f"{sys.argv[1]}.{group.rank()}"
    if not os.path.exists(mark):
        with open(mark + ".new", "w") as file:
            file.write(str(os.getpid()))
        os.rename(mark + ".new", mark)
"""
#: How long the launcher may take to notice that a rank was killed.
KILLED_SECONDS = 10.0
_POLL_SECONDS = 0.01
_HOST = "127.0.0.1"
_PORT_TRIES = 50
#: Below what Linux and macOS choose from.
_PORTS = range(10_000, 20_000)


def launcher() -> str | None:
    """The `mlx.launch` of this environment, or of the search path; `None` where there is none."""
    beside = Path(sys.executable).with_name("mlx.launch")
    return str(beside) if beside.exists() else shutil.which("mlx.launch")


async def launch_seconds(program: str, ranks: int, directory: Path) -> float | None:
    """Run `mlx.launch` once, from before its start to its end, and end what it leaves.

    Args:
        program: What `launcher` answered.
        directory: For the script and for the temporary files that the launcher leaves.

    Returns:
        Seconds; `None` where a rank did not become a member, or it took longer than `LAUNCH_SECONDS`.
    """
    code: int | None = None
    seconds = 0.0
    began = time.monotonic()
    async with _launched(program, ranks, _SCRIPT, directory) as (process, formed):
        with anyio.move_on_after(LAUNCH_SECONDS):
            code = await process.wait()
            seconds = time.monotonic() - began
    members = sum(formed.with_name(f"{formed.name}.{rank}-of-{ranks}").exists() for rank in range(ranks))
    return seconds if code == 0 and members == ranks else None


async def killed_seconds(program: str, directory: Path) -> float | None:
    """SIGKILL rank 1 of 2 that work together, and wait for the launcher's end.

    Returns:
        Seconds from the kill; infinity where it did not end within `KILLED_SECONDS`, and `None` where the ranks did
        not come up.
    """
    async with _launched(program, 2, _WORKING_SCRIPT, directory) as (process, formed):
        marks = [formed.with_name(f"{formed.name}.{rank}") for rank in range(2)]
        with anyio.move_on_after(LAUNCH_SECONDS):
            while not all(mark.exists() for mark in marks):  # noqa: ASYNC110 (another process makes them)
                await anyio.sleep(_POLL_SECONDS)
        if not all(mark.exists() for mark in marks):
            return None
        began = time.monotonic()
        os.kill(int(marks[1].read_text()), signal.SIGKILL)
        with anyio.move_on_after(KILLED_SECONDS):
            await process.wait()
            return time.monotonic() - began
        return float("inf")


@asynccontextmanager
async def _launched(
    program: str, ranks: int, text: str, directory: Path
) -> AsyncGenerator[tuple[anyio.abc.Process, Path]]:
    """The launcher on a script with this text, and the path that its ranks make their marks by. Ended in the end."""
    script = _write_script(directory, text)
    mark = secrets.token_hex(8)
    port = free_ports(ranks)
    formed = directory / mark
    command = [program, "--backend", "ring", "-n", str(ranks), "--starting-port", str(port)]
    # Without the interpreter it takes the script itself for an executable.
    command += ["--python", sys.executable, str(script), str(formed)]
    # At the end of its input the launcher spins instead of waiting, which would count against it: an open pipe.
    process = await anyio.open_process(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, LAUNCH_MARK: mark, "TMPDIR": str(directory)},
        start_new_session=True,
    )
    try:
        yield process, formed
    finally:
        with anyio.CancelScope(shield=True):
            if process.returncode is None:
                process.kill()
                await process.wait()
            end_marked(mark)
            await process.aclose()


def _write_script(directory: Path, text: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    script = directory / "script.py"
    script.write_text(text)
    return script


def end_marked(mark: str) -> int:
    """Kill every process that was started under `mark`, wait for their end, and answer how many there were."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(LAUNCH_MARK) == mark:
                found.append(process)
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(found, timeout=5.0)
    return len(found)


def free_ports(count: int) -> int:
    """The first of `count` free ports in a row; the launcher counts up from one.

    Nothing holds them until they are bound: the system gives nobody these by itself.

    Raises:
        PortError: no such row was found.
    """
    for first in random.SystemRandom().sample(_PORTS, _PORT_TRIES):
        with contextlib.ExitStack() as held, contextlib.suppress(PortError):
            for port in range(first, first + count):
                held.enter_context(reserve_at(_HOST, port))
            return first
    raise PortError(f"no {count} free ports in a row on {_HOST}", remedy="End processes that hold many ports.")
