"""ZeroMQ with sequence numbers, snapshots, replay, and reports that arrive once."""

from muster.bus.client import ControlClient, RefusedError, ReplyStream
from muster.bus.endpoints import DEFAULT_CONTROL_PORT, Endpoint, parse_endpoint
from muster.bus.follower import Applied, Change, Disconnected, Follower, Synchronised
from muster.bus.outbox import Outbox
from muster.bus.publisher import Publisher
from muster.bus.responder import Deduplicator, Verdict
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
    "Verdict",
    "parse_endpoint",
]
