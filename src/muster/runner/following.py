"""The loop of every rank but 0: it replays rank 0's steps in order, and blocks on its sockets between them."""

from __future__ import annotations

import time
from typing import Final

import zmq

from muster.model.batch import Batch
from muster.rank_protocol import AnyStep, Leave, ReadyFrame, Step, Stop, WarmUp
from muster.runner.context import RankContext
from muster.runner.pulse import Pulse, note_memory
from muster.runner.steps import AGAIN, StepSink
from muster.spec import Phase

#: Rank 0 says at its deadline that it leaves: whoever went first would break its last step.
_GRACE_SECONDS: Final = 1.0


class Following:
    """Carries out whatever rank 0 says, until it says `Leave` or the worker wants the end."""

    def __init__(self, rank: RankContext, batch: Batch, sink: StepSink) -> None:
        self._rank = rank
        self._batch = batch
        self._sink = sink
        self._pulse = Pulse(rank.channel, rank.counter)
        self._deadline: float | None = None
        self._loss: zmq.Socket[bytes] | None = None
        self._poller = zmq.Poller()
        self._poller.register(sink.socket, zmq.POLLIN)
        self._poller.register(rank.channel.fileno(), zmq.POLLIN)

    def run(self) -> int:
        """Follow until the end; answers the exit code.

        Raises:
            RuntimeError: from MLX, when another rank is gone.
            ProtocolError: this rank is out of step.
        """
        try:
            return self._run()
        finally:
            if self._loss is not None:
                self._loss.close()

    def _run(self) -> int:
        while True:
            ready = dict(self._poller.poll(self._patience_ms()))
            if self._rank.channel.fileno() in ready:
                self._stop(self._rank.channel.receive())
            if self._sink.socket in ready:
                if not self._carry_out(self._sink.receive()):
                    self._batch.settle()
                    return 0
            elif self._loss is not None and self._loss in ready:
                return 0
            if self._deadline is not None and time.monotonic() >= self._deadline:
                return 0

    def _carry_out(self, step: AnyStep) -> bool:
        """Whether there is more to come."""
        match step:
            case Step():
                self._pulse.busy(step.step, len(self._batch) + len(step.admit))
                self._batch.run(step)
                for _ in range(step.passes - 1):
                    self._batch.run(AGAIN)
                if not len(self._batch):
                    self._pulse.idle(step.step)
            case WarmUp():
                self._batch.warm_up()
                note_memory(self._rank.counter)
                self._rank.phase = Phase.RUNNING
                self._rank.channel.send(ReadyFrame())
            case Leave():
                return False
        return True

    def _stop(self, frame: object) -> None:
        """The worker wants the end, or is gone (`None`). Rank 0 was told as well, and finishes what has begun."""
        if frame is not None and not isinstance(frame, Stop):
            return
        drain_seconds = frame.drain_seconds if isinstance(frame, Stop) else 0.0
        waits = isinstance(frame, Stop) and (drain_seconds > 0 or len(self._batch) > 0)
        self._deadline = time.monotonic() + drain_seconds + (_GRACE_SECONDS if waits else 0.0)
        if self._loss is None and waits:
            self._loss = self._sink.loss()
            self._poller.register(self._loss, zmq.POLLIN)

    def _patience_ms(self) -> int | None:
        return None if self._deadline is None else max(0, int((self._deadline - time.monotonic()) * 1000) + 1)
