"""The tables of the event log's SQLite file."""

from __future__ import annotations

#: Layout of the file. A log with a higher one was written by a newer muster, and is refused.
SCHEMA = 1

#: "mstr" in the file's header, by which `file` and we know it.
APPLICATION_ID = 0x6D737472

CREATE = (
    """CREATE TABLE meta (name TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID""",
    """CREATE TABLE events (
        sequence INTEGER PRIMARY KEY,
        time_ns INTEGER NOT NULL,
        origin TEXT NOT NULL,
        cause INTEGER NOT NULL,
        kind TEXT NOT NULL,
        instance TEXT,
        attempt INTEGER,
        rank INTEGER,
        node TEXT,
        body BLOB NOT NULL,
        report BLOB
    )""",
    """CREATE INDEX events_by_instance ON events (instance) WHERE instance IS NOT NULL""",
    """CREATE INDEX events_by_node ON events (node) WHERE node IS NOT NULL""",
    """CREATE INDEX events_by_kind ON events (kind)""",
    """CREATE INDEX events_by_time ON events (time_ns)""",
    """CREATE TABLE snapshots (sequence INTEGER PRIMARY KEY, state BLOB NOT NULL)""",
)
