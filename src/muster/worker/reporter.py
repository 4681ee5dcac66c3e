"""What a rank tells the coordinator: its events, and what it prints."""

from __future__ import annotations

from contextlib import suppress
from typing import TypedDict

import anyio
from loguru import logger

from muster.bus import Outbox
from muster.events import (
    Event,
    RankConnected,
    RankFailed,
    RankFetched,
    RankGone,
    RankListening,
    RankLoaded,
    RankPrepared,
    RankReady,
)
from muster.rank_protocol import FetchedFrame, LoadedFrame
from muster.spec import Address, BootId, Failure, InstanceId, NodeId, NodeInfo
from muster.worker.process import RunnerProcess
from muster.worker.watch import Place

#: Lines of output that one message carries at most.
_LINES_PER_MESSAGE = 200
#: And characters, of up to three bytes here: with the longest line the message stays below the bus's 1 MiB.
_CHARACTERS_PER_MESSAGE = 128 * 1024


class _Name(TypedDict):
    instance: InstanceId
    attempt: int
    rank: int
    node: NodeId
    boot: BootId


class Reporter:
    """Reports for one rank. `cause` is the sequence of the event that the next report answers."""

    def __init__(self, place: Place, info: NodeInfo, outbox: Outbox) -> None:
        self.cause = place.caused_by
        self.pumped = anyio.Event()  #: all that the runner printed is in the outbox
        self._place = place
        self._outbox = outbox
        self._name: _Name = {
            "instance": place.id,
            "attempt": place.attempt,
            "rank": place.rank,
            "node": info.node,
            "boot": info.boot,
        }

    def prepared(self, runner: RunnerProcess, addresses: tuple[Address, ...], steps: str | None) -> None:
        """A runner has the rank, and its ports are held."""
        self._send(
            RankPrepared(
                **self._name,
                pid=runner.pid,
                process_started=runner.started,
                addresses=addresses,
                steps=steps,
            )
        )

    def fetched(self, frame: FetchedFrame) -> None:
        """Files of the model came to the node."""
        self._send(
            RankFetched(**self._name, source=frame.source, files=frame.files, bytes=frame.bytes, seconds=frame.seconds)
        )

    def listening(self) -> None:
        """The rank's port is in LISTEN."""
        self._send(RankListening(**self._name))

    def connected(self, seconds: float) -> None:
        """The group is formed and verified."""
        self._send(RankConnected(**self._name, seconds=seconds))

    def loaded(self, frame: LoadedFrame) -> None:
        """The shard is in memory."""
        self._send(
            RankLoaded(
                **self._name,
                layers=frame.layers,
                sharding=frame.sharding,
                weights_bytes=frame.weights_bytes,
                seconds=frame.seconds,
            )
        )

    def ready(self) -> None:
        """The rank waits for work, or runs its script."""
        self._send(RankReady(**self._name))

    def failed(self, failure: Failure) -> None:
        """The rank cannot go on."""
        logger.warning("{}: {}", self._place, failure.sentence())
        self._send(RankFailed(**self._name, failure=failure))

    def gone(self, exit_code: int | None, left: str = "", remedy: str = "") -> None:
        """Nothing of the rank is left on this node but `left`."""
        if left:
            logger.error("{}: {}. {}", self._place, left, remedy)
        self._send(RankGone(**self._name, exit_code=exit_code, left=left, remedy=remedy))

    async def pump(self, runner: RunnerProcess) -> None:
        """Carry the runner's output until it ends. Must not be cancelled while that matters: lines would be lost."""
        with suppress(anyio.EndOfStream):
            while True:
                await self._send_lines(runner, await runner.lines.receive())
        self.pumped.set()

    def _send(self, event: Event) -> None:
        self._outbox.report(event, self.cause)

    async def _send_lines(self, runner: RunnerProcess, first: str) -> None:
        lines, size = [first], len(first)
        with suppress(anyio.EndOfStream, anyio.WouldBlock):
            while len(lines) < _LINES_PER_MESSAGE and size < _CHARACTERS_PER_MESSAGE:
                lines.append(runner.lines.receive_nowait())
                size += len(lines[-1])
        await self._outbox.output(self._place.id, self._place.attempt, self._place.rank, tuple(lines))
