"""A rank that follows makes as many passes as a step holds; only the first of them brings its changes."""

from __future__ import annotations

import socket
from typing import Any, cast

import zmq

from muster.rank_protocol import Leave, Step
from muster.runner.context import RankContext
from muster.runner.following import Following
from muster.runner.frames import Channel
from muster.runner.steps import AGAIN


class Passes:
    """Stands in for the batch: keeps what it was called with."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def run(self, step: Step) -> None:
        self.steps.append(step)

    def __len__(self) -> int:
        return 0


class Sink:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.socket = context.socket(zmq.DEALER)


def test_a_step_is_carried_out_once_and_passed_on() -> None:
    ours, theirs = socket.socketpair()
    context = zmq.Context[zmq.Socket[bytes]]()
    batch = Passes()
    rank = RankContext(Channel(theirs), cast(Any, None))
    following = Following(rank, cast(Any, batch), cast(Any, Sink(context)))
    step = Step(step=1, remove=(7,), passes=3)
    try:
        assert following._carry_out(step)
        assert not following._carry_out(Leave(step=2))
    finally:
        context.destroy(linger=0)
        ours.close()
        theirs.close()
    assert batch.steps == [step, AGAIN, AGAIN]
