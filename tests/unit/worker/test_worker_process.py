"""A runner process from its start to its certain end, with a child of a few lines in the place of a runner."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.abc
import pytest
from children import WARM, FakeReaper, as_reaper, exists, frozen, records_in, until, use_child

from muster.rank_protocol import FailedFrame, Form, FromRank, ReadyFrame
from muster.spec import Failure
from muster.worker import process as process_module
from muster.worker.condition import watch
from muster.worker.process import MAX_LINE_BYTES, TAIL_LINES, RunnerProcess
from muster.worker.unburied import Unburied, describe

pytestmark = [pytest.mark.process, pytest.mark.anyio]

STAY = "send(0)\nwhile receive(): pass"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def reaper() -> FakeReaper:
    return FakeReaper()


@pytest.fixture
def runner(reaper: FakeReaper, tmp_path: Path) -> Iterator[RunnerProcess]:
    runner = RunnerProcess(as_reaper(reaper), records_in(tmp_path), full=True)
    yield runner
    runner.frames.close()
    runner.lines.close()


async def frames_of(runner: RunnerProcess) -> list[FromRank]:
    return [frame async for frame in runner.frames]


async def lines_of(runner: RunnerProcess) -> list[str]:
    return [line async for line in runner.lines]


async def run_to_end(runner: RunnerProcess) -> tuple[list[FromRank], list[str]]:
    lines: list[str] = []

    async def collect() -> None:
        lines.extend(await lines_of(runner))

    with anyio.fail_after(15):
        async with anyio.create_task_group() as group:
            group.start_soon(collect)
            await runner.run()
    return await frames_of(runner), lines


def open_descriptors() -> set[str]:
    return {path.name for path in Path("/dev/fd").iterdir()}


async def test_frames_and_lines_keep_apart(runner: RunnerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "send(0)\nsay('one\\ntwo\\r\\nlast')\nsend(1)\nsys.stderr.write('!')\nos._exit(3)"
    commands = use_child(monkeypatch, body, WARM, ReadyFrame())
    frames, lines = await run_to_end(runner)
    assert frames == [ReadyFrame()]
    assert runner.warm == WARM
    assert [line.rstrip("!") for line in lines] == ["one", "two", "last"]
    assert (runner.exit_code, await runner.wait_ended(), runner.ended) == (3, 3, True)
    assert commands[0][:3] == [sys.executable, "-m", "muster.runner"]
    assert commands[0][4:6] == [str(os.getpid()), "full"]


async def test_nothing_is_left_of_a_runner_that_ended(
    runner: RunnerProcess, reaper: FakeReaper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptors = open_descriptors()
    body = "send(0)\nchild = os.fork()\nif child == 0:\n    time.sleep(60)\nsay(str(child))\nos._exit(0)"
    use_child(monkeypatch, body, WARM)
    await run_to_end(runner)
    assert reaper.ever == {runner.pid}
    assert reaper.watched == set()
    assert list((tmp_path / "runners").iterdir()) == []
    child = int(runner.tail[-1])
    until(lambda: not exists(child) and not exists(runner.pid))
    assert open_descriptors() <= descriptors
    assert runner.resident_bytes() == 0


async def test_a_signal_is_told_as_its_negative_number(runner: RunnerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    use_child(monkeypatch, "send(0)\nos.kill(os.getpid(), signal.SIGKILL)", WARM)
    await run_to_end(runner)
    assert runner.exit_code == -signal.SIGKILL


async def test_a_runner_that_dies_before_it_is_warm_is_known_to_be_gone(
    runner: RunnerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_child(monkeypatch, "say('no module named mlx\\n')\nos._exit(1)")
    await run_to_end(runner)
    assert await runner.wait_warm() is False
    assert list(runner.tail) == ["no module named mlx"]


@pytest.mark.parametrize("garbage", ["b'\\xff' * 64", "b'\\x00\\x00\\x00\\x02{}'"])
async def test_what_is_no_frame_ends_the_runner(
    runner: RunnerProcess, monkeypatch: pytest.MonkeyPatch, garbage: str
) -> None:
    use_child(monkeypatch, f"send(0)\nworker.sendall({garbage})\ntime.sleep(60)", WARM)
    frames, _ = await run_to_end(runner)
    assert frames == []
    assert runner.exit_code == -signal.SIGKILL


async def test_half_a_frame_is_no_frame(runner: RunnerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    use_child(monkeypatch, "send(0)\nworker.sendall(FRAMES[1][:-3])\nos._exit(0)", WARM, ReadyFrame())
    frames, _ = await run_to_end(runner)
    assert frames == []
    assert runner.exit_code == 0


async def test_the_last_frame_and_the_last_line_are_not_lost(
    runner: RunnerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = Failure(kind="model-invalid", message="no config")
    use_child(monkeypatch, "say('x' * 30000)\nsend(0)\nos._exit(1)", FailedFrame(failure=failure))
    frames, lines = await run_to_end(runner)
    assert frames == [FailedFrame(failure=failure)]
    assert "".join(lines) == "x" * 30000


async def test_a_line_without_end_is_cut(runner: RunnerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    use_child(monkeypatch, f"say('x' * {3 * MAX_LINE_BYTES + 10})\nsay('\\ny\\n')\nos._exit(0)")
    _, lines = await run_to_end(runner)
    assert "".join(lines) == "x" * (3 * MAX_LINE_BYTES + 10) + "y"
    assert max(map(len, lines)) <= 2 * MAX_LINE_BYTES
    assert len(lines) >= 4


async def test_only_the_last_lines_are_quoted(runner: RunnerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    use_child(monkeypatch, "say(''.join(f'{n}\\n' for n in range(500)))\nsay('\\udcff')\nos._exit(0)")
    _, lines = await run_to_end(runner)
    assert lines[:500] == [str(number) for number in range(500)]
    assert len(runner.tail) == TAIL_LINES


async def test_frames_to_the_runner_arrive_and_one_to_a_dead_runner_is_dropped(
    runner: RunnerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_child(monkeypatch, "send(0)\nsay(repr(b'form' in receive()))\nos._exit(0)", WARM)
    with anyio.fail_after(15):
        async with anyio.create_task_group() as group:
            await group.start(runner.run)
            assert await runner.wait_warm()
            assert runner.resident_bytes() > 0
            await runner.send(Form())
            assert await runner.wait_ended() == 0
    assert list(runner.tail) == ["True"]
    await runner.send(Form())


async def test_memory_that_mlx_has_and_the_process_does_not_show_counts_as_used(
    runner: RunnerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = "import mmap, struct\nshared = mmap.mmap(int(sys.argv[-1]), mmap.PAGESIZE)"
    use_child(monkeypatch, f"{note}\nstruct.pack_into('=q', shared, 8, 2**45)\nsend(0)\nreceive()\nos._exit(0)", WARM)
    with anyio.fail_after(15):
        async with anyio.create_task_group() as group:
            await group.start(runner.run)
            assert await runner.wait_warm()
            assert runner.resident_bytes() < 2**40
            assert runner.used_bytes() == 2**45
            monkeypatch.setattr("muster.worker.process.footprint_bytes", {runner.pid: 2**46}.__getitem__)
            assert runner.used_bytes() == 2**46
            await runner.send(Form())
            await runner.wait_ended()
    assert runner.used_bytes() == 0


@pytest.mark.parametrize(
    ("body", "ask", "code"),
    [
        ("send(0)\nreceive()\nos._exit(7)", True, 7),
        (STAY, False, -signal.SIGTERM),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + STAY, False, -signal.SIGKILL),
        ("send(0)\nos.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(60)", False, -signal.SIGTERM),
    ],
    ids=["asked", "terminated", "killed", "stopped"],
)
async def test_the_ladder(
    runner: RunnerProcess, monkeypatch: pytest.MonkeyPatch, body: str, ask: bool, code: int
) -> None:
    use_child(monkeypatch, body, WARM)
    with anyio.fail_after(15):
        async with anyio.create_task_group() as group:
            await group.start(runner.run)
            assert await runner.wait_warm()
            # Only the child that ignores SIGTERM uses its patience up.
            assert await runner.end(ask=ask, patience_seconds=0.3 if code == -signal.SIGKILL else 10) == code
    assert not exists(runner.pid)


async def test_cancelling_the_owner_ends_the_process(
    runner: RunnerProcess, reaper: FakeReaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_child(monkeypatch, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + STAY, WARM)
    with anyio.fail_after(15):
        async with anyio.create_task_group() as group:
            await group.start(runner.run)
            assert await runner.wait_warm()
            group.cancel_scope.cancel()
    assert runner.ended
    assert runner.exit_code == -signal.SIGKILL
    assert not exists(runner.pid)
    assert reaper.watched == set()


async def test_what_a_script_detached_is_ended_with_it(runner: RunnerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    body = (
        "send(0)\n"
        "source = 'import os, time; print(os.getpid(), flush=True); time.sleep(60)'\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        os.execv(sys.executable, [sys.executable, '-I', '-S', '-c', source])\n"
        "    os._exit(0)\n"
        "receive()"
    )
    use_child(monkeypatch, body, WARM)
    runner.roams = True
    detached = 0
    with anyio.fail_after(15):
        async with anyio.create_task_group() as group:
            await group.start(runner.run)
            detached = int(await runner.lines.receive())
            await runner.end(ask=False, patience_seconds=5)
    assert runner.remains() == []
    assert not exists(detached)


async def test_a_process_that_sigkill_does_not_end_is_told_and_watched_until_it_is_gone(
    runner: RunnerProcess, reaper: FakeReaper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "LEAST_KILL_SECONDS", 0.3)
    use_child(monkeypatch, STAY, WARM)
    unburied = Unburied()
    with anyio.fail_after(15):
        async with anyio.create_task_group() as group:
            await group.start(runner.run)
            assert await runner.wait_warm()
            with frozen(runner.pid):
                assert await runner.end(ask=False, patience_seconds=0.1) is None
                (left,) = runner.remains()
                assert (left.pid, runner.ended, runner.exit_code) == (runner.pid, False, None)
                text = await describe(left, runner.pid, [])
                assert text.startswith(
                    f"runner {runner.pid} does not end: its process is blocked in the kernel; it holds "
                )
                assert (await watch(runner.pid, runner.started).condition()).kind == "blocked"
                unburied.add([left])
                with anyio.move_on_after(0.2) as scope:
                    await unburied.clean()
                assert scope.cancelled_caught
                assert unburied.pids == [runner.pid]
            assert await runner.wait_ended() in (-signal.SIGTERM, -signal.SIGKILL)  # the kernel has both to choose from
            assert await unburied.clean() == [runner.pid]
    assert unburied.pids == []
    assert reaper.watched == set()


async def test_an_owner_that_is_cancelled_does_not_wait_for_ever_for_what_does_not_end(
    runner: RunnerProcess, reaper: FakeReaper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "LEAST_KILL_SECONDS", 0.2)
    use_child(monkeypatch, STAY, WARM)
    descriptors, left = open_descriptors(), anyio.Event()

    async def own(*, task_status: anyio.abc.TaskStatus[None]) -> None:
        try:
            await runner.run(task_status=task_status)
        finally:
            left.set()

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            await group.start(own)
            assert await runner.wait_warm()
            with frozen(runner.pid), anyio.CancelScope(shield=True):
                group.cancel_scope.cancel()
                await left.wait()
                assert not runner.ended
                assert len(list((tmp_path / "runners").iterdir())) == 1
                assert reaper.watched == {runner.pid}
            with anyio.CancelScope(shield=True):
                while exists(runner.pid) or not open_descriptors() <= descriptors:  # noqa: ASYNC110 - nobody tells
                    await anyio.sleep(0.01)
