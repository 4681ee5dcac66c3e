"""A few cells of the fault matrix, and that they touch everything; `make faults` plays all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cells import SHORT, Cell, Fault, Outcome, Phase, Target, cells, expected
from experiment import Laboratory, laboratory
from grounds import best_ground

#: By how much a verdict may be late on a machine with two busy cores.
_SLACK_SECONDS = 3.0


@pytest.fixture(scope="module")
def playing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    directory = tmp_path_factory.mktemp("faults")
    ground, _ = best_ground(directory / "cluster")
    with laboratory(ground, directory / "gates", _SLACK_SECONDS) as made:
        yield made


@pytest.mark.process
@pytest.mark.mlx
@pytest.mark.timeout(90)
@pytest.mark.parametrize("cell", SHORT, ids=str)
def test_what_is_promised_of_a_fault_comes_out(playing: Laboratory, cell: Cell) -> None:
    if reason := playing.ground.lacks(cell):
        pytest.skip(reason)
    result = playing.play(cell)
    assert not result.wrong, "\n".join([*result.wrong, *result.story])


def test_the_few_cells_touch_every_fault_every_phase_and_every_target() -> None:
    assert {cell.fault for cell in SHORT} == set(Fault)
    assert {cell.phase for cell in SHORT} == set(Phase)
    assert {cell.target for cell in SHORT} == set(Target)
    assert set(SHORT) <= set(cells())


def test_the_whole_matrix_has_each_process_fault_in_each_phase_on_each_target() -> None:
    every = cells()
    assert len(every) == len(set(every))
    for fault in (Fault.KILL, Fault.STOP):
        for phase in Phase:
            assert {cell.target for cell in every if (cell.fault, cell.phase) == (fault, phase)} == set(Target)


def test_every_cell_promises_an_end_with_a_cause_in_bounded_time() -> None:
    for cell in cells():
        promised = expected(cell)
        assert promised.outcomes, cell
        assert 0 < promised.seconds <= 5.0, cell
        assert bool(promised.kinds) == (Outcome.READY not in promised.outcomes), cell
