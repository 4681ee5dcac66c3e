"""The active coordinator's right to write, asked before every event, and the claims that keep it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
from loguru import logger

from muster.bus import ControlClient, Endpoint
from muster.coordinator.clock import lease_clock
from muster.coordinator.voting import Right, Tenure, counted, right
from muster.errors import FencedError, LogError, MusterError, QuorumError
from muster.protocol import Claim, Hello, Who
from muster.replies import Role, Vote

#: How long the other coordinator may take to say what it is, in seconds.
WHO_SECONDS = 2.0


class Authority:
    """Whether this coordinator may write. `objection` is cheap: it is asked before each event is logged.

    `heir` is where the other coordinator is, as the remedy names it. `on_fenced` is called once, with the higher term.
    """

    def __init__(
        self,
        epoch: str,
        tenure: Tenure,
        *,
        heir: Endpoint | None = None,
        on_fenced: Callable[[int], None] = lambda term: None,
        now: Callable[[], float] = lease_clock,
    ) -> None:
        self.epoch = epoch
        self.tenure = tenure
        self._heir = heir
        self._on_fenced = on_fenced
        self._now = now
        self._right = right(tenure, now())
        self._counted = anyio.Event()

    @property
    def term(self) -> int:
        """The term that this coordinator has."""
        return self.tenure.term

    @property
    def fenced(self) -> bool:
        """Whether somebody else has a higher term: then this is over for good."""
        return self.tenure.surpassed > self.tenure.term

    def objection(self) -> LogError | None:
        """Why nothing may be written now; `None` where it may."""
        now = right(self.tenure, self._now())
        if now is not self._right:
            self._right = now
            self._say(now)
        match now:
            case Right.WRITE:
                return None
            case Right.WAIT:
                return QuorumError(
                    "this coordinator reaches neither the witness nor its standby, so that another may have taken over",
                    remedy="Mend the network between them; instances run on. Ask again, or ask the other coordinator.",
                )
            case Right.NONE:
                return FencedError(
                    f"this coordinator has term {self.term} and was fenced by one with term {self.tenure.surpassed}",
                    remedy=f"Ask the other one{self._address()}, and start this one again as its standby: "
                    f"muster coordinator --standby-of {self._heir_text()}",
                )

    def hear(self, epoch: str, term: int) -> None:
        """Somebody knows a coordinator with this term of this epoch."""
        if epoch == self.epoch and term > max(self.term, self.tenure.surpassed):
            self.count(Vote(granted=False, term=term), sent=0.0)

    def count(self, vote: Vote, sent: float) -> None:
        """Take the answer to a claim that was sent at `sent`."""
        before = self.fenced
        self.tenure = counted(self.tenure, vote, sent)
        self.objection()
        if self.fenced and not before:
            self._on_fenced(self.tenure.surpassed)
        self._counted.set()
        self._counted = anyio.Event()

    async def decided(self) -> None:
        """Wait until this coordinator may write.

        Raises:
            FencedError: it never will.
        """
        while (objection := self.objection()) is not None:
            if isinstance(objection, FencedError):
                raise objection
            await self._counted.wait()

    def _say(self, now: Right) -> None:
        objection = {
            Right.WRITE: "this coordinator has its votes, and goes on",
            Right.WAIT: "no vote was renewed for a lease: this coordinator changes and publishes nothing until it is",
            Right.NONE: f"FENCED: a coordinator with term {self.tenure.surpassed} has taken over from this one's term "
            f"{self.term}; it changes and publishes nothing any more. To make it a standby, start it again: "
            f"muster coordinator --standby-of {self._heir_text()}",
        }[now]
        logger.log("INFO" if now is Right.WRITE else "ERROR", objection)

    def _address(self) -> str:
        return "" if self._heir is None else f" ({self._heir_text()})"

    def _heir_text(self) -> str:
        return "HOST[:PORT]" if self._heir is None else f"{self._heir.host}:{self._heir.port}"


async def ask_role(endpoint: Endpoint, seconds: float = WHO_SECONDS) -> Role | None:
    """What the coordinator at the endpoint is; `None` where it does not say, at once where nobody listens."""
    try:
        with anyio.fail_after(seconds):
            stream = await anyio.connect_tcp(endpoint.host, endpoint.port)
        await stream.aclose()
    except (OSError, TimeoutError):
        return None
    async with ControlClient(endpoint) as client:
        return await role_of(client, seconds)


async def role_of(client: ControlClient, seconds: float = WHO_SECONDS) -> Role | None:
    """What the coordinator of this client is; `None` where it does not say."""
    try:
        return await client.ask(Who(), seconds, Role)
    except MusterError:
        return None


async def ask_vote(client: ControlClient, claim: Claim, seconds: float) -> Vote | None:
    """The answer to a claim; `None` where there is none."""
    try:
        return await client.ask(claim, seconds, Vote)
    except MusterError:
        return None


async def keep_votes(authority: Authority, voters: Sequence[Endpoint], holder: str, beat_seconds: float) -> None:
    """Claim the vote of each at every heartbeat, until the coordinator is fenced."""
    async with anyio.create_task_group() as group:
        for endpoint in voters:
            group.start_soon(_keep_vote, authority, endpoint, holder, beat_seconds)


async def _keep_vote(authority: Authority, endpoint: Endpoint, holder: str, beat_seconds: float) -> None:
    """One voter has a task of its own: a dead one must not delay the claim at the other."""
    tenure = authority.tenure
    claim = Claim(epoch=authority.epoch, term=tenure.term, holder=holder, seconds=tenure.seconds)
    async with ControlClient(endpoint) as client:
        while not authority.fenced:
            sent = lease_clock()
            vote = await ask_vote(client, claim, max(beat_seconds, tenure.seconds / 3))
            if vote is not None:
                authority.count(vote, sent)
            await anyio.sleep(max(0.0, sent + beat_seconds - lease_clock()))


async def watch_peer(authority: Authority, endpoint: Endpoint, every_seconds: float) -> None:
    """Two that are active at once find each other: the one with the lower term is fenced, whichever it is."""
    async with ControlClient(endpoint) as client:
        while not authority.fenced:
            role = await role_of(client)
            if role is not None and role.role == "active":
                authority.hear(role.epoch, role.term)
                if role.epoch == authority.epoch and role.term < authority.term:
                    logger.warning("{} still has term {}; it is told of term {}", endpoint, role.term, authority.term)
                    await tell(client, authority.epoch, authority.term)
                elif role.epoch != authority.epoch:
                    logger.error("{} is active with another log (epoch {}): stop one of the two", endpoint, role.epoch)
            await anyio.sleep(every_seconds)


async def tell(client: ControlClient, epoch: str, term: int) -> None:
    """Let a coordinator know of a term; one with a lower term is fenced by that."""
    try:
        await client.call(Hello(epoch=epoch, term=term), timeout_seconds=WHO_SECONDS)
    except MusterError as error:
        logger.debug("it could not be told of term {}: {}", term, error)
