"""The ordered stream of steps from rank 0 to the other ranks, over blocking ZeroMQ sockets.

Rank 0 alone decides; the others replay what it says, in order, and never ask. A step is sent before rank 0 carries
it out, so that all ranks compute at the same time. Waiting on the sockets uses no CPU, unlike an MLX collective.
"""

from __future__ import annotations

import msgspec
import zmq

from muster.errors import ProtocolError
from muster.rank_protocol import AnyStep, JoinSteps, Step
from muster.spec import InstanceId

#: Steps that may wait for a rank; it is at most one behind, so that a full queue means a dead rank.
_QUEUE_STEPS = 1000
#: No step is longer: a prompt of a million tokens takes 5 MB.
_MAX_STEP_BYTES = 64 * 2**20
_LINGER_MS = 500

#: A further pass of a step: nothing changes.
AGAIN = Step(step=0)

_encoder = msgspec.msgpack.Encoder()
_step_decoder: msgspec.msgpack.Decoder[AnyStep] = msgspec.msgpack.Decoder(AnyStep)
_join_decoder = msgspec.msgpack.Decoder(JoinSteps)


class StepSource:
    """Rank 0's end: a ROUTER that knows each rank by the message that it joined with."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], host: str, instance: InstanceId, attempt: int) -> None:
        self._instance = instance
        self._attempt = attempt
        self._peers: dict[int, bytes] = {}
        #: The number of the last step that was sent.
        self.sent = 0
        self.socket = context.socket(zmq.ROUTER)
        self.socket.set(zmq.LINGER, _LINGER_MS)
        self.socket.set(zmq.SNDHWM, _QUEUE_STEPS)
        self.socket.set(zmq.RCVHWM, _QUEUE_STEPS)
        self.socket.set(zmq.MAXMSGSIZE, _MAX_STEP_BYTES)
        self.socket.set(zmq.ROUTER_MANDATORY, 1)
        port = self.socket.bind_to_random_port(f"tcp://{host}")
        #: Where the others connect, "host:port".
        self.address = f"{host}:{port}"

    def take_join(self) -> None:
        """Read what waits on the socket; whatever is no join of this attempt is ignored."""
        while self.socket.poll(0):
            frames = self.socket.recv_multipart()
            if len(frames) != 2:
                continue
            try:
                join = _join_decoder.decode(frames[1])
            except msgspec.DecodeError:
                continue
            if join.instance == self._instance and join.attempt == self._attempt and join.rank > 0:
                self._peers.setdefault(join.rank, frames[0])

    def joined(self, world_size: int) -> bool:
        """Whether every other rank has joined."""
        return set(range(1, world_size)) <= self._peers.keys()

    def send(self, step: AnyStep) -> None:
        """Tell the others what comes next; its number must follow `sent`.

        Raises:
            ProtocolError: a rank is gone, or a thousand steps behind.
        """
        assert step.step == self.sent + 1, (step.step, self.sent)
        self.sent = step.step
        body = _encoder.encode(step)
        for rank, identity in self._peers.items():
            try:
                self.socket.send_multipart((identity, body), zmq.NOBLOCK)
            except zmq.ZMQError as error:
                raise ProtocolError(
                    f"the connection to a peer was lost: step {step.step} cannot reach rank {rank} ({error})",
                    remedy="See why that rank ended.",
                ) from error

    def close(self) -> None:
        """Close the socket; what was sent still goes out until the context ends."""
        self.socket.close()


class StepSink:
    """Another rank's end: joins, and then gets every step once and in order."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, instance: InstanceId, attempt: int, rank: int
    ) -> None:
        self._expected = 1
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, _LINGER_MS)
        self.socket.set(zmq.SNDHWM, _QUEUE_STEPS)
        self.socket.set(zmq.RCVHWM, _QUEUE_STEPS)
        self.socket.set(zmq.MAXMSGSIZE, _MAX_STEP_BYTES)
        self.socket.connect(f"tcp://{address}")
        self.socket.send(_encoder.encode(JoinSteps(instance=instance, attempt=attempt, rank=rank)))

    def receive(self) -> AnyStep:
        """The next step; blocks until it is there.

        Raises:
            ProtocolError: it is no step, or one is missing; the rank cannot go on in step.
        """
        body = self.socket.recv()
        try:
            step = _step_decoder.decode(body)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"a step from rank 0 cannot be decoded: {error}") from error
        if step.step != self._expected:
            raise ProtocolError(f"step {step.step} came instead of step {self._expected}")
        self._expected += 1
        return step

    def loss(self) -> zmq.Socket[bytes]:
        """A socket that becomes readable when the connection to rank 0 is lost; the caller closes it."""
        return self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def close(self) -> None:
        """Close the socket."""
        self.socket.disable_monitor()
        self.socket.close()
