"""When waiting for an instance ends, and what it shows on the way."""

from __future__ import annotations

import io

import msgspec
import pytest
from cluster_states import FAILURE, MODEL, NOW, ONE, instance, state
from rich.console import Console

from muster.cli.live import LiveTable
from muster.cli.watch import Lines, Seen, Watched, doing, is_awaited, is_over, is_settled, left_over
from muster.protocol import Progress
from muster.spec import GroupWorkload, NodeId, Phase, ScriptWorkload
from muster.state import (
    Broken,
    Connected,
    Deleting,
    Ending,
    Finished,
    Gone,
    Instance,
    InstanceStatus,
    RankState,
    Ready,
    Running,
    Starting,
    State,
)


def loading(done: int, phase: Phase = Phase.LOADING) -> Progress:
    return Progress(instance=ONE, attempt=1, rank=1, phase=phase, done=done, total=24, unit="layers")


@pytest.mark.parametrize(
    ("found", "settled", "over"),
    [
        (instance(Starting()), False, False),
        (instance(Running()), True, False),
        (instance(Broken(FAILURE, retry_at_ns=NOW), Gone(0), Gone(0)), False, False),
        (instance(Broken(FAILURE), Gone(0), Ready()), False, False),
        (instance(Broken(FAILURE), Gone(0), Gone(3)), True, True),
        (instance(Finished(), Gone(0), Gone(0)), True, True),
        (instance(Deleting(), Gone(0), Ready()), False, False),
        (instance(Ending("drained"), Gone(0), Gone(0)), False, False),
    ],
)
def test_waiting_ends_when_nothing_more_can_come(found: Instance, settled: bool, over: bool) -> None:
    assert is_settled(state(found), ONE) is settled
    assert is_over(state(found), ONE) is over


@pytest.mark.parametrize(
    ("status", "ranks", "script", "other"),
    [
        (Starting(), (Connected(), Connected()), False, False),
        (Running(), (Ready(), Ready()), False, True),
        (Running(), (Ready(), Gone(0)), False, True),
        (Finished(), (Gone(0), Gone(0)), True, True),
        (Broken(FAILURE, retry_at_ns=NOW), (Gone(0), Gone(0)), False, False),
        (Broken(FAILURE), (Gone(3), Gone(-15)), True, True),
    ],
)
def test_a_script_is_awaited_to_its_end_and_all_else_until_ready(
    status: InstanceStatus, ranks: tuple[RankState, ...], script: bool, other: bool
) -> None:
    for workload, awaited in ((ScriptWorkload(path="/x/train.py"), script), (GroupWorkload(), other), (MODEL, other)):
        assert is_awaited(state(instance(status, *ranks, workload=workload)), ONE) is awaited


def test_a_rank_that_a_signal_ended_is_shown_with_its_name() -> None:
    found = instance(Deleting(), Gone(-15), Gone(3))
    assert [doing(Seen(instance=found), number) for number in range(2)] == ["gone (SIGTERM)", "gone (exit code 3)"]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (Ending("node b is being drained"), "stopping"),
        (Ending("node b is being drained", 10.0), "finishing its requests"),
        (Deleting(), "stopping"),
        (Deleting(10.0), "finishing its requests"),
        (Broken(FAILURE), "stopping"),
    ],
)
def test_a_rank_of_an_attempt_that_is_over_is_stopping(status: InstanceStatus, words: str) -> None:
    seen = Seen(instance=instance(status, Ready(), Connected()))
    assert [doing(seen, number) for number in range(2)] == [words, "stopping"]


NO_PLACE = msgspec.structs.replace(FAILURE, kind="placement-refused", phase=Phase.PLACING, rank=-1, node=NodeId(""))


def test_why_another_attempt_follows_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    watched = Watched()
    watched.shown.add(ONE)
    for status in (
        Running(),
        Broken(FAILURE),
        Broken(FAILURE, NOW),
        Broken(FAILURE, NOW),
        Broken(NO_PLACE, NOW),
        Ending("node b is being drained"),
    ):
        watched.take(state(instance(status)))
    assert capsys.readouterr().err.splitlines() == [
        f"muster: {ONE}: attempt 1 failed: {FAILURE.sentence()} It is tried again.",
        f"muster: {ONE} waits for a place: {NO_PLACE.sentence()}",
        f"muster: {ONE}: attempt 1 is ended: node b is being drained. The next one follows.",
    ]
    watched.shown.clear()
    watched.take(state(instance(Broken(FAILURE, NOW))))
    assert not capsys.readouterr().err


def test_an_instance_that_is_deleted_is_not_waited_for() -> None:
    assert is_settled(State(), ONE)
    assert is_over(State(), ONE)


def test_progress_is_shown_in_the_phase_that_it_is_of() -> None:
    found = instance(Starting(), Connected(), Connected())
    assert doing(Seen(instance=found, progress={1: loading(3)}), 1) == "loading 3/24 layers"
    assert doing(Seen(instance=found, progress={1: loading(3, Phase.WARMING)}), 1) == "loading"
    assert doing(Seen(instance=found), 0) == "loading"


def test_what_is_left_names_rank_node_and_process() -> None:
    found = instance(Deleting(), Gone(0), Ready())
    assert left_over(state(found), [ONE]) == [f"rank 1 of {ONE} on b (pid 101)"]


def test_lines_are_printed_only_when_something_changed(capsys: pytest.CaptureFixture[str]) -> None:
    shown = Lines()
    found = instance(Starting(), Connected(), Connected())
    for progress in ({}, {}, {1: loading(3)}, {1: loading(3)}):
        shown.show(Seen(instance=found, progress=progress))
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": rank ")[2] for line in lines] == [
        "0 on a: loading",
        "1 on b: loading",
        "1 on b: loading 3/24 layers",
    ]


def test_the_live_table_has_a_row_per_rank() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    with LiveTable(console) as table:
        table.show(Seen(instance=instance(Starting(), Connected(), Connected()), progress={1: loading(12)}))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert f"{ONE}, attempt 1: starting" in shown
    assert "loading 12/24 layers" in shown
