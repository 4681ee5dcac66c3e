"""Random lives of a cluster: whatever the workers report, the decisions come to rest and every attempt ends."""

from __future__ import annotations

import msgspec
from cluster import ECHO, A, B, C, Cluster, boot_of, failed, node_info, rank_event
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muster.errors import PlacementError
from muster.events import (
    AttemptEnding,
    AttemptStarted,
    Event,
    InstanceDeleted,
    InstanceFact,
    InstanceFailed,
    InstanceFinished,
    InstanceReady,
    InstanceRetried,
    NodeDraining,
    NodeResumed,
    RankConnected,
    RankFact,
    RankFailed,
    RankGone,
    RankListening,
    RankLoaded,
    RankPrepared,
    RankReady,
)
from muster.lifecycle import SECOND, Settings, decide, is_over, wake_ns
from muster.spec import (
    Failure,
    GroupWorkload,
    InstanceId,
    InstanceSpec,
    ModelWorkload,
    NeverRestart,
    NodeId,
    Phase,
    RestartOnFailure,
    ScriptWorkload,
)
from muster.state import (
    Broken,
    Deleting,
    Draining,
    Ending,
    Gone,
    Instance,
    Running,
    Starting,
    counted_failures,
    rank_of,
    wants_ranks,
)

NODES = (A, B, C)
KINDS: tuple[type[RankFact], ...] = (
    RankPrepared,
    RankListening,
    RankConnected,
    RankLoaded,
    RankReady,
    RankFailed,
    RankGone,
)
CLOCKS = Settings(ended_seconds=3600.0, ended_kept=3)
FAST = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)

workloads = st.sampled_from((GroupWorkload(), ModelWorkload(model="/m"), ScriptWorkload(path="/x.py")))
restarts = st.one_of(
    st.just(NeverRestart()),
    st.builds(
        RestartOnFailure,
        maximum=st.integers(1, 3),
        backoff_seconds=st.sampled_from((0.0, 0.2, 5.0)),
        backoff_max_seconds=st.sampled_from((0.0, 1.0, 30.0)),
    ),
)
specs = st.builds(InstanceSpec, workload=workloads, ranks=st.integers(2, 4), restart=restarts)


class Create(msgspec.Struct, frozen=True):
    spec: InstanceSpec


class Delete(msgspec.Struct, frozen=True):
    instance: int


class Tell(msgspec.Struct, frozen=True):
    """A rank event. `back` attempts late."""

    instance: int
    rank: int
    kind: int
    code: int | None
    secondary: bool
    retryable: bool
    back: int


class Pass(msgspec.Struct, frozen=True):
    """Time goes by; `silent` sends no heartbeat."""

    seconds: float
    silent: int | None


class Return(msgspec.Struct, frozen=True):
    """A worker starts again."""

    node: int


class TearDown(msgspec.Struct, frozen=True):
    """The workers end what is not wanted; with `left` one of them does not get rid of a process."""

    left: bool


class Oversee(msgspec.Struct, frozen=True):
    """An operator drains a node, or lets it take instances again."""

    node: int
    drain: bool
    now: bool


class Retry(msgspec.Struct, frozen=True):
    """An operator tries a failed instance again, or moves one that is up."""

    instance: int


Action = Create | Delete | Tell | Pass | Return | TearDown | Oversee | Retry

tells = st.builds(
    Tell,
    instance=st.integers(0, 5),
    rank=st.integers(0, 3),
    kind=st.integers(0, len(KINDS) - 1),
    code=st.sampled_from((None, 0, 0, 1, -9)),
    secondary=st.booleans(),
    retryable=st.booleans(),
    back=st.sampled_from((0, 0, 0, 1)),
)
passes = st.builds(
    Pass, seconds=st.sampled_from((0.0, 0.01, 0.7, 3.0, 20.0, 400.0)), silent=st.sampled_from((None, None, 0, 1, 2))
)
creations = st.builds(Create, specs)
actions = st.one_of(
    creations,
    tells,
    tells,
    tells,
    passes,
    st.builds(Delete, st.integers(0, 5)),
    st.builds(Return, st.integers(0, 2)),
    st.builds(TearDown, st.sampled_from((False, False, False, True))),
    st.builds(Oversee, st.integers(0, 2), st.booleans(), st.booleans()),
    st.builds(Retry, st.integers(0, 5)),
)


def _told(begin: list[Action], then: list[Action]) -> list[Action]:
    return [*begin, *then]


#: Instances to begin with, and what happens to them; short random lists alone would leave most clusters empty.
stories = st.builds(
    _told,
    st.lists(creations, min_size=1, max_size=3),
    st.lists(actions, min_size=10, max_size=40),
)


class World(Cluster):
    """A cluster that checks, at every event, what must hold whatever happens."""

    def __init__(self) -> None:
        super().__init__(*NODES, settings=CLOCKS)
        self.made = 0
        self.boots = dict.fromkeys(NODES, 1)

    def commit(self, event: Event) -> None:
        before = self.state
        if isinstance(event, AttemptStarted):
            old = before.instances[event.instance]
            assert isinstance(old.status, Broken | Ending)
            for item in event.assignments:
                node = before.nodes[item.node]
                assert node.lost is None
                assert node.suspect is None
                assert not isinstance(node.duty, Draining), "nothing new is placed where nothing may be"
            assert old.attempt + 1 == event.attempt
            assert all(isinstance(rank.state, Gone) for rank in old.ranks), "a rank of the last attempt is still there"
        if isinstance(event, InstanceFailed):
            assert event.failure.kind
            assert event.retry_at_ns is None or event.failure.retryable
            restart = before.instances[event.instance].spec.restart
            maximum = restart.maximum if isinstance(restart, RestartOnFailure) else 0
            failures = counted_failures(before.instances[event.instance], event.failure.rank, self.now_ns)
            failures += event.failure.phase is not Phase.PLACING
            assert failures <= maximum + 1
            assert (event.retry_at_ns is None) or failures <= maximum
        if isinstance(event, InstanceReady | InstanceFinished | InstanceFailed | InstanceDeleted):
            assert event.attempt == before.instances[event.instance].attempt
        stale = isinstance(event, RankFact) and rank_of(before, event) is None
        super().commit(event)
        if stale:
            assert msgspec.structs.replace(self.state, sequence=before.sequence) == before
        for node in self.state.nodes.values():
            held = sum(
                rank.node == node.info.node and not isinstance(rank.state, Gone)
                for instance in self.state.instances.values()
                for rank in instance.ranks
            )
            assert held <= node.info.max_ranks

    def pick(self, number: int) -> Instance | None:
        found = list(self.state.instances.values())
        return found[number % len(found)] if found else None

    def act(self, action: Action) -> None:
        match action:
            case Create(spec=spec):
                self.made += 1
                try:
                    self.create(spec, InstanceId(f"i{self.made}"))
                except PlacementError:
                    return
            case Delete(instance=number):
                instance = self.pick(number)
                if instance is not None and not isinstance(instance.status, Deleting):
                    self.delete(instance.id)
            case Tell():
                self.tell(action)
            case Pass(seconds=seconds, silent=silent):
                self.advance(seconds, heard=tuple(n for n in self.alive if silent is None or n != NODES[silent]))
            case Return(node=number):
                self.come_back(NODES[number])
            case TearDown(left=left):
                self.leave_something() if left else self.tear_down()
            case Oversee(node=number, drain=True, now=now):
                self.commit(NodeDraining(node=NODES[number], now=now))
            case Oversee(node=number):
                self.commit(NodeResumed(node=NODES[number]))
            case Retry(instance=number):
                self.retry(number)
        self.settle()

    def leave_something(self) -> None:
        for instance in self.state.instances.values():
            if not wants_ranks(instance):
                for rank in instance.ranks:
                    if not isinstance(rank.state, Gone):
                        self.commit(rank_event(RankGone, instance, rank.rank, left="a process that does not end"))
                        return

    def retry(self, number: int) -> None:
        instance = self.pick(number)
        match instance:
            case Instance(status=Broken()):
                self.commit(InstanceRetried(instance=instance.id, attempt=instance.attempt))
            case Instance(status=Starting() | Running()):
                self.commit(AttemptEnding(instance=instance.id, attempt=instance.attempt, reason="moved"))
            case _:
                return

    def tell(self, tell: Tell) -> None:
        instance = self.pick(tell.instance)
        if instance is None:
            return
        fields: dict[str, object] = {}
        kind = KINDS[tell.kind]
        if kind is RankFailed:
            fields["failure"] = failed("cause", secondary=tell.secondary, retryable=tell.retryable)
        if kind is RankGone:
            fields["exit_code"] = tell.code
        told = msgspec.structs.replace(instance, attempt=instance.attempt - tell.back)
        self.commit(rank_event(kind, told, tell.rank % len(instance.ranks), **fields))

    def come_back(self, node: NodeId) -> None:
        if self.state.nodes[node].lost is not None:
            self.boots[node] += 1
            self.join(node_info(node, boot=self.boots[node]))


@FAST
@given(stories)
def test_whatever_happens_the_decisions_come_to_rest_and_keep_the_rules(story: list[Action]) -> None:
    world = World()
    for action in story:
        world.act(action)


@FAST
@given(stories)
def test_every_attempt_ends_when_time_goes_on(story: list[Action]) -> None:
    """Workers that only tear down what is not wanted: nothing is left half-made, whatever had happened before."""
    world = World()
    for action in story:
        world.act(action)
    for node in NODES:
        world.commit(NodeResumed(node=node))
    begun = world.now_ns
    while not all(isinstance(i.status, Running) or is_over(i) for i in world.state.instances.values()):
        assert world.now_ns < begun + 3 * 3600 * SECOND, world.state.instances
        world.advance(5)
        world.tear_down()
    for instance in world.state.instances.values():
        if isinstance(instance.status, Broken):
            assert instance.status.failure.kind
            assert instance.status.failure.message


@FAST
@given(stories)
def test_wake_never_lies(story: list[Action]) -> None:
    """Before the time that `wake_ns` names nothing is decided; at that time something is."""
    world = World()
    for action in story:
        world.act(action)
    for _ in range(8):
        wake = wake_ns(world.state, world.observed, world.now_ns, world.settings)
        if wake is None:
            assert decide(world.state, world.observed, world.now_ns + 10**18, world.settings) == []
            return
        assert wake > world.now_ns
        nap_ns = SECOND // 20
        if wake - world.now_ns > nap_ns:
            assert decide(world.state, world.observed, wake - 1, world.settings) == []
        world.now_ns = wake
        assert world.settle(), "woken for nothing"


@FAST
@given(specs, st.data())
def test_from_create_to_ready_or_a_named_cause_in_bounded_time(spec: InstanceSpec, data: st.DataObject) -> None:
    """Each rank goes forward as far as it likes and then falls silent; its node lives on."""
    world = World()
    instance = world.create(spec, InstanceId("i"))
    model = isinstance(spec.workload, ModelWorkload)
    way = [kind for kind in KINDS[:5] if model or kind is not RankLoaded]
    reached = [data.draw(st.integers(0, len(way))) for _ in range(spec.ranks)]
    for step, kind in enumerate(way):
        for rank in range(spec.ranks):
            if step < reached[rank]:
                world.advance(data.draw(st.sampled_from((0.0, 0.5))))
                world.report(kind, rank, instance.id)
    limit = sum(getattr(spec.deadlines, name) for name in spec.deadlines.__struct_fields__)
    events: list[Event] = []
    for _ in range(int(limit) // 5 + 1):
        events += world.advance(5)
    status = world.instance(instance.id).status
    if min(reached) == len(way):
        assert isinstance(status, Running)
        return
    assert isinstance(status, Broken)
    (event,) = [event for event in events if isinstance(event, InstanceFailed)]
    assert event.failure.kind == "deadline-passed"
    late = event.failure.rank
    # Prepared and listening are both part of forming: between these two nobody is earlier.
    phases = [1 if count == 2 else count for count in reached]
    assert phases[late] == min(phases), "the rank that the others wait for is to blame"
    assert event.failure.node == instance.ranks[late].node


@FAST
@given(st.permutations(range(4)), st.integers(0, 3), st.lists(st.floats(0, 0.24), min_size=4, max_size=4))
def test_one_primary_failure_is_found_among_echoes(order: list[int], primary: int, gaps: list[float]) -> None:
    world = World()
    world.create(InstanceSpec(workload=GroupWorkload(), ranks=4), InstanceId("i"))
    world.bring_up(InstanceId("i"))
    events: list[Event] = []
    for rank, gap in zip(order, gaps, strict=True):
        events += world.advance(gap)
        failure: Failure = failed("the-cause") if rank == primary else ECHO
        events += world.report(RankFailed, rank, InstanceId("i"), failure=failure)
    events += world.advance(10)
    causes = [event.failure.kind for event in events if isinstance(event, InstanceFailed)]
    assert causes == ["the-cause"]


def test_twenty_instances_on_two_nodes_all_get_up_and_leave_nothing() -> None:
    world = Cluster()
    for node in ("a", "b"):
        world.join(node_info(node, max_ranks=20))
    names = [InstanceId(f"i{number}") for number in range(20)]
    for name in names:
        world.create(InstanceSpec(workload=GroupWorkload(), ranks=2), name)
    ready = [event for name in names for event in world.bring_up(name)]
    assert [event.instance for event in ready if isinstance(event, InstanceFact)] == names
    for name in names:
        world.delete(name)
    world.tear_down()
    assert world.state.instances == {}
    assert boot_of("a") == world.state.nodes[A].info.boot
