"""What the formation benchmark makes of its rounds, of events, and of what is left behind."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from muster.bench.formation import FOUR, TWO, formation_figures
from muster.bench.leftovers import collisions, files_in, left_by
from muster.bench.observer import Seen, Trial
from muster.bench.report import Round
from muster.bench.steps import steps_of
from muster.events import InstanceCreated, InstanceFact, InstanceReady, RankConnected, RankListening, RankPrepared
from muster.group.ports import reserve
from muster.spec import Address, BootId, GroupWorkload, InstanceId, InstanceSpec, NodeId
from muster.state import Instance, Rank, Ready, Running

SPEC = InstanceSpec(workload=GroupWorkload(), ranks=2)
GONE_PID = 2**22 + 1  # above the kernel's largest


def round_of(name: str, number: int, muster: float | None, peer: float | None = None) -> Round:
    return Round(name=name, number=number, unit="s", muster=muster, peer=peer)


def instance(ports: tuple[int, int], *, pid: int = GONE_PID, started: float = 0.0) -> Instance:
    ranks = tuple(
        Rank(
            rank=number,
            node=NodeId("a"),
            boot="b",
            state=Ready(),
            since_ns=0,
            pid=pid,
            process_started=started,
            addresses=(Address("127.0.0.1", port, "127.0.0.0/8"),),
        )
        for number, port in enumerate(ports)
    )
    return Instance(
        id=InstanceId("i"),
        spec=SPEC,
        created_ns=0,
        attempt=1,
        backend="ring",
        status=Running(),
        since_ns=0,
        ranks=ranks,
        created_by=1,
        caused_by=1,
    )


def test_medians_are_of_the_rounds_beside_the_peer_and_the_worst_is_of_all() -> None:
    rounds = [
        round_of(TWO.name, 1, 0.05, 1.2),
        round_of(TWO.name, 2, 0.07, 1.3),
        round_of(TWO.name, 3, 0.09, 1.4),
        round_of(FOUR.name, 1, 0.1, 1.0),
        round_of(TWO.name, 4, 0.2),
    ]
    two, four, worst, late = formation_figures(rounds, 3)
    assert (two.name, two.muster, two.peer, two.holds) == ("create to ready, 2 ranks, median of 3", 0.07, 1.3, True)
    assert (four.muster, four.bar, four.holds) == (0.1, "≤ 1/6", True)
    assert (worst.name, worst.muster, worst.peer, worst.holds) == (
        "create to ready, 2 ranks, worst of 4",
        0.2,
        1.3,
        True,
    )
    assert (late.muster, late.holds) == (0, True)


def test_a_round_of_a_second_and_one_that_failed_count_as_late() -> None:
    late = formation_figures([round_of(TWO.name, 1, 1.0), round_of(FOUR.name, 1, None)], 1)[-1]
    assert (late.muster, late.holds) == (2, False)


def test_without_the_peer_the_shares_are_left_open() -> None:
    two = formation_figures([round_of(TWO.name, 1, 0.05)], 1)[0]
    assert (two.muster, two.peer, two.holds) == (0.05, None, None)


def test_the_steps_follow_each_other_and_add_up_to_the_whole() -> None:
    i, a, b = InstanceId("i"), NodeId("a"), BootId("b")
    events: list[tuple[InstanceFact, int]] = [
        (InstanceCreated(instance=i, attempt=1, spec=SPEC, assignments=(), backend="ring"), 1),
        (RankPrepared(instance=i, attempt=1, rank=0, node=a, boot=b, pid=1, process_started=0.0), 4),
        (RankPrepared(instance=i, attempt=1, rank=1, node=a, boot=b, pid=2, process_started=0.0), 6),
        (RankListening(instance=i, attempt=1, rank=0, node=a, boot=b), 10),
        (RankListening(instance=i, attempt=1, rank=1, node=a, boot=b), 15),
        (RankConnected(instance=i, attempt=1, rank=0, node=a, boot=b, seconds=0.0), 30),
        (InstanceReady(instance=i, attempt=1), 33),
    ]
    began_ns = 10**9
    trial = Trial(
        instance=instance((1, 2)),
        seconds=0.034,
        began_ns=began_ns,
        seen=tuple(Seen(event, began_ns + at * 10**6, 0.0) for event, at in events),
    )
    steps = steps_of(trial)
    milliseconds = {step: round(seconds * 1000, 6) for step, seconds in steps.items()}
    assert milliseconds == {
        "placed": 1,
        "prepared": 5,
        "first listens": 4,
        "last listens": 5,
        "connected": 15,
        "judged": 3,
        "told": 1,
    }
    assert sum(steps.values()) == pytest.approx(trial.seconds)


def test_an_endpoint_that_two_ranks_have_is_a_collision() -> None:
    assert collisions([instance((4001, 4002)), instance((4003, 4004))]) == 0
    assert collisions([instance((4001, 4002)), instance((4002, 4001))]) == 2


def test_files_ports_and_processes_that_are_still_there_are_counted(tmp_path: Path) -> None:
    (tmp_path / "before").touch()
    before = files_in([tmp_path])
    with reserve("127.0.0.1", 2) as held:
        ports = (held.ports[0], held.ports[1])
        mine = instance(ports, pid=os.getpid(), started=psutil.Process().create_time())
        (tmp_path / "left.json").touch()
        left = left_by([mine], before, [tmp_path])
        assert (left.files, left.ports, left.processes) == (1, 2, 2)
    (tmp_path / "left.json").unlink()
    left = left_by([instance(ports)], before, [tmp_path])
    assert (left.files, left.ports, left.processes) == (0, 0, 0)


def test_the_record_of_a_living_runner_is_not_left_over_but_that_of_a_gone_one_is(tmp_path: Path) -> None:
    started = round(psutil.Process().create_time() * 100)
    (tmp_path / f"{os.getpid()}-{started}.runner").touch()
    assert files_in([tmp_path]) == set()
    gone = tmp_path / f"{GONE_PID}-{started}.runner"
    gone.touch()
    assert files_in([tmp_path]) == {gone}
