"""A worker without processes or sockets, which lives by what it is told, and the air between it and the coordinator."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any, Protocol, cast

import msgspec
from cluster import node_info

from muster.events import (
    Envelope,
    Event,
    RankConnected,
    RankFact,
    RankFailed,
    RankGone,
    RankListening,
    RankPrepared,
    RankReady,
    encode_event,
)
from muster.fold import apply
from muster.lifecycle import SECOND, Settings
from muster.protocol import Hello, Report
from muster.replies import Acked, Refused
from muster.spec import (
    BootId,
    Failure,
    InstanceId,
    NodeId,
    NodeInfo,
)
from muster.state import (
    Assigned,
    Connected,
    Listening,
    Loaded,
    Ready,
    State,
    rank_of,
    wants_ranks,
)
from muster.worker.census import endings

SETTINGS = Settings(heartbeat_seconds=0.2, lease_seconds=1.5)
#: The longest that a message takes.
DELAY_NS = SECOND // 2
Key = tuple[InstanceId, int, int]


class Sky:
    """Time, chance, and the messages that are on their way."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 1_000 * SECOND
        self.faults = 0.3  #: the share of messages that are lost, doubled or late
        self._sent = 0
        self._flying: list[tuple[int, int, Callable[[], None]]] = []

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def send(self, arrive: Callable[[], None]) -> None:
        fate = self.random.choice(("lost", "doubled", "late")) if self.chance(self.faults) else ""
        for _ in range({"lost": 0, "doubled": 2}.get(fate, 1)):
            self._sent += 1
            delay = self.random.randrange(DELAY_NS) if fate else 0
            heapq.heappush(self._flying, (self.now + delay, self._sent, arrive))

    def pass_on(self) -> None:
        while self._flying and self._flying[0][0] <= self.now:
            heapq.heappop(self._flying)[2]()


class Coordinator(Protocol):
    """What a worker talks to."""

    sky: Sky

    def hello(self, worker: Worker, hello: Hello) -> None: ...
    def beat(self, worker: Worker) -> None: ...
    def take(self, worker: Worker, report: Report) -> None: ...
    def replay(self, worker: Worker, after: int) -> None: ...


class Worker:
    """One boot of a node: a copy of the state, numbered reports until they are acknowledged, and ranks that are up."""

    def __init__(self, cluster: Coordinator, node: NodeId, boot: int, replaces: BootId | None) -> None:
        self.cluster = cluster
        self.node = node
        self.info: NodeInfo = msgspec.structs.replace(node_info(node, boot=boot), replaces=replaces)
        self.state = State()
        self.welcomed = ""  #: the coordinator that it follows
        self.proof = ""  #: what a coordinator that had lost it wants to be told again
        self.begun: set[Key] = set()
        self.ranks: dict[Key, type[RankFact] | None] = {}  #: what each last reported
        self.outbox: dict[int, Report] = {}
        self.numbers = 0
        self.heard = cluster.sky.now
        self.cut_until = 0

    def exchange(self, arrive: Callable[[], None]) -> None:
        """A message of either side, unless the node is cut off."""
        if self.cluster.sky.now >= self.cut_until:
            self.cluster.sky.send(arrive)

    def report(self, event: Event) -> None:
        self.numbers += 1
        self.outbox[self.numbers] = Report(
            node=self.node, boot=self.info.boot, n=self.numbers, cause=0, event=encode_event(event)
        )

    def speak(self) -> None:
        """Say hello until the coordinator knows this boot; then heartbeats, and what is not acknowledged yet."""
        cluster = self.cluster
        node = self.state.nodes.get(self.node)
        if cluster.sky.now - self.heard > 3 * SETTINGS.heartbeat_seconds * SECOND:
            self.welcomed = ""
        known = node is not None and node.info.boot == self.info.boot and node.lost is None
        if not self.welcomed or not known:
            hello = Hello(info=self.info, proof=self.proof)
            self.exchange(lambda: cluster.hello(self, hello))
            return
        self.exchange(lambda: cluster.beat(self))
        oldest = min(self.outbox, default=0)
        for report in self.outbox.values():
            told = msgspec.structs.replace(report, oldest=oldest, to=BootId(self.welcomed))
            self.exchange(lambda told=told: cluster.take(self, told))

    def doubt(self, proof: str) -> None:
        self.proof = proof

    def welcome(self, state: State) -> None:
        if state.coordinator_boot == self.welcomed and state.sequence < self.state.sequence:
            return
        self.state, self.welcomed = state, state.coordinator_boot
        for event in endings(state, self.info.boot, self.ranks, self.begun):
            self.report(event)
        self.begin()

    def hear(self, boot: str, envelope: Envelope) -> None:
        self.heard = self.cluster.sky.now
        if boot != self.welcomed:
            self.welcomed = ""
        elif envelope.sequence == self.state.sequence + 1:
            self.state = apply(self.state, envelope)
            self.begin()
        elif envelope.sequence > self.state.sequence:
            self.ask()

    def pulse(self, boot: str, head: int) -> None:
        self.heard = self.cluster.sky.now
        if boot != self.welcomed:
            self.welcomed = ""
        elif head > self.state.sequence:
            self.ask()

    def ask(self) -> None:
        cluster, after = self.cluster, self.state.sequence
        self.exchange(lambda: cluster.replay(self, after))

    def settle(self, reply: Acked | Refused | None) -> None:
        if isinstance(reply, Acked):
            self.outbox = {n: report for n, report in self.outbox.items() if n > reply.n}

    def begin(self) -> None:
        """Begin what is assigned."""
        for instance in self.state.instances.values():
            for rank in instance.ranks if wants_ranks(instance) else ():
                key = (instance.id, instance.attempt, rank.rank)
                if rank.boot == self.info.boot and isinstance(rank.state, Assigned) and key not in self.begun:
                    self.begun.add(key)
                    self.ranks[key] = None

    def work(self) -> None:
        """Bring what was begun one step further, and end what is not wanted any more."""
        for key, said in list(self.ranks.items()):
            instance = self.state.instances.get(key[0])
            wanted = instance is not None and instance.attempt == key[1] and wants_ranks(instance)
            if not wanted or rank_of(self.state, cast(RankGone, self.fact(RankGone, key))) is None:
                self.end(key, -15)
            elif self.cluster.sky.chance(0.3) and (following := self.next_of(key, said)) is not None:
                self.ranks[key] = following
                self.report(self.fact(following, key))

    def next_of(self, key: Key, said: type[RankFact] | None) -> type[RankFact] | None:
        states = [rank.state for rank in self.state.instances[key[0]].ranks]
        if said is None:
            return RankPrepared
        if said is RankPrepared and not any(isinstance(state, Assigned) for state in states):
            return RankListening
        if said is RankListening and all(isinstance(s, Listening | Connected | Loaded | Ready) for s in states):
            return RankConnected
        return RankReady if said is RankConnected else None

    def end(self, key: Key, code: int) -> None:
        del self.ranks[key]
        self.report(self.fact(RankGone, key, exit_code=code))

    def die(self, key: Key) -> None:
        failure = Failure(kind="rank-killed", message="killed", rank=key[2], node=self.node, retryable=True)
        self.report(self.fact(RankFailed, key, failure=failure))
        self.end(key, -9)

    def fact(self, kind: type[RankFact], key: Key, **fields: Any) -> Event:
        if kind is RankPrepared:
            fields |= {"pid": 100 + len(self.begun), "process_started": 1.0}
        if kind is RankConnected:
            fields |= {"seconds": 0.1}
        fact = kind(instance=key[0], attempt=key[1], rank=key[2], node=self.node, boot=self.info.boot, **fields)
        return cast(Event, fact)
