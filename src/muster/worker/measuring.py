"""Measures this node's links to the others: who answers at which address, how far away, how fast."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterable
from typing import Final

import anyio
import anyio.abc
import msgspec
from loguru import logger

from muster.bus.peer import PeerConnection, dialled
from muster.errors import MusterError, PeerError, RequestError
from muster.links import Measured, NodeLinks
from muster.peer_protocol import AnyPeerReply, Burst, DialBack, DialledBack, PeerRefused, Ping, Pong, Watch
from muster.protocol import TellLinks
from muster.spec import NodeId, NodeInfo
from muster.state import State
from muster.worker.pairs import is_reachable, leads, lot, neighbours, pairs_of
from muster.worker.peer import BURST_SECONDS, MAXIMUM_BURST_BYTES, PeerServer, send_burst, shortened, whoever

#: How many others a node pings, and sends bursts to: in a larger cluster the rest is left unmeasured.
MAXIMUM_PINGED: Final = 256
MAXIMUM_BURSTS: Final = 64
#: Others that are measured at one time; of the bursts among them there is one.
_AT_ONCE: Final = 8
_CONNECT_SECONDS: Final = 2.0
_PING_SECONDS: Final = 2.0
_DIAL_BACK_SECONDS: Final = 4.0
_PINGS: Final = 5
#: Bursts grow until one takes so long: then the rate is hardly that of buffers and of TCP's first steps any more.
_FIRST_BURST_BYTES: Final = 64 * 2**10
_GROWTH: Final = 8
_LONG_ENOUGH_SECONDS: Final = 0.025
#: How long to wait for the other end's turn, which another link may have, and how often to ask.
_TURN_SECONDS: Final = 20.0
_TURN_PAUSE_SECONDS: Final = 0.05
#: Others, and pairs with each, that are watched.
_WATCHED: Final = 32
_WATCHED_PAIRS: Final = 4
#: A watch that lasted so long was one; shorter ones mean that something is wrong with watching.
_STABLE_SECONDS: Final = 10.0
#: How long until what was not reached is tried again, each time.
_RETRY_SECONDS: Final = (0.5, 1.0, 2.0, 5.0)
#: How long the results of a round may wait for each other before they are told.
_TELL_SECONDS: Final = 0.5


class _Other(msgspec.Struct):
    """What is known of another node: what it said of itself when it was measured, and what came of it."""

    info: NodeInfo
    measured: tuple[Measured, ...] = ()
    due: float = 0.0  #: when it is to be measured, on the monotonic clock
    failures: int = 0  #: in a row
    round: int = -1  #: that it was last measured for
    once: set[tuple[str, str]] = msgspec.field(default_factory=set)  #: pairs that worked at some time
    watched: dict[tuple[str, str], anyio.CancelScope] = msgspec.field(default_factory=dict)

    def later(self) -> None:
        """Measure it again, the later the more often that was in vain."""
        pause = _RETRY_SECONDS[min(self.failures, len(_RETRY_SECONDS) - 1)]
        self.due = min(self.due, time.monotonic() + pause)
        self.failures += 1

    def watch_only(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Give up watching others than these."""
        for pair in self.watched.keys() - set(pairs):
            self.watched[pair].cancel()


class Measurer:
    """Measures when a node joins or changes, when a link that worked breaks, and when the coordinator asks for it.

    `see` and `hear` are told the state and the measuring round of the coordinator, `send` gets the results. While
    nothing happens one idle connection per pair is all there is: the kernel watches over it. Both ends of a pair ping
    each other; only one of them, by chance of their names, sends the bursts, one at a time.
    """

    def __init__(self, info: NodeInfo, peers: PeerServer, send: Callable[[TellLinks], object]) -> None:
        self._info = info
        self._peers = peers
        self._send = send
        self._others: dict[NodeId, _Other] = {}
        self._nodes: object = None  #: of the state that was seen last
        self._round = self._answered = 0
        self._told = NodeLinks(node=info.node, boot=info.boot, n=0)
        self._wake = anyio.Event()
        peers.on_unwatched = self._unwatched

    def see(self, state: State) -> None:
        """Take the newest state: who is there, and at which addresses."""
        if state.nodes is self._nodes:
            return
        self._nodes = state.nodes
        own = state.nodes.get(self._info.node)
        moved = False
        if own is not None and own.info.boot == self._info.boot:
            moved = own.info.candidates != self._info.candidates
            self._info = own.info
        there = {
            name: node.info
            for name, node in state.nodes.items()
            if node.lost is None and name != self._info.node and is_reachable(self._info, node.info)
        }
        near = sorted(there, key=lambda name: (lot(self._info.node, name), name))[:MAXIMUM_PINGED]
        for name in self._others.keys() - set(near):
            self._others.pop(name).watch_only(())
        for name in near:
            known = self._others.get(name)
            if known is None or known.info.boot != there[name].boot:
                if known is not None:
                    known.watch_only(())
                self._others[name] = _Other(info=there[name])
            elif moved or known.info.candidates != there[name].candidates:
                known.info, known.due, known.failures = there[name], 0.0, 0
        self._rouse()

    def hear(self, round: int) -> None:
        """Take the coordinator's measuring round: where it grew, measure all again."""
        if round == self._round:
            return
        again, self._round = round > self._round, round
        self._answered = min(self._answered, round)  # another coordinator, which counts from 0
        if again:
            for other in self._others.values():
                other.due, other.failures = 0.0, 0
        self._rouse()

    def tell(self) -> None:
        """Tell the coordinator what is known, as after each new welcome."""
        if not self._told.n:
            return
        silent = tuple(msgspec.structs.replace(one, error="") for one in self._told.measured)
        for links in (self._told, msgspec.structs.replace(self._told, measured=silent)):
            try:
                self._send(TellLinks(links=links))
            except RequestError as error:  # thousands of pairs, each with a long reason why it does not work
                logger.warning("too much to tell the coordinator; reasons are left out: {}", error.message)
            else:
                return

    async def run(self) -> None:
        """Measure until cancelled; returns at once where nobody could dial back."""
        if not self._peers.port:
            return
        async with anyio.create_task_group() as watches:
            while True:
                now = time.monotonic()
                round = self._round
                due = [name for name, other in self._others.items() if other.due <= now]
                if due:
                    await self._measure(due, round, watches)
                done = all(other.due > now for other in self._others.values())
                if done and self._answered != round == self._round:
                    self._answered = round
                self._tell_news()
                next_due = min((other.due for other in self._others.values()), default=float("inf"))
                with anyio.move_on_at(max(next_due - time.monotonic(), 0.0) + anyio.current_time()):
                    await self._wake.wait()
                self._wake = anyio.Event()

    def _rouse(self) -> None:
        self._wake.set()

    def _tell_news(self) -> None:
        measured = tuple(one for other in self._others.values() for one in other.measured)
        if measured == self._told.measured and self._answered == self._told.round:
            return
        self._told = NodeLinks(
            node=self._info.node,
            boot=self._info.boot,
            n=self._told.n + 1,
            round=self._answered,
            measured=measured,
        )
        self.tell()

    # --- one other node -----------------------------------------------------------------------------------

    async def _measure(self, names: Iterable[NodeId], round: int, watches: anyio.abc.TaskGroup) -> None:
        """Measure these others, some at a time, and tell the results as they come."""
        turns = anyio.CapacityLimiter(_AT_ONCE)
        told = time.monotonic()

        async def one(name: NodeId) -> None:
            nonlocal told
            async with turns:
                await self._measure_one(name, round, watches)
            if time.monotonic() - told >= _TELL_SECONDS:
                told = time.monotonic()
                self._tell_news()

        async with anyio.create_task_group() as group:
            for name in names:
                group.start_soon(one, name)

    async def _measure_one(self, name: NodeId, round: int, watches: anyio.abc.TaskGroup) -> None:
        other = self._others.get(name)
        if other is None:
            return
        info, other.due = other.info, float("inf")
        bursts = name in self._mine()[:MAXIMUM_BURSTS]
        pairs = pairs_of(self._info, info)
        rated = {(one.own, one.host): one for one in other.measured if _is_rated(one) and other.round == round}
        found: dict[tuple[str, str], Measured] = {}

        async def one(pair: tuple[str, str]) -> None:
            before = rated.get(pair)
            now = await self._try(info, *pair, bursts=bursts and before is None)
            if before is not None and now.reached and now.dialled_back:
                now = msgspec.structs.replace(now, mbps_out=before.mbps_out, mbps_in=before.mbps_in)
            found[pair] = msgspec.structs.replace(now, error=shortened(now.error))

        async with anyio.create_task_group() as group:
            for pair in pairs:
                group.start_soon(one, pair)
        other.measured, other.round = tuple(found[pair] for pair in pairs), round
        fine = [(one.own, one.host) for one in other.measured if one.reached and one.dialled_back]
        other.once.update(fine)
        # What routing never joined is not waited for, where another pair is there.
        expected = other.once.intersection(pairs).union(neighbours(self._info, info))
        # A burst whose turn did not come, or that failed, must not leave a fast link without its rate.
        unrated = bursts and not all(_is_rated(found[pair]) for pair in fine)
        if not fine or not expected <= set(fine) or unrated:
            other.later()
        elif not leads(self._info.node, name):
            other.failures = 0  # where this end watches, a watch that lasts says so
        other.watch_only(fine)
        if self._others.get(name) is other and name in self._mine()[:_WATCHED]:
            for pair in fine[:_WATCHED_PAIRS]:
                if pair not in other.watched:
                    other.watched[pair] = anyio.CancelScope()
                    watches.start_soon(self._watch, other, pair)

    def _mine(self) -> list[NodeId]:
        """Those with whom it is this end that sends the bursts, and watches."""
        return [name for name in self._others if leads(self._info.node, name)]

    async def _watch(self, other: _Other, pair: tuple[str, str]) -> None:
        """Keep a connection over a pair of addresses, and measure again when it ends."""
        own, host = pair
        began = time.monotonic()
        try:
            with other.watched[pair] as scope, contextlib.suppress(MusterError):
                async with dialled(host, other.info.peer_port, own=own, seconds=_CONNECT_SECONDS) as connection:
                    await connection.send(Watch())
                    if not isinstance(await connection.reply(seconds=_PING_SECONDS), Pong):
                        raise PeerError(f"{host} watches no more links")
                    await connection.skip(1, seconds=float("inf"))  # nothing comes before the end
        finally:
            del other.watched[pair]
        if not scope.cancel_called:
            self._ended(other, time.monotonic() - began)

    def _unwatched(self, host: str, seconds: float) -> None:
        """A watch from the other end is over: what was measured from here may be as old as that."""
        for other in self._others.values():
            if any(one.host == host for one in other.measured):
                self._ended(other, seconds)

    def _ended(self, other: _Other, seconds: float) -> None:
        if seconds >= _STABLE_SECONDS:
            other.due, other.failures = 0.0, 0
        else:
            other.later()
        self._rouse()

    async def _try(self, other: NodeInfo, own: str, host: str, *, bursts: bool) -> Measured:
        """Measure one pair of addresses."""
        found = Measured(other=other.node, other_boot=other.boot, own=own, host=host, reached=False)
        if own == host:
            one, two = sorted((self._info.node, other.node))
            error = f"nodes {one} and {two} both have the address {host}"
            return msgspec.structs.replace(found, error=error)
        try:
            async with dialled(host, other.peer_port, own=own, seconds=_CONNECT_SECONDS) as connection:
                rtt_us, reply = await _pinged(connection, Ping(node=other.node, boot=other.boot))
                if error := whoever(host, reply, other.node, other.boot):
                    return msgspec.structs.replace(found, error=error)
                found = msgspec.structs.replace(found, reached=True, rtt_us=rtt_us)
                error = await self._dialled_back(connection, own)
                found = msgspec.structs.replace(found, dialled_back=not error, error=error)
                if error or not bursts:
                    return found
                out = await self._rate(connection, rtt_us, up=True)
                into = await self._rate(connection, rtt_us, up=False)
                async with self._peers.bursting:  # the first pings may have shared this process with a burst
                    again_us, _ = await _pinged(connection, Ping(node=other.node, boot=other.boot))
                return msgspec.structs.replace(found, mbps_out=out, mbps_in=into, rtt_us=min(rtt_us, again_us))
        except MusterError as error:
            return msgspec.structs.replace(found, error=error.message)

    async def _dialled_back(self, connection: PeerConnection, own: str) -> str:
        """Why the other end cannot dial this one; empty where it can."""
        request = DialBack(node=self._info.node, boot=self._info.boot, host=own, port=self._peers.port)
        await connection.send(request)
        match await connection.reply(seconds=_DIAL_BACK_SECONDS):
            case DialledBack(reached=True):
                return ""
            case DialledBack(error=error):
                return error or f"{connection.other} does not say why it cannot dial back"
            case reply:
                return f"{connection.other} answers a dial-back with {type(reply).__name__}"

    async def _rate(self, connection: PeerConnection, rtt_us: float, *, up: bool) -> float | None:
        """Mbit/s in one direction, the best of two long bursts; `None` where the other end's turn did not come."""
        count, best = _FIRST_BURST_BYTES, 0.0
        while True:
            seconds = await self._turn(connection, count, up=up)
            if seconds is None:
                return best or None
            seconds = max(seconds - rtt_us / 1e6, 1e-6)
            mbps = count * 8 / seconds / 1e6
            if best:
                return max(best, mbps)
            if seconds >= _LONG_ENOUGH_SECONDS or count >= MAXIMUM_BURST_BYTES:
                best = mbps  # other work on either machine makes a burst slower, nothing makes it faster
            else:
                count = min(count * _GROWTH, MAXIMUM_BURST_BYTES)

    async def _turn(self, connection: PeerConnection, count: int, *, up: bool) -> float | None:
        """The seconds of one burst, as soon as neither end is in another one."""
        deadline = time.monotonic() + _TURN_SECONDS
        while time.monotonic() < deadline:
            async with self._peers.bursting:
                await connection.send(Burst(upload=count if up else 0, download=0 if up else count))
                reply = await connection.reply()
                if isinstance(reply, Pong):
                    begin = time.monotonic()
                    if up:
                        await send_burst(connection, count)
                        await connection.reply(seconds=BURST_SECONDS)
                        return time.monotonic() - begin
                    await connection.skip(count, seconds=BURST_SECONDS)
                    seconds = time.monotonic() - begin
                    await connection.reply()
                    return seconds
            if not isinstance(reply, PeerRefused):
                raise PeerError(f"{connection.other} answers a burst with {type(reply).__name__}")
            await anyio.sleep(random.uniform(1, 3) * _TURN_PAUSE_SECONDS)
        return None


def _is_rated(one: Measured) -> bool:
    return bool(one.mbps_out and one.mbps_in)


async def _pinged(connection: PeerConnection, ping: Ping) -> tuple[float, AnyPeerReply]:
    """The best round trip of a few, in microseconds, and the last answer."""
    best = float("inf")
    reply: AnyPeerReply | None = None
    for _ in range(_PINGS):
        begin = time.monotonic_ns()
        await connection.send(ping)
        reply = await connection.reply(seconds=_PING_SECONDS)
        best = min(best, (time.monotonic_ns() - begin) / 1_000)
    assert reply is not None
    return best, reply
