"""Who may be the active coordinator: pure rules of the votes, of the right to write, and of how a process begins.

Three have a vote: two coordinators and the witness. Who has two of the three is active, as long as it renews them. A
vote is given for a while, to one holder; the holder counts that while from when it asked, the voter from when it
answered, so that the holder always thinks that it is over first. Times are seconds of one clock that does not jump.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Literal

import msgspec

from muster.protocol import Claim
from muster.replies import Role, Vote

#: A holder stops so much earlier than its votes end, as a share of the lease: two clocks never run quite alike.
CAUTION = 0.1
#: Epochs that one witness keeps apart; a stranger must not fill its memory.
EPOCHS_MAXIMUM = 256
#: A grant that ended so long ago makes room for another epoch, where there are too many.
_FORGOTTEN_SECONDS = 86_400.0


# --- a voter ------------------------------------------------------------------------------------------------


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """The vote of one epoch: who has it, in which term, and until when."""

    term: int
    holder: str
    until: float
    seconds: float  #: the lease that the holder asked for


class Voter(msgspec.Struct, frozen=True, kw_only=True):
    """All votes of one voter, by epoch. Until `quiet_until` it may have forgotten a vote that still stands."""

    grants: Mapping[str, Grant] = {}
    quiet_until: float = 0.0


def vote(voter: Voter, claim: Claim, now: float) -> tuple[Voter, Vote]:
    """Answer a claim. A term is given to one holder for ever; the vote moves on only to a higher one.

    Before the answer leaves, whatever is new in the voter's terms and holders has to be safe.
    """
    grant = voter.grants.get(claim.epoch)
    granted = _may_have(voter, grant, claim, now)
    if not granted:
        if grant is None:
            return voter, Vote(granted=False, term=0, remaining_seconds=max(0.0, voter.quiet_until - now))
        remaining = max(0.0, grant.until - now)
        return voter, Vote(granted=False, term=grant.term, holder=grant.holder, remaining_seconds=remaining)
    given = Grant(term=claim.term, holder=claim.holder, until=now + claim.seconds, seconds=claim.seconds)
    answer = Vote(granted=True, term=claim.term, holder=claim.holder, remaining_seconds=claim.seconds)
    kept = voter.grants if len(voter.grants) < EPOCHS_MAXIMUM else _current(voter, now)
    return Voter(grants={**kept, claim.epoch: given}, quiet_until=voter.quiet_until), answer


def _current(voter: Voter, now: float) -> dict[str, Grant]:
    """The grants that may not be forgotten yet: of a cluster that is over for a day nobody asks any more."""
    return {epoch: grant for epoch, grant in voter.grants.items() if now - grant.until < _FORGOTTEN_SECONDS}


def _may_have(voter: Voter, grant: Grant | None, claim: Claim, now: float) -> bool:
    if grant is None:
        return now >= voter.quiet_until and len(_current(voter, now)) < EPOCHS_MAXIMUM
    if claim.holder == grant.holder:
        return claim.term >= grant.term
    return claim.term > grant.term and now >= grant.until


def woken(grants: Mapping[str, Grant], now: float) -> Voter:
    """A voter that was started again: whoever has a vote has it for one more lease, since it may have renewed it."""
    again = {epoch: msgspec.structs.replace(grant, until=now + grant.seconds) for epoch, grant in grants.items()}
    return Voter(grants=again)


# --- a holder -----------------------------------------------------------------------------------------------


class Tenure(msgspec.Struct, frozen=True, kw_only=True):
    """What an active coordinator knows of its right to write.

    `renewed` is when it sent the last claim that was granted.
    `surpassed` is the highest term that it heard of, of its own epoch.
    """

    term: int
    seconds: float
    renewed: float
    voted: bool  #: whether it needs votes at all: only with a witness can they be counted
    surpassed: int = 0


class Right(Enum):
    """What an active coordinator may do."""

    WRITE = "write"
    WAIT = "wait"  #: change nothing until a vote is renewed
    NONE = "none"  #: another one has a higher term, for good


def right(tenure: Tenure, now: float) -> Right:
    """What the coordinator may do now."""
    if tenure.surpassed > tenure.term:
        return Right.NONE
    if tenure.voted and now >= tenure.renewed + tenure.seconds * (1 - CAUTION):
        return Right.WAIT
    return Right.WRITE


def counted(tenure: Tenure, vote: Vote, sent: float) -> Tenure:
    """The tenure after the answer to a claim that was sent at `sent`."""
    if vote.granted and vote.term == tenure.term:
        return msgspec.structs.replace(tenure, renewed=max(tenure.renewed, sent))
    return msgspec.structs.replace(tenure, surpassed=max(tenure.surpassed, vote.term))


def candidacy(voter: Voter, epoch: str, term: int, holder: str, seconds: float, now: float) -> Claim | None:
    """The claim with which a standby that has lost the active one asks the witness; `None` while its vote is given.

    `term` is the highest that it knows. It counts its own vote as given to itself once the witness grants the claim.
    """
    grant = voter.grants.get(epoch)
    if now < voter.quiet_until or (grant is not None and grant.holder != holder and now < grant.until):
        return None
    highest = max(term, 0 if grant is None else grant.term)
    return Claim(epoch=epoch, term=highest + 1, holder=holder, seconds=seconds)


# --- how a process begins -------------------------------------------------------------------------------------


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What a coordinator was when it was last heard of, kept beside its log. `term` is the highest that it heard of."""

    role: Literal["active", "standby", "fenced"]
    epoch: str = ""
    term: int = 0
    holder: str = ""
    reason: str = ""


class Start(Enum):
    """What a coordinator is to be when it is started."""

    LEAD = "lead"
    FOLLOW = "follow"
    REFUSE = "refuse"  #: another one leads, and it was not told to follow


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What a coordinator was told to be: to lead where nobody else does, to follow where somebody does."""

    leads: bool = True
    follows: bool = False


def begin(standing: Standing, epoch: str, term: int, head: int, peer: Role | None, wish: Wish) -> Start:
    """How to begin, with a log of this epoch, term and head.

    `peer` is what the other coordinator says of itself, `None` where it does not answer. One that was the active one
    until it ended goes on as that where nobody else is.
    """
    known = max(term, standing.term if standing.epoch == epoch else 0)
    otherwise = Start.FOLLOW if wish.follows else Start.REFUSE
    if peer is not None:
        if peer.role == "active" and (peer.epoch != epoch or peer.term >= term):
            return otherwise
        if not head and peer.head:  # a new disk: the other one has the log
            return otherwise
        if peer.epoch == epoch:
            known = max(known, peer.term)
    if known > term:  # somebody else was promoted, whether or not it answers now
        return otherwise
    was_active = standing.role == "active" and standing.epoch == epoch
    return Start.LEAD if wish.leads or was_active else Start.FOLLOW
