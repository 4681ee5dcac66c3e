"""The latest of what nodes tell and nobody logs: heartbeats, facts, links."""

from __future__ import annotations

import msgspec
from loguru import logger

from muster.coordinator.plausible import fault_of_facts, fault_of_links
from muster.facts import NodeFacts
from muster.known import Known
from muster.links import NodeLinks
from muster.protocol import Beat
from muster.spec import NodeId
from muster.state import State


class Knowledge:
    """Replaced by what comes later; what is of a boot that is not there any more counts for nothing."""

    def __init__(self) -> None:
        self.beats: dict[NodeId, Beat] = {}
        self.facts: dict[NodeId, NodeFacts] = {}
        self.links: dict[NodeId, NodeLinks] = {}
        self.measure_round = 0

    def known(self, state: State) -> Known:
        """What placement may go by, of the nodes that are there."""
        boots = {name: node.info.boot for name, node in state.nodes.items() if node.lost is None}
        beats = {name: beat for name, beat in self.beats.items() if boots.get(name) == beat.boot}
        return Known(
            facts={name: facts for name, facts in self.facts.items() if boots.get(name) == facts.boot},
            links={name: links for name, links in self.links.items() if boots.get(name) == links.boot},
            available_bytes={name: beat.memory_available_bytes for name, beat in beats.items()},
            ranks_bytes={name: beat.ranks_memory_bytes for name, beat in beats.items()},
        )

    def forget(self, node: NodeId) -> None:
        """Another boot of the node is there: nothing that was told holds any more."""
        for told in (self.beats, self.facts, self.links):
            told.pop(node, None)

    def tell_facts(self, facts: NodeFacts, state: State) -> None:
        """Take a node's facts, unless they are of another boot than the one that is there."""
        node = state.nodes.get(facts.node)
        if node is not None and node.info.boot == facts.boot and _heard(facts.node, fault_of_facts(facts)):
            self.facts[facts.node] = facts

    def tell_links(self, links: NodeLinks, state: State) -> None:
        """Take what a node measured, unless it is of another boot than the one that is there."""
        node = state.nodes.get(links.node)
        if node is not None and node.info.boot == links.boot and _heard(links.node, fault_of_links(links)):
            # A round that nobody has asked for here is of another coordinator, and answers none of this one's.
            asked = links.round <= self.measure_round
            self.links[links.node] = links if asked else msgspec.structs.replace(links, round=0)


def _heard(node: NodeId, fault: str) -> bool:
    if fault:
        logger.warning("node {} tells what cannot be, and is not listened to: {}", node, fault)
    return not fault
