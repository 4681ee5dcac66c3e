"""What a coordinator makes of what nodes tell unasked: heartbeats, facts, links. None of it is answered or logged."""

from __future__ import annotations

from muster.coordinator.comparing import Clocks
from muster.coordinator.knowledge import Knowledge
from muster.coordinator.ledger import Ledger
from muster.lifecycle import SECOND, Settings
from muster.protocol import Beat, TellFacts, TellLinks

#: Pulses that a node may miss before its silence is counted from the last one that it heard.
_PULSES_MISSED = 2


class Hearing:
    """Takes what nodes tell, and notes in the ledger when they were heard and which ranks moved on."""

    def __init__(
        self, ledger: Ledger, knowledge: Knowledge, clocks: Clocks, fenced: dict[str, int], settings: Settings
    ) -> None:
        self._ledger = ledger
        self._knowledge = knowledge
        self._clocks = clocks
        self._fenced = fenced
        self._settings = settings

    def take(self, request: Beat | TellFacts | TellLinks) -> None:
        """Take one message; it replaces what the node told before."""
        match request:
            case Beat():
                self._beat(request)
            case TellFacts(facts=facts):
                self._knowledge.tell_facts(facts, self._ledger.state)
            case TellLinks(links=links):
                self._knowledge.tell_links(links, self._ledger.state)

    def _beat(self, beat: Beat) -> None:
        node = self._ledger.state.nodes.get(beat.node)
        if node is None or node.info.boot != beat.boot or node.lost is not None:
            self._fenced["boot"] += node is not None and node.info.boot != beat.boot
            return
        now = self._ledger.clock.now_ns()
        self._clocks.note(beat, now)
        self._ledger.heard_ns[beat.node] = max(self._ledger.heard_ns.get(beat.node, 0), now - self._deaf_ns(beat))
        before = self._knowledge.beats.get(beat.node)
        known = set(before.progress) if before is not None else set()
        for progress in beat.progress:
            instance = self._ledger.state.instances.get(progress.instance)
            if progress not in known and instance is not None and 0 <= progress.rank < len(instance.ranks):
                self._ledger.progress_ns[progress.instance, progress.attempt, progress.rank] = now
        self._knowledge.beats[beat.node] = beat

    def _deaf_ns(self, beat: Beat) -> int:
        """For how long the node has not heard this coordinator: a link may work in one direction only."""
        patience_ns = int(_PULSES_MISSED * self._settings.heartbeat_seconds * SECOND)
        return max(0, beat.pulse_age_ns - patience_ns) if beat.pulse_ns else 0
