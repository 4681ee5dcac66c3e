"""What the recovery benchmark makes of its rounds: times with their worst, wrong causes, and what a log lacks."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from muster.bench.ground import node_of
from muster.bench.leftovers import is_alive, left_after
from muster.bench.machine import Machine
from muster.bench.recovery import QUICK, RecoverySettings
from muster.bench.recovery_figures import (
    CUT_PLACED,
    GROUP_READY,
    KILLED_FAILED,
    MODEL_READY,
    PARTS,
    SERVING,
    STOPPED_FAILED,
    Findings,
    Limit,
    check_log,
    count_figures,
    left_figures,
    limits,
    mistake,
    time_figures,
)
from muster.bench.report import Figure, Report, render
from muster.cli.bench_commands import _RECOVERY_PARTS
from muster.group.ports import reserve
from muster.spec import Address, Failure, NodeId, Phase

BARS = limits(lease_seconds=5.0, step_seconds=3.0)
KILLED = Failure(
    kind="rank-killed",
    message="the runner was ended by SIGKILL",
    phase=Phase.RUNNING,
    rank=1,
    node=NodeId("b"),
)


def found(name: str, *seconds: float, wrong: str = "") -> Findings:
    findings = Findings()
    for number, each in enumerate(seconds, start=1):
        findings.add("a round", number, {name: each})
    if wrong:
        findings.complain((name,), len(seconds) + 1, wrong)
    return findings


def row(name: str, *seconds: float, wrong: str = "") -> Figure:
    (only,) = time_figures(found(name, *seconds, wrong=wrong), BARS)
    return only


@pytest.mark.parametrize(
    ("seconds", "holds"),
    [((0.09, 0.1, 0.3), True), ((0.09, 0.11, 0.3), False), ((0.01, 0.01, 0.31), False)],
)
def test_a_kill_is_judged_by_its_median_and_its_worst(seconds: tuple[float, ...], holds: bool) -> None:
    one = row(KILLED_FAILED, *seconds)
    assert (one.muster, one.worst, one.count, one.holds) == (seconds[1], seconds[2], 3, holds)
    assert one.bar == "≤ 100 ms, worst ≤ 300 ms"


@pytest.mark.parametrize(
    ("name", "limit"), [(GROUP_READY, 0.5), (MODEL_READY, 2.0), (STOPPED_FAILED, 4.0), (CUT_PLACED, 6.0), (SERVING, 2)]
)
def test_everything_else_is_judged_by_its_worst(name: str, limit: float) -> None:
    assert row(name, 0.1, limit).holds is True
    assert row(name, 0.1, limit + 0.01).holds is False
    assert row(name, 0.1).bar == f"≤ {limit:g} s"


def test_one_wrong_round_is_enough_to_hold_no_more() -> None:
    one = row(SERVING, 0.1, wrong="2 runners are lost")
    assert (one.count, one.worst, one.holds) == (1, 0.1, False)
    never = row(SERVING, wrong="nothing was answered")
    assert (never.muster, never.worst, never.holds) == (None, None, False)
    assert found(SERVING, 0.1, wrong="so").wrong == [f"round 2 of {SERVING}: so"]


def test_what_was_not_asked_for_has_no_row() -> None:
    assert time_figures(Findings(), BARS) == []
    assert count_figures(Findings()) == []


def test_the_peer_stands_beside_the_kill_alone() -> None:
    findings = found(KILLED_FAILED, 0.1)
    findings.add("a round", 2, {SERVING: 1.0})
    findings.peer_seconds = 3.0
    rows = time_figures(findings, BARS, "a launcher")
    assert [(one.peer, one.peer_name) for one in rows] == [(3.0, "a launcher"), (None, None)]


def test_a_limit_without_a_median_says_so() -> None:
    assert Limit(worst_seconds=1.0).holds([0.2, 1.0])
    assert not Limit(worst_seconds=1.0, median_seconds=0.1).holds([0.2])


def test_the_right_cause_is_no_mistake() -> None:
    assert mistake(KILLED, kind="rank-killed", rank=1, node=NodeId("b"), saying="SIGKILL") == ""
    assert mistake(KILLED, kind="rank-killed", node=NodeId("b")) == ""


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ({"kind": "step-timeout", "rank": 1, "node": "b"}, "kind is 'rank-killed'"),
        ({"kind": "rank-killed", "rank": 0, "node": "b"}, "rank is 1"),
        ({"kind": "rank-killed", "rank": 1, "node": "a"}, "node is 'b'"),
        ({"kind": "rank-killed", "rank": 1, "node": "b", "saying": "stopped"}, "does not say 'stopped'"),
    ],
)
def test_a_wrong_cause_is_told_with_what_is_wrong(wanted: dict[str, str], told: str) -> None:
    sentence = mistake(KILLED, **wanted)  # pyright: ignore[reportArgumentType]
    assert told in sentence and KILLED.sentence() in sentence


def test_an_event_is_missing_when_the_log_has_none_or_another_one() -> None:
    seen = {1: {b"a"}, 2: {b"b", b"c"}, 3: {b"d"}}
    checked = check_log(7, seen, {1: b"a", 2: b"c", 4: b"e"})
    assert (checked.kills, checked.seen, checked.logged, checked.missing) == (7, 4, 3, 2)
    findings = Findings()
    findings.log = checked
    findings.runners_lost = 1
    assert [(one.muster, one.holds) for one in count_figures(findings)] == [(1, False), (4, True), (2, False)]


def test_what_is_left_is_told_by_kind() -> None:
    assert [one.holds for one in left_figures(0, 1, 0)] == [True, False, True]


def test_files_ports_and_processes_that_a_cluster_left_are_found(tmp_path: Path) -> None:
    (tmp_path / "groups" / "x").mkdir(parents=True)
    (tmp_path / "runners").mkdir()
    (tmp_path / "boot").touch()
    clean = {(2**22 + 1, 0.0): ()}
    with reserve("127.0.0.1") as free:
        port = free.port
    assert left_after(clean, [tmp_path], [port]) == left_after({}, [], [])
    (tmp_path / "groups" / "x" / "hostfile").touch()
    (tmp_path / "runners" / "1-2.runner").touch()
    me = psutil.Process()
    with reserve("127.0.0.1") as held, reserve("127.0.0.1") as other:
        address = Address("127.0.0.1", held.port, "127.0.0.0/8")
        left = left_after({(me.pid, me.create_time()): (address,)}, [tmp_path], [other.port])
    assert (left.files, left.ports, left.processes) == (2, 2, 1)


def test_a_process_that_waits_to_be_buried_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    started = psutil.Process(child.pid).create_time()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(child.pid, started)
    child.wait()
    assert is_alive(os.getpid(), psutil.Process().create_time())
    assert not is_alive(os.getpid(), psutil.Process().create_time() - 100)


def test_rounds_take_turns() -> None:
    assert [node_of(("a", "b"), number) for number in (1, 2, 3)] == ["a", "b", "a"]


def test_the_command_knows_the_parts_and_a_quick_run_has_them_all() -> None:
    assert _RECOVERY_PARTS == PARTS == RecoverySettings().parts == QUICK.parts


def test_the_table_shows_medians_and_worst_cases() -> None:
    machine = Machine(
        cores=2,
        cpu="x",
        memory_bytes=2**30,
        system="Linux",
        python="3",
        mlx="0",
        mlx_lm="0",
        muster="0",
        load_average=0.0,
    )
    findings = found(KILLED_FAILED, 0.02, 0.03, 0.25)
    findings.peer_seconds = 1.5
    figures = (*time_figures(findings, BARS, "a launcher"), *left_figures(0, 0, 0))
    console = Console(file=io.StringIO(), width=160)
    console.print(render(Report(machine=machine, figures=figures, rounds=tuple(findings.rounds), notes=("so",))))
    text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    line = next(line for line in text.splitlines() if line.startswith(KILLED_FAILED))
    cells = [cell.strip() for cell in line.split("│")]
    assert cells[1:] == ["30.0 ms", "250.0 ms", "3", "≤ 100 ms, worst ≤ 300 ms", "yes"]
    assert f"peer of {KILLED_FAILED}: a launcher: 1.50 s" in text
    assert "ratio" not in text and "median of each step" not in text
