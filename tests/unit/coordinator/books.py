"""A ledger on a log in memory, with a publisher that only remembers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from muster.bus import Publisher
from muster.coordinator import intake
from muster.coordinator.ledger import Ledger
from muster.errors import LogError
from muster.eventlog.memory import MemoryEventLog
from muster.events import Envelope, NodeJoined
from muster.lifecycle import Settings
from muster.needs import ModelNeeds
from muster.placement import decide
from muster.protocol import Create
from muster.replies import Created, Refused
from muster.spec import BootId, NodeAddress, NodeId, NodeInfo

A, B = NodeId("a"), NodeId("b")


def create(
    ledger: Ledger, request: Create, needs: ModelNeeds | None = None, weights_bytes: int = 0
) -> Created | Refused:
    """Place an instance on the state as it is, and enter it."""
    found = decide(request.spec, ledger.state, ledger.known(), needs, weights_bytes=weights_bytes)
    return intake.create(ledger, request, found, needs)


class Log(MemoryEventLog):
    """A log whose disk is full while `full` says so, and which tells `order` of every append."""

    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self.full = False
        self.order = order

    def append(self, envelopes: Sequence[Envelope]) -> None:
        if self.full:
            raise LogError("the disk is full", remedy="Make room.")
        super().append(envelopes)
        self.order.extend(f"log {envelope.sequence}" for envelope in envelopes)


class Books:
    """Everything that a test of the coordinator's pure parts looks at."""

    def __init__(self, *nodes: str, settings: Settings | None = None) -> None:
        self.order: list[str] = []
        self.published: list[Envelope] = []
        self.log = Log(self.order)
        self.settings = settings or Settings()
        self.ledger = self.open()
        for node in nodes:
            self.ledger.heard_ns[NodeId(node)] = self.ledger.clock.now_ns()
            self.ledger.commit(NodeJoined(info=info(node)))

    def open(self) -> Ledger:
        """A coordinator that starts on this log."""
        return Ledger(self.log, cast(Publisher, self), self.settings)

    def publish(self, envelope: Envelope) -> None:
        """In the place of the publisher."""
        self.published.append(envelope)
        self.order.append(f"publish {envelope.sequence}")


def info(node: str = "a", *, boot: str = "boot-1", replaces: str | None = None) -> NodeInfo:
    return NodeInfo(
        node=NodeId(node),
        boot=BootId(boot),
        hostname="host-of-" + node,
        machine=node,
        pid=4711,
        addresses=(NodeAddress(host="127.0.0.1", network="127.0.0.0/8"),),
        backends=("ring",),
        memory_bytes=2**34,
        max_ranks=8,
        replaces=BootId(replaces) if replaces else None,
    )
