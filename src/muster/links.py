"""Measured links between nodes, and which one to use. Pure: `muster.worker` measures, placement asks."""

from __future__ import annotations

import msgspec

from muster.facts import InterfaceKind
from muster.spec import BootId, NodeId


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One pair of addresses, as the node at `own` measured it towards the node `other` at `host`.

    `reached`: the other worker answered at `host`, and was the one that was meant. `dialled_back`: asked to, it
    reached `own` from `host`, so that both ends agree on the pair. Rates are in Mbit/s, `rtt_us` in microseconds,
    the best of a few.
    """

    other: NodeId
    other_boot: BootId
    own: str
    host: str
    reached: bool
    dialled_back: bool = False
    rtt_us: float | None = None
    mbps_out: float | None = None
    mbps_in: float | None = None
    error: str = ""


class NodeLinks(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a boot of a node measured; the latest value counts, none is logged.

    `round` is the highest measuring round that was asked for and is answered with this.
    """

    node: NodeId
    boot: BootId
    n: int = 1
    round: int = 0
    measured: tuple[Measured, ...] = ()


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """The pair of addresses that two nodes use between each other, seen from `a`.

    `kind` is the slower kind of both ends. `mbps` is the lesser of both directions; it and `rtt_us` are `None` where
    nothing was measured yet.
    """

    a: NodeId
    b: NodeId
    a_host: str
    b_host: str
    kind: InterfaceKind = "other"
    mbps: float | None = None
    rtt_us: float | None = None

    def reversed(self) -> Link:
        """The same link, seen from the other end."""
        return msgspec.structs.replace(self, a=self.b, b=self.a, a_host=self.b_host, b_host=self.a_host)
