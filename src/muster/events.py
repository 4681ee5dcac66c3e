"""The facts that the event log holds, as tagged Structs in one union, and the envelope around them.

Evolution: a tag, once published, keeps its meaning; new fields get defaults; a field is never retyped.
A reader keeps and skips what it does not know: unknown fields are ignored, an unknown tag decodes to `Unknown`.
"""

from __future__ import annotations

from typing import get_args

import msgspec

from muster.layout import Layout
from muster.needs import ModelNeeds
from muster.spec import (
    Address,
    Assignment,
    Backend,
    BootId,
    Failure,
    InstanceId,
    InstanceSpec,
    NodeAddress,
    NodeId,
    NodeInfo,
)


class Fact(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of every event."""


class CoordinatorStarted(Fact, frozen=True, kw_only=True, tag="coordinator.started"):
    """A coordinator opened the log. `epoch` names the log, `boot` this run of the coordinator.

    `term` counts who may write: a standby that takes over has a higher one, and who has a lower one is fenced.
    """

    epoch: str
    boot: BootId
    version: str
    term: int = 1


class NodeJoined(Fact, frozen=True, kw_only=True, tag="node.joined"):
    """A worker said hello. It replaces what an earlier boot of the node said."""

    info: NodeInfo


class NodeLost(Fact, frozen=True, kw_only=True, tag="node.lost"):
    """A boot of a node is over: it left, its lease ran out, or a new boot replaced it."""

    node: NodeId
    boot: BootId
    reason: str


class NodeSuspected(Fact, frozen=True, kw_only=True, tag="node.suspected"):
    """A node is late with its heartbeat. It keeps what it has and is given nothing new."""

    node: NodeId
    boot: BootId
    reason: str


class NodeHeard(Fact, frozen=True, kw_only=True, tag="node.heard"):
    """A suspected node was heard again before its lease ran out."""

    node: NodeId
    boot: BootId


class NodeDraining(Fact, frozen=True, kw_only=True, tag="node.draining"):
    """An operator wants the node empty: it is given nothing new, and what it has is placed again elsewhere.

    Models first finish the requests that they have begun. Scripts are left to their end, unless `now`.
    """

    node: NodeId
    reason: str = ""
    now: bool = False


class NodeSetAside(Fact, frozen=True, kw_only=True, tag="node.set-aside"):
    """A node keeps failing, or has something left that cannot be ended: it is given nothing new.

    Until `until_ns`, when it is tried again; with `None` until it is clean, its worker starts again, or an operator
    says so.
    """

    node: NodeId
    boot: BootId
    reason: str
    remedy: str = ""
    until_ns: int | None = None


class NodeChanged(Fact, frozen=True, kw_only=True, tag="node.changed"):
    """The addresses of a node changed while its worker runs; what is up goes on with those that it was given.

    `gone` are the addresses that it no longer has, `new` those that it has now and had not before. `moved` says of
    those that stayed what carried each before and what does now: another interface, kind, speed or bridge.
    """

    node: NodeId
    boot: BootId
    candidates: tuple[NodeAddress, ...]
    gone: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()


class NodeResumed(Fact, frozen=True, kw_only=True, tag="node.resumed"):
    """A node that was drained or set aside takes instances again; on `trial` the next failure sets it aside again."""

    node: NodeId
    reason: str = ""
    trial: bool = False


class InstanceFact(Fact, frozen=True, kw_only=True):
    """Base of the events about one attempt of one instance."""

    instance: InstanceId
    attempt: int


class InstanceCreated(InstanceFact, frozen=True, kw_only=True, tag="instance.created"):
    """A request was accepted and placed; its first attempt begins."""

    spec: InstanceSpec
    assignments: tuple[Assignment, ...]
    backend: Backend
    key: str = ""
    layout: Layout = Layout()
    needs: ModelNeeds | None = None  #: what was known of the model; `None` for other workloads, and where nothing was


class AdoptedRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that was found ready: what its events said when it came up. One of a script may have ended with 0."""

    rank: int
    node: NodeId
    boot: BootId
    pid: int
    process_started: float
    addresses: tuple[Address, ...] = ()
    steps: str | None = None
    layers: tuple[int, int] | None = None
    sharding: str = "none"
    weights_bytes: int = 0
    exit_code: int | None = None


class AttemptStarted(InstanceFact, frozen=True, kw_only=True, tag="attempt.started"):
    """A further attempt begins, after every process of the one before is gone."""

    assignments: tuple[Assignment, ...]
    backend: Backend
    layout: Layout = Layout()


class AttemptEnding(InstanceFact, frozen=True, kw_only=True, tag="attempt.ending"):
    """The attempt is ended although nothing failed, and the next one follows: an operator wants it elsewhere.

    A model first finishes the requests that it has begun, for `drain_seconds` at most; new ones wait for the next.
    """

    reason: str
    drain_seconds: float = 0.0


class InstanceRetried(InstanceFact, frozen=True, kw_only=True, tag="instance.retried"):
    """An operator wants a failed instance tried again, now and with its whole budget."""


class InstanceAdopted(InstanceFact, frozen=True, kw_only=True, tag="instance.adopted"):
    """An instance that this log did not know was found running on every one of its nodes, and is kept as it is."""

    spec: InstanceSpec
    backend: Backend
    ranks: tuple[AdoptedRank, ...]
    key: str = ""
    layout: Layout = Layout()
    needs: ModelNeeds | None = None


class InstanceCleared(InstanceFact, frozen=True, kw_only=True, tag="instance.cleared"):
    """An instance that this log does not know was found and cannot be kept: its ranks are torn down."""

    reason: str


class InstanceReady(InstanceFact, frozen=True, kw_only=True, tag="instance.ready"):
    """Every rank is ready."""


class InstanceFailed(InstanceFact, frozen=True, kw_only=True, tag="instance.failed"):
    """The attempt is over; its ranks are torn down. The next one starts at `retry_at_ns`, never where `None`."""

    failure: Failure
    retry_at_ns: int | None = None


class InstanceFinished(InstanceFact, frozen=True, kw_only=True, tag="instance.finished"):
    """A script ended with exit code 0 on every rank."""


class InstanceDeleting(InstanceFact, frozen=True, kw_only=True, tag="instance.deleting"):
    """Somebody asked for the end of the instance; its ranks are torn down, a model's after `drain_seconds` at most.

    Until then it finishes the requests that it has begun. A second one may cut that short.
    """

    reason: str = ""
    drain_seconds: float = 0.0


class InstanceDeleted(InstanceFact, frozen=True, kw_only=True, tag="instance.deleted"):
    """Every process of the instance is gone, and so is the instance."""


class RankFact(InstanceFact, frozen=True, kw_only=True):
    """Base of the events about one rank. `boot` is the boot of the node that reports it."""

    rank: int
    node: NodeId
    boot: BootId


class RankPrepared(RankFact, frozen=True, kw_only=True, tag="rank.prepared"):
    """A runner took the rank, looked at its workload, and its ports are reserved.

    `steps` is where rank 0 hands out the order of work ("host:port"), on models over two or more ranks.
    `process_started` is the runner's start time in seconds since 1970: with the pid it names the process for good.
    """

    pid: int
    process_started: float
    addresses: tuple[Address, ...] = ()
    steps: str | None = None


class RankFetched(RankFact, frozen=True, kw_only=True, tag="rank.fetched"):
    """The rank's runner brought files of the model to the node. `source` is "hub", or "node NAME"."""

    source: str
    files: int
    bytes: int
    seconds: float


class RankListening(RankFact, frozen=True, kw_only=True, tag="rank.listening"):
    """The rank's own port is in LISTEN: its neighbour may dial it."""


class RankConnected(RankFact, frozen=True, kw_only=True, tag="rank.connected"):
    """The group is formed and its members are verified."""

    seconds: float


class RankLoaded(RankFact, frozen=True, kw_only=True, tag="rank.loaded"):
    """The rank holds its shard. `layers` is the range [first, end) of the model's layers that it runs."""

    layers: tuple[int, int] | None = None
    sharding: str = "none"
    weights_bytes: int = 0
    seconds: float = 0.0


class RankReady(RankFact, frozen=True, kw_only=True, tag="rank.ready"):
    """The rank is warm and waits for work; for a script: it runs."""


class RankFailed(RankFact, frozen=True, kw_only=True, tag="rank.failed"):
    """The rank cannot go on."""

    failure: Failure


class RankGone(RankFact, frozen=True, kw_only=True, tag="rank.gone"):
    """The rank's process is gone for certain, its files and ports with it. `exit_code` < 0 is minus the signal.

    `left` names what could not be verified to be gone, such as a process that the kernel does not end: the node is
    set aside for it, with `remedy`, and the instance goes on elsewhere.
    """

    exit_code: int | None = None
    left: str = ""
    remedy: str = ""


Event = (
    CoordinatorStarted
    | NodeJoined
    | NodeSuspected
    | NodeHeard
    | NodeLost
    | NodeDraining
    | NodeSetAside
    | NodeChanged
    | NodeResumed
    | InstanceCreated
    | AttemptStarted
    | AttemptEnding
    | InstanceRetried
    | InstanceAdopted
    | InstanceCleared
    | InstanceReady
    | InstanceFailed
    | InstanceFinished
    | InstanceDeleting
    | InstanceDeleted
    | RankPrepared
    | RankFetched
    | RankListening
    | RankConnected
    | RankLoaded
    | RankReady
    | RankFailed
    | RankGone
)

EVENT_TYPES: tuple[type[Fact], ...] = get_args(Event)


class Unknown(msgspec.Struct, frozen=True):
    """An event of a newer peer. Its bytes are kept; it changes nothing here."""

    kind: str


class ReportId(msgspec.Struct, frozen=True, kw_only=True):
    """Which report of a worker an event came in; `n` counts up within a boot, so that each is applied once.

    `happened_ns` is when it happened on the coordinator's clock, as far as the node's clock could be compared with
    it; 0 where it could not.
    """

    node: NodeId
    boot: BootId
    n: int
    happened_ns: int = 0


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """An event with its place in the log.

    `sequence` starts at 1 and has no gaps. `time_ns` is the coordinator's wall clock when it was logged.
    `cause` is the sequence of the event that led to it, 0 for an outside cause. `body` is the event as msgpack.
    """

    sequence: int
    time_ns: int
    origin: NodeId
    cause: int
    body: msgspec.Raw
    report: ReportId | None = None

    def event(self) -> Event | Unknown:
        """Decode the body. Raises `msgspec.DecodeError` if it is no event at all."""
        return decode_event(self.body)


class _Tagged(msgspec.Struct):
    type: str


_encoder = msgspec.msgpack.Encoder()
_event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
_tag_decoder = msgspec.msgpack.Decoder(_Tagged)
_envelope_decoder = msgspec.msgpack.Decoder(Envelope)
_KNOWN_TAGS = frozenset(str(kind.__struct_config__.tag) for kind in EVENT_TYPES)


def kind_of(event: Event | Unknown) -> str:
    """The event's tag, for example "rank.ready"."""
    return event.kind if isinstance(event, Unknown) else str(type(event).__struct_config__.tag)


def encode_event(event: Event) -> msgspec.Raw:
    """The event as msgpack bytes, ready for an envelope's body."""
    return msgspec.Raw(_encoder.encode(event))


def decode_event(body: bytes | msgspec.Raw) -> Event | Unknown:
    """Decode an event; a tag that this version does not know gives `Unknown`.

    Raises:
        msgspec.DecodeError: the bytes are no event, or a known event with a field of the wrong type.
    """
    try:
        return _event_decoder.decode(body)
    except msgspec.ValidationError:
        tag = _tag_decoder.decode(body).type
        if tag in _KNOWN_TAGS:
            raise
        return Unknown(kind=tag)


def encode_envelope(envelope: Envelope) -> bytes:
    """The envelope as msgpack bytes, as the events socket and the log carry it."""
    return _encoder.encode(envelope)


def decode_envelope(payload: bytes) -> Envelope:
    """Inverse of `encode_envelope`. Raises `msgspec.DecodeError` on anything else."""
    return _envelope_decoder.decode(payload)
