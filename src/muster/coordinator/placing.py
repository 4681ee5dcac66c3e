"""Placements in a thread, since one may take seconds: what was found counts while the state has the same room."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

import anyio
import anyio.to_thread
import msgspec
from loguru import logger

from muster.coordinator.ledger import Ledger
from muster.errors import PlacementError
from muster.known import Known
from muster.placement import Cluster, Placement, Refusal, cluster_of
from muster.placement.again import place_again
from muster.spec import InstanceId, InstanceSpec
from muster.state import Instance, State

#: So often the room may change while it is looked for; then it is looked for where nothing changes meanwhile.
_TRIES: Final = 3
#: What was found out stands so many times as long as that took, within these bounds in seconds: what nodes tell of
#: memory and links changes all the time, and an instance without room must not keep a processor busy.
_STANDS: Final = 20.0
_STANDS_LEAST: Final = 0.25
_STANDS_MOST: Final = 30.0

T = TypeVar("T")
_NOTHING = Known()


class Basis:
    """What a placement went by."""

    def __init__(self, spec: InstanceSpec, state: State, known: Known) -> None:
        self.spec = spec
        self.state = state
        self.known = known
        self._same = state
        self._room: Cluster | str | None = None

    def holds(self, state: State) -> bool:
        """Whether a later state has the same nodes with the same room, going by what was known then."""
        if state is not self._same:
            if self._room is None:
                self._room = self._room_in(self.state)
            if self._room != self._room_in(state):
                return False
            self._same = state
        return True

    def _room_in(self, state: State) -> Cluster | str:
        try:
            cluster, _ = cluster_of(self.spec, state, self.known)
        except PlacementError as error:
            return error.message
        return msgspec.structs.replace(cluster, known=_NOTHING)


class _Sought(msgspec.Struct, frozen=True):
    """What was found for the next attempt after `attempt`, and until when it stands, on the monotonic clock."""

    attempt: int
    basis: Basis
    found: Placement | Refusal | None
    until: float


class Placing:
    """Looks for room, one search at a time, in the order asked. `on_found` is called when `next_attempt` knows more."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.on_found: Callable[[], None] = lambda: None
        self._turn = anyio.Lock()
        self._wanted: dict[InstanceId, None] = {}
        self._asked = anyio.Event()
        self._sought: dict[InstanceId, _Sought] = {}

    async def search(self, spec: InstanceSpec, look: Callable[[State, Known], T]) -> T:
        """What `look` finds in its thread, true of the state as it is when this returns: log it before waiting again.

        Raises:
            Exception: what `look` raises.
        """
        found, _ = await self._search(spec, look)
        return found

    async def _search(self, spec: InstanceSpec, look: Callable[[State, Known], T]) -> tuple[T, Basis]:
        async with self._turn:
            for _ in range(_TRIES):
                basis = Basis(spec, self._ledger.state, self._ledger.known())
                found = await anyio.to_thread.run_sync(look, basis.state, basis.known, abandon_on_cancel=True)
                if basis.holds(self._ledger.state):
                    return found, basis
            basis = Basis(spec, self._ledger.state, self._ledger.known())
            return look(basis.state, basis.known), basis

    # --- instances that wait for their next attempt ---------------------------------------------------------

    def next_attempt(self, instance: Instance, state: State) -> Placement | Refusal | None:
        """Where it goes, or why nowhere; `None` while that is looked for, which this begins."""
        sought = self._sought.get(instance.id)
        if sought is not None and self._stands(instance.id, sought) and sought.basis.holds(state):
            return sought.found
        self._wanted[instance.id] = None
        self._asked.set()
        return None

    def _stands(self, name: InstanceId, sought: _Sought) -> bool:
        instance = self._ledger.state.instances.get(name)
        return instance is not None and instance.attempt == sought.attempt and time.monotonic() < sought.until

    async def run(self) -> None:
        """Look for what `next_attempt` was asked for, until cancelled."""
        while True:
            while not self._wanted:
                await self._asked.wait()
                self._asked = anyio.Event()
            name = next(iter(self._wanted))
            instance = self._ledger.state.instances.get(name)
            if instance is not None:
                self._sought[name] = await self._seek(instance)
            del self._wanted[name]
            self._sought = {key: one for key, one in self._sought.items() if self._stands(key, one)}
            self.on_found()

    async def _seek(self, instance: Instance) -> _Sought:
        begin = time.monotonic()
        found: Placement | Refusal | None = None
        basis = Basis(instance.spec, self._ledger.state, _NOTHING)
        try:
            found, basis = await self._search(instance.spec, lambda state, known: place_again(instance, state, known))
        except Exception:  # one instance that cannot be placed must not end the coordinator of all the others
            logger.exception("instance {} could not be placed", instance.id)
        now = time.monotonic()
        stands = min(max(_STANDS_LEAST, _STANDS * (now - begin)), _STANDS_MOST)
        return _Sought(instance.attempt, basis, found, now + stands)
