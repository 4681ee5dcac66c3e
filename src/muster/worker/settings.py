"""How a worker runs."""

from __future__ import annotations

from pathlib import Path

import msgspec

from muster.bus import Endpoint
from muster.spec import NodeId
from muster.worker.pool import PoolSettings
from muster.worker.ports import PortRange


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker runs. `directory` is its own: files of its runners, its lock, its last boot.

    `coordinators` are the addresses of the coordinator and its standbys, in any order. `models` are directories with
    models, which are only read: other nodes may copy from them. What is copied from other nodes goes to `copies`, which
    all workers of a machine may have in common. With `offline` the hub is never asked; without `share` nothing is given
    to other nodes.
    """

    node: NodeId
    coordinators: tuple[Endpoint, ...]
    directory: Path
    addresses: tuple[str, ...] = ()
    ports: PortRange | None = None
    memory_bytes: int | None = None
    max_ranks: int = 32
    pool: PoolSettings = PoolSettings()
    models: tuple[Path, ...] = ()
    copies: Path | None = None  #: by default below `directory`
    offline: bool = False
    share: bool = True

    @property
    def copies_directory(self) -> Path:
        """Where copies of models go."""
        return self.copies or self.directory / "models"
