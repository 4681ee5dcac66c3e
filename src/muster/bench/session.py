"""What is done with one server that has come up, the same for each: the parts that are asked for, in one order."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Sequence

import anyio
import msgspec

from muster.bench.load import Ask, Reading, ask_all, checked
from muster.bench.peer_server import Running, cpu_seconds
from muster.bench.samples import Contender, Metric, Part, Sample
from muster.bench.shapes import Shape, prompt

#: As many streams as the issue names.
STREAMS = 8
_WARM_TOKENS = 16
#: Prompts of warming up are numbered from here, beyond those that are measured.
_WARM_NUMBERS = 90_000
_LONG_NUMBERS = 80_000
_LONG_WORDS = 400
_TURN_TOKENS = 32
_SETTLE_SECONDS = 1.0


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """How much is done in one session."""

    singles: int = 5
    waves: int = 2
    idle_seconds: float = 10.0
    long_chats: int = 2


class ClientCost(msgspec.Struct):
    """What the load client itself took."""

    cpu_seconds: float = 0.0
    tokens: int = 0


class Session:
    """One server, one model, one round."""

    def __init__(self, running: Running, shape: Shape, contender: Contender, number: int, cost: ClientCost) -> None:
        self.samples: list[Sample] = []
        self._running = running
        self._shape = shape
        self._contender: Contender = contender
        self._number = number
        self._cost = cost
        self._prompts = iter(range(_LONG_NUMBERS))

    async def run(
        self, parts: Collection[Part], effort: Effort, settle: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Measure.

        Args:
            parts: Those that this contender takes part in.
            effort: How much.
            settle: Waits until the server has nothing to do but to serve.

        Raises:
            BenchError: an answer did not come whole.
        """
        (first,) = await self._ask([_question(_WARM_NUMBERS)], 1)
        if "start" in parts:
            self._add("start", first.began_seconds + (first.first_seconds or 0.0) - self._running.began_seconds)
        if settle is not None:
            await settle()
        await self._ask([_question(_WARM_NUMBERS + number) for number in range(1, STREAMS + 1)], _WARM_TOKENS)
        if {"throughput", "latency"} & set(parts):
            await self._singles(effort.singles)
            await self._waves(effort.waves)
        if "prefix" in parts:
            await self._long_chats(effort.long_chats)
        if "idle" in parts:
            await self._idle(effort.idle_seconds)

    async def _singles(self, count: int) -> None:
        for _ in range(count):
            (reading,) = await self._ask([_question(next(self._prompts))], self._shape.answer_tokens)
            self._add("stream", reading.tokens / reading.last_seconds)
            self._add("first", reading.first_seconds or 0.0)

    async def _waves(self, count: int) -> None:
        for _ in range(count):
            questions = [_question(next(self._prompts)) for _ in range(STREAMS)]
            readings = await self._ask(questions, self._shape.answer_tokens)
            self._add("streams", aggregate_rate(readings))
            for reading in readings:
                self._add("first of 8", reading.first_seconds or 0.0)

    async def _long_chats(self, count: int) -> None:
        for number in range(count):
            turns = [("user", prompt(_LONG_NUMBERS + number, _LONG_WORDS))]
            (first,) = await self._ask([tuple(turns)], _TURN_TOKENS)
            turns += [("assistant", first.text), ("user", prompt(number))]
            (second,) = await self._ask([tuple(turns)], _TURN_TOKENS)
            self._add("first turn", first.first_seconds or 0.0)
            self._add("second turn", second.first_seconds or 0.0)

    async def _idle(self, seconds: float) -> None:
        await anyio.sleep(_SETTLE_SECONDS)
        began = time.perf_counter()
        used = cpu_seconds(self._running.roots)
        await anyio.sleep(seconds)
        used = cpu_seconds(self._running.roots) - used
        self._add("idle", 100 * used / (time.perf_counter() - began))

    async def _ask(self, chats: Sequence[tuple[tuple[str, str], ...]], max_tokens: int) -> Sequence[Reading]:
        used = time.process_time()
        readings = await ask_all(
            self._running.target, [Ask(messages=messages, max_tokens=max_tokens) for messages in chats]
        )
        self._cost.cpu_seconds += time.process_time() - used
        self._cost.tokens += sum(reading.tokens for reading in readings)
        return checked(readings, self._running.name)

    def _add(self, metric: Metric, value: float) -> None:
        self.samples.append(
            Sample(contender=self._contender, shape=self._shape.name, metric=metric, round=self._number, value=value)
        )


def aggregate_rate(readings: Sequence[Reading]) -> float:
    """Tokens per second of streams that ran together, from the first request to the last piece."""
    began = min(reading.began_seconds for reading in readings)
    ended = max(reading.began_seconds + reading.last_seconds for reading in readings)
    return sum(reading.tokens for reading in readings) / (ended - began)


def _question(number: int) -> tuple[tuple[str, str], ...]:
    return (("user", prompt(number)),)
