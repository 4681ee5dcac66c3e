"""Opening the event log's SQLite file, and saying what is wrong with it."""

from __future__ import annotations

import itertools
import sqlite3
from pathlib import Path

from muster.errors import LockError, LogError
from muster.filelock import FileLock

#: How long to wait for somebody who holds the database, such as a backup, in seconds.
BUSY_SECONDS = 5.0

#: The write-ahead file is cut back to this after a checkpoint, so that one large batch does not leave it large.
WAL_BYTES_MAXIMUM = 4 * 2**20


def lock_log(path: Path) -> FileLock:
    """Keep others from the log. Raises `LogError` where another process has it."""
    try:
        return FileLock(
            path.with_name(path.name + ".lock"),
            what=f"the event log {path}",
            remedy="Stop that coordinator, or give this one a state directory of its own.",
        )
    except LockError as error:
        raise LogError(error.message, remedy=error.remedy) from error


def open_database(path: Path, synchronous: str) -> sqlite3.Connection:
    """Connect to the file, private and in WAL mode. Raises `LogError` where that fails."""
    try:
        path.touch(mode=0o600)  # SQLite gives its other files the mode of this one
        path.chmod(0o600)
        connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
    except (OSError, sqlite3.Error) as error:
        raise log_error(path, "opened", error) from error
    try:
        # Before the first page is written, or it has no effect.
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES_MAXIMUM}")
    except sqlite3.Error as error:
        connection.close()
        raise log_error(path, "opened", error) from error
    return connection


def unused(path: Path) -> Path:
    """The path, or one with a number behind it where there is something already."""
    numbered = (path if number == 1 else path.with_name(f"{path.name}-{number}") for number in itertools.count(1))
    return next(one for one in numbered if not one.exists())


def log_error(path: Path, verb: str, error: Exception) -> LogError:
    """Say what failed, and what to do about it, by SQLite's own code where there is one."""
    code: int = getattr(error, "sqlite_errorcode", 0) & 0xFF
    match code:
        case sqlite3.SQLITE_FULL | sqlite3.SQLITE_IOERR:
            remedy = f"Make room on the disk that holds {path.parent}, or check it for errors."
        case sqlite3.SQLITE_NOTADB:
            remedy = "Choose another state directory, or move that file away."
        case sqlite3.SQLITE_CORRUPT:
            remedy = "Restore it from a backup, or move it away to start with an empty cluster."
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            remedy = "Another program holds it: end that, for instance a backup or an sqlite3 shell."
        case _:
            remedy = f"Check that {path.parent} exists and that the coordinator's user may write to it."
    return LogError(f"the event log {path} cannot be {verb}: {error}", remedy=remedy)
