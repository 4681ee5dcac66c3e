"""The state of the cluster: what the log says, as `muster.fold` folds it. Pure vocabulary, and questions about it."""

from __future__ import annotations

import msgspec

from muster.events import (
    RankFact,
    RankGone,
    ReportId,
)
from muster.layout import Layout
from muster.needs import ModelNeeds
from muster.spec import (
    Address,
    Backend,
    Failure,
    InstanceId,
    InstanceSpec,
    ModelWorkload,
    NodeId,
    NodeInfo,
    Phase,
    ScriptWorkload,
)

#: After so long as ready, earlier failures are forgiven: a minute, in ns.
SETTLED_NS = 60 * 1_000_000_000
#: Failures that are blamed on a node count together when they are so close: ten minutes, in ns.
FAULTS_NS = 600 * 1_000_000_000


#: Kinds of failures that another node might not have had.
_NODE_FAULTS = frozenset(
    {
        "deadline-passed",
        "internal",
        "node-lost",
        "port-unavailable",
        "rank-exited",
        "rank-killed",
        "scope-unavailable",
        "step-timeout",
    }
)


# --- ranks --------------------------------------------------------------------------------------------------


class Assigned(msgspec.Struct, frozen=True, tag="assigned"):
    """Given to a node; its worker has not reported yet."""


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """A runner holds the rank and its ports."""


class Listening(msgspec.Struct, frozen=True, tag="listening"):
    """Waits for its neighbour to dial."""


class Connected(msgspec.Struct, frozen=True, tag="connected"):
    """Member of a verified group."""


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """Holds its shard."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Warm; a script: running."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Cannot go on; its process may still be there."""

    failure: Failure


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """Its process is gone for certain. `failure` is why, where it was not asked to go."""

    exit_code: int | None = None
    failure: Failure | None = None


RankState = Assigned | Prepared | Listening | Connected | Loaded | Ready | Failed | Gone


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of the current attempt. `since_ns` is when it entered its state."""

    rank: int
    node: NodeId
    boot: str
    state: RankState
    since_ns: int
    pid: int = 0
    process_started: float = 0.0
    addresses: tuple[Address, ...] = ()
    steps: str | None = None
    layers: tuple[int, int] | None = None
    sharding: str = "none"
    weights_bytes: int = 0


# --- instances ----------------------------------------------------------------------------------------------


class Starting(msgspec.Struct, frozen=True, tag="starting"):
    """An attempt is under way."""


class Running(msgspec.Struct, frozen=True, tag="ready"):
    """Every rank is ready."""


class Broken(msgspec.Struct, frozen=True, tag="failed"):
    """The attempt failed. The next one starts at `retry_at_ns`; never where that is `None`."""

    failure: Failure
    retry_at_ns: int | None = None


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """A script ended well on every rank."""


class Ending(msgspec.Struct, frozen=True, tag="ending"):
    """The attempt is ended although nothing failed, and the next one follows when its processes are gone."""

    reason: str
    drain_seconds: float = 0.0


class Deleting(msgspec.Struct, frozen=True, tag="deleting"):
    """Its ranks are being torn down, and then it is gone. Up to `drain_seconds` it finishes what it has begun."""

    drain_seconds: float = 0.0


InstanceStatus = Starting | Running | Ending | Broken | Finished | Deleting


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """An instance and its current attempt."""

    id: InstanceId
    spec: InstanceSpec
    created_ns: int
    attempt: int
    backend: Backend
    status: InstanceStatus
    since_ns: int
    ranks: tuple[Rank, ...]
    created_by: int  #: sequence of its `InstanceCreated`
    caused_by: int  #: sequence of the event that began the current attempt
    key: str = ""  #: the client's own name for its request, so that asking twice creates once
    failures: tuple[Failure, ...] = ()
    failed_attempts: int = 0
    blamed: dict[int, int] = {}  #: failed attempts by the rank that they are blamed on; -1 where it was none
    layout: Layout = Layout()  #: of the current attempt
    needs: ModelNeeds | None = None


class Serving(msgspec.Struct, frozen=True, tag="serving"):
    """Takes instances."""


class Draining(msgspec.Struct, frozen=True, tag="draining"):
    """An operator wants it empty; `now` also of scripts."""

    reason: str = ""
    now: bool = False


class Aside(msgspec.Struct, frozen=True, tag="aside"):
    """Failed too often, or has something left that cannot be ended; tried again at `until_ns`, if that is a time."""

    reason: str
    remedy: str = ""
    until_ns: int | None = None

    @property
    def on_trial(self) -> bool:
        """Whether only failures speak against the node, and nothing is left on it."""
        return self.until_ns is not None


NodeDuty = Serving | Draining | Aside


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node as it last said hello. `lost` is the reason why it is not there, `None` while it is.

    `suspect` is why it may be about to get lost, `duty` whether it takes instances. `faults_ns` are the times of the
    latest failures that are blamed on it; `asides` is how often it was set aside since it last behaved, and
    `tried_ns` when it was last tried again. `gone_ns` is when each address went that it had and has no more.
    """

    info: NodeInfo
    since_ns: int
    lost: str | None = None
    suspect: str | None = None
    duty: NodeDuty = Serving()
    faults_ns: tuple[int, ...] = ()
    asides: int = 0
    tried_ns: int = 0
    gone_ns: dict[str, int] = {}


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the log says, up to and including `sequence`.

    `reports` is the last report of each node that was applied. Treat the dicts as frozen: `apply` replaces them.
    """

    sequence: int = 0
    epoch: str = ""
    term: int = 1
    coordinator_boot: str = ""
    nodes: dict[NodeId, Node] = {}
    instances: dict[InstanceId, Instance] = {}
    reports: dict[NodeId, ReportId] = {}


# --- questions that several layers ask ----------------------------------------------------------------------


def status_name(status: InstanceStatus | RankState) -> str:
    """The state's name as people see it: its tag."""
    return str(type(status).__struct_config__.tag)


def rank_of(state: State, fact: RankFact) -> Rank | None:
    """The rank that a rank event speaks of, or `None` if the event is stale.

    Stale is an event of an instance that is not there, of another attempt, of another boot of the node, of a rank
    that is gone already, or one that would bring a failed rank back.
    """
    instance = state.instances.get(fact.instance)
    if instance is None or instance.attempt != fact.attempt or not 0 <= fact.rank < len(instance.ranks):
        return None
    rank = instance.ranks[fact.rank]
    if rank.node != fact.node or rank.boot != fact.boot or isinstance(rank.state, Gone):
        return None
    if isinstance(rank.state, Failed) and not isinstance(fact, RankGone):
        return None
    return rank


def all_gone(instance: Instance) -> bool:
    """Whether no process of the instance is left anywhere."""
    return all(isinstance(rank.state, Gone) for rank in instance.ranks)


def wants_ranks(instance: Instance) -> bool:
    """Whether the instance's ranks should be alive (else they are torn down)."""
    return isinstance(instance.status, Starting | Running)


def phase_of(instance: Instance, rank: Rank) -> Phase:
    """What a rank is busy with, given the last thing that it reported."""
    match rank.state:
        case Assigned():
            return Phase.PREPARING
        case Prepared() | Listening():
            return Phase.FORMING
        case Connected():
            return Phase.LOADING if isinstance(instance.spec.workload, ModelWorkload) else Phase.WARMING
        case Loaded():
            return Phase.WARMING
        case Ready():
            return Phase.RUNNING
        case Failed() | Gone():
            return Phase.STOPPING


def is_settled(instance: Instance, now_ns: int) -> bool:
    """Whether it has been ready for `SETTLED_NS`: then its earlier failures are forgiven."""
    return isinstance(instance.status, Running) and now_ns - instance.since_ns >= SETTLED_NS


def counted_failures(instance: Instance, rank: int, now_ns: int) -> int:
    """Failed attempts that count against the rank's budget of the restart policy; rank -1 is nobody's fault."""
    return 0 if is_settled(instance, now_ns) else instance.blamed.get(rank, 0)


def blames_node(failure: Failure) -> bool:
    """Whether the node has a part in the failure, as opposed to the workload, the request, or another rank."""
    return bool(failure.node) and failure.retryable and not failure.secondary and failure.kind in _NODE_FAULTS


def takes_instances(node: Node) -> bool:
    """Whether the node may be given something new."""
    return node.lost is None and node.suspect is None and isinstance(node.duty, Serving)


def reserved_bytes(instance: Instance, rank: int) -> int:
    """What a rank was promised: as it was laid out, else what the spec says of every rank."""
    if rank < len(instance.layout.ranks):
        return instance.layout.ranks[rank].memory_bytes
    return instance.spec.memory_bytes or 0


def is_script(instance: Instance) -> bool:
    """Whether the instance runs a script, whose ranks may end by themselves."""
    return isinstance(instance.spec.workload, ScriptWorkload)


def drain_seconds(instance: Instance) -> float:
    """How long the instance may finish what it has begun: only a model that is ready has begun anything."""
    serves = isinstance(instance.spec.workload, ModelWorkload) and isinstance(
        instance.status, Running | Deleting | Ending
    )
    return instance.spec.deadlines.drain_seconds if serves else 0.0


# --- copies with one thing replaced ---------------------------------------------------------------------------


def with_rank(instance: Instance, rank: Rank) -> Instance:
    """The instance with this rank in the place of the one of the same number."""
    ranks = (*instance.ranks[: rank.rank], rank, *instance.ranks[rank.rank + 1 :])
    return msgspec.structs.replace(instance, ranks=ranks)


def with_instance(state: State, instance: Instance) -> State:
    """The state with this instance in the place of the one of the same id."""
    return msgspec.structs.replace(state, instances={**state.instances, instance.id: instance})
