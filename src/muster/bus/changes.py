"""What a follower tells its consumer: a new state, one more event, or that nobody answers."""

from __future__ import annotations

import msgspec

from muster.bus.endpoints import Endpoint
from muster.events import Envelope, Event, Unknown
from muster.replies import Welcome
from muster.state import State


class Synchronised(msgspec.Struct, frozen=True, tag="synchronised"):
    """The state was replaced by a snapshot: the consumer reconciles everything with it.

    `endpoint` is the control socket of the coordinator that it is from.
    """

    state: State
    welcome: Welcome
    endpoint: Endpoint


class Applied(msgspec.Struct, frozen=True, tag="applied"):
    """One more event; `state` is the one after it."""

    envelope: Envelope
    event: Event | Unknown
    state: State


class Disconnected(msgspec.Struct, frozen=True, tag="disconnected"):
    """Nothing was heard from the coordinator for `seconds`. Repeated while it lasts; `Synchronised` ends it."""

    seconds: float


Change = Synchronised | Applied | Disconnected


class FollowerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the start. `gaps` were mended by replay or snapshot.

    `fenced` are the messages of coordinators that had been replaced by one with a higher term.
    """

    events: int
    gaps: int
    replayed: int
    snapshots: int
    garbage: int
    fenced: int = 0
