"""The worker's view of the state, and waiting for it to say something."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from muster.spec import Assignment, InstanceId
from muster.state import Gone, Instance, Rank, State, wants_ranks


class StateWatch:
    """The newest state that this worker has heard, with waiters that wake when it changes."""

    def __init__(self) -> None:
        self.state = State()
        self._changed = anyio.Event()

    def update(self, state: State) -> None:
        """Take a new state and wake whoever waits."""
        self.state = state
        self._changed.set()
        self._changed = anyio.Event()

    async def until(self, holds: Callable[[State], bool]) -> int:
        """Wait until `holds` does; answers the sequence of the state in which it did."""
        while not holds(self.state):
            await self._changed.wait()
        return self.state.sequence


class Place:
    """One rank of one attempt, as this worker was given it: finds itself in a state."""

    def __init__(self, instance: Instance, assignment: Assignment) -> None:
        self.id: InstanceId = instance.id
        self.attempt = instance.attempt
        self.rank = assignment.rank
        self.spec = instance.spec
        self.backend = instance.backend
        self.world_size = len(instance.ranks)
        self.caused_by = instance.caused_by

    def ranks(self, state: State) -> tuple[Rank, ...]:
        """All ranks of the attempt; empty when the state no longer has it."""
        instance = state.instances.get(self.id)
        return instance.ranks if instance is not None and instance.attempt == self.attempt else ()

    def wanted(self, state: State) -> bool:
        """Whether the attempt still wants this rank alive."""
        instance = state.instances.get(self.id)
        if instance is None or instance.attempt != self.attempt or not wants_ranks(instance):
            return False
        return not isinstance(instance.ranks[self.rank].state, Gone)

    def __str__(self) -> str:
        return f"{self.id} attempt {self.attempt} rank {self.rank}"
