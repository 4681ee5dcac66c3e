"""What an event log is, and the rules that every implementation shares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from muster.errors import LogError, RequestError
from muster.events import (
    Envelope,
    InstanceFact,
    InstanceFailed,
    NodeChanged,
    NodeDraining,
    NodeHeard,
    NodeJoined,
    NodeLost,
    NodeResumed,
    NodeSetAside,
    NodeSuspected,
    RankFact,
    Unknown,
    kind_of,
)
from muster.fold import apply
from muster.protocol import Query
from muster.state import State

#: How many snapshots a log keeps: the newest, and one to fall back on where the newest cannot be read.
SNAPSHOTS_KEPT = 2

#: How many events one `prune` deletes at most, so that it never holds an event loop up for long.
PRUNE_BATCH_EVENTS = 10_000

#: How many kinds one query may name; SQLite limits the depth of an expression to 1,000.
QUERY_KINDS_MAXIMUM = 100

#: Integers of the log are signed and 64 bits wide, as SQLite's are.
INTEGER_MAXIMUM = 2**63 - 1


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """What a log may forget. Events behind a snapshot go when they are too old, or when the log is too large.

    `max_bytes` counts events and snapshots; on disk, SQLite's own write-ahead file of at most a few MiB adds to it.
    """

    max_age_seconds: float = 30 * 86_400.0
    max_bytes: int = 64 * 2**20
    keep_events: int = 1_000  #: the newest events that stay whatever their age, for whoever asks what happened
    snapshot_every_events: int = 2_000

    def __post_init__(self) -> None:
        if not 0 <= self.max_age_seconds <= 1e9:
            raise ValueError(f"retention.max_age_seconds is {self.max_age_seconds}; it must be between 0 and 1e9")
        for name in ("max_bytes", "keep_events"):
            value: int = getattr(self, name)
            if value < 0:
                raise ValueError(f"retention.{name} is {value}; it must not be negative")
        if self.snapshot_every_events < 1:
            raise ValueError(f"retention.snapshot_every_events is {self.snapshot_every_events}; it must be at least 1")


class EventLog(Protocol):
    """Every event in sequence, without a gap, with snapshots of the state to start from.

    Used from one thread. Calls block for as long as the storage takes.
    """

    @property
    def epoch(self) -> str:
        """Random name of this log, made with it: a subscriber with another epoch followed another log."""
        ...

    @property
    def head(self) -> int:
        """The last sequence that was appended; 0 before the first."""
        ...

    @property
    def oldest(self) -> int:
        """The first sequence that is still there; `head + 1` where there is none."""
        ...

    @property
    def bytes_used(self) -> int:
        """Bytes that the log takes where it is stored."""
        ...

    def append(self, envelopes: Sequence[Envelope]) -> None:
        """Add all of them or none. They are safe when this returns.

        Raises:
            ValueError: they do not continue the sequence, or a body is no event; nothing was added.
            LogError: they could not be stored; nothing was added, and a later append may succeed.
        """
        ...

    def read(self, after: int, limit: int) -> list[Envelope]:
        """At most `limit` envelopes after the sequence `after`; where `after + 1 < oldest`, they begin at `oldest`.

        Raises:
            LogError: the storage cannot be read.
        """
        ...

    def query(self, query: Query) -> list[Envelope]:
        """The envelopes that match, in sequence. `query.until_ns` itself is excluded, `query.since_ns` included.

        Raises:
            RequestError: the query names more than `QUERY_KINDS_MAXIMUM` kinds.
            LogError: the storage cannot be read.
        """
        ...

    def load(self) -> State:
        """The state at `head`: the newest readable snapshot, and the events after it folded in.

        Raises:
            LogError: an event is corrupt, or missing; the message names its sequence.
        """
        ...

    def should_snapshot(self, state: State) -> bool:
        """Whether so many events came after the newest snapshot that `state` should be the next."""
        ...

    def snapshot(self, state: State) -> None:
        """Keep `state` to load from, and forget all but the newest `SNAPSHOTS_KEPT`.

        Raises:
            ValueError: `state` is ahead of the log.
            LogError: it could not be stored; the snapshots before it are still there.
        """
        ...

    def prune(self, now_ns: int) -> int:
        """Delete the oldest events that the retention lets go, at most `PRUNE_BATCH_EVENTS`; says how many.

        An event goes only if every kept snapshot holds it already.

        Raises:
            LogError: the storage failed; nothing was deleted.
        """
        ...

    def replace(self, epoch: str, state: State) -> str:
        """Begin again as another log's copy: its `epoch`, and `state`, which holds everything up to its sequence.

        Afterwards there is no event; the next one to append follows `state.sequence`. Where the storage outlives its
        process, what was in the log stays beside it. Returns where, as text for people; "" where nothing is kept.

        Raises:
            LogError: the storage failed; the log is as it was before.
        """
        ...

    def close(self) -> None:
        """Release the storage. Harmless when called again."""
        ...


class Index(msgspec.Struct, frozen=True):
    """What a log can be searched for. `None` where the event has no such thing."""

    kind: str
    instance: str | None = None
    attempt: int | None = None
    rank: int | None = None
    node: str | None = None


def index_of(envelope: Envelope) -> Index:
    """What the envelope is found by. A failed instance is found by the rank and node of its cause, too.

    Raises:
        ValueError: the body is no event.
    """
    try:
        event = envelope.event()
    except msgspec.DecodeError as error:
        raise ValueError(f"the body of event {envelope.sequence} is no event: {error}") from error
    match event:
        case Unknown(kind=kind):
            return _index_of_unknown(kind, envelope.body)
        case RankFact():
            return _index(kind_of(event), event.instance, event.attempt, event.rank, event.node)
        case InstanceFailed(failure=failure):
            rank = failure.rank if failure.rank >= 0 else None
            return _index(kind_of(event), event.instance, event.attempt, rank, failure.node or None)
        case InstanceFact():
            return _index(kind_of(event), event.instance, event.attempt)
        case NodeJoined(info=info):
            return _index(kind_of(event), node=info.node)
        case NodeLost(node=node) | NodeSuspected(node=node) | NodeHeard(node=node):
            return _index(kind_of(event), node=node)
        case NodeDraining(node=node) | NodeSetAside(node=node) | NodeResumed(node=node) | NodeChanged(node=node):
            return _index(kind_of(event), node=node)
        case _:
            return _index(kind_of(event))


def _index_of_unknown(kind: str, body: msgspec.Raw) -> Index:
    """Newer events keep our names of fields, so they can be found, although they cannot be read."""
    try:
        fields: object = msgspec.msgpack.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return Index(kind)
    if not isinstance(fields, dict):
        return Index(kind)
    return _index(kind, *(fields.get(name) for name in ("instance", "attempt", "rank", "node")))


def _index(
    kind: str, instance: object = None, attempt: object = None, rank: object = None, node: object = None
) -> Index:
    return Index(
        kind,
        instance if isinstance(instance, str) else None,
        attempt if isinstance(attempt, int) and abs(attempt) <= INTEGER_MAXIMUM else None,
        rank if isinstance(rank, int) and abs(rank) <= INTEGER_MAXIMUM else None,
        node if isinstance(node, str) else None,
    )


def split_kinds(query: Query) -> tuple[list[str], list[str]]:
    """The query's whole tags, and its prefixes, which end in a full stop ("rank.").

    Raises:
        RequestError: there are more than `QUERY_KINDS_MAXIMUM`.
    """
    kinds = dict.fromkeys(query.kinds)
    if len(kinds) > QUERY_KINDS_MAXIMUM:
        raise RequestError(
            f"the query names {len(kinds)} kinds of events",
            remedy=f"Name at most {QUERY_KINDS_MAXIMUM}, or a prefix such as rank. with a full stop at its end.",
        )
    return [kind for kind in kinds if not kind.endswith(".")], [kind for kind in kinds if kind.endswith(".")]


def check_sequence(head: int, envelopes: Sequence[Envelope]) -> None:
    """Raise `ValueError` unless the envelopes continue the log at `head` and their numbers fit it."""
    for offset, envelope in enumerate(envelopes, start=1):
        if envelope.sequence != head + offset:
            raise ValueError(f"event {envelope.sequence} does not follow {head + offset - 1}")
        if not 0 <= envelope.cause <= INTEGER_MAXIMUM or not 0 <= envelope.time_ns <= INTEGER_MAXIMUM:
            raise ValueError(
                f"event {envelope.sequence} has cause {envelope.cause} and time_ns {envelope.time_ns};"
                " both must be between 0 and 2**63 - 1"
            )


def fold(state: State, envelopes: Iterable[Envelope]) -> State:
    """Fold logged events into a state, naming the one that does not fold.

    Raises:
        LogError: an event cannot be decoded, or does not follow the one before it.
    """
    for envelope in envelopes:
        try:
            state = apply(state, envelope)
        except (ValueError, msgspec.DecodeError) as error:
            raise LogError(
                f"event {envelope.sequence} of the event log cannot be applied: {error}",
                remedy="The log is damaged: restore it from a backup, or move it away to start with an empty cluster.",
            ) from error
    return state
