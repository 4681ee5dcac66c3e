"""The peer that serves: `mlx_lm.server`, on one rank, on two plain processes, and as its users start it."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import psutil

from muster.bench.launch import LAUNCH_MARK, end_marked, free_ports, launcher
from muster.bench.load import Target
from muster.bench.observer import BenchError
from muster.group.ports import reserve
from muster.group.scope import CONFLICTING_NAMES, CONFLICTING_PREFIXES, coordination_scope
from muster.group.shapes import RingPayload

_HOST = "127.0.0.1"
_UP_SECONDS = 60.0
_POLL_SECONDS = 0.01
_LOG_LINES = 6


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """A server that listens. Its processes are `roots` and their descendants."""

    name: str
    target: Target
    roots: tuple[int, ...]
    began_seconds: float  #: monotonic clock, just before its start


def environment(**more: str) -> dict[str, str]:
    """What every server gets: ours, without what would put it into some other group."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in CONFLICTING_NAMES and not name.startswith(CONFLICTING_PREFIXES)
    }
    return kept | more


@asynccontextmanager
async def one_rank(model: Path, directory: Path) -> AsyncGenerator[Running]:
    """`mlx_lm.server` on one rank.

    Raises:
        BenchError: it does not come up.
    """
    port = free_ports(1)
    async with _started("mlx_lm.server", directory, port, [(_command(model, port), {})]) as running:
        yield running


@asynccontextmanager
async def two_ranks(model: Path, directory: Path) -> AsyncGenerator[Running]:
    """`mlx_lm.server` on two ranks, as two plain processes that find MLX's variables: its best case.

    Raises:
        BenchError: it does not come up.
    """
    port = free_ports(1)
    with contextlib.ExitStack() as held:
        endpoints = [f"{_HOST}:{port}" for port in _ring_ports(held, 2)]
        commands: list[tuple[list[str], Mapping[str, str]]] = []
        for rank in range(2):
            payload = RingPayload(
                instance="bench", attempt=1, rank=rank, world_size=2, hosts=tuple((one,) for one in endpoints)
            )
            # The files must outlast the start of the processes that read them.
            scope = coordination_scope(payload, directory=directory / "hostfiles", environ={})
            commands.append((_command(model, port), held.enter_context(scope).variables))
        async with _started("mlx_lm.server, 2 plain processes", directory, port, commands) as running:
            yield running


@asynccontextmanager
async def launched(model: Path, directory: Path) -> AsyncGenerator[Running]:
    """`mlx_lm.server` on two ranks under `mlx.launch`.

    Raises:
        BenchError: it does not come up, or there is no `mlx.launch`.
    """
    program = launcher()
    if program is None:
        raise BenchError("there is no mlx.launch here", remedy="Install mlx with its scripts.")
    port = free_ports(1)
    command = [program, "--backend", "ring", "-n", "2", "--starting-port", str(free_ports(2))]
    command += ["--python", sys.executable, "--", *_command(model, port)[1:]]
    async with _started("mlx.launch -n 2 mlx_lm.server", directory, port, [(command, {})]) as running:
        yield running


def _command(model: Path, port: int) -> list[str]:
    options = ["--model", str(model), "--host", _HOST, "--port", str(port), "--log-level", "WARNING"]
    return [sys.executable, "-m", "mlx_lm", "server", *options]


@asynccontextmanager
async def _started(
    name: str, directory: Path, port: int, commands: Sequence[tuple[list[str], Mapping[str, str]]]
) -> AsyncGenerator[Running]:
    """Start the processes, wait until the port is served, and end all of them whatever happens."""
    mark = secrets.token_hex(8)
    log = directory / f"{mark}.log"
    processes: list[subprocess.Popen[bytes]] = []
    began = time.perf_counter()
    try:
        await anyio.to_thread.run_sync(_start, commands, mark, log, processes)
        await _wait_served(name, port, processes, log)
        yield Running(
            name=name,
            target=Target(port=port, model="default_model"),
            roots=tuple(process.pid for process in processes),
            began_seconds=began,
        )
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(_end, processes, mark)


def _start(
    commands: Sequence[tuple[list[str], Mapping[str, str]]],
    mark: str,
    log: Path,
    processes: list[subprocess.Popen[bytes]],
) -> None:
    """Start all, each into `processes` as soon as it is there."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        for command, variables in commands:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # at the end of its input mlx.launch spins
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(**{LAUNCH_MARK: mark, "TMPDIR": str(log.parent)}, **variables),
                start_new_session=True,
            )
            processes.append(process)


def _end(processes: Sequence[subprocess.Popen[bytes]], mark: str) -> None:
    for process in processes:
        process.kill()
    # mlx.launch leaves its ranks behind whatever signal it gets.
    end_marked(mark)
    for process in processes:
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


async def _wait_served(name: str, port: int, processes: Sequence[subprocess.Popen[bytes]], log: Path) -> None:
    deadline = time.monotonic() + _UP_SECONDS
    while True:
        try:
            stream = await anyio.connect_tcp(_HOST, port)
        except OSError:
            ended = [process.poll() for process in processes if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                what = f"ended with {ended[0]}" if ended else f"does not listen after {_UP_SECONDS:g} s"
                raise BenchError(f"{name} {what}:\n{tail_of(log)}") from None
            await anyio.sleep(_POLL_SECONDS)
            continue
        await stream.aclose()
        return


def tail_of(log: Path) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:]) if log.exists() else ""


def _ring_ports(held: contextlib.ExitStack, count: int) -> list[int]:
    """Ports that stay ours while MLX binds them, too."""
    return [held.enter_context(reserve(_HOST)).port for _ in range(count)]


# --- processes ----------------------------------------------------------------------------------------------


def tree(roots: Sequence[int]) -> list[psutil.Process]:
    """These processes and all below them that are alive."""
    found: dict[int, psutil.Process] = {}
    for root in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(root)
            found |= {one.pid: one for one in (process, *process.children(recursive=True))}
    return list(found.values())


def cpu_seconds(roots: Sequence[int]) -> float:
    """CPU time of these processes and all below them, so far."""
    total = 0.0
    for process in tree(roots):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total
