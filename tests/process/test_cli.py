"""The `muster` command against a real cluster, as a user types it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from kit import until

from muster.cli.app import main
from muster.demo.answers import CONVERSATIONS, ENDLESS_PROMPT, MODEL_DIRECTORY
from muster.local import LocalCluster

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

QUESTION = "What is an instance?"
ANSWER = next(
    conversation.answer
    for conversation in CONVERSATIONS
    if len(conversation.prompt) == 1 and conversation.prompt[0].content == QUESTION
)
DEADLINE_SECONDS = 40.0


class Command:
    """Runs `muster` against one cluster."""

    def __init__(self, address: str, directory: Path) -> None:
        self.address = address
        self.directory = directory
        self._environment = {**os.environ, "MUSTER_COORDINATOR": address, "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}

    def __call__(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "muster", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
            cwd=self.directory,
            env=self._environment,
            check=False,
        )

    def ok(self, *arguments: str, stdin: str = "") -> str:
        found = self(*arguments, stdin=stdin)
        assert found.returncode == 0, (arguments, found)
        return found.stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self.ok(*arguments, "--json"))

    @contextmanager
    def started(self, *arguments: str) -> Generator[subprocess.Popen[str]]:
        """Still running when the body begins; ended politely where the body does not end it."""
        process = subprocess.Popen(
            [sys.executable, "-m", "muster", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.directory,
            env=self._environment,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
            process.communicate(timeout=DEADLINE_SECONDS)

    def script(self, name: str, text: str) -> str:
        (self.directory / name).write_text(text)
        return name


@pytest.fixture(scope="module")
def muster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    directory = tmp_path_factory.mktemp("cli")
    with LocalCluster(directory / "cluster", ("a", "b"), node_options=("--pool", "0")) as cluster:
        yield Command(cluster.address, directory)


@pytest.fixture(scope="module")
def served(muster: Command) -> Iterator[str]:
    """The demo model on both nodes; its id."""
    found = muster("create", str(MODEL_DIRECTORY), "--ranks", "2", "--sharding", "pipeline", "--name", "demo", "--wait")
    assert found.returncode == 0, found
    assert "rank 1 on b: " in found.stderr
    assert ": 2 ranks on a, b: pipeline of 2+2 layers, ring" in found.stderr
    yield found.stdout.strip()
    muster("delete", "--all")


def is_alive(process: psutil.Process) -> bool:
    """Whether it still runs; one that nobody has waited for yet does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_node_is_drained_and_taken_back_and_what_failed_is_tried_again(
    muster: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(*arguments: str) -> Any:
        """The command within this process, which saves the start of another one."""
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--coordinator", muster.address, "--json"])
        assert not ended.value.code
        return json.loads(capsys.readouterr().out)

    created = ask("create", "--group", "--ranks", "2", "--wait")
    name = created["instance"]
    assert created["nodes"] == ["a", "b"]
    # Nothing is left there, and it is known why; the group comes up on the other one.
    assert muster.ok("drain", "b", "--reason", "new memory") == "b\n"
    a, b = ask("nodes")
    assert (a["state"], b["state"], b["reason"], b["ranks"]) == ("ready", "draining", "new memory", 0)
    assert ask("describe", name)["nodes"] == ["a", "a"]
    # It comes back only when asked.
    assert [node["node"] for node in ask("resume", "b")] == ["b"]
    (moved,) = ask("retry", name, "--move", "--wait")
    assert (moved["state"], moved["nodes"], moved["attempt"]) == ("ready", ["a", "b"], 3)
    # One that failed for good is tried again.
    with muster.started("events", "--follow", "--instance", name, "--kind", "instance.failed", "--json") as process:
        os.kill(ask("describe", name)["ranks"][0]["pid"], signal.SIGKILL)
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["event"]["failure"]["kind"] == "rank-killed"
    (again,) = ask("retry", name, "--wait")
    assert (again["state"], again["attempt"], again["failure"]) == ("ready", 4, None)
    assert "has not failed, it is ready" in muster("retry", name).stderr
    muster.ok("delete", name)


def test_a_served_model_is_seen_by_every_command_that_looks(muster: Command, served: str) -> None:
    (row,) = [row for row in muster.json("ps") if row["instance"] == served]
    assert (row["name"], row["state"], row["ranks_ready"], row["nodes"]) == ("demo", "ready", 2, ["a", "b"])
    described = muster.json("describe", "demo")
    assert [rank["layers"] for rank in described["ranks"]] == [[2, 4], [0, 2]]
    assert all(psutil.pid_exists(rank["pid"]) for rank in described["ranks"])
    layout = described["layout"]
    assert (layout["sharding"], [rank["layers"] for rank in layout["ranks"]]) == ("pipeline", [2, 2])
    assert all(rank["memory_bytes"] > rank["weights_bytes"] > 0 for rank in layout["ranks"])
    nodes = muster.json("nodes")
    assert [(node["node"], node["state"], node["ranks"]) for node in nodes] == [("a", "ready", 1), ("b", "ready", 1)]
    shown = muster.ok("describe", served[:-2])
    assert "restart" in shown
    assert "instance.ready" in shown
    timeline = muster.json("trace", "demo")
    assert timeline["outcome"] == "ready"
    assert {span["rank"] for span in timeline["spans"]} == {-1, 0, 1}


def test_place_shows_where_a_model_would_go_and_creates_nothing(
    muster: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(*arguments: str) -> tuple[int, str]:
        """The command within this process, which saves the start of another one."""
        with pytest.raises(SystemExit) as ended:
            main(["place", str(MODEL_DIRECTORY), *arguments, "--coordinator", muster.address])
        return int(ended.value.code or 0), capsys.readouterr().out

    code, shown = ask()
    assert code == 0
    assert "would go to 1 rank on " in shown
    assert "tensor sharding" in shown and "pipeline of 2+2 layers" in shown
    code, shown = ask("--ranks", "2", "--split", "3,1", "--nodes", "b,a", "--json")
    first = json.loads(shown)["options"][0]
    assert (code, [one["node"] for one in first["assignments"]]) == (0, ["b", "a"])
    assert [rank["layers"] for rank in first["layout"]["ranks"]] == [3, 1]
    code, shown = ask("--memory", "100000")
    assert code == 1
    assert "refused: " in shown and "node a has " in shown and "start one more node with at least" not in shown
    code, shown = ask("--split", "3,3")
    assert (code, "split is [3, 3]" in shown, "what would help: " in shown) == (1, True, True)
    assert all(row["name"] in (None, "demo") for row in muster.json("ps"))


def test_events_are_filtered_and_one_object_per_line(muster: Command, served: str) -> None:
    lines = muster.ok("events", "--instance", "demo", "--kind", "rank", "--node", "a", "--since", "10m", "--json")
    events = [json.loads(line) for line in lines.splitlines()]
    assert [event["kind"] for event in events][-1] == "rank.ready"
    assert {event["event"]["instance"] for event in events} == {served}
    assert {event["event"]["node"] for event in events} == {"a"}


def test_an_answer_to_standard_input_is_printed(muster: Command, served: str) -> None:
    assert muster.ok("generate", "demo", "-", stdin=QUESTION + "\n") == ANSWER + "\n"
    assert muster("generate", "demo", "-", stdin="\n").returncode == 2


def test_an_answer_as_json_has_its_counts(muster: Command, served: str) -> None:
    found = muster.json("generate", served, QUESTION, "--max-tokens", "5")
    assert ANSWER.startswith(found["text"])
    assert (found["reason"], found["completion_tokens"]) == ("length", 5)


def test_an_interrupted_generation_leaves_the_model_free(muster: Command, served: str) -> None:
    with muster.started("generate", "demo", ENDLESS_PROMPT, "--raw", "--max-tokens", "1000") as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=10)
        assert process.returncode == 130
    assert muster.ok("generate", "demo", QUESTION, "--timeout", "4") == ANSWER + "\n"


def test_following_events_shows_what_happens_meanwhile_and_ends_with_a_signal(muster: Command) -> None:
    with muster.started("events", "--follow", "--limit", "1", "--json") as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        name = muster.ok("create", "--group", "--ranks", "2", "--wait").strip()
        assert muster.ok("delete", name).strip() == name
        kinds: list[str] = []
        sequences = [first["sequence"]]
        while not kinds or kinds[-1] != "instance.deleted":
            event = json.loads(process.stdout.readline())
            kinds.append(event["kind"])
            sequences.append(event["sequence"])
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=10)
        assert process.returncode == 143
        assert kinds[0] == "instance.created"
        assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))
        assert muster.json("trace", name)["outcome"] == "deleted"
        assert muster("describe", name).returncode == 2


def test_exec_streams_with_ranks_and_gives_the_script_its_own_options(muster: Command) -> None:
    file = muster.script(
        "hello.py",
        "import os, sys\nimport mlx.core as mx\ngroup = mx.distributed.init()\n"
        "print(group.rank(), group.size(), sys.argv[1:], os.environ['GREETING'], os.getcwd())\n",
    )
    arguments = ("--ranks", "2", "--env", "GREETING=hello", file, "--ranks", "7", "-x")
    lines = muster.ok("exec", *arguments).splitlines()
    assert sorted(lines) == [f"[{rank}] {rank} 2 ['--ranks', '7', '-x'] hello {muster.directory}" for rank in range(2)]


def test_exec_ends_with_the_exit_code_of_the_script(muster: Command) -> None:
    found = muster("exec", "--ranks", "2", muster.script("fails.py", "import sys; print('bye'); sys.exit(3)"))
    assert found.returncode == 3
    assert re.search(r"^\[[01]\] bye$", found.stdout, re.MULTILINE)
    assert re.search(r"muster: rank [01] on node [ab], while running", found.stderr)
    assert not [row for row in muster.json("ps", "--all") if "fails" in row["instance"]]


def test_exec_of_a_missing_file_says_so(muster: Command) -> None:
    found = muster("exec", "missing.py")
    assert found.returncode == 1
    assert "missing.py" in found.stderr


def test_an_interrupted_exec_leaves_nothing(muster: Command) -> None:
    file = muster.script("forever.py", "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    with muster.started("exec", "--ranks", "2", file) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        runners = [int(line.partition("] ")[2]) for line in lines]
        assert all(psutil.pid_exists(pid) for pid in runners)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
        assert process.returncode == 130
        # The command has waited for the end of both: there is nothing left to wait for here.
        assert not any(psutil.pid_exists(pid) for pid in runners)
        assert not [row for row in muster.json("ps", "--all") if "forever" in row["instance"]]


def test_output_can_be_read_later_and_followed_to_the_end(muster: Command) -> None:
    file = muster.script("talk.py", "import sys\nprint('one')\nprint('two')\n")
    name = muster.ok("create", "--script", file, "--ranks", "1", "--wait").strip()
    assert muster.ok("logs", name, "--follow") == "[0] one\n[0] two\n"
    assert name not in [row["instance"] for row in muster.json("ps")]
    assert name in [row["instance"] for row in muster.json("ps", "--all")]
    muster.ok("delete", name)


def test_waiting_for_a_script_is_waiting_for_its_end(muster: Command) -> None:
    gate = muster.directory / "gate"
    file = muster.script(
        "gated.py",
        "import pathlib, sys, time\n"
        "while not pathlib.Path('gate').exists():\n    time.sleep(0.02)\n"
        "sys.exit(int(pathlib.Path('gate').read_text()))\n",
    )
    for code, expected, ended in ((0, 0, "finished"), (3, 1, "failed")):
        gate.unlink(missing_ok=True)
        arguments = ("create", "--script", file, "--ranks", "2", "--wait")
        with muster.started(*arguments) as process:
            assert process.stdout is not None
            name = process.stdout.readline().strip()
            with muster.started("events", "--follow", "--instance", name, "--json") as follower:
                assert follower.stdout is not None
                while json.loads(follower.stdout.readline())["kind"] != "instance.ready":
                    pass
            # It runs, which is not enough; whoever took that for the end would have ended before another command does.
            assert muster.json("describe", name)["state"] == "ready"
            assert process.poll() is None
            (muster.directory / "gate.new").write_text(str(code))
            (muster.directory / "gate.new").rename(gate)
            _, errors = process.communicate(timeout=DEADLINE_SECONDS)
            assert process.returncode == expected
            assert ("exit code 3" in errors) == (code == 3)
        assert muster.json("describe", name)["state"] == ended
        muster.ok("delete", name)


def test_logs_say_what_is_not_there(muster: Command) -> None:
    created = muster("create", "--group", "--wait", "--quiet")
    assert (created.returncode, created.stderr) == (0, "")
    name = created.stdout.strip()
    found = muster("logs", name)
    assert (found.returncode, found.stdout) == (0, "")
    assert f"{name} has printed nothing" in found.stderr
    beyond = muster("logs", name, "--rank", "7")
    assert beyond.returncode == 2
    assert f"--rank is 7, but {name} has 2 ranks" in beyond.stderr
    muster.ok("delete", name)


def test_events_of_a_node_that_never_was_say_so(muster: Command) -> None:
    found = muster("events", "--node", "nope")
    assert (found.returncode, found.stdout) == (0, "")
    assert "no node nope" in found.stderr
    assert not muster("events", "--node", "a", "--kind", "node").stderr


def test_a_failed_creation_ends_with_the_cause_and_the_remedy(muster: Command) -> None:
    found = muster("create", "./no-such-model", "--wait")
    assert found.returncode == 1
    assert str(muster.directory / "no-such-model") in found.stderr
    shown = muster.ok("describe", found.stdout.strip())
    assert "last failure: model-invalid" in shown
    muster.ok("delete", found.stdout.strip())


def test_waiting_no_longer_than_asked_leaves_the_instance_coming_up(muster: Command) -> None:
    found = muster("create", "--group", "--ranks", "2", "--name", "slow", "--wait-seconds", "0.0001")
    assert found.returncode == 1
    assert "muster describe" in found.stderr
    assert muster("create", "--group", "--name", "slow").returncode == 2
    muster.ok("delete", "slow")


def test_a_refused_creation_says_what_is_missing(muster: Command) -> None:
    found = muster("create", "--group", "--nodes", "zz")
    assert found.returncode == 1
    assert "zz" in found.stderr
    assert "muster nodes" in found.stderr


def test_up_runs_until_a_signal_and_leaves_nothing(tmp_path: Path) -> None:
    command = Command("", tmp_path)
    with command.started(
        "up", "--nodes", "1", "--pool", "0", "--port", "0", "--directory", str(tmp_path / "up")
    ) as process:
        assert process.stdout is not None
        address = re.match(r"coordinator on (\S+), nodes n1", process.stdout.readline())
        assert address is not None
        children = psutil.Process(process.pid).children(recursive=True)
        assert Command(address[1], tmp_path).json("nodes")[0]["node"] == "n1"
        # A second one that wants the same port is told so.
        taken = command("up", "--port", address[1].rpartition(":")[2], "--directory", str(tmp_path / "other"))
        assert taken.returncode == 1
        assert "cannot be had" in taken.stderr
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 0
        assert "n1          | " in errors
        assert not any(is_alive(child) for child in children)


def test_up_ends_when_a_member_does(tmp_path: Path) -> None:
    command = Command("", tmp_path)
    with command.started(
        "up", "--nodes", "1", "--pool", "0", "--port", "0", "--directory", str(tmp_path / "up")
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        children = psutil.Process(process.pid).children(recursive=True)
        (worker,) = [child for child in children if "worker" in child.cmdline()]
        worker.kill()
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 1
        assert "worker n1" in errors
        assert "SIGKILL" in errors
        assert not any(is_alive(child) for child in children)


def test_a_hostfile_is_written_and_read_again(muster: Command, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> str:
        """The command within this process, which saves the start of another one."""
        with pytest.raises(SystemExit) as ended:
            main([arguments[0], "--coordinator", muster.address, *arguments[1:]])
        assert not ended.value.code
        return capsys.readouterr().out

    name = run("create", "--group", "--ranks", "2", "--wait", "--quiet").strip()
    written = json.loads(run("hostfile", name))
    run("delete", name)
    assert (written["backend"], [host["node"] for host in written["hosts"]]) == ("ring", ["a", "b"])
    written["hosts"].reverse()
    written["envs"] = ["GREETING=from the file"]
    if sys.platform == "linux":  # where all of 127.0.0.0/8 is the machine's own
        written["hosts"][1]["ips"] = ["127.0.0.2"]
    path = muster.directory / "hosts.json"
    path.write_text(json.dumps(written))
    # The order of the file is that of the ranks, its addresses are used, and its variables are set.
    name = run("create", "--group", "--hostfile", str(path), "--wait", "--quiet").strip()
    again = run("hostfile", name)
    assert json.loads(again) == written
    ranks = json.loads(run("describe", name, "--json"))["ranks"]
    used = [[address.partition(":")[0] for address in rank["addresses"]] for rank in ranks]
    assert used == [host["ips"] for host in written["hosts"]]
    run("delete", name)
    script = muster.directory / muster.script("greet.py", "import os\nprint(os.environ['GREETING'])\n")
    shown = run("exec", "--hostfile", str(path), str(script))
    assert sorted(shown.splitlines()) == ["[0] from the file", "[1] from the file"]
    # What does not fit is refused before anything is created.
    assert (
        "--hostfile and --nodes exclude each other"
        in muster("create", "m", "--hostfile", str(path), "--nodes", "a").stderr
    )
    written["hosts"][1] = {"ssh": "mac7", "ips": ["10.0.0.7"]}
    path.write_text(json.dumps(written))
    refused = muster("create", "--group", "--hostfile", str(path))
    assert refused.returncode == 2
    assert "no node answers to 'mac7'; the nodes are: a (" in refused.stderr


def test_the_doctor_looks_at_this_machine_and_at_every_node(
    muster: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    def examined(*arguments: str) -> dict[str, Any]:
        with pytest.raises(SystemExit) as ended:
            main(["doctor", *arguments, "--json"])
        found = {check["check"]: check for check in json.loads(capsys.readouterr().out)}
        assert bool(ended.value.code) == any(check["verdict"] == "FAILURE" for check in found.values())
        return found

    here = examined("--no-hub", "--ports", "40000-40020")
    assert {"system", "python", "mlx", "mlx runs", "memory", "disk", "ports", "worker ports"} <= set(here)
    assert "hub" not in here
    assert here["mlx runs"]["verdict"] == "OK"

    def told() -> dict[str, Any] | None:
        found = examined("--cluster", "--coordinator", muster.address)
        return None if "facts" in found else found

    every = until(told, "the nodes tell what they know of their machine")
    assert every["node"]["nodes"] == ["a", "b"]
    assert (every["versions"]["verdict"], every["links"]["verdict"]) == ("OK", "OK")
    assert every["mlx"]["nodes"] == ["a", "b"]
    assert not {"no link", "directed link", "duplicate address"} & set(every)
    assert muster("doctor", "--cluster", "--coordinator", "127.0.0.1:9").returncode == 3
