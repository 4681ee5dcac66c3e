"""What is known of the nodes beside the log: facts, links, and memory now. Pure; placement decides by it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from muster.facts import NodeFacts
from muster.links import NodeLinks
from muster.spec import NodeId


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """The latest of what nodes tell, each only of the boot that is there now.

    `available_bytes` is what the machine could still give out, `ranks_bytes` what the node's ranks have in use of it.
    """

    facts: Mapping[NodeId, NodeFacts] = {}
    links: Mapping[NodeId, NodeLinks] = {}
    available_bytes: Mapping[NodeId, int] = {}
    ranks_bytes: Mapping[NodeId, int] = {}
