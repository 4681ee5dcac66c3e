"""A coordinator that follows the active one, serves reads, and takes over when it is told to or may."""

from __future__ import annotations

import secrets
import time

import anyio
import msgspec
from loguru import logger

from muster.bus import Applied, ControlClient, ControlServer, Endpoint, Follower, Incoming, Publisher, Synchronised
from muster.coordinator.authority import WHO_SECONDS, ask_role, ask_vote, role_of, tell
from muster.coordinator.clock import lease_clock
from muster.coordinator.find import refusal
from muster.coordinator.reads import Reads
from muster.coordinator.replica import Replica
from muster.coordinator.voting import Voter, candidacy, vote
from muster.errors import MusterError, StandbyError, UnreachableError
from muster.eventlog.api import EventLog
from muster.events import Envelope
from muster.lifecycle import Settings
from muster.protocol import Claim, Promote
from muster.replies import Answer, AnyReply, Pulse, Refused, Role, Vote
from muster.spec import BootId, Failure, Phase


class Following(msgspec.Struct, frozen=True, kw_only=True):
    """Whom a standby follows, who votes, and under which name it claims. `term` is the highest that it knows."""

    target: Endpoint
    witness: Endpoint | None = None
    holder: str
    term: int = 0


class Promotion(msgspec.Struct, frozen=True, kw_only=True):
    """A standby is to be the active one. `renewed` is when it sent the claim that the witness granted, if it did."""

    term: int
    renewed: float | None = None
    asked: Incoming | None = None  #: who wants to hear of it


class Standby:
    """Follows until it is promoted. The sockets and the log are the caller's, who goes on with them."""

    def __init__(
        self, log: EventLog, server: ControlServer, publisher: Publisher, clocks: Settings, following: Following
    ) -> None:
        self._log = log
        self._server = server
        self._publisher = publisher
        self._clocks = clocks
        self._following = following
        self._target = following.target
        self._replica = Replica(log, publisher.publish, self._begin_again)
        self._reads = Reads(log, self._replica, clocks, publisher.port, self._target, _new_boot())
        self._reads.reason = "nothing was heard of it yet"
        self._voter = Voter(quiet_until=lease_clock() + clocks.lease_seconds)
        self._follower: Follower | None = None
        self._aligned = False  #: whether the log is the active one's, as far as was heard
        self._was_aligned = False  #: whether it ever was in this life: else it may be old, and must not lead by itself
        self._whole = log.head > 0  #: whether nothing is missing before its head
        self._known_term = following.term
        self._claiming = False
        self._promoted: Promotion | None = None
        self._done = anyio.Event()

    async def run(self) -> Promotion:
        """Serve and follow; returns with the promotion."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._serve, group)
            group.start_soon(self._follow)
            group.start_soon(self._keep_time)
            await self._done.wait()
            group.cancel_scope.cancel()
        assert self._promoted is not None
        return self._promoted

    # --- answering ----------------------------------------------------------------------------------------

    async def _serve(self, group: anyio.abc.TaskGroup) -> None:
        async for incoming in self._server.incoming:
            request = incoming.call.request
            try:
                match request:
                    case Promote():
                        group.start_soon(self._promote, incoming, request.force)
                        continue
                    case Claim():
                        reply = self._vote(request)
                    case _:
                        reply = self._reads.answer(request)
            except Exception:
                # One bad request must not end the standby of everybody else.
                logger.exception("request {} failed", type(request).__name__)
                failure = Failure(kind="internal", message="the request failed in the coordinator; see its log")
                reply = Refused(failure=failure)
            if reply is not None:
                self._answer(incoming, reply)

    def _answer(self, incoming: Incoming, reply: AnyReply) -> None:
        self._server.send(incoming.identity, Answer(id=incoming.call.id, reply=reply))

    def _vote(self, claim: Claim) -> Vote:
        """Vote for the active one; not while this one asks the witness for itself, which needs its own vote."""
        term = self._replica.state.term
        if claim.epoch != self._log.epoch or claim.term < term or self._claiming:
            return Vote(granted=False, term=term if claim.epoch == self._log.epoch else 0)
        self._voter, answer = vote(self._voter, claim, lease_clock())
        return answer

    # --- following ----------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        while True:
            try:
                await self._follow_once()
            except (MusterError, ValueError) as error:
                self._wait_for(str(error))
            except Exception as error:  # the edge of one try: the standby goes on answering, and tries again
                logger.exception("following {} failed", self._target)
                self._wait_for(str(error))
            self._aligned = False
            await anyio.sleep(self._clocks.heartbeat_seconds)

    async def _follow_once(self) -> None:
        async with ControlClient(self._target) as client, Follower(client) as follower:
            self._follower = follower
            try:
                async for change in follower.changes():
                    match change:
                        case Synchronised():
                            await self._align(client)
                        case Applied(envelope=envelope):
                            self._take(envelope)
                        case _:
                            self._wait_for(f"nothing heard from it for {change.seconds:.1f} s")
            finally:
                self._follower = None

    async def _align(self, client: ControlClient) -> None:
        """Make the log equal to that of the coordinator, if it is the active one."""
        self._aligned = False
        role = await role_of(client)
        if role is None:
            raise UnreachableError("it does not say what it is")
        self._check(role)
        await self._replica.catch_up(client, role.epoch)
        if not self._aligned and self._reads.reason:
            logger.info("follows {}, term {}, at event {}", self._target, self._replica.state.term, self._log.head)
        self._reads.reason = ""
        self._aligned = self._was_aligned = self._whole = True
        self._pulse()

    def _begin_again(self) -> None:
        """Observers must not take the events of one log for those of the other."""
        self._was_aligned = self._whole = False
        self._reads.boot = _new_boot()
        self._pulse()

    def _check(self, role: Role) -> None:
        """Raises `StandbyError` where the coordinator is not one to follow."""
        if role.role != "active":
            raise StandbyError(f"it is {role.role}", remedy=role.reason)
        same = role.epoch == self._log.epoch
        known = max(self._replica.state.term, self._known_term)
        if same and role.term < known:
            raise StandbyError(f"it has term {role.term}, and this one knows of term {known}")

    def _take(self, envelope: Envelope) -> None:
        if not self._aligned:
            return
        if envelope.sequence > self._log.head + 1:
            raise StandbyError(f"event {envelope.sequence} came after {self._log.head}")
        self._replica.take([envelope])

    def _wait_for(self, reason: str) -> None:
        self._aligned = False
        if self._reads.reason != reason:
            logger.warning("{} is not followed any more: {}; trying again until it is", self._target, reason)
        self._reads.reason = reason

    # --- time ---------------------------------------------------------------------------------------------

    @property
    def _hears(self) -> bool:
        return self._aligned and self._follower is not None and self._follower.connected

    async def _keep_time(self) -> None:
        while True:
            await anyio.sleep(self._clocks.heartbeat_seconds)
            if self._hears:
                self._pulse()
                self._replica.keep_house(time.time_ns())
            else:
                self._publisher.hush()
                await self._stand()

    def _pulse(self) -> None:
        """Tell observers that this copy is live."""
        self._publisher.pulse(
            Pulse(
                epoch=self._log.epoch,
                coordinator_boot=self._reads.boot,
                head=self._log.head,
                time_ns=time.time_ns(),
                term=self._replica.state.term,
            )
        )

    # --- taking over --------------------------------------------------------------------------------------

    async def _stand(self) -> None:
        """With a witness: ask for its vote, once this one's own is free, and take over with both."""
        if self._following.witness is None or not self._was_aligned or self._claiming or self._done.is_set():
            return
        promotion = await self._claim()
        if isinstance(promotion, Promotion):
            logger.warning("nothing is heard of {} and the witness agrees", self._target)
            self._win(promotion)

    async def _claim(self) -> Promotion | Vote | None:
        """Ask the witness. The promotion, or what it answered; `None` where it, or this one's own vote, is not free."""
        assert self._following.witness is not None
        term = max(self._replica.state.term, self._known_term)
        now, seconds = lease_clock(), self._clocks.lease_seconds
        claim = candidacy(self._voter, self._log.epoch, term, self._following.holder, seconds, now)
        if claim is None:
            return None
        self._claiming = True
        async with ControlClient(self._following.witness) as client:
            answer = await ask_vote(client, claim, WHO_SECONDS)
        if answer is not None and answer.granted:
            return Promotion(term=claim.term, renewed=now)  # and it goes on to keep its own vote for itself
        self._claiming = False
        if answer is not None:
            self._known_term = max(self._known_term, answer.term if answer.holder != self._following.holder else 0)
        return answer

    async def _promote(self, incoming: Incoming, force: bool) -> None:
        try:
            promotion = await self._elect(force)
        except MusterError as error:
            self._answer(incoming, refusal(error, Phase.PLACING))
            return
        self._win(msgspec.structs.replace(promotion, asked=incoming))

    async def _elect(self, force: bool) -> Promotion:
        """Whether this one may be promoted now. Where the active one lives and `force` says so, it hands over.

        Raises:
            StandbyError: it may not.
        """
        if not self._log.head or not (self._whole or force):
            part = f"only the part up to event {self._log.head}" if self._log.head else "nothing"
            raise StandbyError(
                f"this standby has {part} of the log yet, and would lose what it says of the cluster",
                remedy="Let it reach the active coordinator first; or begin an empty cluster, without --standby-of.",
            )
        role = await ask_role(self._target)
        if role is None or role.role != "active" or role.epoch != self._log.epoch:
            self._known_term = max(self._known_term, 0 if role is None else role.term)
            return await self._votes(force)
        if not force:
            raise StandbyError(
                f"the coordinator at {self._target} is active: term {role.term}, event {role.head}",
                remedy="Stop it first, or take over from it all the same: muster promote --force",
            )
        self._known_term = max(self._known_term, role.term)
        elected = await self._votes(force)
        await self._hand_over(elected.term)
        return elected

    async def _votes(self, force: bool) -> Promotion:
        term = max(self._replica.state.term, self._known_term)
        if self._following.witness is None:
            return Promotion(term=term + 1)
        answer = None if self._claiming else await self._claim()
        if isinstance(answer, Promotion):
            return answer
        if not force:
            what = "cannot be reached" if answer is None else f"has given its vote for {answer.remaining_seconds:.1f} s"
            raise StandbyError(
                f"the witness at {self._following.witness} {what}, or this one's own vote is not free yet",
                remedy="Try again in a moment, or take over without its vote: muster promote --force",
            )
        return Promotion(term=max(term, self._known_term) + 1)

    async def _hand_over(self, term: int) -> None:
        """Fence the active one, and fetch what it logged until then."""
        async with ControlClient(self._target) as client:
            await tell(client, self._log.epoch, term)
            try:
                await self._replica.catch_up(client, self._log.epoch)
            except MusterError as error:
                logger.warning("the last events of {} could not be fetched: {}", self._target, error)

    def _win(self, promotion: Promotion) -> None:
        if not self._done.is_set():
            self._promoted = promotion
            self._done.set()


def _new_boot() -> BootId:
    return BootId(secrets.token_hex(8))
