"""A script runs as if Python had been started on it: its arguments, its exit code, its traceback."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from muster.errors import ScriptError
from muster.rank_protocol import Prepare, PreparedFrame
from muster.runner.context import RankContext
from muster.runner.frames import Channel
from muster.runner.script_rank import ScriptRank
from muster.spec import InstanceId, ScriptWorkload

#: A runner reduced to this workload: prepares and runs it, and ends with its code.
RUN = """
import os, signal, socket, sys
from muster.rank_protocol import (Form)
import msgspec
from muster.rank_protocol import (Prepare)
from muster.runner.context import RankContext
from muster.runner.frames import Channel
from muster.runner.script_rank import ScriptRank
prepare = msgspec.json.decode(sys.argv[1], type=Prepare)
ours, theirs = socket.socketpair()
context = RankContext(Channel(theirs), prepare)
rank = ScriptRank(context, prepare.workload)
rank.prepare()
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as every runner does
code = rank.run(None, Form())
sys.stdout.flush(); sys.stderr.flush()
frame = ours.recv(1000)
os._exit(code if b"ready" in frame and context.phase == "running" else 99)
"""


def prepare_of(workload: ScriptWorkload) -> Prepare:
    return Prepare(
        instance=InstanceId("one"),
        attempt=1,
        rank=0,
        world_size=1,
        workload=workload,
        host="127.0.0.1",
        directory="/tmp",
        generation="",
        shared_seconds=1.0,
    )


def rank_of(workload: ScriptWorkload) -> ScriptRank:
    channel = Channel(socket.socket.__new__(socket.socket))
    return ScriptRank(RankContext(channel, prepare_of(workload)), workload)


def script(directory: Path, source: str, name: str = "job.py") -> Path:
    path = directory / name
    path.write_text(source)
    return path


def run(workload: ScriptWorkload) -> subprocess.CompletedProcess[str]:
    import msgspec

    body = msgspec.json.encode(prepare_of(workload)).decode()
    return subprocess.run(
        [sys.executable, "-c", RUN, body], capture_output=True, text=True, timeout=30, check=False, cwd="/"
    )


# --- preparing ------------------------------------------------------------------------------------------------


def test_a_good_script_is_prepared_and_known_by_its_bytes(tmp_path: Path) -> None:
    path = script(tmp_path, "x = 1\n")
    rank = rank_of(ScriptWorkload(path=str(path)))
    assert rank.prepare() == PreparedFrame()
    assert rank.fingerprint() == hashlib.sha256(b"x = 1\n").hexdigest()


def test_a_relative_path_is_looked_for_in_the_directory(tmp_path: Path) -> None:
    script(tmp_path, "x = 1\n")
    assert rank_of(ScriptWorkload(path="job.py", directory=str(tmp_path))).prepare() == PreparedFrame()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "cannot be read on this node: No such file"),
        ("def f(:\n", "is not valid Python: invalid syntax"),
        ("x = 1\0\n", "is not valid Python"),
        ("  x = 1\n", "unexpected indent"),
    ],
)
def test_a_script_that_cannot_run_is_refused_before_any_group_is_formed(
    tmp_path: Path, source: str | None, message: str
) -> None:
    path = tmp_path / "job.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(ScriptError, match=message) as caught:
        rank_of(ScriptWorkload(path=str(path))).prepare()
    assert str(path) in caught.value.message
    assert not caught.value.retryable
    assert caught.value.remedy


def test_a_missing_working_directory_is_told(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match=r"working directory .*nowhere does not exist on this node"):
        rank_of(ScriptWorkload(path="job.py", directory=str(tmp_path / "nowhere"))).prepare()


def test_a_directory_is_no_script(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match="cannot be read on this node: Is a directory"):
        rank_of(ScriptWorkload(path=str(tmp_path))).prepare()


# --- running --------------------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize(
    ("ending", "code", "stderr"),
    [
        ("pass", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(0)", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit(256 + 7)", 7, ""),
        ("sys.exit(-1)", 255, ""),
        ("sys.exit(True)", 1, ""),
        ("sys.exit('no data')", 1, "no data\n"),
        ("os._exit(4)", 4, ""),
    ],
)
def test_the_exit_code_is_that_of_python(tmp_path: Path, ending: str, code: int, stderr: str) -> None:
    path = script(tmp_path, f"import os, sys\n{ending}\n")
    plain = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=30, check=False)
    done = run(ScriptWorkload(path=str(path)))
    assert (done.returncode, done.stderr) == (code, stderr) == (plain.returncode, plain.stderr)


@pytest.mark.process
def test_a_script_sees_what_python_would_show_it(tmp_path: Path) -> None:
    script(tmp_path, "SAID = 'hello from a neighbour'\n", "neighbour.py")
    (tmp_path / "inner").mkdir()
    source = (
        "import json, os, sys, neighbour\n"
        "print(json.dumps([sys.argv, __name__, os.getcwd(), os.environ['COLOUR'], sys.path[0], neighbour.SAID]))\n"
    )
    script(tmp_path, source)
    workload = ScriptWorkload(
        path="../job.py",
        directory=str(tmp_path / "inner"),
        arguments=("--lr", "0.1", ""),
        environment={"COLOUR": "blue"},
    )
    done = run(workload)
    assert done.returncode == 0, done.stderr
    argv, name, directory, colour, first, said = json.loads(done.stdout)
    assert os.path.realpath(argv[0]) == os.path.realpath(tmp_path / "job.py")
    assert argv[1:] == ["--lr", "0.1", ""]
    assert name == "__main__"
    assert directory == os.path.realpath(tmp_path / "inner")
    assert (colour, first, said) == ("blue", os.path.realpath(tmp_path), "hello from a neighbour")


@pytest.mark.process
@pytest.mark.parametrize(
    ("source", "last"),
    [
        ("def inner():\n    raise ValueError('bad batch')\ninner()\n", "ValueError: bad batch"),
        ("import sys\nclass Own(BaseException): pass\nraise Own('odd')\n", "Own: odd"),
        ("raise KeyboardInterrupt\n", "KeyboardInterrupt"),
    ],
)
def test_an_exception_ends_with_1_and_a_traceback_that_begins_in_the_script(
    tmp_path: Path, source: str, last: str
) -> None:
    path = script(tmp_path, source)
    done = run(ScriptWorkload(path=str(path)))
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].startswith(f'  File "{path}", line ')
    assert lines[-1].endswith(last)
    assert "muster" not in done.stderr.replace(str(tmp_path), "")
    assert "runpy" not in done.stderr


@pytest.mark.process
def test_ctrl_c_reaches_the_script_as_in_python(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "import os, signal, sys\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    signal.pause()\n"
        "except KeyboardInterrupt:\n    sys.exit(5)\n",
    )
    assert run(ScriptWorkload(path=str(path))).returncode == 5
