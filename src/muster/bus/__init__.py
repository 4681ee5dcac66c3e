"""ZeroMQ with sequence numbers, snapshots, replay, and reports that arrive once."""

from muster.bus.changes import Applied, Change, Disconnected, Synchronised
from muster.bus.client import ControlClient, RefusedError, ReplyStream
from muster.bus.endpoints import DEFAULT_CONTROL_PORT, Endpoint, parse_endpoint, parse_endpoints
from muster.bus.follower import Follower
from muster.bus.outbox import Outbox
from muster.bus.publisher import Publisher
from muster.bus.responder import Deduplicator, Verdict
from muster.bus.seeking import Terms, find_active, seek
from muster.bus.server import ControlServer, Incoming

__all__ = [
    "DEFAULT_CONTROL_PORT",
    "Applied",
    "Change",
    "ControlClient",
    "ControlServer",
    "Deduplicator",
    "Disconnected",
    "Endpoint",
    "Follower",
    "Incoming",
    "Outbox",
    "Publisher",
    "RefusedError",
    "ReplyStream",
    "Synchronised",
    "Terms",
    "Verdict",
    "find_active",
    "parse_endpoint",
    "parse_endpoints",
    "seek",
]
