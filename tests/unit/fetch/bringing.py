"""One go at obtaining a model in a test's own directories, and what was told of it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from muster.fetch.choice import shard_files
from muster.fetch.obtain import Wish, obtain
from muster.fetch.progress import Brought, Moved
from muster.model.files import read_index
from muster.testing.checkpoints import split_checkpoint

DEMO = Path(__file__).parents[3] / "src" / "muster" / "demo" / "model"
MODEL = "owner/tiny"


class Go:
    """`layers` of the model are wanted, all of it with `None`."""

    def __init__(self, layers: range | None = None, total: int = 4, **wish: Any) -> None:
        self.moved: list[Moved] = []
        self.brought: list[Brought] = []
        self._layers = layers
        self._total = total
        options: dict[str, Any] = {"model": MODEL, **wish}
        self._wish = Wish(**options)

    def path(self) -> Path:
        return obtain(self._wish, self._choose, self.moved.append, self.brought.append)

    def _choose(self, path: Path, weights: Collection[str]) -> Collection[str]:
        return shard_files(read_index(path), weights, self._layers, self._total)


def split_demo(target: Path) -> list[str]:
    """The demo's model in several weight files: the first outside of layers, then one for each of its layers."""
    return split_checkpoint(DEMO, target)


def parts_below(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.muster-part"))
