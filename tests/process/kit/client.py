"""A blocking client that sees every event."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Self, TypeVar

import anyio
from anyio.from_thread import start_blocking_portal

from kit.waiting import DEADLINE_SECONDS, until
from muster.bus import Applied, ControlClient, Follower, Synchronised
from muster.events import (
    Envelope,
    Event,
    InstanceDeleted,
    InstanceFact,
    InstanceFailed,
    InstanceReady,
    Unknown,
    kind_of,
)
from muster.protocol import AnyRequest, CancelGenerate, Create, Delete, Get, ReadOutput
from muster.replies import AnyReply, Created, Refused, Snapshot
from muster.replies import Outputs as OutputsReply
from muster.spec import Failure, InstanceId, InstanceSpec
from muster.state import Instance, State

E = TypeVar("E", bound=InstanceFact)
T = TypeVar("T")


class Client:
    """Calls, and every event of the cluster in a list that `wait` looks at; a context manager."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.events: list[Event | Unknown] = []
        self.envelopes: list[Envelope] = []
        self.latest = State()
        self._calls: dict[int, int] = {}
        self._changed = threading.Condition()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._portal = self._stack.enter_context(start_blocking_portal())
        self._future, _ = self._portal.start_task(self._run)
        self._stack.callback(lambda: self._portal.call(self._stop.set))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    async def _run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        self._stop = anyio.Event()
        async with (
            ControlClient(self.address) as self._client,
            Follower(self._client) as follower,
            anyio.create_task_group() as group,
        ):
            group.start_soon(self._follow, follower, task_status)
            await self._stop.wait()
            group.cancel_scope.cancel()

    async def _follow(self, follower: Follower, task_status: anyio.abc.TaskStatus[None]) -> None:
        begun = False
        async for change in follower.changes():
            with self._changed:
                if isinstance(change, Applied):
                    self.events.append(change.event)
                    self.envelopes.append(change.envelope)
                if isinstance(change, Applied | Synchronised):
                    self.latest = change.state
                self._changed.notify_all()
            if not begun and isinstance(change, Synchronised):
                begun = True
                task_status.started()

    # --- calls --------------------------------------------------------------------------------------------

    def call(self, request: AnyRequest, seconds: float = DEADLINE_SECONDS) -> AnyReply:
        """One request, and its first reply."""

        async def ask() -> AnyReply:
            return await self._client.call(request, timeout_seconds=seconds)

        return self._portal.call(ask)

    def stream(self, request: AnyRequest, seconds: float = DEADLINE_SECONDS) -> list[AnyReply]:
        """One request, and all its replies."""

        async def ask() -> list[AnyReply]:
            async with self._client.stream(request, timeout_seconds=seconds) as replies:
                return [reply async for reply in replies]

        return self._portal.call(ask)

    def begin(self, request: AnyRequest, seconds: float = DEADLINE_SECONDS) -> list[AnyReply]:
        """One request whose replies are put into the list as they come; `wait_for` sees each."""
        replies: list[AnyReply] = []

        async def ask() -> None:
            stream = self._client.stream(request, timeout_seconds=seconds)
            self._calls[id(replies)] = stream.id
            async with stream as incoming:
                async for reply in incoming:
                    with self._changed:
                        replies.append(reply)
                        self._changed.notify_all()

        self._portal.start_task_soon(ask)
        return replies

    def cancel(self, replies: list[AnyReply]) -> None:
        """Stop the generation that `begin` began."""
        self._portal.call(self._client.send, CancelGenerate(id=self._calls[id(replies)]))

    def create(self, spec: InstanceSpec) -> InstanceId:
        """Create an instance that must be accepted."""
        reply = self.call(Create(spec=spec))
        assert isinstance(reply, Created), reply
        return reply.instance

    def refusal(self, request: AnyRequest) -> Failure:
        """Ask for what must be refused, and say why it was."""
        reply = self.call(request)
        assert isinstance(reply, Refused), reply
        return reply.failure

    def delete(self, instance: InstanceId) -> None:
        """Delete an instance, and wait until it is gone."""
        reply = self.call(Delete(instance=instance))
        assert not isinstance(reply, Refused), reply
        self.gone(instance)

    def gone(self, instance: InstanceId) -> None:
        """Wait until an instance is deleted."""
        self.wait(InstanceDeleted, instance)

    def snapshot(self) -> Snapshot:
        """What the coordinator answers to `Get`."""
        reply = self.call(Get())
        assert isinstance(reply, Snapshot)
        return reply

    def output(self, instance: InstanceId) -> list[str]:
        """Everything that the ranks of an instance printed so far, as "rank: text"."""
        found: list[str] = []
        position = 0
        while True:
            reply = self.call(ReadOutput(instance=instance, after=position))
            assert isinstance(reply, OutputsReply), reply
            if not reply.lines:
                return found
            found += [f"{line.rank}: {line.text}" for line in reply.lines]
            position = reply.position

    def lines(self, instance: InstanceId, count: int) -> list[str]:
        """So many lines of output, once they have been printed."""
        return until(
            lambda: found if len(found := self.output(instance)) >= count else None, f"{count} lines of {instance}"
        )

    # --- events -------------------------------------------------------------------------------------------

    def wait(
        self,
        kind: type[E],
        instance: InstanceId,
        *,
        attempt: int | None = None,
        rank: int | None = None,
        seconds: float = DEADLINE_SECONDS,
    ) -> E:
        """The first event of this kind of the instance (and attempt, and rank), past or still to come."""

        def match() -> E | None:
            for event in self.events:
                if not isinstance(event, kind) or event.instance != instance:
                    continue
                if attempt not in (None, event.attempt) or rank not in (None, getattr(event, "rank", None)):
                    continue
                return event
            return None

        return self.wait_for(match, f"{kind.__name__} of {instance}", seconds)

    def wait_event(self, kind: type[T], where: Callable[[T], bool], seconds: float = DEADLINE_SECONDS) -> T:
        """The first event of this kind for which `where` holds."""
        return self.wait_for(
            lambda: next((event for event in self.events if isinstance(event, kind) and where(event)), None),
            kind.__name__,
            seconds,
        )

    def wait_for(self, answer: Callable[[], T | None], what: str, seconds: float = DEADLINE_SECONDS) -> T:
        """Ask again after each event until there is an answer."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not (found := answer()):
                left = deadline - time.monotonic()
                if left <= 0:
                    seen = "\n".join(_described(event) for event in self.events[-40:])
                    raise AssertionError(f"not within {seconds:g} s: {what}; the last events:\n{seen}")
                self._changed.wait(left)
        return found

    def instance(self, instance: InstanceId) -> Instance:
        """What `muster describe` shows of an instance."""
        return self.latest.instances[instance]

    def failure_of(self, instance: InstanceId, *, attempt: int = 1, seconds: float = DEADLINE_SECONDS) -> Failure:
        """Why an attempt failed, once it has, as the state has it that `muster describe` shows."""

        def failure() -> Failure | None:
            found = self.latest.instances[instance].failures if instance in self.latest.instances else ()
            return found[attempt - 1] if len(found) >= attempt else None

        return self.wait_for(failure, f"the end of attempt {attempt} of {instance}", seconds)

    def ready(self, instance: InstanceId, *, attempt: int = 1, seconds: float = DEADLINE_SECONDS) -> Instance:
        """The instance, once it is ready; a failure ends the waiting."""

        def over() -> InstanceFact | None:
            ends = (event for event in self.events if isinstance(event, InstanceReady | InstanceFailed))
            return next((end for end in ends if end.instance == instance and end.attempt == attempt), None)

        end = self.wait_for(over, f"InstanceReady of {instance}", seconds)
        assert isinstance(end, InstanceReady), end
        return self.instance(instance)


def _described(event: Event | Unknown) -> str:
    failure = getattr(event, "failure", None)
    rank = f" rank {event.rank}" if hasattr(event, "rank") else ""  # pyright: ignore[reportAttributeAccessIssue]
    return f"  {kind_of(event)}{rank} {failure.sentence() if failure is not None else ''}"
