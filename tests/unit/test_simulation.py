"""A whole cluster without processes or sockets: the coordinator's real books, and workers that live by its messages.

The bus between them loses, doubles, delays and reorders. The coordinator is started again from its log, workers die and
come back, ranks fail. After every step the log and the workers must keep the rules; when the faults stop, all comes to
rest. Thousands of steps take a second.
"""

from __future__ import annotations

from typing import cast

import pytest
from simulated import SETTINGS, Key, Sky, Worker

from muster.bus import Publisher
from muster.coordinator.clock import Clock
from muster.coordinator.comparing import Clocks
from muster.coordinator.ledger import Ledger
from muster.coordinator.nodes import Registrar
from muster.coordinator.outputs import OutputStore
from muster.coordinator.reports import Reports
from muster.errors import PlacementError
from muster.eventlog.memory import MemoryEventLog
from muster.events import (
    AttemptStarted,
    CoordinatorStarted,
    Envelope,
    Event,
    InstanceCreated,
    InstanceDeleted,
    InstanceDeleting,
    InstanceRetried,
    NodeDraining,
    NodeJoined,
    NodeLost,
    NodeResumed,
    RankFact,
)
from muster.fold import apply
from muster.lifecycle import SECOND, is_over
from muster.placement import place
from muster.protocol import Hello, Report
from muster.spec import (
    BootId,
    Failure,
    GroupWorkload,
    InstanceId,
    InstanceSpec,
    NeverRestart,
    NodeId,
    RestartOnFailure,
)
from muster.state import (
    Broken,
    Deleting,
    Gone,
    Running,
    State,
    all_gone,
)

NODES = (NodeId("a"), NodeId("b"), NodeId("c"))
TICK_NS = SECOND // 50


class StandingClock(Clock):
    """The sky's time."""

    def __init__(self, sky: Sky) -> None:
        super().__init__()
        self._sky = sky

    def now_ns(self) -> int:
        return self._sky.now


class Simulation:
    """The coordinator's side, and the workers that are there."""

    def __init__(self, seed: int) -> None:
        self.sky = Sky(seed)
        self.log = MemoryEventLog()
        self.boots = dict.fromkeys(NODES, 0)
        self.workers: dict[NodeId, Worker] = {}
        self.made = self.starts = 0
        self.checked = State()
        self.given_up: set[Key] = set()  #: ranks whose node was lost meanwhile, and may not know it yet
        self.numbers: dict[tuple[str, str], int] = {}
        self.start_coordinator()
        for node in NODES:
            self.start_worker(node)

    # --- the coordinator -------------------------------------------------------------------------------------

    def start_coordinator(self) -> None:
        self.starts += 1
        self.boot = BootId(f"coordinator-{self.starts}")
        self.ledger = Ledger(self.log, cast(Publisher, self), SETTINGS)
        self.ledger.clock = StandingClock(self.sky)
        self.ledger.heard_ns = dict.fromkeys(self.ledger.state.nodes, self.sky.now)
        self.ledger._settled_ns = self.sky.now
        self.registrar = Registrar(SETTINGS)
        self.reports = Reports(self.ledger, OutputStore(), Clocks(), {"attempt": 0, "boot": 0})
        self.ledger.commit(CoordinatorStarted(epoch="epoch", boot=self.boot, version="1"))

    def publish(self, envelope: Envelope) -> None:
        """In the place of the publisher."""
        assert self.log.read(envelope.sequence - 1, 1) == [envelope], "published, and not in the log"
        for worker in self.workers.values():
            worker.exchange(lambda worker=worker, boot=self.boot: worker.hear(boot, envelope))

    def hello(self, worker: Worker, hello: Hello) -> None:
        info, state, now = worker.info, self.ledger.state, self.sky.now
        verdict = self.registrar.admit(hello, state, self.ledger.heard_ns.get(info.node), now)
        if isinstance(verdict, Failure):
            return
        if verdict.proof:
            worker.exchange(lambda: worker.doubt(verdict.proof))
            return
        if verdict.lost is not None:
            self.ledger.commit(NodeLost(node=info.node, boot=state.nodes[info.node].info.boot, reason=verdict.lost))
        if verdict.joins:
            self.ledger.heard_ns[info.node] = now
            self.ledger.commit(NodeJoined(info=info), origin=info.node)
        state = self.ledger.state
        worker.exchange(lambda: worker.welcome(state))

    def beat(self, worker: Worker) -> None:
        node = self.ledger.state.nodes.get(worker.node)
        if node is not None and node.info.boot == worker.info.boot and node.lost is None:
            self.ledger.heard_ns[worker.node] = self.sky.now

    def take(self, worker: Worker, report: Report) -> None:
        reply = self.reports.take(report)
        self.ledger.settle()
        worker.exchange(lambda: worker.settle(reply))

    def replay(self, worker: Worker, after: int) -> None:
        boot = self.boot
        for envelope in self.log.read(after, 1_000):
            worker.exchange(lambda envelope=envelope: worker.hear(boot, envelope))

    # --- what happens ----------------------------------------------------------------------------------------

    def start_worker(self, node: NodeId) -> None:
        before = self.workers.get(node)
        self.boots[node] += 1
        replaces = before.info.boot if before is not None else None
        self.workers[node] = Worker(self, node, self.boots[node], replaces)

    def create(self) -> None:
        restart = self.sky.random.choice((NeverRestart(), RestartOnFailure(maximum=3, backoff_seconds=0.1)))
        ranks = self.sky.random.randint(2, 4)
        spec = InstanceSpec(workload=GroupWorkload(), ranks=ranks, restart=restart, memory_bytes=0)
        try:
            placement = place(spec, self.ledger.state)
        except PlacementError:
            return
        self.made += 1
        self.ledger.commit(
            InstanceCreated(
                instance=InstanceId(f"i{self.made}"),
                attempt=1,
                spec=spec,
                assignments=placement.assignments,
                backend=placement.backend,
            )
        )

    def disturb(self) -> None:
        """One random deed of a client, an operator, or fate."""
        pick = self.sky.random.choice
        instances = list(self.ledger.state.instances.values())
        worker = self.workers[pick(NODES)]
        match self.sky.random.randrange(11):
            case 0 | 1 if len(instances) < 6:
                self.create()
            case 2 if instances and not isinstance((chosen := pick(instances)).status, Deleting):
                self.ledger.commit(InstanceDeleting(instance=chosen.id, attempt=chosen.attempt))
            case 3 if instances and isinstance((chosen := pick(instances)).status, Broken):
                self.ledger.commit(InstanceRetried(instance=chosen.id, attempt=chosen.attempt))
            case 4 | 5 if worker.ranks:
                worker.die(pick(list(worker.ranks)))
            case 6 if self.sky.chance(0.3):
                self.start_worker(worker.node)
            case 7 if self.sky.chance(0.5):
                self.start_coordinator()
            case 8 if worker.node in self.ledger.state.nodes:
                self.ledger.commit(NodeDraining(node=worker.node, now=self.sky.chance(0.5)))
            case 9 if worker.node in self.ledger.state.nodes:
                self.ledger.commit(NodeResumed(node=worker.node))
            case 10:
                worker.cut_until = self.sky.now + self.sky.random.randrange(2 * SECOND)
            case _:
                pass

    def tick(self) -> None:
        self.sky.now += TICK_NS
        self.sky.pass_on()
        for worker in self.workers.values():
            if self.sky.now // TICK_NS % 5 == 0:
                worker.speak()
                worker.exchange(
                    lambda worker=worker, boot=self.boot, head=self.ledger.state.sequence: worker.pulse(boot, head)
                )
            worker.work()
        self.ledger.settle()
        self.check()

    # --- what must hold --------------------------------------------------------------------------------------

    def check(self) -> None:
        for envelope in self.log.read(self.checked.sequence, 10_000):
            event = envelope.event()
            self._check(envelope, cast(Event, event))
            self.checked = apply(self.checked, envelope)
        assert self.checked == self.ledger.state, "the log leads to another state"

    def _check(self, envelope: Envelope, event: Event) -> None:
        before = self.checked
        if envelope.report is not None:
            sender = (envelope.report.node, envelope.report.boot)
            assert envelope.report.n > self.numbers.get(sender, 0), "a report was applied twice, or out of order"
            self.numbers[sender] = envelope.report.n
        match event:
            case RankFact():
                instance = before.instances[event.instance]
                rank = instance.ranks[event.rank]
                assert (instance.attempt, rank.node, rank.boot) == (event.attempt, event.node, event.boot), "stale"
                assert before.nodes[event.node].info.boot == event.boot, "of an earlier boot"
                assert not isinstance(rank.state, Gone), "gone already"
            case AttemptStarted():
                assert all_gone(before.instances[event.instance])
                older = {key for each in self.workers.values() for key in each.ranks if key[0] == event.instance}
                older = {key for key in older - self.given_up if key[1] < event.attempt}
                assert not older, f"{older} are alive at the next attempt"
            case NodeLost():
                self.given_up |= {
                    key for each in self.workers.values() for key in each.ranks if each.node == event.node
                }
            case InstanceDeleted():
                assert all_gone(before.instances[event.instance])
            case _:
                pass

    def at_rest(self) -> bool:
        state = self.ledger.state
        wanted = {
            (instance.id, instance.attempt, rank.rank)
            for instance in state.instances.values()
            for rank in instance.ranks
            if isinstance(instance.status, Running)
        }
        return (
            all(isinstance(each.status, Running) or is_over(each) for each in state.instances.values())
            and all(node.lost is None and node.suspect is None for node in state.nodes.values())
            and {key for worker in self.workers.values() for key in worker.ranks} == wanted
            and all(worker.state == state and not worker.outbox for worker in self.workers.values())
        )


@pytest.mark.parametrize("seed", range(12, 20))
def test_whatever_the_bus_does_the_rules_hold_and_everything_comes_to_rest(seed: int) -> None:
    world = Simulation(seed)
    for _ in range(500):
        if world.sky.chance(0.2):
            world.disturb()
        world.tick()
    world.sky.faults = 0.0
    for node in NODES:
        world.ledger.commit(NodeResumed(node=node))
    for _ in range(1_500):
        world.tick()
        if world.at_rest():
            break
    assert world.at_rest(), world.ledger.state
    assert world.made > 2, "the lives are too quiet to prove anything"
