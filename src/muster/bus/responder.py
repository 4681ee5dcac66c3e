"""The coordinator's side of the reports: each is applied once, in order, whatever is lost or sent twice."""

from __future__ import annotations

from enum import Enum

from muster.protocol import Output, Report
from muster.spec import BootId, NodeId
from muster.state import State


class Verdict(Enum):
    """What to do with a report or an output."""

    #: It is the next one: carry it out, call `applied`, and acknowledge once it is safe.
    APPLY = "apply"
    #: It was carried out before: acknowledge `acknowledged(...)` again, do nothing else.
    REPEATED = "repeated"
    #: One before it is missing: no acknowledgement; its worker sends all of them again.
    MISSING = "missing"
    #: Its boot is not the one that the node last said hello with, or it was written for another coordinator: refuse
    #: it (retryable); it has to say hello.
    STRANGER = "stranger"


class Deduplicator:
    """Judges by three marks, of which the highest counts: the last number applied by this process, the last in
    the log (`State.reports`; outputs are not logged), and the number below the sender's `oldest`, which an earlier
    coordinator acknowledged.
    """

    def __init__(self) -> None:
        self._applied: dict[NodeId, tuple[BootId, int]] = {}

    def judge(self, message: Report | Output, state: State) -> Verdict:
        """What to do with `message`, given the state up to the end of the log."""
        node = state.nodes.get(message.node)
        if node is None or node.info.boot != message.boot or message.to not in ("", state.coordinator_boot):
            return Verdict.STRANGER
        mark = max(self.acknowledged(message.node, message.boot, state), message.oldest - 1)
        if message.n <= mark:
            return Verdict.REPEATED
        return Verdict.APPLY if message.n == mark + 1 else Verdict.MISSING

    def applied(self, message: Report | Output) -> None:
        """Remember that `message` was carried out. Call it after every `Verdict.APPLY`."""
        self._applied[message.node] = (message.boot, message.n)

    def acknowledged(self, node: NodeId, boot: BootId, state: State) -> int:
        """The last number of this boot that was carried out, 0 if none: what an `Acked` says."""
        applied_boot, applied = self._applied.get(node, (boot, 0))
        durable = state.reports.get(node)
        return max(
            applied if applied_boot == boot else 0,
            durable.n if durable is not None and durable.boot == boot else 0,
        )
