"""How the nodes' wall clocks compare with the coordinator's, from what their heartbeats carry."""

from __future__ import annotations

from collections import deque

import msgspec

from muster.protocol import Beat
from muster.replies import NodeClock
from muster.spec import BootId, NodeId

#: Heartbeats that a comparison is made from: the one that travelled fastest of so many says most.
_SAMPLES = 16
#: A clock that is further off than the fastest sample allows has been set: what was known of it is void.
_JUMP_NS = 50_000_000
#: An echo older than this says little: clocks drift, and the pulse may have waited in a queue.
_STALE_NS = 10_000_000_000


class _Sample(msgspec.Struct, frozen=True):
    offset_ns: int
    error_ns: int


class Clocks:
    """The offset of every node, as NTP estimates it: a pulse goes out, a heartbeat comes back, half the way is assumed.

    The error of an estimate is half the time that pulse and heartbeat travelled.
    """

    def __init__(self) -> None:
        self._samples: dict[NodeId, deque[_Sample]] = {}
        self._boots: dict[NodeId, BootId] = {}

    def note(self, beat: Beat, arrived_ns: int) -> None:
        """Take a heartbeat that arrived at `arrived_ns` on the coordinator's clock."""
        travelled = arrived_ns - beat.pulse_ns - beat.pulse_age_ns
        if beat.pulse_ns <= 0 or beat.time_ns <= 0 or travelled < 0 or beat.pulse_age_ns > _STALE_NS:
            return
        sample = _Sample(beat.time_ns - (arrived_ns - travelled // 2), travelled // 2)
        samples = self._samples.get(beat.node)
        if samples is None or self._boots.get(beat.node) != beat.boot or _jumped(samples, sample):
            samples = self._samples[beat.node] = deque(maxlen=_SAMPLES)
            self._boots[beat.node] = beat.boot
        samples.append(sample)

    def of(self, node: NodeId) -> NodeClock | None:
        """The best estimate, `None` before there is one."""
        samples = self._samples.get(node)
        if not samples:
            return None
        best = min(samples, key=lambda sample: sample.error_ns)
        return NodeClock(node=node, offset_ns=best.offset_ns, error_ns=best.error_ns)

    def all(self) -> tuple[NodeClock, ...]:
        """Every node's, in order of their names."""
        return tuple(clock for node in sorted(self._samples) if (clock := self.of(node)) is not None)

    def here_ns(self, node: NodeId, boot: BootId, there_ns: int) -> int:
        """A node's time on the coordinator's clock; 0 where that cannot be told."""
        clock = self.of(node) if self._boots.get(node) == boot else None
        return 0 if clock is None or there_ns <= 0 else there_ns - clock.offset_ns


def _jumped(samples: deque[_Sample], sample: _Sample) -> bool:
    best = min(samples, key=lambda known: known.error_ns)
    return abs(sample.offset_ns - best.offset_ns) > best.error_ns + sample.error_ns + _JUMP_NS
