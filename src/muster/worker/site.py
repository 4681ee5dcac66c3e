"""What all ranks of a worker share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from muster.group.ports import Reservation
from muster.spec import NodeInfo


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks of a worker share: who it is, where its files go, how it reserves ports."""

    info: NodeInfo
    directory: Path  #: of the coordination files
    generation: str  #: endpoint of the coordinator's gateway
    reserve: Callable[[str], Reservation]
    copies: Path | None = None  #: where models that come from other nodes go
    offline: bool = False  #: whether the hub must not be asked
    on_fetched: Callable[[], None] | None = None  #: called when a model came
