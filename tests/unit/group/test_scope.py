"""The file and the variables are there inside the scope, private and alone, and gone on every way out."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from muster.errors import PayloadError, ScopeError
from muster.group.payload import JacclPayload, Payload, RingPayload
from muster.group.scope import coordination_scope, owner_alive, private_directory, sweep

RING = RingPayload("one", 1, 1, 2, (("localhost:5000",), ("10.0.0.2:5001",)))
JACCL = JacclPayload("one", 1, 1, 2, ((None, "a"), (("b", "c"), None)), "localhost:7000")

INHERITED = {
    "MLX_HOSTFILE": "old",
    "MLX_RANK": "7",
    "MLX_WORLD_SIZE": "9",
    "MLX_RING_VERBOSE": "1",
    "MLX_IBV_DEVICES": "old",
    "MLX_JACCL_COORDINATOR": "old",
    "MLX_JACCL_RING": "1",
    "JACCL_RANK": "3",
    "JACCL_ANYTHING": "x",
    "NCCL_HOST_IP": "old",
    "NCCL_PORT": "1",
}
UNRELATED = {"PATH": "/bin", "MLX_METAL_FAST_SYNCH": "1", "MLX_DISABLE_COMPILE": "1", "NCCL_DEBUG": "INFO"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run"


def inside(payload: Payload, directory: Path) -> tuple[dict[str, str], object, int]:
    environ = INHERITED | UNRELATED
    with coordination_scope(payload, directory=directory, environ=environ) as files:
        seen = {name: value for name, value in environ.items() if name not in UNRELATED}
        assert UNRELATED.items() <= environ.items()
        assert seen == dict(files.variables)
        content = json.loads(files.path.read_bytes())
        mode = stat.S_IMODE(files.path.stat().st_mode)
        assert files.path.parent == directory
        assert str(files.path) in seen.values()
    assert environ == INHERITED | UNRELATED
    assert list(directory.iterdir()) == []
    return {name: value for name, value in seen.items() if value != str(files.path)}, content, mode


def test_ring_sets_its_own_variables_only(directory: Path) -> None:
    variables, content, mode = inside(RING, directory)
    assert variables == {"MLX_RANK": "1"}
    assert content == [["127.0.0.1:5000"], ["10.0.0.2:5001"]]
    assert mode == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_jaccl_sets_its_own_variables_only(directory: Path) -> None:
    variables, content, _ = inside(JACCL, directory)
    assert variables == {"MLX_RANK": "1", "MLX_JACCL_COORDINATOR": "127.0.0.1:7000"}
    assert content == [[None, "a"], [["b", "c"], None]]


def test_the_ring_of_jaccl_is_preferred_by_one_more_variable(directory: Path) -> None:
    variables, _, _ = inside(JacclPayload("one", 1, 0, 2, ((None, "a"), ("b", None)), "10.0.0.1:7000", True), directory)
    assert variables["MLX_JACCL_RING"] == "1"


@pytest.mark.parametrize("way_out", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_every_way_out_cleans_up(way_out: type[BaseException], directory: Path) -> None:
    environ = INHERITED | UNRELATED
    with pytest.raises(way_out), coordination_scope(RING, directory=directory, environ=environ):
        raise way_out
    assert environ == INHERITED | UNRELATED
    assert list(directory.iterdir()) == []


def test_a_bad_payload_writes_nothing(directory: Path) -> None:
    environ = dict(INHERITED)
    bad = RingPayload("one", 1, 0, 2, (("10.0.0.1:1",), ("10.0.0.2",)))
    with pytest.raises(PayloadError), coordination_scope(bad, directory=directory, environ=environ):
        pass
    assert environ == INHERITED
    assert not directory.exists()


@pytest.mark.parametrize(
    "instance", ["../../etc/passwd", "a/b", "", "x" * 300, "ü\u0000 \n", "-rf", "\udcff", "CON", "%s{}"]
)
def test_odd_instance_names_stay_in_the_directory(instance: str, directory: Path) -> None:
    payload = RingPayload(instance, 1, 0, 2, (("10.0.0.1:1",), ("10.0.0.2:1",)))
    with coordination_scope(payload, directory=directory, environ={}) as files:
        assert files.path.resolve().parent == directory.resolve()
        assert files.path.name.isascii()
        assert sweep(directory, alive=lambda pid, start: True) == []
        assert sweep(directory, alive=lambda pid, start: False) == [files.path]


def test_scopes_may_end_in_any_order(directory: Path) -> None:
    environ = INHERITED | UNRELATED
    first = coordination_scope(RING, directory=directory, environ=environ)
    second = coordination_scope(JACCL, directory=directory, environ=environ)
    one = first.__enter__()
    two = second.__enter__()
    assert environ == UNRELATED | dict(two.variables)
    first.__exit__(None, None, None)
    assert environ == UNRELATED | dict(two.variables)
    assert (one.path.exists(), two.path.exists()) == (False, True)
    third = coordination_scope(RING, directory=directory, environ=environ)
    three = third.__enter__()
    third.__exit__(None, None, None)
    assert environ == UNRELATED | dict(two.variables)
    second.__exit__(None, None, None)
    assert environ == INHERITED | UNRELATED
    assert three.path not in (one.path, two.path)
    assert list(directory.iterdir()) == []


def test_many_threads_never_share_a_file(directory: Path) -> None:
    environ = INHERITED | UNRELATED
    barrier = threading.Barrier(16)

    def one(number: int) -> tuple[Path, bool]:
        payload = RingPayload("one", 1, number % 2, 2, (("10.0.0.1:1",), (f"10.0.0.2:{number + 1}",)))
        with coordination_scope(payload, directory=directory, environ=environ) as files:
            barrier.wait(10)
            mine = json.loads(files.path.read_bytes()) == [["10.0.0.1:1"], [f"10.0.0.2:{number + 1}"]]
        return files.path, mine

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(one, range(64)))
    assert all(mine for _, mine in results)
    assert len({path for path, _ in results}) == 64
    assert environ == INHERITED | UNRELATED
    assert list(directory.iterdir()) == []


def test_a_directory_where_others_may_write_is_refused(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o1777)
    with pytest.raises(ScopeError, match="mode 1777") as caught:
        private_directory(directory)
    assert "chmod 700" in caught.value.remedy
    directory.chmod(0o770)
    with pytest.raises(ScopeError, match="mode 0770"), coordination_scope(RING, directory=directory, environ={}):
        pass


def test_a_file_in_the_place_of_the_directory_is_refused(directory: Path) -> None:
    directory.write_text("")
    with pytest.raises(ScopeError, match="cannot create the directory"):
        private_directory(directory)


def test_a_disk_without_space_is_said(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, mode: str) -> object:
        os.close(descriptor)
        raise OSError(28, "No space left on device")

    environ = dict(INHERITED)
    monkeypatch.setattr("muster.group.scope.os.fdopen", full)
    with (
        pytest.raises(ScopeError, match="No space left"),
        coordination_scope(RING, directory=directory, environ=environ),
    ):
        pass
    assert environ == INHERITED
    assert list(directory.iterdir()) == []


def test_sweep_leaves_strangers_files_and_the_living_alone(directory: Path) -> None:
    assert sweep(directory, alive=owner_alive) == []
    directory.mkdir()
    (directory / "notes.json").write_text("")
    (directory / "muster-x-r0.json").write_text("")
    with coordination_scope(RING, directory=directory, environ={}) as files:
        seen: list[tuple[int, float]] = []

        def alive(pid: int, start_seconds: float) -> bool:
            seen.append((pid, start_seconds))
            return owner_alive(pid, start_seconds)

        assert sweep(directory, alive=alive) == []
        assert seen == [(os.getpid(), pytest.approx(psutil.Process().create_time(), abs=0.01))]
        assert files.path.exists()
    assert len(list(directory.iterdir())) == 2


def test_a_pid_used_again_is_not_the_owner() -> None:
    started = psutil.Process().create_time()
    assert owner_alive(os.getpid(), started)
    assert not owner_alive(os.getpid(), started - 60)


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="this system cannot wait for a child and leave it unburied")
def test_an_owner_that_has_ended_and_was_not_buried_owns_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        started = psutil.Process(process.pid).create_time()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not owner_alive(process.pid, started)


CHILD = """
import os, signal, sys, threading
from pathlib import Path
from muster.group.payload import RingPayload
from muster.group.scope import coordination_scope

signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
before = dict(os.environ)
payload = RingPayload("one", 1, 0, 2, (("127.0.0.1:1",), ("127.0.0.1:2",)))
try:
    with coordination_scope(payload, directory=Path(sys.argv[1])) as files:
        print(files.path, flush=True)
        threading.Event().wait()
finally:
    assert dict(os.environ) == before
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "code", "left"), [(signal.SIGTERM, 3, 0), (signal.SIGINT, -2, 0), (signal.SIGKILL, -9, 1)]
)
def test_signals(number: signal.Signals, code: int, left: int, directory: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(directory)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as child:
        assert child.stdout is not None
        path = Path(child.stdout.readline().strip())
        assert path.exists()
        assert sweep(directory, alive=owner_alive) == []
        child.send_signal(number)
        assert child.wait(10) == code
    assert len(list(directory.iterdir())) == left
    assert sweep(directory, alive=owner_alive) == [path] * left
    assert list(directory.iterdir()) == []


@pytest.mark.process
def test_processes_with_the_same_payload_have_files_of_their_own(directory: Path) -> None:
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", CHILD, str(directory)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
            for _ in range(4)
        ]
        paths: set[str] = set()
        for child in children:
            assert child.stdout is not None
            paths.add(child.stdout.readline().strip())
        assert {str(path) for path in directory.iterdir()} == paths
        assert len(paths) == 4
        for child in children:
            child.terminate()
        assert [child.wait(10) for child in children] == [3] * 4
    assert list(directory.iterdir()) == []
