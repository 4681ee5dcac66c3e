"""Scripts that do not end well: the exit code and the last lines are told, and no rank stays behind."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from kit import Stage, alive, assert_blames, script, spec_of, until

from muster.events import InstanceFailed, InstanceFinished, RankReady
from muster.spec import Deadlines, RestartOnFailure, ScriptWorkload

pytestmark = [pytest.mark.process, pytest.mark.mlx]

#: Rank 1 fails while rank 0 waits for it inside a collective, where it cannot be asked to stop.
ONE_FAILS = """
import mlx.core as mx
group = mx.distributed.init()
print("rank", group.rank(), flush=True)
mx.eval(mx.distributed.all_sum(mx.ones(4), group=group))
if group.rank() == 1:
    {}
mx.eval(mx.distributed.all_sum(mx.ones(4), group=group))
"""


@pytest.mark.parametrize(
    ("statement", "code", "tail"),
    [
        ("raise ValueError('bad data')", 1, "ValueError: bad data"),
        ("raise SystemExit(3)", 3, ""),
        ("import os; os._exit(4)", 4, ""),
        ("raise SystemExit('no data')", 1, "no data"),
    ],
)
def test_a_script_that_fails_on_one_rank_stops_all(
    shared: Stage, tmp_path: Path, statement: str, code: int, tail: str
) -> None:
    instance = shared.client.create(script(tmp_path, ONE_FAILS.format(statement)))
    failure = shared.client.failure_of(instance)
    assert_blames(failure, kind="script-failed", rank=1, node="b", phase="running")
    assert failure.exit_code == code
    assert tail in "\n".join(failure.log_tail)
    assert {"0: rank 0", "1: rank 1"} <= set(shared.client.lines(instance, 2))
    shared.clean(instance)


@pytest.mark.parametrize(
    ("said", "kind", "told", "remedy"),
    [
        ("[jaccl] Register memory region failed", "rdma-unusable", "cannot register more memory", "Delete the other"),
        ("[METAL] Caused GPU Timeout Error", "peer-lost", "the GPU waited too long", "Let the communication run"),
    ],
)
def test_what_mlx_says_of_the_group_is_explained_and_what_lasts_is_not_tried_again(
    shared: Stage, tmp_path: Path, said: str, kind: str, told: str, remedy: str
) -> None:
    text = f"import mlx.core as mx\nmx.distributed.init()\nraise RuntimeError({said!r})\n"
    maximum = RestartOnFailure(maximum=1, backoff_seconds=0.0)
    instance = shared.client.create(script(tmp_path, text, restart=maximum))
    failed = shared.client.wait(InstanceFailed, instance)
    assert (failed.failure.kind, failed.failure.exit_code) == (kind, 1)
    assert told in failed.failure.message
    assert failed.failure.remedy.startswith(remedy)
    assert (failed.retry_at_ns is None) == (kind == "rdma-unusable")
    shared.clean(instance)


@pytest.mark.parametrize("before", ["", "os.closerange(3, 1024)"])
def test_a_script_that_hangs_is_ended_at_its_deadline(shared: Stage, tmp_path: Path, before: str) -> None:
    text = f"import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{before}\ntime.sleep(600)\n"
    spec = script(tmp_path, text, 1, run_seconds=0.5, deadlines=Deadlines(stop_seconds=0.3))
    instance = shared.client.create(spec)
    failure = shared.client.failure_of(instance)
    assert_blames(failure, kind="deadline-passed", rank=0, node="a", phase="running")
    assert "0.5 s" in failure.message
    shared.clean(instance)


def test_a_syntax_error_is_found_before_the_group_forms(shared: Stage, tmp_path: Path) -> None:
    instance = shared.client.create(script(tmp_path, "def broken(:\n"))
    failure = shared.client.failure_of(instance)
    assert failure.kind == "script-invalid"
    assert failure.phase.value == "preparing"
    assert failure.node in ("a", "b")
    assert "not valid Python" in failure.message
    shared.clean(instance)


@pytest.mark.parametrize("what", ["script", "directory"])
def test_a_missing_file_is_named_and_not_tried_again(shared: Stage, tmp_path: Path, what: str) -> None:
    directory = str(tmp_path if what == "script" else tmp_path / "nowhere")
    workload = ScriptWorkload(path="missing.py", directory=directory)
    instance = shared.client.create(spec_of(workload, 1, ("a",), restart=RestartOnFailure(maximum=3)))
    failed = shared.client.wait(InstanceFailed, instance)
    assert_blames(failed.failure, kind="script-invalid", rank=0, node="a", phase="preparing")
    assert ("missing.py" if what == "script" else "nowhere") in failed.failure.message
    assert failed.retry_at_ns is None
    shared.clean(instance)


def test_what_a_script_started_is_gone_when_it_fails(shared: Stage, tmp_path: Path) -> None:
    text = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('child', child.pid, flush=True)\n"
        "raise SystemExit(3)\n"
    )
    instance = shared.client.create(script(tmp_path, text, 1))
    assert shared.client.failure_of(instance).exit_code == 3
    (line,) = shared.client.lines(instance, 1)
    until(lambda: not alive(int(line.split()[-1])), "the end of the script's child", 5.0)
    shared.clean(instance)


def test_deleting_a_running_script_leaves_none_of_its_processes(shared: Stage, tmp_path: Path) -> None:
    text = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('child', child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    instance = shared.client.create(script(tmp_path, text, 1))
    shared.client.wait(RankReady, instance)
    (line,) = shared.client.lines(instance, 1)
    child = psutil.Process(int(line.split()[-1]))
    shared.clean(instance)
    assert not alive(child.pid)


def test_ranks_that_end_at_different_times_finish_the_instance(shared: Stage, tmp_path: Path) -> None:
    text = (
        "import mlx.core as mx, time\n"
        "group = mx.distributed.init()\n"
        "mx.eval(mx.distributed.all_sum(mx.ones(4), group=group))\n"
        "time.sleep(0.2 * group.rank())\n"
    )
    instance = shared.client.create(script(tmp_path, text))
    shared.client.wait(InstanceFinished, instance)
    shared.clean(instance)


def test_all_that_a_script_prints_arrives_in_order(shared: Stage, tmp_path: Path) -> None:
    instance = shared.client.create(script(tmp_path, "for number in range(8000): print(number)\n", 2))
    shared.client.wait(InstanceFinished, instance)
    lines = shared.client.lines(instance, 16_000)
    for rank in (0, 1):
        mine = [line.partition(": ")[2] for line in lines if line.startswith(f"{rank}: ")]
        assert mine == [str(number) for number in range(8000)]
    shared.clean(instance)


FINISHES = """
import atexit, threading, time
atexit.register(lambda: print("handler ran", flush=True))
def work():
    time.sleep(0.2)
    print("thread ended", flush=True)
threading.Thread(target=work).start()
log = open({path!r}, "w")
log.write("kept")
def keeps_the_globals_in_a_cycle(): return log
"""


def test_a_script_ends_as_under_the_interpreter(shared: Stage, tmp_path: Path) -> None:
    written = tmp_path / "written"
    instance = shared.client.create(script(tmp_path, FINISHES.format(path=str(written)), 1))
    shared.client.wait(InstanceFinished, instance)
    assert {"0: handler ran", "0: thread ended"} == set(shared.client.lines(instance, 2))
    assert written.read_text() == "kept"
    shared.clean(instance)


@pytest.mark.parametrize("statement", ["sys.stdout.close()", "sys.stdout = None"])
def test_a_script_may_close_its_output(shared: Stage, tmp_path: Path, statement: str) -> None:
    instance = shared.client.create(script(tmp_path, f"import sys\n{statement}\n", 1))
    shared.client.wait(InstanceFinished, instance)
    shared.clean(instance)


def test_a_fork_of_a_script_leaves_the_coordination_file(shared: Stage, tmp_path: Path) -> None:
    text = """
import os, sys
if (child := os.fork()) == 0:
    sys.exit(0)
os.waitpid(child, 0)
print(os.path.exists(os.environ["MLX_HOSTFILE"]), flush=True)
"""
    instance = shared.client.create(script(tmp_path, text, 2))
    shared.client.wait(InstanceFinished, instance)
    assert set(shared.client.lines(instance, 2)) == {"0: True", "1: True"}
    shared.clean(instance)


def test_long_last_lines_do_not_hide_the_failure(shared: Stage, tmp_path: Path) -> None:
    text = "import sys\nfor _ in range(8): print('x' * 60000)\nsys.exit(3)\n"
    instance = shared.client.create(script(tmp_path, text, 1))
    failure = shared.client.failure_of(instance)
    assert_blames(failure, kind="script-failed", rank=0, node="a", phase="running")
    assert max(len(line) for line in failure.log_tail) < 600
    shared.clean(instance)
