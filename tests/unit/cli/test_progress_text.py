"""How far a rank is, in words."""

from __future__ import annotations

import pytest

from muster.cli.progress_text import amount, milestone, progress_lines
from muster.protocol import Beat, Progress
from muster.spec import BootId, InstanceId, NodeId, Phase

ONE = InstanceId("one")


def moved(done: int, total: int, unit: str = "bytes", rate: float = 0.0, note: str = "") -> Progress:
    return Progress(
        instance=ONE, attempt=1, rank=0, phase=Phase.PREPARING, done=done, total=total, unit=unit, rate=rate, note=note
    )


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (moved(3, 24, "layers"), "3/24 layers"),
        (moved(2**20, 2**30, rate=96 * 2**20, note="from the hub"), "1 MiB of 1.0 GiB, 96 MiB/s, from the hub"),
        (moved(2**20, 2**30, note="from node b"), "1 MiB of 1.0 GiB, from node b"),
        (moved(0, 0, note="waits for another download of the model"), "waits for another download of the model"),
        (moved(0, 0), ""),
    ],
)
def test_amounts(progress: Progress, words: str) -> None:
    assert amount(progress) == words


def test_a_line_is_due_for_each_tenth_of_a_download() -> None:
    marks = [milestone(moved(done, 1000, rate=done, note="from the hub")) for done in range(0, 1001, 10)]
    assert len(set(marks)) == 11
    assert milestone(moved(1, 5, "layers")) != milestone(moved(2, 5, "layers"))


def test_lines_are_of_one_instance_or_of_all() -> None:
    beat = Beat(node=NodeId("a"), boot=BootId("a1"), progress=(moved(5 * 2**20, 10 * 2**20), moved(0, 0)))
    assert progress_lines([beat]) == ["one rank 0 is preparing: 5 MiB of 10 MiB"]
    assert progress_lines([beat], ONE) == progress_lines([beat])
    assert progress_lines([beat], InstanceId("other")) == []
