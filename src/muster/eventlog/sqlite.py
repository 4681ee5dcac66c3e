"""The event log in one SQLite file, which anybody may query while the coordinator runs."""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from muster.errors import LogError
from muster.eventlog.api import (
    INTEGER_MAXIMUM,
    PRUNE_BATCH_EVENTS,
    SNAPSHOTS_KEPT,
    Retention,
    check_sequence,
    fold,
    index_of,
    split_kinds,
)
from muster.eventlog.layout import APPLICATION_ID, CREATE, SCHEMA
from muster.eventlog.opening import lock_log, log_error, open_database, unused
from muster.events import Envelope, ReportId
from muster.protocol import Query
from muster.spec import NodeId
from muster.state import State

_COLUMNS = "sequence, time_ns, origin, cause, body, report"
_Row = tuple[int, int, str, int, bytes, bytes | None]

_report_decoder = msgspec.msgpack.Decoder(ReportId)
_state_decoder = msgspec.msgpack.Decoder(State)


class SqliteEventLog:
    """`muster.eventlog.EventLog` in the SQLite file `path`, in WAL mode, owned by one process.

    It is meant for the thread of an event loop, without a thread of its own: an append of one event takes well
    under a millisecond, and a checkpoint, once in about a thousand appends, as long as the disk takes to sync.

    With `synchronous="NORMAL"` what `append` accepted survives the death of this process by any means; with "FULL"
    the loss of power too, for the price of a sync with each append.

    Raises:
        LogError: another process has the log, the path is no event log, it is one of a newer muster, or the file
            system refuses.
    """

    def __init__(
        self,
        path: Path,
        *,
        retention: Retention | None = None,
        synchronous: Literal["NORMAL", "FULL"] = "NORMAL",
    ) -> None:
        self._path = path
        self._retention = retention or Retention()
        self._connection: sqlite3.Connection | None = None
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise LogError(
                f"the directory {path.parent} of the event log cannot be made: {error.strerror}",
                remedy="Choose another state directory, or make this one writable for the coordinator's user.",
            ) from error
        self._lock = lock_log(path)
        try:
            self._connection = open_database(path, synchronous)
            with self._guard("opened"):
                self._epoch = self._prepare(self._connection)
                self._head = self._stored_head()
        except BaseException:
            self.close()
            raise

    @property
    def epoch(self) -> str:
        return self._epoch

    @property
    def head(self) -> int:
        return self._head

    @property
    def oldest(self) -> int:
        with self._guard("read"):
            return self._integer("SELECT min(sequence) FROM events", self._head + 1)

    @property
    def bytes_used(self) -> int:
        """Bytes on disk: the database and its write-ahead file."""
        total = 0
        for path in (self._path, self._path.with_name(self._path.name + "-wal")):
            try:
                total += path.stat().st_size
            except OSError:
                continue  # a write-ahead file need not exist
        return total

    def append(self, envelopes: Sequence[Envelope]) -> None:
        check_sequence(self._head, envelopes)
        rows = [_row_of(envelope) for envelope in envelopes]
        if not rows:
            return
        with self._guard("written"), self._transaction() as connection:
            connection.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        self._head += len(rows)

    def read(self, after: int, limit: int) -> list[Envelope]:
        return self._select("sequence > ?", [_clamp(after)], limit, newest=False)

    def query(self, query: Query) -> list[Envelope]:
        tags, prefixes = split_kinds(query)
        terms: list[str] = ["sequence > ?", "time_ns >= ?"]
        values: list[int | str] = [_clamp(query.after), _clamp(query.since_ns)]
        for column, value in (("instance", query.instance), ("node", query.node)):
            if value is not None:
                terms.append(f"{column} = ?")
                values.append(value)
        if query.until_ns is not None:
            terms.append("time_ns < ?")
            values.append(_clamp(query.until_ns))
        if query.kinds:
            kinds = [f"kind IN ({', '.join('?' * len(tags))})", *("kind >= ? AND kind < ?" for _ in prefixes)]
            terms.append(f"({' OR '.join(kinds)})")
            values += tags
            for prefix in prefixes:  # "/" is the character after "."
                values += [prefix, prefix[:-1] + "/"]
        return self._select(" AND ".join(terms), values, query.limit, newest=query.newest)

    def load(self) -> State:
        state = self._newest_snapshot()
        while batch := self.read(state.sequence, PRUNE_BATCH_EVENTS):
            state = fold(state, batch)
        return state

    def should_snapshot(self, state: State) -> bool:
        with self._guard("read"):
            newest = self._integer("SELECT max(sequence) FROM snapshots", 0)
        return state.sequence - newest >= self._retention.snapshot_every_events

    def snapshot(self, state: State) -> None:
        if state.sequence > self._head:
            raise ValueError(f"the state is at {state.sequence}, the log only at {self._head}")
        with self._guard("written"), self._transaction() as connection:
            encoded = msgspec.msgpack.encode(state)
            connection.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?)", (state.sequence, encoded))
            connection.execute(
                "DELETE FROM snapshots WHERE sequence NOT IN"
                " (SELECT sequence FROM snapshots ORDER BY sequence DESC LIMIT ?)",
                (SNAPSHOTS_KEPT,),
            )

    def prune(self, now_ns: int) -> int:
        oldest = self.oldest
        with self._guard("pruned"):
            floor = self._integer("SELECT min(sequence) FROM snapshots", 0)
            last = min(floor, self._head - self._retention.keep_events, oldest - 1 + PRUNE_BATCH_EVENTS)
            last = min(last, max(self._last_too_old(now_ns), oldest - 1 + self._surplus_events(oldest)))
            if last < oldest:
                return 0
            with self._transaction() as connection:
                connection.execute("DELETE FROM events WHERE sequence <= ?", (last,))
            # It gives back one page for each step, and only `executescript` steps to the end.
            self._open_connection().executescript("PRAGMA incremental_vacuum")
        return last + 1 - oldest

    def replace(self, epoch: str, state: State) -> str:
        """Begin again, in one transaction; the events that were here are first copied to a database beside this one."""
        aside = self._copy_aside() if self._head else None
        try:
            with self._guard("written"), self._transaction() as connection:
                for table in ("events", "snapshots"):
                    connection.execute(f"DELETE FROM {table}")
                connection.execute("UPDATE meta SET value = ? WHERE name = 'epoch'", (epoch,))
                if state.sequence:
                    row = (state.sequence, msgspec.msgpack.encode(state))
                    connection.execute("INSERT INTO snapshots VALUES (?, ?)", row)
        except BaseException:
            if aside is not None:
                aside.unlink(missing_ok=True)
            raise
        self._epoch, self._head = epoch, state.sequence
        with self._guard("pruned"):
            self._open_connection().executescript("PRAGMA incremental_vacuum")
        return "" if aside is None else str(aside)

    def _copy_aside(self) -> Path:
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        aside = unused(self._path.with_name(f"{self._path.name}.fenced-{moment}"))
        try:
            aside.touch(mode=0o600)  # SQLite writes into an empty file as it is
            self._open_connection().execute("VACUUM INTO ?", (str(aside),))
        except BaseException as error:
            aside.unlink(missing_ok=True)
            if isinstance(error, sqlite3.Error | OSError):
                raise log_error(self._path, "copied aside", error) from error
            raise
        return aside

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._lock.release()

    # --- inside -------------------------------------------------------------------------------------------------

    def _prepare(self, connection: sqlite3.Connection) -> str:
        """Make the tables of a new log, or check those of an old one; returns its epoch."""
        if self._integer("SELECT count(*) FROM sqlite_master", 0) == 0:
            epoch = secrets.token_hex(8)
            with self._transaction():
                for statement in CREATE:
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute("INSERT INTO meta VALUES ('schema', ?), ('epoch', ?)", (SCHEMA, epoch))
            return epoch
        if self._integer("PRAGMA application_id", 0) != APPLICATION_ID:
            raise LogError(
                f"{self._path} is a database, but no event log of muster",
                remedy="Choose another state directory, or move that file away.",
            )
        meta: dict[str, object] = dict(connection.execute("SELECT name, value FROM meta").fetchall())
        schema, epoch = meta.get("schema"), meta.get("epoch")
        if not isinstance(schema, int) or not isinstance(epoch, str):
            raise LogError(
                f"the event log {self._path} has schema {schema!r} and epoch {epoch!r}, which no muster wrote",
                remedy="Restore it from a backup, or move it away to start with an empty cluster.",
            )
        if schema > SCHEMA:
            raise LogError(
                f"the event log {self._path} has schema {schema}; this muster knows {SCHEMA} and older",
                remedy="Start the coordinator with the newer muster that wrote it.",
            )
        return epoch

    def _stored_head(self) -> int:
        newest = self._integer("SELECT max(sequence) FROM events", 0)
        return max(newest, self._integer("SELECT max(sequence) FROM snapshots", 0))

    def _newest_snapshot(self) -> State:
        """The newest snapshot that can be read and has every event after it; the empty state where the log is whole."""
        oldest = self.oldest
        with self._guard("read"):
            rows = self._open_connection().execute("SELECT sequence, state FROM snapshots ORDER BY sequence DESC")
            snapshots: list[tuple[int, bytes]] = rows.fetchall()
        for sequence, encoded in snapshots:
            try:
                state = _state_decoder.decode(encoded)
            except (msgspec.DecodeError, TypeError):
                continue  # the one before it, with more events to fold, gives the same state
            if state.sequence == sequence:
                return state
        if oldest == 1:
            return State()
        raise LogError(
            f"the event log {self._path} begins at event {oldest} and has no readable snapshot of what was before",
            remedy="Restore it from a backup, or move it away to start with an empty cluster.",
        )

    def _last_too_old(self, now_ns: int) -> int:
        """The sequence before the first event that is young enough; a clock that jumped back changes nothing."""
        cutoff_ns = _clamp(now_ns - round(self._retention.max_age_seconds * 1e9))
        first = self._open_connection().execute(
            "SELECT sequence FROM events NOT INDEXED WHERE time_ns >= ? ORDER BY sequence LIMIT 1", (cutoff_ns,)
        )
        row: tuple[int] | None = first.fetchone()
        return self._head if row is None else row[0] - 1

    def _surplus_events(self, oldest: int) -> int:
        """About how many events must go until the rest fits `max_bytes`; the next round corrects the guess."""
        pages = self._integer("PRAGMA page_count", 0) - self._integer("PRAGMA freelist_count", 0)
        live_bytes = pages * self._integer("PRAGMA page_size", 0)
        surplus_bytes = live_bytes - self._retention.max_bytes
        events = self._head + 1 - oldest
        if surplus_bytes <= 0 or events <= 0:
            return 0
        snapshots_bytes = self._integer("SELECT sum(length(state)) FROM snapshots", 0)
        per_event_bytes = max(1, (live_bytes - snapshots_bytes) // events)
        return 1 + surplus_bytes // per_event_bytes

    def _select(self, where: str, values: list[int | str], limit: int, *, newest: bool) -> list[Envelope]:
        order = "DESC" if newest else "ASC"
        with self._guard("read"):
            rows: list[_Row] = (
                self._open_connection()
                .execute(
                    f"SELECT {_COLUMNS} FROM events WHERE {where} ORDER BY sequence {order} LIMIT ?",
                    (*values, min(max(0, limit), INTEGER_MAXIMUM)),
                )
                .fetchall()
            )
            found = [_envelope_of(row) for row in rows]
        return found[::-1] if newest else found

    def _integer(self, statement: str, default: int) -> int:
        row: tuple[int | None] | None = self._open_connection().execute(statement).fetchone()
        return default if row is None or row[0] is None else row[0]

    def _open_connection(self) -> sqlite3.Connection:
        if self._connection is None:
            raise LogError(f"the event log {self._path} is closed", remedy="Open it again.")
        return self._connection

    @contextmanager
    def _transaction(self) -> Generator[sqlite3.Connection]:
        connection = self._open_connection()
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
            connection.execute("COMMIT")
        except BaseException:
            # SQLite rolls back by itself on some errors, a full disk among them.
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    @contextmanager
    def _guard(self, verb: str) -> Generator[None]:
        try:
            yield
        except (sqlite3.Error, msgspec.DecodeError) as error:
            raise log_error(self._path, verb, error) from error


def _row_of(envelope: Envelope) -> tuple[int | str | bytes | None, ...]:
    index = index_of(envelope)
    return (
        envelope.sequence,
        envelope.time_ns,
        envelope.origin,
        envelope.cause,
        index.kind,
        index.instance,
        index.attempt,
        index.rank,
        index.node,
        bytes(envelope.body),
        None if envelope.report is None else msgspec.msgpack.encode(envelope.report),
    )


def _envelope_of(row: _Row) -> Envelope:
    sequence, time_ns, origin, cause, body, report = row
    return Envelope(
        sequence=sequence,
        time_ns=time_ns,
        origin=NodeId(origin),
        cause=cause,
        body=msgspec.Raw(body),
        report=None if report is None else _report_decoder.decode(report),
    )


def _clamp(value: int) -> int:
    """SQLite's integers have 64 bits; a caller's may have more."""
    return max(-INTEGER_MAXIMUM, min(value, INTEGER_MAXIMUM))
