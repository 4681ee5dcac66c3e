"""The words of placement: what there is to choose from, and the answer to a wish. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, Protocol

import msgspec

from muster.facts import NodeFacts
from muster.known import Known
from muster.layout import Layout
from muster.links import Link
from muster.rdma import InUse
from muster.spec import Assignment, Backend, NodeId, NodeInfo, Shortfall

#: What a rank takes before any weight: the interpreter, MLX and, for a model, mlx-lm (measured: 115 and 330 MB).
RANK_BYTES = 128 * 2**20
MODEL_RANK_BYTES = 400 * 2**20
#: So many candidates are told of in a message; all are in `Refusal.shortfalls`.
_TOLD: Final = 16


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A node that ranks may be given to, with what is left on it. `holds`: it has the model, whole."""

    info: NodeInfo
    free_bytes: int
    free_ranks: int
    facts: NodeFacts | None = None
    holds: bool = False

    @property
    def node(self) -> NodeId:
        """Its name."""
        return self.info.node

    @property
    def machine(self) -> str:
        """What it shares its memory with."""
        return self.info.machine or self.info.node


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes to choose from: those asked for, in that order, or all that take instances, by name.

    `pools` are bytes that all nodes of one machine may be given together; a machine that is not in it has no limit
    but those of its nodes. `sources` are nodes that hold the model, candidates or not, with the directory there.
    `parts` are nodes that hold some of it only. `commit` is which one of a hub's model is meant, where that is known.
    `known` is what else was told of the nodes, `in_use` what other groups take of RDMA devices.
    """

    nodes: tuple[Candidate, ...]
    named: bool = False
    pools: Mapping[str, int] = {}
    sources: Mapping[NodeId, tuple[NodeInfo, str]] = {}
    parts: Mapping[NodeId, tuple[NodeInfo, str]] = {}
    commit: str = ""
    known: Known = Known()
    in_use: InUse = InUse()


class Links(Protocol):
    """What is known of the links between nodes; `muster.links.LinkMap` is one."""

    def between(self, a: NodeId, b: NodeId) -> Link | None:
        """The link that the two would use, seen from `a`; `None` where there is none."""
        ...

    def why_not(self, a: NodeId, b: NodeId) -> str:
        """Why there is none; empty where there is one."""
        ...

    def nearest(self, a: NodeId, limit: int) -> tuple[NodeId, ...]:
        """Nodes that `a` reached, at most so many, the best rate first."""
        ...

    def fastest(self, limit: int) -> tuple[NodeId, ...]:
        """The nodes that have the best links of all, at most so many, the best first."""
        ...


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a wish: one assignment per rank, in rank order, the backend of the group, and the plan."""

    assignments: tuple[Assignment, ...]
    backend: Backend
    layout: Layout = Layout()


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why there is no placement: for each candidate what was short, and what would help, the nearest first."""

    message: str
    remedies: tuple[str, ...] = ()
    kind: Literal["placement-refused", "sharding-unsupported"] = "placement-refused"
    shortfalls: tuple[Shortfall, ...] = ()

    @property
    def remedy(self) -> str:
        """All that would help, as a sentence."""
        text = "; or ".join(self.remedies)
        return text[:1].upper() + text[1:]


def size(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def told(short: Sequence[Shortfall], most: int = _TOLD) -> str:
    """What nodes lack, in a line."""
    reasons = [one.reason for one in short[:most]]
    if len(short) > most:
        reasons.append(f"and {len(short) - most} more nodes")
    return "; ".join(reasons)
