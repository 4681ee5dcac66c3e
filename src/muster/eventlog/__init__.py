"""The event log: every fact of the cluster in sequence, on disk or in memory."""

from muster.eventlog.api import EventLog, Retention
from muster.eventlog.memory import MemoryEventLog
from muster.eventlog.sqlite import SqliteEventLog

__all__ = ["EventLog", "MemoryEventLog", "Retention", "SqliteEventLog"]
