"""The coordinator's events socket: every logged event to everybody, never waiting for anybody."""

from __future__ import annotations

import time

import anyio
import msgspec
import zmq
import zmq.asyncio

from muster.bus.sockets import Resident, bind_socket, open_socket, receive, receive_now, send_now
from muster.events import Envelope, encode_envelope
from muster.replies import TOPIC_BEAT, TOPIC_EVENT, Pulse
from muster.spec import BootId

#: Events that wait for one slow subscriber before it starts to miss some (it then asks for a replay).
QUEUED_EVENTS = 2_000
#: A subscription is a topic; anything longer is no subscriber of ours.
_MAXIMUM_SUBSCRIPTION_BYTES = 256
#: Between answers to new subscriptions, so that one that comes and goes cannot make everybody busy.
_GREETING_INTERVAL_SECONDS = 0.01

# ZeroMQ's subscriptions: 1 and the topic. An empty topic is all of them.
_SUBSCRIPTIONS = frozenset(b"\x01" + topic for topic in (TOPIC_BEAT, TOPIC_EVENT, b""))

_encoder = msgspec.msgpack.Encoder()


class PublisherStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a publisher has sent since it was opened. `subscriptions` counts topics that were asked for."""

    events: int
    event_bytes: int
    pulses: int
    subscriptions: int


class Publisher(Resident):
    """The XPUB socket. A message is (topic, envelope, boot of the coordinator) or (topic, pulse).

    A subscriber that is too slow misses messages; the publisher neither waits nor keeps more than
    `QUEUED_EVENTS` for it. A new subscription is answered with the last pulse, so that a joiner and a
    subscriber that comes back learn at once what they missed.

    Raises (on entering):
        PortError: the port is taken, or `host` is no address of this machine.
    """

    def __init__(self, host: str, port: int = 0, *, boot: BootId | None = None) -> None:
        super().__init__()
        self._host = host
        self._port = port
        self._boot = (boot or "").encode()
        self._socket: zmq.asyncio.Socket | None = None
        self._pulse: Pulse | None = None
        self._head = 0
        self._events = self._event_bytes = self._pulses = self._subscriptions = 0

    @property
    def port(self) -> int:
        """The port that is bound."""
        return self._port

    def publish(self, envelope: Envelope) -> None:
        """Send an event that is already in the log. Never waits."""
        payload = encode_envelope(envelope)
        frames = [TOPIC_EVENT, payload, self._boot] if self._boot else [TOPIC_EVENT, payload]
        self._head = max(self._head, envelope.sequence)
        self._events += 1
        self._event_bytes += len(payload)
        self._send(frames)

    def pulse(self, pulse: Pulse) -> None:
        """Send the heartbeat. The first one should follow right after opening: it names the coordinator."""
        boot = pulse.coordinator_boot.encode()
        # Another boot may have another log, with fewer events.
        self._head = max(self._head, pulse.head) if boot == self._boot else pulse.head
        self._pulse, self._boot = pulse, boot
        self._pulses += 1
        self._send([TOPIC_BEAT, _encoder.encode(pulse)])

    def hush(self) -> None:
        """Greet nobody until the next `pulse`: this coordinator has nothing to say any more."""
        self._pulse = None

    def statistics(self) -> PublisherStatistics:
        """Counts since the socket was opened."""
        return PublisherStatistics(
            events=self._events,
            event_bytes=self._event_bytes,
            pulses=self._pulses,
            subscriptions=self._subscriptions,
        )

    def _send(self, frames: list[bytes]) -> None:
        if self._socket is not None and not self._socket.closed:
            send_now(self._socket, frames)

    async def _open(self) -> None:
        socket = open_socket(
            zmq.XPUB,
            receive_messages=QUEUED_EVENTS,
            send_messages=QUEUED_EVENTS,
            maximum_bytes=_MAXIMUM_SUBSCRIPTION_BYTES,
        )
        # Every subscription must show, also one that another subscriber has already: it gets a pulse.
        socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._port = await bind_socket(socket, self._host, self._port, "events")
        self._socket = socket

    async def _serve(self) -> None:
        """Read subscriptions (unread they would pile up) and greet."""
        assert self._socket is not None
        while True:
            topics = [await receive(self._socket)]
            while len(topics) < QUEUED_EVENTS and (more := receive_now(self._socket)) is not None:
                topics.append(more)
            wanted = sum(frames[0] in _SUBSCRIPTIONS for frames in topics)
            self._subscriptions += wanted
            if wanted and self._pulse is not None:
                self.pulse(msgspec.structs.replace(self._pulse, head=self._head, time_ns=time.time_ns()))
                await anyio.sleep(_GREETING_INTERVAL_SECONDS)

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
