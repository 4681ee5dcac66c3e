"""What every coordinator does with its event log, whether it writes it or copies it: search, replay, keep house."""

from __future__ import annotations

import msgspec
from loguru import logger

from muster.errors import LogError
from muster.eventlog.api import EventLog
from muster.events import encode_envelope
from muster.protocol import Query
from muster.replies import Found, Replayed
from muster.spec import BootId
from muster.state import State

#: Events in one answer to a query, whatever was asked.
_QUERY_EVENTS = 10_000
#: Events in one answer to a replay; its reader asks again for the rest.
_REPLAY_EVENTS = 1_000


def search(log: EventLog, query: Query) -> Found:
    """The events that match.

    Raises:
        RequestError: the query names too many kinds.
        LogError: the storage cannot be read.
    """
    found = log.query(msgspec.structs.replace(query, limit=max(0, min(query.limit, _QUERY_EVENTS))))
    return Found(envelopes=tuple(map(encode_envelope, found)), head=log.head, oldest=log.oldest)


def replay(log: EventLog, after: int, boot: BootId) -> Replayed | None:
    """The events after `after`, told by the coordinator `boot`; `None` where the log does not go there.

    Raises:
        LogError: the storage cannot be read.
    """
    if after + 1 < log.oldest or after > log.head:
        return None
    envelopes = log.read(after, _REPLAY_EVENTS)
    return Replayed(envelopes=tuple(map(encode_envelope, envelopes)), head=log.head, coordinator_boot=boot)


def keep_house(log: EventLog, state: State, now_ns: int) -> None:
    """Snapshot and prune where it is time; a failure costs no event."""
    if log.should_snapshot(state):
        try:
            log.snapshot(state)
            log.prune(now_ns)
        except LogError as error:
            logger.warning("no snapshot of the event log: {}", error)
