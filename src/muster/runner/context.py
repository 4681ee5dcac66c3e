"""What every kind of workload is handed inside the runner."""

from __future__ import annotations

from typing import Protocol

from muster.rank_protocol import Form, Prepare, PreparedFrame
from muster.runner.counter import StepCounter
from muster.runner.frames import Channel
from muster.spec import Phase


class RankContext:
    """The rank that this process is, the line to its worker, and the phase that a failure will name.

    `counter` is where the worker reads the rank's step, where there is a worker.
    """

    def __init__(self, channel: Channel, prepare: Prepare, counter: StepCounter | None = None) -> None:
        self.counter = counter
        self.channel = channel
        self.prepare = prepare
        self.phase = Phase.PREPARING


class RankWorkload(Protocol):
    """What a kind of workload does as one rank. Every method may raise `MusterError`."""

    def prepare(self) -> PreparedFrame:
        """Look at the workload and bind what others must find; nothing is formed or loaded yet."""
        ...

    def fingerprint(self) -> str:
        """What must be the same on every rank beside versions: a digest of the model's files or the script."""
        ...

    def run(self, group: object | None, form: Form) -> int:
        """Load, get ready, work until told to stop; answers the exit code of the process.

        `group` is the `mx.distributed.Group`, `None` for one rank alone.
        """
        ...
