"""How one attempt is laid out over its nodes: what placement decided, as events carry it. Pure vocabulary."""

from __future__ import annotations

from typing import Literal

import msgspec

from muster.facts import InterfaceKind
from muster.spec import NodeId

#: Entry [i][j]: the RDMA devices by which rank i reaches rank j; None on the diagonal and where there is no link.
Devices = tuple[tuple[str | tuple[str, ...] | None, ...], ...]


class RankLink(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank dials the next one in the ring: from `own`, an address of its node, to `host`, one of the other's.

    `mbps` and `rtt_us` are as measured, `None` where nothing was. The interfaces are those that had the two addresses
    then, empty where that is not known.
    """

    own: str
    host: str
    kind: InterfaceKind = "other"
    mbps: float | None = None
    rtt_us: float | None = None
    own_interface: str = ""
    host_interface: str = ""


class ModelSource(msgspec.Struct, frozen=True, kw_only=True):
    """A node that holds the model, and where its worker gives the files out. `path` is the directory there."""

    node: NodeId
    host: str
    port: int
    path: str


class Sharer(msgspec.Struct, frozen=True, kw_only=True):
    """Another node of the attempt that lacks the model too, and where its worker gives out what has come of it.

    `ranks` are those that run there, of the ones below the rank that is told of it.
    """

    node: NodeId
    host: str
    port: int
    ranks: tuple[int, ...]


class RankLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank is given. `memory_bytes` is the prediction: weights, cache, workspace, the process itself.

    `layers` is how many it runs (all of them with tensor sharding). `next` is the link to the next rank of the ring;
    `None` where the rank's own addresses decide. `coordinator` is the address of rank 0 that a jaccl rank dials.
    `sources` are where it may copy the model from, the best first. Where no node has all of a hub's model, the lowest
    rank that needs a file downloads it, and `sharers` are where this one takes those of lower ranks from.
    """

    memory_bytes: int = 0
    weights_bytes: int = 0
    cache_bytes: int = 0
    layers: int = 0
    next: RankLink | None = None
    coordinator: str = ""
    sources: tuple[ModelSource, ...] = ()
    sharers: tuple[Sharer, ...] = ()


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of an attempt; the default is one that leaves everything to the ranks.

    `ranks` is in rank order, or empty. `sharding` is empty where the workload is no model, or nothing is known of it.
    `steps_down` are the reasons why better backends were not taken, the best first. `commit` is the one that all ranks
    take of a hub's model, whatever its branch is on their nodes; empty where it is not known.
    """

    sharding: Literal["", "none", "pipeline", "tensor"] = ""
    ranks: tuple[RankLayout, ...] = ()
    devices: Devices = ()
    jaccl_ring: bool = False
    steps_down: tuple[str, ...] = ()
    commit: str = ""

    @property
    def split(self) -> tuple[int, ...]:
        """Layers per rank of a pipeline, rank 0 first; empty where none was decided."""
        return tuple(rank.layers for rank in self.ranks) if self.sharding == "pipeline" else ()
