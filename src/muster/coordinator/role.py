"""A coordinator process over its life: it follows or leads, takes over, and is fenced, on one log and its ports."""

from __future__ import annotations

import anyio
import anyio.abc
import msgspec
from loguru import logger

from muster.bus import Endpoint
from muster.coordinator.authority import Authority, ask_role, keep_votes, watch_peer
from muster.coordinator.clock import lease_clock
from muster.coordinator.service import Coordinator, CoordinatorSettings
from muster.coordinator.standby import Following, Promotion, Standby
from muster.coordinator.standing import load_standing, save_standing
from muster.coordinator.voting import Start, Tenure, Wish, begin
from muster.errors import MusterError
from muster.eventlog import SqliteEventLog
from muster.eventlog.api import EventLog
from muster.events import CoordinatorStarted
from muster.protocol import Query
from muster.replies import Answer, Role


class Partners(msgspec.Struct, frozen=True, kw_only=True):
    """The other coordinator and the witness. `peer` is the standby of one that leads, `standby_of` whom one follows.

    With both, a coordinator leads unless the other one does.
    """

    standby_of: Endpoint | None = None
    peer: Endpoint | None = None
    witness: Endpoint | None = None

    @property
    def other(self) -> Endpoint | None:
        """The other coordinator."""
        return self.standby_of or self.peer


class OtherLeadsError(MusterError):
    """Another coordinator is active, or was promoted, and this one was not told to follow it."""

    kind = "fenced"


class Member:
    """One coordinator process. `run` serves until it is cancelled; `activated` is set once it leads."""

    def __init__(self, settings: CoordinatorSettings, partners: Partners) -> None:
        self.coordinator = Coordinator(settings)
        self.activated = anyio.Event()
        self._settings = settings
        self._partners = partners

    async def run(self, *, task_status: anyio.abc.TaskStatus[bool] = anyio.TASK_STATUS_IGNORED) -> None:
        """Open the log and the sockets, and be what is right; started with whether it leads.

        Raises:
            LogError: the log cannot be opened, or another coordinator has it.
            OtherLeadsError: another one leads, and this one may not follow.
            FencedError: the witness knows a higher term.
            PortError: a port is taken, or the host is no address of this machine.
        """
        log = SqliteEventLog(self._settings.directory / "events.db", retention=self._settings.retention)
        try:
            self._standing = load_standing(self._settings.directory)
            save_standing(self._settings.directory, self._standing)  # a name that is new must last before it claims
            follows = await self._begins_as_standby(log)
            coordinator = self.coordinator
            async with coordinator.publisher, coordinator.server, coordinator.gateway:
                promotion = None
                if follows:
                    promotion = await self._follow(log, task_status)
                    task_status = anyio.TASK_STATUS_IGNORED
                await self._lead(log, promotion, task_status)
        finally:
            log.close()

    # --- following ----------------------------------------------------------------------------------------

    async def _begins_as_standby(self, log: EventLog) -> bool:
        partners = self._partners
        wish = Wish(leads=partners.standby_of is None or partners.peer is not None, follows=bool(partners.standby_of))
        peer = None if partners.other is None else await ask_role(partners.other)
        term = term_of(log)
        match begin(self._standing, log.epoch, term, log.head, peer, wish):
            case Start.LEAD:
                return False
            case Start.FOLLOW:
                return True
            case Start.REFUSE:
                raise self._refusal(term, peer)

    def _refusal(self, term: int, peer: Role | None) -> OtherLeadsError:
        other = self._partners.other
        address = "HOST[:PORT]" if other is None else f"{other.host}:{other.port}"
        if peer is None:
            what = f"it was fenced: {self._standing.reason}"
        elif peer.role == "active":
            what = f"the coordinator at {address} is active with term {peer.term} and event {peer.head}"
        else:
            what = f"the {peer.role} coordinator at {address} knows of term {peer.term} and event {peer.head}"
        return OtherLeadsError(
            f"this coordinator, with term {term} in its log, must not lead: {what}",
            remedy=f"Start it as a standby: muster coordinator --standby-of {address}",
        )

    async def _follow(self, log: EventLog, task_status: anyio.abc.TaskStatus[bool]) -> Promotion:
        assert self._partners.standby_of is not None
        known = self._standing.term if self._standing.epoch == log.epoch else 0
        self._stand("standby", log.epoch, max(known, term_of(log)))
        following = Following(
            target=self._partners.standby_of,
            witness=self._partners.witness,
            holder=self._standing.holder,
            term=known,
        )
        coordinator = self.coordinator
        standby = Standby(log, coordinator.server, coordinator.publisher, self._settings.clocks, following)
        logger.info("standby of {}; its log is at event {}", self._partners.standby_of, log.head)
        task_status.started(False)
        promotion = await standby.run()
        logger.warning("takes over from {} with term {}", self._partners.standby_of, promotion.term)
        return promotion

    # --- leading ------------------------------------------------------------------------------------------

    async def _lead(self, log: EventLog, promotion: Promotion | None, task_status: anyio.abc.TaskStatus[bool]) -> None:
        partners, clocks = self._partners, self._settings.clocks
        renewed = float("-inf")
        if promotion is not None:  # one that was forced has a lease's time to find a vote
            renewed = lease_clock() if promotion.renewed is None else promotion.renewed
        tenure = Tenure(
            term=term_of(log) if promotion is None else promotion.term,
            seconds=clocks.lease_seconds,
            renewed=renewed,
            voted=partners.witness is not None,
        )
        authority = Authority(
            log.epoch, tenure, heir=partners.other, on_fenced=lambda term: self._fenced(authority, term)
        )
        async with anyio.create_task_group() as group:
            if partners.witness is not None:
                voters = [partners.witness, *([] if partners.other is None else [partners.other])]
                beat_seconds = min(clocks.heartbeat_seconds, clocks.lease_seconds / 3)
                group.start_soon(keep_votes, authority, voters, self._standing.holder, beat_seconds)
                if promotion is None:
                    logger.info("asks for a vote of {}", " or ".join(map(str, voters)))
                    await authority.decided()
            self._stand("active", log.epoch, authority.term)
            if partners.other is not None:
                group.start_soon(watch_peer, authority, partners.other, clocks.lease_seconds)
            await self.coordinator.lead(log, authority, task_status=_Leads(self, promotion, task_status))
            group.cancel_scope.cancel()

    def _fenced(self, authority: Authority, term: int) -> None:
        """Remember it for the next start, and let go of what waits here."""
        if self.activated.is_set():
            self.coordinator.shut()
        reason = f"another coordinator has term {term}, this one had {authority.term}"
        try:
            self._stand("fenced", authority.epoch, term, reason)
        except MusterError as error:
            logger.error("that this coordinator is fenced cannot be remembered: {}", error)

    def _stand(self, role: str, epoch: str, term: int, reason: str = "") -> None:
        self._standing = msgspec.structs.replace(self._standing, role=role, epoch=epoch, term=term, reason=reason)
        save_standing(self._settings.directory, self._standing)

    def led(self, promotion: Promotion | None) -> None:
        """The coordinator leads: whoever asked for that hears of it."""
        self.activated.set()
        if promotion is not None and promotion.asked is not None:
            asked = promotion.asked
            self.coordinator.server.send(asked.identity, Answer(id=asked.call.id, reply=self.coordinator.role()))


class _Leads(anyio.abc.TaskStatus[int]):
    """Tells the member before whoever started it."""

    def __init__(self, member: Member, promotion: Promotion | None, task_status: anyio.abc.TaskStatus[bool]) -> None:
        self._member = member
        self._promotion = promotion
        self._task_status = task_status

    def started(self, value: int | None = None) -> None:
        """The coordinator has logged its start."""
        del value
        self._member.led(self._promotion)
        self._task_status.started(True)


def term_of(log: EventLog) -> int:
    """The term that the log says.

    Raises:
        LogError: the log is damaged.
    """
    found = log.query(Query(kinds=("coordinator.started",), limit=1, newest=True))
    event = found[0].event() if found else None
    return event.term if isinstance(event, CoordinatorStarted) else log.load().term
