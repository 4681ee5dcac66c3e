"""A rank that forms the group and holds it."""

from __future__ import annotations

from muster.rank_protocol import Form, PreparedFrame, ReadyFrame, Stop
from muster.runner.context import RankContext
from muster.spec import Phase


class GroupRank:
    """The `group` workload: nothing to load; it waits on its worker and uses no CPU."""

    def __init__(self, context: RankContext) -> None:
        self._context = context

    def prepare(self) -> PreparedFrame:
        """Nothing to look at."""
        return PreparedFrame()

    def fingerprint(self) -> str:
        """Empty: any two members of the attempt fit."""
        return ""

    def run(self, group: object | None, form: Form) -> int:
        """Hold the group until told to stop."""
        del group, form
        self._context.phase = Phase.RUNNING
        self._context.channel.send(ReadyFrame())
        while (frame := self._context.channel.receive()) is not None and not isinstance(frame, Stop):
            pass
        return 0
