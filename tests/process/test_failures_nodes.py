"""Workers that are killed, stopped, doubled, or cannot join."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from kit import (
    DEADLINE_SECONDS,
    FAST_CLOCKS,
    STATES,
    Stage,
    alive,
    assert_blames,
    brought_to,
    group,
    script,
    spec_of,
    stage,
    stopped,
    until,
)

from muster.events import NodeJoined, NodeLost, RankPrepared
from muster.local import Member
from muster.protocol import Create
from muster.spec import GroupWorkload, NodeId, RestartOnFailure

pytestmark = [pytest.mark.process, pytest.mark.mlx]

#: A script whose rank has a child and a grandchild, and says who they are.
FAMILY = """
import subprocess, sys, time
text = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
text += "; print('pid', p.pid, flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", text])
print("pid", child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Stage]:
    with stage(tmp_path / "cluster", coordinator_options=FAST_CLOCKS) as made:
        yield made


def exit_code(member: Member, seconds: float = DEADLINE_SECONDS) -> int:
    return member.process.wait(seconds)


# --- kill -9 of a worker --------------------------------------------------------------------------------------


def test_a_killed_worker_takes_its_runners_along_and_is_clean_when_it_is_back(own: Stage) -> None:
    instance = own.client.create(group(restart=RestartOnFailure(maximum=5, backoff_seconds=1.0)))
    lost = own.client.ready(instance).ranks[1]
    own.cluster.kill("b")
    until(lambda: not alive(lost.pid, lost.process_started), "the end of the killed worker's runner", 5.0)
    failure = own.client.failure_of(instance)
    assert_blames(failure, kind="node-lost", rank=1, node="b", phase="running")
    directory = own.cluster.directory / "b"
    before = {path for part in ("groups", "runners") for path in (directory / part).glob("*")}
    own.cluster.start_worker("b")
    assert not any(path.exists() for path in before)  # a runner of the next attempt may be there
    running = own.client.wait_for(
        lambda: now if (now := own.client.instance(instance)).ranks[1].boot != lost.boot else None,
        "an attempt on the new boot",
    )
    own.client.ready(instance, attempt=running.attempt)
    own.clean(instance)


def test_a_killed_worker_takes_the_children_of_a_script_along(own: Stage, tmp_path: Path) -> None:
    instance = own.client.create(script(tmp_path, FAMILY, 1))
    rank = own.client.ready(instance).ranks[0]
    lines = own.client.lines(instance, 2)
    family = [rank.pid, *(int(line.split()[-1]) for line in lines)]
    own.cluster.kill("a")
    until(lambda: not any(alive(pid) for pid in family), "the end of the runner, its child and its grandchild", 5.0)
    assert_blames(own.client.failure_of(instance), kind="node-lost", rank=0, node="a", phase="running")
    own.cluster.start_worker("a")  # sweeps what the killed one has left on disk
    own.clean(instance)


def test_a_late_reaper_still_ends_what_a_runner_left(own: Stage, tmp_path: Path) -> None:
    """On Linux the kernel ends the runner first, and nothing but its process group is left to tell its children."""
    instance = own.client.create(script(tmp_path, FAMILY, 1))
    rank = own.client.ready(instance).ranks[0]
    lines = own.client.lines(instance, 2)
    family = [int(line.split()[-1]) for line in lines]
    reaper = next(child for child in own.worker("a").children() if "reaper.py" in " ".join(child.cmdline()))
    with stopped(reaper):
        own.cluster.kill("a")
        until(lambda: not psutil.pid_exists(rank.pid), "the end of the runner")
    until(lambda: not any(alive(pid) for pid in family), "the end of the script's child and grandchild", 5.0)


def test_a_worker_that_is_killed_while_a_group_forms(own: Stage) -> None:
    instance = own.client.create(group())
    with stopped(own.new_runner("a")) as first:
        own.client.wait(RankPrepared, instance, rank=1)
        own.cluster.kill("a")
        until(lambda: not alive(first.pid), "the end of the stopped runner", 5.0)
    assert_blames(own.client.failure_of(instance), kind="node-lost", rank=0, node="a", phase="preparing")
    own.cluster.start_worker("a")
    own.clean(instance)


def test_a_worker_that_stands_still_is_lost_and_joins_again_without_its_rank(own: Stage) -> None:
    instance = own.client.create(group())
    own.client.ready(instance)
    with stopped(own.worker("b")):
        failure = own.client.failure_of(instance)
        assert_blames(failure, kind="node-lost", rank=1, node="b", phase="running")
        assert "no heartbeat" in failure.message
    own.client.wait_event(NodeJoined, lambda joined: joined.info.node == "b")
    records = own.cluster.directory / "b" / "runners"
    until(lambda: list(records.iterdir()) == [], "the end of the rank that was given up")
    own.clean(instance)
    again = own.client.create(group())
    own.client.ready(again)
    own.clean(again)


def test_the_last_node_that_is_left_says_so(own: Stage) -> None:
    own.cluster.kill("a")
    own.client.wait_event(NodeLost, lambda lost: lost.node == "a")
    failure = own.client.refusal(Create(spec=group()))
    assert failure.kind == "placement-refused"
    assert "node a is lost" in failure.message
    assert failure.remedy


# --- SIGTERM of a worker --------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
def test_sigterm_of_a_worker_ends_its_ranks_and_says_so(own: Stage, tmp_path: Path, state: str) -> None:
    with brought_to(own, state, tmp_path) as instance:
        runners = own.runners("a")
        member = own.cluster.members["a"]
        member.process.send_signal(signal.SIGTERM)
        assert exit_code(member) == 0
        assert not any(alive(runner.pid) for runner in runners)
        lost = own.client.wait_event(NodeLost, lambda lost: lost.node == "a")
        assert "stopped" in lost.reason
        own.assert_node_empty("a")
        if instance is not None:
            failure = own.client.failure_of(instance)
            assert (failure.kind, failure.rank, failure.node) == ("worker-stopped", 0, "a"), failure.sentence()
            assert failure.remedy
            own.clean(instance)


def test_sigint_ends_a_worker_as_sigterm_does(own: Stage) -> None:
    member = own.cluster.members["a"]
    member.process.send_signal(signal.SIGINT)
    assert exit_code(member) == 0


# --- joining ----------------------------------------------------------------------------------------------------


def test_a_worker_without_a_coordinator_keeps_trying_says_so_and_ends_on_sigterm(own: Stage) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        own.cluster.address = f"127.0.0.1:{nobody.getsockname()[1]}"
        member = own.cluster.start_worker("lonely", wait=False)
        until(lambda: "trying again" in own.cluster.log_of("lonely"), "a line about the coordinator")
    assert own.cluster.address in own.cluster.log_of("lonely")
    assert member.process.poll() is None
    member.process.send_signal(signal.SIGTERM)
    assert exit_code(member, 10.0) == 0


def test_two_workers_in_one_directory_are_refused_at_once(own: Stage) -> None:
    first = own.cluster.members["a"]
    second = own.cluster.start_worker("a", wait=False)
    own.cluster.members["first"] = first
    assert exit_code(second) == 1
    log = own.cluster.log_of("a")
    assert "node a" in log
    assert "--node-id" in log
    instance = own.client.create(group())
    own.client.ready(instance)
    own.client.delete(instance)


def test_a_worker_that_is_refused_shows_no_traceback(own: Stage) -> None:
    first = own.cluster.members["a"]
    second = own.cluster.start_worker("a", wait=False)
    own.cluster.members["first"] = first
    assert exit_code(second) == 1
    assert "Traceback" not in own.cluster.log_of("a")


def test_two_workers_with_one_node_id_are_refused_after_the_lease(own: Stage, tmp_path: Path) -> None:
    first = own.cluster.members["a"]
    boot = own.client.latest.nodes[NodeId("a")].info.boot
    second = own.cluster.start_worker("a", wait=False, options=["--directory", str(tmp_path / "other")])
    own.cluster.members["first"] = first
    assert exit_code(second) == 1
    log = own.cluster.log_of("a")
    assert f"process {first.process.pid}" in log
    assert "--node-id" in log
    assert own.client.latest.nodes[NodeId("a")].info.boot == boot
    instance = own.client.create(group())
    own.client.ready(instance)
    own.client.delete(instance)


def test_a_runner_whose_mlx_is_broken_is_told_with_its_error(
    own: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    own.cluster.start_worker("broken")
    package = tmp_path / "path" / "mlx"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('libmlx.so is damaged')\n")
    instance = own.client.create(spec_of(GroupWorkload(), 2, ("a", "broken")))
    failure = own.client.failure_of(instance)
    assert_blames(failure, kind="internal", rank=1, node="broken", phase="preparing")
    assert "libmlx.so is damaged" in failure.message
    own.clean(instance)


def test_sigterm_ends_a_worker_whose_first_runner_hangs(
    own: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "path" / "mlx"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    member = own.cluster.start_worker("slow", wait=False)
    runner = own.new_runner("slow")
    member.process.send_signal(signal.SIGTERM)
    assert exit_code(member, 10.0) == 0
    assert not alive(runner.pid)


def test_a_worker_on_a_node_without_mlx_does_not_join(
    own: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "path" / "mlx"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('libmlx.so is damaged')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    member = own.cluster.start_worker("broken", wait=False)
    assert exit_code(member) == 1
    log = own.cluster.log_of("broken")
    assert "a runner does not come up on this node" in log
    assert "libmlx.so is damaged" in log
