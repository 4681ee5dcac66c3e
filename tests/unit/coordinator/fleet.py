"""Instances in any state and the dispatcher between them and the requests, without sockets and clocks."""

from __future__ import annotations

from collections.abc import Callable

from muster.coordinator.dispatcher import Dispatcher, QueueSettings
from muster.coordinator.requests import Request
from muster.protocol import Generate
from muster.rank_protocol import Ask, Cancel, Piece, ToRunner
from muster.replies import AnyPiece, Chunk, Done, Refused, Started
from muster.sampling import SamplingParams
from muster.spec import (
    Failure,
    GroupWorkload,
    InstanceId,
    InstanceSpec,
    ModelWorkload,
    NodeId,
    Phase,
    Workload,
)
from muster.state import Broken, Gone, Instance, InstanceStatus, Rank, RankState, Ready, Running, Starting, State

KILLED = Failure(
    kind="rank-killed", message="the runner was ended by SIGKILL", rank=1, node=NodeId("b"), retryable=True
)
DONE = Done(reason="stop", prompt_tokens=1, completion_tokens=1, seconds_to_first_token=0.1, seconds=0.1)


def done(reason: str, tokens: int = 1) -> Done:
    return Done(reason=reason, prompt_tokens=1, completion_tokens=tokens, seconds_to_first_token=0.1, seconds=0.1)


class Asked:
    """A request and everything that it was answered with."""

    def __init__(self, wanted: str) -> None:
        self.wanted = wanted
        self.replies: list[AnyPiece] = []
        self.cancelled = False
        self.request: Request | None = None

    @property
    def ended(self) -> bool:
        return self.cancelled or (bool(self.replies) and isinstance(self.replies[-1], Done | Refused))

    @property
    def kind(self) -> str:
        """The kind of its refusal; empty where it was not refused."""
        last = self.replies[-1] if self.replies else None
        return last.failure.kind if isinstance(last, Refused) else ""

    @property
    def refusal(self) -> Failure:
        last = self.replies[-1]
        assert isinstance(last, Refused), last
        return last.failure

    @property
    def answered(self) -> bool:
        return any(isinstance(reply, Chunk) for reply in self.replies)

    def take(self, piece: AnyPiece) -> None:
        assert not self.ended, f"{piece} after the end: {self.replies}"
        self.replies.append(piece)


class Fleet:
    """The state of a cluster that the test edits, and runners that only remember what they were sent."""

    def __init__(self, *, max_waiting: int = 512) -> None:
        self.now = 1000.0
        self.sequence = 0
        self.instances: dict[InstanceId, Instance] = {}
        self.unreachable: set[bytes] = set()
        self.held: dict[bytes, dict[int, Generate]] = {}  #: what each runner has to do
        self.cancels: list[tuple[bytes, int]] = []
        self.sent: list[tuple[bytes, Generate]] = []
        self.on_sent: Callable[[bytes, Generate], None] = lambda identity, generate: None
        self.dispatcher = Dispatcher(self._send, QueueSettings(max_waiting=max_waiting))

    def _send(self, identity: bytes, message: ToRunner) -> bool:
        if identity in self.unreachable:
            return False
        match message:
            case Ask(request=number, generate=generate):
                self.held.setdefault(identity, {})[number] = generate
                self.sent.append((identity, generate))
                self.on_sent(identity, generate)
            case Cancel(request=number):
                self.held.get(identity, {}).pop(number, None)
                self.cancels.append((identity, number))
        return True

    # --- the cluster --------------------------------------------------------------------------------------

    def put(
        self,
        name: str,
        status: InstanceStatus,
        *ranks: RankState,
        served: str = "m",
        attempt: int = 1,
        workload: Workload | None = None,
        max_batch: int = 4,
        failures: tuple[Failure, ...] = (),
    ) -> None:
        """An instance as it is now."""
        self.instances[InstanceId(name)] = Instance(
            id=InstanceId(name),
            spec=InstanceSpec(
                workload=workload or ModelWorkload(model=f"/models/{served}", max_batch=max_batch), ranks=2
            ),
            created_ns=1,
            attempt=attempt,
            backend="ring",
            status=status,
            since_ns=1,
            ranks=tuple(
                Rank(rank=number, node=NodeId("a"), boot="b", state=state, since_ns=1)
                for number, state in enumerate(ranks or (Ready(), Ready()))
            ),
            created_by=1,
            caused_by=1,
            failures=failures,
        )
        self.update()

    def remove(self, name: str) -> None:
        del self.instances[InstanceId(name)]
        self.update()

    def ready(self, name: str, *, attempt: int = 1, served: str = "m", max_batch: int = 4) -> None:
        self.put(name, Running(), attempt=attempt, served=served, max_batch=max_batch)

    def starting(self, name: str, *, attempt: int = 1, served: str = "m") -> None:
        self.put(name, Starting(), attempt=attempt, served=served)

    def broken(self, name: str, *, retries: bool = True, attempt: int = 1, served: str = "m") -> None:
        """Its runner is gone with it."""
        self.held.pop(f"{name}/{attempt}".encode(), None)
        self.put(
            name, Broken(KILLED, 1 if retries else None), Gone(-9, KILLED), Gone(0), attempt=attempt, served=served
        )

    def group(self, name: str) -> None:
        self.put(name, Running(), workload=GroupWorkload())

    def update(self) -> None:
        self.sequence += 1
        self.dispatcher.update(State(sequence=self.sequence, instances=dict(self.instances)), self.now)

    # --- requests -----------------------------------------------------------------------------------------

    def ask(self, wanted: str = "m", *, wait_seconds: float = 60.0, max_tokens: int = 16, prompt: str = "hi") -> Asked:
        asked = Asked(wanted)
        generate = Generate(
            instance=wanted, prompt=prompt, wait_seconds=wait_seconds, sampling=SamplingParams(max_tokens=max_tokens)
        )
        asked.request = self.dispatcher.submit(generate, asked.take, self.now)
        return asked

    def cancel(self, asked: Asked) -> None:
        assert asked.request is not None
        asked.cancelled = asked.cancelled or not asked.ended
        self.dispatcher.cancel(asked.request, self.now)

    def number(self, asked: Asked) -> int:
        assert asked.request is not None
        return asked.request.number

    def home(self, asked: Asked) -> str:
        """Where it runs, "" where it does not."""
        assert asked.request is not None
        return asked.request.load.identity.decode() if asked.request.load is not None else ""

    # --- the runners --------------------------------------------------------------------------------------

    def say(self, asked: Asked, *replies: AnyPiece) -> None:
        """Its runner answers, in one message."""
        identity, number = self.home(asked).encode(), self.number(asked)
        if any(isinstance(reply, Done | Refused) for reply in replies):
            self.held[identity].pop(number)
        self.dispatcher.receive(identity, [Piece(request=number, reply=reply) for reply in replies], self.now)

    def go_on(self) -> None:
        """Every runner that is reached sends a token of whatever it has to do."""
        for identity, held in self.held.items():
            for number in list(held) if identity not in self.unreachable else ():
                self.dispatcher.receive(identity, [Piece(request=number, reply=Chunk(text="x", tokens=(1,)))], self.now)

    def token(self, asked: Asked, text: str = "x") -> None:
        self.say(asked, Chunk(text=text, tokens=(1,)))

    def start(self, asked: Asked, prompt_tokens: int = 5) -> None:
        self.say(asked, Started(prompt_tokens=prompt_tokens))

    def pass_time(self, seconds: float) -> None:
        """The clock of the gateway: it looks whenever something is due."""
        end = self.now + seconds
        while self.dispatcher.due <= end:
            self.now = max(self.now, self.dispatcher.due)
            self.dispatcher.expire(self.now)
            assert self.dispatcher.due > self.now, "the gateway would spin"
        self.now = end


FAILED = Failure(kind="step-timeout", message="stuck", phase=Phase.RUNNING, retryable=True)
