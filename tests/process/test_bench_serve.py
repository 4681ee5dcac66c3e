"""`muster bench serve` measures muster and its peer, and leaves no process and no file, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import anyio
import msgspec
import psutil
import pytest
from kit.waiting import until

from muster.bench.load import Ask, ask_all
from muster.bench.observer import BenchError
from muster.bench.peer_server import Running, cpu_seconds, launched, one_rank, tree, two_ranks
from muster.bench.report import Report

pytestmark = [pytest.mark.process, pytest.mark.mlx, pytest.mark.timeout(240)]

Start = Callable[[Path, Path], AbstractAsyncContextManager[Running]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    command = [sys.executable, "-m", "muster.bench.tiny_model", "tiny", str(path)]
    made = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    assert 800_000 < int(made.stdout) < 1_200_000
    return path


def bench(tmp_path: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "muster", "bench", "serve", "--quick", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )


def naming(text: str) -> list[int]:
    found: list[int] = []
    for process in psutil.process_iter(["cmdline"]):
        if text in " ".join(process.info["cmdline"] or ()):
            found.append(process.pid)
    return found


def left_in(tmp_path: Path) -> list[str]:
    # MLX keeps compiled kernels in a directory of its own there.
    return [path.name for path in tmp_path.iterdir() if path.name not in ("mlx", "report.json")]


def test_a_quick_run_stands_beside_the_peer_and_leaves_nothing(tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    process = bench(tmp_path, "--only", "start", "--json", "--output", str(output))
    shown, errors = process.communicate(timeout=230)
    assert process.returncode == 0, errors
    report = msgspec.json.decode(shown, type=Report)
    assert msgspec.json.decode(output.read_bytes(), type=Report) == report
    (start, cost) = report.figures
    assert start.muster is not None and start.peer is not None and start.ratio is not None, report.notes
    assert cost.name.startswith("load client") and cost.muster is not None
    assert [(one.number, one.muster) for one in report.rounds] == [(1, start.muster)]
    assert any("other work" in note for note in report.notes)
    assert naming(str(tmp_path)) == []
    assert left_in(tmp_path) == []


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    process = bench(tmp_path, "--only", "throughput")
    try:
        until(lambda: len(naming(f"{tmp_path}/muster-bench-")) >= 3, "a coordinator and two workers run")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert naming(str(tmp_path)) == []
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(("start", "ranks"), [(one_rank, 1), (two_ranks, 2), (launched, 2)])
def test_a_peer_answers_and_is_gone_with_all_its_ranks(start: Start, ranks: int, model: Path, tmp_path: Path) -> None:
    processes: list[psutil.Process] = []

    async def run() -> None:
        async with start(model, tmp_path) as running:
            (reading,) = await ask_all(running.target, [Ask(messages=(("user", "Hello"),), max_tokens=5)])
            assert (reading.error, reading.tokens, len(reading.text)) == ("", 5, 5)
            processes.extend(tree(running.roots))
            assert len([one for one in processes if "mlx_lm" in " ".join(one.cmdline()[:4])]) >= ranks
            assert cpu_seconds(running.roots) > 0

    anyio.run(run)
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes)
    assert naming(str(tmp_path)) == []


def test_a_peer_is_gone_when_the_measurement_is_cancelled(model: Path, tmp_path: Path) -> None:
    async def run() -> None:
        with anyio.CancelScope() as scope:
            async with two_ranks(model, tmp_path):
                assert len(naming(str(model))) == 2
                scope.cancel()
                await anyio.sleep_forever()

    anyio.run(run)
    assert naming(str(model)) == []


def test_a_peer_that_does_not_come_up_is_told_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with one_rank(tmp_path / "nothing", tmp_path):
            pytest.fail("it came up without a model")

    (tmp_path / "mlx_lm.py").write_text("raise SystemExit('no such server')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(BenchError, match="no such server"):
        anyio.run(run)
