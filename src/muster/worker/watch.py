"""The worker's view of the state, and waiting for it to say something."""

from __future__ import annotations

from collections.abc import Callable, Collection

import anyio
import msgspec

from muster.spec import Assignment, InstanceId
from muster.state import Gone, Instance, Rank, State, wants_ranks


class StateWatch:
    """The newest state that this worker has heard, with waiters that wake when it changes.

    A coordinator may judge instances that its log does not know: until it has, they stay here as they were.
    """

    def __init__(self) -> None:
        self.state = State()
        self._changed = anyio.Event()
        self._judged: dict[InstanceId, Instance] = {}

    def update(self, state: State, judging: Collection[InstanceId] | None = None) -> None:
        """Take a new state and wake whoever waits. `judging` is given with a snapshot, and replaces the one before."""
        if judging is not None:
            known = self.state.instances
            self._judged = {name: known[name] for name in judging if name in known}
        self._judged = {name: kept for name, kept in self._judged.items() if name not in state.instances}
        if self._judged:
            state = msgspec.structs.replace(state, instances={**state.instances, **self._judged})
        self.state = state
        self._changed.set()
        self._changed = anyio.Event()

    def clear(self, instance: InstanceId, attempt: int) -> bool:
        """The attempt was judged, and is not kept: the next `update` is without it. `False` if it was not known."""
        kept = self._judged.get(instance)
        if kept is None or kept.attempt != attempt:
            return False
        del self._judged[instance]
        return True

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
        self.layout = instance.layout
        self.world_size = len(instance.ranks)
        self.caused_by = instance.caused_by

    def instance(self, state: State) -> Instance | None:
        """The attempt in this state; `None` where that no longer has it."""
        instance = state.instances.get(self.id)
        return instance if instance is not None and instance.attempt == self.attempt else None

    def ranks(self, state: State) -> tuple[Rank, ...]:
        """All ranks of the attempt; empty when the state no longer has it."""
        instance = self.instance(state)
        return instance.ranks if instance is not None else ()

    def wanted(self, state: State) -> bool:
        """Whether the attempt still wants this rank alive."""
        instance = self.instance(state)
        if instance is None or not wants_ranks(instance):
            return False
        return not isinstance(instance.ranks[self.rank].state, Gone)

    def __str__(self) -> str:
        return f"{self.id} attempt {self.attempt} rank {self.rank}"
