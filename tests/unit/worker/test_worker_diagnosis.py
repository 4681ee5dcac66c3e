"""What a worker says of a runner that ended, or of a group that was not formed."""

from __future__ import annotations

import signal
from unittest.mock import Mock

import pytest

from muster.spec import Address, NodeId, Phase
from muster.state import Listening, Rank
from muster.worker import diagnosis
from muster.worker.condition import Condition
from muster.worker.diagnosis import TAIL_LINES, ended, not_formed

ECHO = "RuntimeError: [ring] connection to a peer was lost"


def test_a_signal_is_named_and_sigkill_hints_at_memory() -> None:
    killed = ended(-signal.SIGKILL, ["x"], script=False, phase=Phase.LOADING)
    assert (killed.kind, killed.exit_code, killed.retryable) == ("rank-killed", -9, True)
    assert "SIGKILL" in killed.message
    assert "memory" in killed.remedy
    crashed = ended(-signal.SIGSEGV, [], script=True, phase=Phase.RUNNING)
    assert "SIGSEGV" in crashed.message
    assert "memory" not in crashed.remedy
    assert "signal 200" in ended(-200, [], script=False, phase=Phase.RUNNING).message


def test_a_script_fails_with_its_own_code() -> None:
    failure = ended(3, ["Traceback", "ValueError"], script=True, phase=Phase.RUNNING)
    assert (failure.kind, failure.exit_code, failure.secondary) == ("script-failed", 3, False)
    assert failure.message == "the script ended with exit code 3"
    assert failure.log_tail == ("Traceback", "ValueError")


@pytest.mark.parametrize(("script", "phase"), [(False, Phase.RUNNING), (True, Phase.FORMING), (False, Phase.LOADING)])
def test_a_runner_that_ends_otherwise_ended_by_itself(script: bool, phase: Phase) -> None:
    failure = ended(1, ["x"], script=script, phase=phase)
    assert (failure.kind, failure.exit_code) == ("rank-exited", 1)


@pytest.mark.parametrize("script", [True, False])
def test_a_lost_neighbour_is_an_echo(script: bool) -> None:
    failure = ended(1, ["Traceback", ECHO], script=script, phase=Phase.RUNNING)
    assert (failure.kind, failure.secondary, failure.retryable) == ("peer-lost", True, True)


def test_only_the_last_lines_are_quoted() -> None:
    lines = [str(number) for number in range(50)]
    assert ended(1, lines, script=True, phase=Phase.RUNNING).log_tail == tuple(lines[-TAIL_LINES:])


RTR = "RuntimeError: [jaccl] Changing queue pair to RTR failed with errno 22"
REGIONS = "RuntimeError: [jaccl] Register memory region failed"
BROKEN = "RuntimeError: [jaccl] Recv failed with error code 12"
GPU = "RuntimeError: [METAL] Command buffer execution failed: Caused GPU Timeout Error"


@pytest.mark.parametrize(
    ("last", "kind", "cause", "remedy"),
    [
        (
            RTR,
            "script-failed",
            "the RDMA device has no usable address",
            "Remove the interface from the Thunderbolt bridge",
        ),
        (REGIONS, "rdma-unusable", "the RDMA device cannot register more memory", "Delete the other jaccl instance"),
        (BROKEN, "peer-lost", "the connection between the ranks broke", "Look at that rank's log"),
        (GPU, "peer-lost", "the GPU waited too long", "Let the communication run on the CPU's stream"),
        (ECHO, "peer-lost", "a neighbour's process ended", "Look at that rank's log"),
    ],
)
def test_what_mlx_says_of_the_group_is_explained(last: str, kind: str, cause: str, remedy: str) -> None:
    failure = ended(1, ["Traceback", "  File", last], script=True, phase=Phase.RUNNING, ranks=2)
    assert failure.kind == kind
    assert failure.message.startswith(f"the script ended with exit code 1: {cause}")
    assert failure.remedy.startswith(remedy)
    assert failure.retryable == (kind != "rdma-unusable")
    assert failure.secondary == (kind == "peer-lost")
    assert failure.exit_code == 1


def test_what_lasts_is_told_before_what_came_of_it() -> None:
    lines = [REGIONS, "during handling of that:", BROKEN]
    assert ended(1, lines, script=True, phase=Phase.RUNNING, ranks=2).kind == "rdma-unusable"
    assert ended(1, [BROKEN, RTR], script=True, phase=Phase.RUNNING, ranks=2).kind == "script-failed"


@pytest.mark.parametrize("line", ["json: parse_error", "Creating queue pair", "failed with errno 16", GPU])
def test_a_text_that_is_not_of_a_group_is_the_scripts_own(line: str) -> None:
    failure = ended(1, ["Traceback", line], script=True, phase=Phase.RUNNING, ranks=1)
    assert (failure.kind, failure.message) == ("script-failed", "the script ended with exit code 1")
    assert failure.remedy == "See its output: muster logs"


def ranks(*hosts: str) -> list[Rank]:
    return [
        Rank(
            rank=number,
            node=NodeId(f"n{number}"),
            boot="b",
            state=Listening(),
            since_ns=0,
            pid=100 + number,
            addresses=(Address(host, 4000 + number, "10.0.0.0/8"),),
        )
        for number, host in enumerate(hosts)
    ]


def test_a_group_that_was_not_formed_names_both_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "strangers", Mock(return_value=[]))
    monkeypatch.setattr(diagnosis, "is_listening", Mock(return_value=True))
    group = ranks("10.0.0.1", "10.0.0.2", "10.0.0.3")
    failure = not_formed(group[0], group, 100, 15.0, Condition("running", "its process runs"))
    assert (failure.kind, failure.secondary) == ("formation-timeout", True)
    assert "within 15 s" in failure.message
    assert "rank 2 on node n2 to dial it" in failure.message
    assert "rank 1 on node n1 to take" in failure.message
    assert "firewall" in failure.remedy


def test_a_rank_that_cannot_go_on_is_the_cause_of_a_group_that_was_not_formed() -> None:
    group = ranks("10.0.0.1", "10.0.0.2")
    stopped = Condition("stopped", "its process is stopped (SIGSTOP)", "kill -CONT 100")
    failure = not_formed(group[0], group, 100, 15.0, stopped)
    assert (failure.kind, failure.secondary, failure.remedy) == ("formation-timeout", False, "kill -CONT 100")
    assert failure.message == "the group was not formed within 15 s: its process is stopped (SIGSTOP)"


def test_a_stranger_is_named_with_the_port_that_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def strangers(*arguments: object) -> list[str]:
        asked.append(arguments)
        return ["10.0.0.9:50000"]

    monkeypatch.setattr(diagnosis, "strangers", strangers)
    group = ranks("10.0.0.1", "10.0.0.2")
    failure = not_formed(group[1], group, 101, 15.0)
    assert failure.kind == "stranger-connected"
    assert "10.0.0.9:50000 connected to the rank's port (10.0.0.2:4001)" in failure.message
    assert asked == [(101, [("10.0.0.2", 4001)], {"10.0.0.1"}, None)]


@pytest.mark.parametrize(("connected", "kind"), [(False, "stranger-connected"), (True, "formation-timeout")])
def test_a_port_that_is_closed_again_was_taken_by_somebody(
    monkeypatch: pytest.MonkeyPatch, connected: bool, kind: str
) -> None:
    monkeypatch.setattr(diagnosis, "strangers", Mock(return_value=[]))
    monkeypatch.setattr(diagnosis, "is_listening", Mock(return_value=False))
    monkeypatch.setattr(diagnosis, "has_connection", Mock(return_value=connected))
    group = ranks("10.0.0.1", "10.0.0.2")
    assert not_formed(group[0], group, 100, 15.0).kind == kind


def test_on_one_machine_the_neighbour_is_told_by_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Mock(return_value=[])
    monkeypatch.setattr(diagnosis, "strangers", asked)
    group = ranks("127.0.0.1", "127.0.0.1")
    not_formed(group[1], group, 101, 15.0)
    assert asked.call_args.args[3] == [100]
