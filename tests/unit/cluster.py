"""A cluster without processes: the pure core under a clock that the test turns, with workers that obey or misbehave."""

from __future__ import annotations

import msgspec

from muster.events import (
    AttemptStarted,
    Envelope,
    Event,
    InstanceCreated,
    InstanceDeleting,
    NodeJoined,
    RankConnected,
    RankFact,
    RankFailed,
    RankGone,
    RankListening,
    RankLoaded,
    RankPrepared,
    RankReady,
    encode_event,
)
from muster.fold import apply
from muster.lifecycle import SECOND, Observed, Settings, decide, wake_ns
from muster.placement import place
from muster.spec import (
    COORDINATOR,
    BootId,
    Failure,
    InstanceId,
    InstanceSpec,
    ModelWorkload,
    NodeAddress,
    NodeId,
    NodeInfo,
    Phase,
    ScriptWorkload,
)
from muster.state import Gone, Instance, Rank, State, wants_ranks

ONE = InstanceId("one")
A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
#: More decisions than any settled cluster of these tests can need.
MAX_ROUNDS = 200


def boot_of(node: str, count: int = 1) -> BootId:
    return BootId(f"{node}-boot-{count}")


def node_info(node: str, *, boot: int = 1, memory_bytes: int = 1000, max_ranks: int = 8) -> NodeInfo:
    return NodeInfo(
        node=NodeId(node),
        boot=boot_of(node, boot),
        hostname="host",
        machine=f"machine-{node}",
        pid=1,
        addresses=(NodeAddress(host="127.0.0.1", network="127.0.0.0/8"),),
        backends=("ring",),
        memory_bytes=memory_bytes,
        max_ranks=max_ranks,
    )


def failed(kind: str = "rank-killed", *, secondary: bool = False, retryable: bool = True) -> Failure:
    return Failure(kind=kind, message=kind, phase=Phase.FORMING, secondary=secondary, retryable=retryable)


ECHO = failed("peer-lost", secondary=True)


class Cluster:
    """The log, the state and what the coordinator observes; `settle` does what the coordinator would."""

    def __init__(self, *nodes: str, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.now_ns = 1_000 * SECOND
        self.state = State()
        self.log: list[Event] = []
        self.heard_ns: dict[NodeId, int] = {}
        self.progress_ns: dict[tuple[InstanceId, int, int], int] = {}
        for node in nodes:
            self.join(node_info(node))

    # --- the coordinator ----------------------------------------------------------------------------------

    @property
    def observed(self) -> Observed:
        return Observed(heard_ns=self.heard_ns, progress_ns=self.progress_ns)

    def commit(self, event: Event) -> None:
        envelope = Envelope(
            sequence=self.state.sequence + 1,
            time_ns=self.now_ns,
            origin=COORDINATOR,
            cause=0,
            body=encode_event(event),
        )
        self.log.append(event)
        self.state = apply(self.state, envelope)

    def settle(self) -> list[Event]:
        """Carry out decisions until there are none, and check that the next wake-up lies ahead."""
        done: list[Event] = []
        for _ in range(MAX_ROUNDS):
            decisions = decide(self.state, self.observed, self.now_ns, self.settings)
            if not decisions:
                wake = wake_ns(self.state, self.observed, self.now_ns, self.settings)
                assert wake is None or wake > self.now_ns, "a coordinator at rest would spin"
                return done
            for decision in decisions:
                self.commit(decision.event)
                done.append(decision.event)
        raise AssertionError(f"the rules do not come to rest; the last of {len(done)} events: {done[-3:]}")

    def advance(self, seconds: float, *, heard: tuple[str, ...] | None = None) -> list[Event]:
        """Turn the clock; the `heard` nodes (by default all that are there) beat at the new time."""
        self.now_ns += round(seconds * SECOND)
        self.beat(*(self.alive if heard is None else heard))
        return self.settle()

    def beat(self, *nodes: str) -> None:
        for node in nodes:
            self.heard_ns[NodeId(node)] = self.now_ns

    @property
    def alive(self) -> tuple[NodeId, ...]:
        return tuple(name for name, node in self.state.nodes.items() if node.lost is None)

    def join(self, info: NodeInfo) -> None:
        self.heard_ns[info.node] = self.now_ns
        self.commit(NodeJoined(info=info))

    # --- clients ------------------------------------------------------------------------------------------

    def create(self, spec: InstanceSpec, instance: InstanceId = ONE) -> Instance:
        spec = msgspec.structs.replace(spec, memory_bytes=spec.memory_bytes or 0)
        placement = place(spec, self.state)
        self.commit(
            InstanceCreated(
                instance=instance,
                attempt=1,
                spec=spec,
                assignments=placement.assignments,
                backend=placement.backend,
            )
        )
        return self.state.instances[instance]

    def delete(self, instance: InstanceId = ONE) -> list[Event]:
        self.commit(InstanceDeleting(instance=instance, attempt=self.state.instances[instance].attempt))
        return self.settle()

    def instance(self, instance: InstanceId = ONE) -> Instance:
        return self.state.instances[instance]

    # --- workers ------------------------------------------------------------------------------------------

    def report(self, kind: type[RankFact], rank: int, instance: InstanceId = ONE, **fields: object) -> list[Event]:
        """A rank event of the current attempt, in the name of the worker that has it."""
        self.commit(rank_event(kind, self.instance(instance), rank, **fields))
        return self.settle()

    def bring_up(self, instance: InstanceId = ONE) -> list[Event]:
        """Every rank goes all the way to ready."""
        done: list[Event] = []
        model = isinstance(self.instance(instance).spec.workload, ModelWorkload)
        kinds = (RankPrepared, RankListening, RankConnected, *((RankLoaded,) if model else ()), RankReady)
        for kind in kinds:
            for rank in range(len(self.instance(instance).ranks)):
                done += self.report(kind, rank, instance)
        return done

    def tear_down(self) -> list[Event]:
        """The workers of live nodes end every rank that is not wanted any more."""
        done: list[Event] = []
        for key in list(self.state.instances):
            for number in range(len(self.state.instances[key].ranks) if key in self.state.instances else 0):
                instance = self.state.instances.get(key)
                if instance is None or wants_ranks(instance):
                    break
                if not isinstance(instance.ranks[number].state, Gone):
                    done += self.report(RankGone, number, key, exit_code=-15)
        return done


def rank_event(kind: type[RankFact], instance: Instance, rank: int, **fields: object) -> Event:
    """The event as the worker of that rank reports it."""
    holder: Rank = instance.ranks[rank]
    values: dict[str, object] = {
        "instance": instance.id,
        "attempt": instance.attempt,
        "rank": rank,
        "node": holder.node,
        "boot": holder.boot,
    }
    if kind is RankPrepared:
        values |= {"pid": 100 + rank, "process_started": 1.0}
    if kind is RankConnected:
        values |= {"seconds": 0.01}
    if kind is RankFailed:
        values |= {"failure": failed()}
    event = msgspec.convert({"type": kind.__struct_config__.tag, **values} | msgspec.to_builtins(fields), Event)
    assert not isinstance(event, AttemptStarted)
    return event


def script(ranks: int = 2, **fields: object) -> InstanceSpec:
    return msgspec.structs.replace(InstanceSpec(workload=ScriptWorkload(path="/x.py"), ranks=ranks), **fields)
