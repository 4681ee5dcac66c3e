"""A bad line between the coordinator and a worker: messages are dropped, doubled, delayed and put out of order.

Both sockets of the bus pass it, control and events. What a connection promises (all arrives, in order, once) the bus
does not build on: a coordinator that is started again, a full queue or a second line breaks each of it.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Self

import msgspec
import zmq

from muster.bus import parse_endpoint
from muster.local import LocalCluster, Member
from muster.replies import Answer, Welcome

_TICK_MILLISECONDS = 10
_HOST = "127.0.0.1"
_answers = msgspec.msgpack.Decoder(Answer)

Send = Callable[[], None]


class Odds(msgspec.Struct, frozen=True, kw_only=True):
    """How likely each fault is for a message, from 0 to 1; a message suffers one at most."""

    drop: float = 0.0
    duplicate: float = 0.0  #: it comes at once, and again later
    delay: float = 0.0
    reorder: float = 0.0  #: it comes after the next one of its flow, or as late as a delayed one where there is none
    delay_seconds: float = 0.2  #: the longest delay


class Chaos:
    """Decides what becomes of each message. Pure but for `send`: time comes in, and randomness is seeded.

    A flow is what has an order: one direction of one connection.
    """

    def __init__(self, odds: Odds, seed: int) -> None:
        self.odds = odds
        self.counts = Counter[str]()  #: "passed", "dropped", "duplicated", "delayed", "reordered"
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._later: list[tuple[float, int, Send]] = []
        self._held: dict[object, dict[int, Send]] = {}  #: by flow, what waits to be overtaken

    def take(self, flow: object, send: Send, now: float) -> None:
        """Let a message suffer its fate; `send` is called as often as it arrives, now or by `run_due`."""
        odds, draw = self.odds, self._random.random()
        bounds = itertools.accumulate((odds.drop, odds.duplicate, odds.delay, odds.reorder))
        fates = ("dropped", "duplicated", "delayed", "reordered")
        fate = next((fate for fate, bound in zip(fates, bounds, strict=True) if draw < bound), "passed")
        self.counts[fate] += 1
        if fate in ("duplicated", "delayed"):
            self._schedule(now + self._random.uniform(0, odds.delay_seconds), send)
        elif fate == "reordered":
            number = self._schedule(now + odds.delay_seconds, lambda: self._release(flow, number))
            self._held.setdefault(flow, {})[number] = send
        if fate in ("passed", "duplicated"):
            send()
            for number in list(self._held.get(flow, ())):
                self._release(flow, number)

    def run_due(self, now: float) -> None:
        """Send what was put off until now."""
        while self._later and self._later[0][0] <= now:
            heapq.heappop(self._later)[2]()

    def _schedule(self, due: float, send: Send) -> int:
        number = next(self._numbers)
        heapq.heappush(self._later, (due, number, send))
        return number

    def _release(self, flow: object, number: int) -> None:
        """Send what was held, unless that has happened."""
        send = self._held[flow].pop(number, None)
        if send is not None:
            send()


class FaultyBus:
    """A proxy of one coordinator, at `address`; a context manager.

    The answer to a hello is changed in one point, the port of the events socket: it is the proxy's. Generation and
    HTTP are reached at the coordinator itself. Subscriptions pass unharmed, since TCP would lose them only together
    with the connection, which begins with them again.
    """

    def __init__(self, coordinator: str, odds: Odds, seed: int) -> None:
        self.chaos = Chaos(odds, seed)
        self._coordinator = parse_endpoint(coordinator)
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._poller = zmq.Poller()
        self._calls, control_port = self._bound(zmq.ROUTER)
        self._events, self._events_port = self._bound(zmq.XPUB)
        self._events.setsockopt(zmq.XPUB_VERBOSE, 1)  # the coordinator greets each subscriber
        self._source = self._opened(zmq.XSUB)
        self._source_port: int | None = None
        self._lines: dict[bytes, zmq.Socket[bytes]] = {}  #: by caller: each has a connection of its own, as ids need
        self.address = f"{_HOST}:{control_port}"
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"faulty bus {self.address}")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def calm(self) -> None:
        """No further faults; what was put off still comes."""
        self.chaos.odds = Odds()

    def _opened(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def _bound(self, kind: int) -> tuple[zmq.Socket[bytes], int]:
        socket = self._opened(kind)
        return socket, socket.bind_to_random_port(f"tcp://{_HOST}")

    def _run(self) -> None:
        while not self._stopped.is_set():
            for socket, _ in self._poller.poll(_TICK_MILLISECONDS):
                self._pass_on(socket, socket.recv_multipart())
            self.chaos.run_due(time.monotonic())

    def _pass_on(self, socket: zmq.Socket[Any], frames: list[bytes]) -> None:
        if socket is self._events:
            self._source.send_multipart(frames)
        elif socket is self._source:
            self._harm(socket, self._events, frames)
        elif socket is self._calls:
            caller, *call = frames
            self._harm(caller, self._line(caller), call)
        else:
            caller = next(caller for caller, line in self._lines.items() if line is socket)
            self._harm(socket, self._calls, [caller, *map(self._redirected, frames)])

    def _line(self, caller: bytes) -> zmq.Socket[bytes]:
        if caller not in self._lines:
            self._lines[caller] = self._opened(zmq.DEALER)
            self._lines[caller].connect(self._coordinator.url)
        return self._lines[caller]

    def _redirected(self, payload: bytes) -> bytes:
        """An answer as the caller is to see it; a welcome leads it to the proxy's events."""
        answer = _answers.decode(payload)
        if not isinstance(answer.reply, Welcome):
            return payload
        port = answer.reply.events_port
        if port != self._source_port:
            if self._source_port is not None:
                self._source.disconnect(self._coordinator.at(self._source_port).url)
            self._source.connect(self._coordinator.at(port).url)
            self._source_port = port
        welcome = msgspec.structs.replace(answer.reply, events_port=self._events_port)
        return msgspec.msgpack.encode(msgspec.structs.replace(answer, reply=welcome))

    def _harm(self, flow: object, target: zmq.Socket[bytes], frames: Sequence[bytes]) -> None:
        def send() -> None:
            with contextlib.suppress(zmq.Again):  # a full queue loses it, as everywhere on the bus
                target.send_multipart(frames, zmq.NOBLOCK)

        self.chaos.take(flow, send, time.monotonic())


class FaultyCluster(LocalCluster):
    """A cluster whose workers reach the coordinator through a `FaultyBus` each, with seeds counted up from `seed`."""

    def __init__(self, *arguments: Any, odds: Odds, seed: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.lines: dict[str, FaultyBus] = {}
        self._odds = odds
        self._seed = seed
        self._stack = contextlib.ExitStack()

    def line(self, name: str) -> FaultyBus:
        """The line of this name, made where there is none. The coordinator must be started."""
        if name not in self.lines:
            bus = FaultyBus(self.address, self._odds, self._seed + len(self.lines))
            self.lines[name] = self._stack.enter_context(bus)
        return self.lines[name]

    def start_worker(self, node: str, *, wait: bool = True, options: Sequence[str] = ()) -> Member:
        """Start one worker at the end of its line."""
        line = self.line(node)
        direct, self.address = self.address, line.address
        try:
            return super().start_worker(node, wait=wait, options=options)
        finally:
            self.address = direct

    def stop(self) -> None:
        """Stop all, and the lines last: so the last events are logged."""
        for line in self.lines.values():
            line.calm()
        try:
            super().stop()
        finally:
            self._stack.close()
