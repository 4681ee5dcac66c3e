"""What the HTTP API needs of the coordinator, so that it can be tested without one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol, Self

from muster.coordinator.calls import ClientRequest
from muster.coordinator.served import Readiness, ServedModel
from muster.events import Envelope
from muster.protocol import Generate, ReadOutput
from muster.replies import AnyPiece, AnyReply
from muster.state import State


class Stream(Protocol):
    """One generation under way. Iterate it to the end, or cancel it.

    The pieces end with a `Done` or a `Refused`. A reader that is slow gets what it missed merged into one `Chunk`,
    so that waiting pieces take no more room than the answer itself.
    """

    def __aiter__(self) -> Self:
        """Itself."""
        ...

    async def __anext__(self) -> AnyPiece:
        """The next piece; raises `StopAsyncIteration` after the last."""
        ...

    def cancel(self) -> None:
        """Nobody reads on: the runner stops at its next step. Does nothing after the end."""
        ...


class Backend(Protocol):
    """The coordinator, as the API sees it. Everything runs on the event loop that calls it."""

    def generate(self, request: Generate) -> Stream:
        """Queue a request. It never raises: a request that cannot be taken yields one `Refused`.

        Kinds of `Refused`: "request-invalid", "context-exceeded", "model-unknown" (the message lists the names that
        exist), "queue-full", "wait-exceeded", "model-unavailable" (no instance is left that could become ready),
        "answer-lost" (the instance failed after the first token), "instance-deleted".
        """
        ...

    def models(self) -> tuple[ServedModel, ...]:
        """Every model that an instance serves or will serve, by name."""
        ...

    def state(self) -> State:
        """The state now; it changes as events come."""
        ...

    async def call(self, request: ClientRequest | ReadOutput) -> AnyReply:
        """What the control socket would answer; `ReadOutput` may wait."""
        ...

    def follow(self, after: int) -> AsyncIterator[Envelope]:
        """Logged events after a sequence, those of the past first, then each as it is published; endless."""
        ...

    async def probe(self, model: str) -> Readiness:
        """Whether the model decodes: by its running answers, or where it is idle by a token made for the purpose."""
        ...
