"""An event log that ends with its process: for tests, and for clusters that need no memory of themselves."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from itertools import islice

import msgspec

from muster.errors import LogError
from muster.eventlog.api import (
    PRUNE_BATCH_EVENTS,
    SNAPSHOTS_KEPT,
    Index,
    Retention,
    check_sequence,
    fold,
    index_of,
    split_kinds,
)
from muster.events import Envelope, encode_envelope
from muster.protocol import Query
from muster.state import State


class _Entry(msgspec.Struct, frozen=True):
    envelope: Envelope
    index: Index
    size_bytes: int


class MemoryEventLog:
    """`muster.eventlog.EventLog` in memory. `bytes_used` counts events and snapshots as msgpack."""

    def __init__(self, *, retention: Retention | None = None) -> None:
        self._retention = retention or Retention()
        self._epoch = secrets.token_hex(8)
        self._entries: list[_Entry] = []
        self._snapshots: list[bytes] = []
        self._snapshot_sequences: list[int] = []
        self._head = 0
        self._events_bytes = 0
        self._closed = False

    @property
    def epoch(self) -> str:
        return self._epoch

    @property
    def head(self) -> int:
        return self._head

    @property
    def oldest(self) -> int:
        return self._head + 1 - len(self._entries)

    @property
    def bytes_used(self) -> int:
        return self._events_bytes + sum(map(len, self._snapshots))

    def append(self, envelopes: Sequence[Envelope]) -> None:
        self._check_open()
        check_sequence(self._head, envelopes)
        entries = [_Entry(item, index_of(item), len(encode_envelope(item))) for item in envelopes]
        self._entries += entries
        self._head += len(entries)
        self._events_bytes += sum(entry.size_bytes for entry in entries)

    def read(self, after: int, limit: int) -> list[Envelope]:
        self._check_open()
        start = max(0, after + 1 - self.oldest)
        return [entry.envelope for entry in self._entries[start : start + max(0, limit)]]

    def query(self, query: Query) -> list[Envelope]:
        self._check_open()
        tags, prefixes = split_kinds(query)
        entries = reversed(self._entries) if query.newest else iter(self._entries)
        matching = (entry.envelope for entry in entries if _matches(query, tags, tuple(prefixes), entry))
        found = list(islice(matching, min(max(0, query.limit), len(self._entries))))
        return found[::-1] if query.newest else found

    def load(self) -> State:
        self._check_open()
        if not self._snapshots:
            return fold(State(), self.read(0, len(self._entries)))
        state = msgspec.msgpack.decode(self._snapshots[-1], type=State)
        return fold(state, self.read(state.sequence, len(self._entries)))

    def should_snapshot(self, state: State) -> bool:
        newest = self._snapshot_sequences[-1] if self._snapshot_sequences else 0
        return state.sequence - newest >= self._retention.snapshot_every_events

    def snapshot(self, state: State) -> None:
        self._check_open()
        if state.sequence > self._head:
            raise ValueError(f"the state is at {state.sequence}, the log only at {self._head}")
        kept = dict(zip(self._snapshot_sequences, self._snapshots, strict=True))
        kept[state.sequence] = msgspec.msgpack.encode(state)
        self._snapshot_sequences = sorted(kept)[-SNAPSHOTS_KEPT:]
        self._snapshots = [kept[sequence] for sequence in self._snapshot_sequences]

    def prune(self, now_ns: int) -> int:
        self._check_open()
        floor = min(self._snapshot_sequences, default=0)
        last = min(floor, self._head - self._retention.keep_events, self.oldest - 1 + PRUNE_BATCH_EVENTS)
        cutoff_ns = now_ns - round(self._retention.max_age_seconds * 1e9)
        count, freed_bytes = 0, 0
        surplus_bytes = self.bytes_used - self._retention.max_bytes
        for entry in self._entries[: max(0, last + 1 - self.oldest)]:
            if entry.envelope.time_ns >= cutoff_ns and freed_bytes >= surplus_bytes:
                break
            count += 1
            freed_bytes += entry.size_bytes
        del self._entries[:count]
        self._events_bytes -= freed_bytes
        return count

    def replace(self, epoch: str, state: State) -> str:
        self._check_open()
        self._epoch = epoch
        self._entries.clear()
        self._events_bytes = 0
        self._head = state.sequence
        self._snapshots.clear()
        self._snapshot_sequences.clear()
        if state.sequence:
            self.snapshot(state)
        return ""

    def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise LogError("the event log is closed", remedy="Open it again.")


def _matches(query: Query, tags: list[str], prefixes: tuple[str, ...], entry: _Entry) -> bool:
    envelope, index = entry.envelope, entry.index
    return (
        envelope.sequence > query.after
        and (query.instance is None or index.instance == query.instance)
        and (query.node is None or index.node == query.node)
        and (not query.kinds or index.kind in tags or index.kind.startswith(prefixes))
        and envelope.time_ns >= query.since_ns
        and (query.until_ns is None or envelope.time_ns < query.until_ns)
    )
