"""A pipeline rank loads from its own weight files alone, and misses no weight of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.errors import ModelError
from muster.model.load import _load_lazily
from muster.model.plan import ShardPlan
from muster.testing.checkpoints import split_checkpoint

pytestmark = pytest.mark.mlx

DEMO = Path(__file__).parents[2] / "src" / "muster" / "demo" / "model"
#: Rank 0 holds the last two layers.
PIPELINE = ShardPlan(sharding="pipeline", world_size=2, layers=4, split=(2, 2))


def part(directory: Path, *absent: int) -> Path:
    """The demo's model without these of its files: 0 is outside of layers, 1 the first layer."""
    names = split_checkpoint(DEMO, directory)
    for number in absent:
        (directory / names[number]).unlink()
    return directory


def test_files_of_other_ranks_may_be_absent(tmp_path: Path) -> None:
    _load_lazily(part(tmp_path / "last", 1, 2), PIPELINE, 0)
    _load_lazily(part(tmp_path / "first", 3, 4), PIPELINE, 1)


@pytest.mark.parametrize(("rank", "absent"), [(0, (4,)), (0, (1, 2, 3)), (0, (0,)), (1, (1,)), (1, (3, 4, 2))])
def test_a_weight_of_its_own_may_not(tmp_path: Path, rank: int, absent: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match="weights are missing"):
        _load_lazily(part(tmp_path / "part", *absent), PIPELINE, rank)


def test_slices_need_every_file(tmp_path: Path) -> None:
    tensor = ShardPlan(sharding="tensor", world_size=2, layers=4, split=(4, 4))
    with pytest.raises(ModelError, match="weights are missing"):
        _load_lazily(part(tmp_path / "part", 1), tensor, 0)
