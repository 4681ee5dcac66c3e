"""Which of several addresses has the coordinator to follow: the active one with the highest term."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import anyio
from loguru import logger

from muster.bus.client import ControlClient, RefusedError
from muster.bus.endpoints import Endpoint
from muster.bus.sockets import Signal, Throttle
from muster.errors import ProtocolError, UnreachableError
from muster.protocol import Hello, Who
from muster.replies import Role

#: How long one answer may take, in seconds; whoever does not answer is asked again.
_WHO_SECONDS = 1.0
#: Between two questions to the same address.
_AGAIN_SECONDS = 0.2
#: How long the other addresses may take once one has an active coordinator.
_GRACE_SECONDS = 0.3
_EPOCHS_KEPT = 16


class Terms:
    """The highest term that was followed, by epoch: whoever has a lower one of the same epoch is fenced."""

    def __init__(self) -> None:
        self.epoch = ""  #: the one that was followed last
        self.fenced = 0  #: messages of coordinators that had been replaced
        self._highest: dict[str, int] = {}
        self._line = Throttle()

    @property
    def term(self) -> int:
        """The highest one of the epoch that was followed last, 0 before the first."""
        return self._highest.get(self.epoch, 0)

    def note(self, epoch: str, term: int) -> None:
        """A coordinator of this epoch and term is followed."""
        highest = max(term, self._highest.pop(epoch, 0))
        self._highest[epoch] = highest
        self.epoch = epoch
        while len(self._highest) > _EPOCHS_KEPT:
            del self._highest[next(iter(self._highest))]

    def is_behind(self, epoch: str, term: int) -> bool:
        """Whether a coordinator of this epoch and term has been replaced."""
        return term < self._highest.get(epoch, 0)

    def fences(self, epoch: str, term: int) -> bool:
        """Whether a message of this epoch and term is from one that has been replaced; such are counted."""
        if not self.is_behind(epoch, term):
            return False
        self.fenced += 1
        if count := self._line.count():
            highest = self._highest[epoch]
            logger.warning("ignored {} messages of a coordinator of term {}: term {} took over", count, term, highest)
        return True

    def is_promoted(self, role: Role) -> bool:
        """Whether it has taken over from the one that was followed last."""
        return role.role == "active" and role.epoch == self.epoch and role.term > self.term


def preferred(endpoints: Sequence[Endpoint], roles: Mapping[Endpoint, Role], terms: Terms) -> Endpoint | None:
    """Whom to follow of those that answered; `None` where none is active, or all of them have been replaced.

    The epoch that was followed last goes first: an empty log is no reason to leave the one that is known.
    """
    active = [
        endpoint
        for endpoint in endpoints
        if (role := roles.get(endpoint)) is not None
        and role.role == "active"
        and not terms.is_behind(role.epoch, role.term)
    ]
    return max(active, key=lambda one: (roles[one].epoch == terms.epoch, roles[one].term), default=None)


async def find_active(endpoints: Sequence[Endpoint], terms: Terms, roles: dict[Endpoint, Role]) -> Endpoint:
    """Ask all addresses, round and round, until one has a coordinator to follow; the caller sets the deadline.

    `roles` has what each answered last. An active coordinator that was replaced is told so, which fences it.
    """
    heard = Signal()

    async def ask(endpoint: Endpoint) -> None:
        async with ControlClient(endpoint) as client:
            while True:
                role = await _ask(client)
                if role is None:
                    roles.pop(endpoint, None)
                else:
                    roles[endpoint] = role
                    heard.set()
                    if role.role == "active" and terms.fences(role.epoch, role.term):
                        client.send(Hello(epoch=terms.epoch, term=terms.term))
                await anyio.sleep(_AGAIN_SECONDS)

    async def all_heard() -> None:
        while len(roles) < len(endpoints) and not any(map(terms.is_promoted, roles.values())):
            await heard.wait()

    found: Endpoint | None = None
    async with anyio.create_task_group() as group:
        for endpoint in endpoints:
            group.start_soon(ask, endpoint)
        while found is None:
            await heard.wait()
            if preferred(endpoints, roles, terms) is not None:
                with anyio.move_on_after(_GRACE_SECONDS):
                    await all_heard()
                found = preferred(endpoints, roles, terms)
        group.cancel_scope.cancel()
    assert found is not None
    return found


async def seek(
    endpoints: Sequence[Endpoint], terms: Terms, within_seconds: float, *, standby: bool = False, other: bool = False
) -> Endpoint | None:
    """The address of the coordinator to follow, or of a standby for who makes do with one; `None` for neither.

    `other` makes do with whatever answers: a coordinator that may not write says so itself.
    """
    roles: dict[Endpoint, Role] = {}
    found: Endpoint | None = None
    with anyio.move_on_after(within_seconds):
        found = await find_active(endpoints, terms, roles)
    if found is None and standby:
        found = next((endpoint for endpoint, role in roles.items() if role.role == "standby"), None)
    if found is None and other:
        found = next(iter(roles), None)
    return found


async def _ask(client: ControlClient) -> Role | None:
    try:
        return await client.ask(Who(), _WHO_SECONDS, Role)
    except (UnreachableError, RefusedError, ProtocolError):
        return None
