"""Votes, leases and beginnings of coordinators: whatever is lost, delayed or restarted, one at a time may write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.coordinator.voting import (
    EPOCHS_MAXIMUM,
    Grant,
    Right,
    Standing,
    Start,
    Tenure,
    Voter,
    Wish,
    begin,
    candidacy,
    counted,
    right,
    vote,
    woken,
)
from muster.protocol import Claim
from muster.replies import Role, Vote
from muster.spec import BootId

EPOCH = "e"
LEASE = 10.0


def claim(term: int, holder: str, epoch: str = EPOCH) -> Claim:
    return Claim(epoch=epoch, term=term, holder=holder, seconds=LEASE)


def voted(term: int, holder: str, *, at: float = 0.0) -> Voter:
    voter, answer = vote(Voter(), claim(term, holder), at)
    assert answer.granted
    return voter


# --- a voter --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("term", "holder", "now", "granted"),
    [
        (2, "a", 3.0, True),  # it renews
        (3, "a", 3.0, True),  # it goes on to a higher term by itself
        (1, "a", 3.0, False),  # what it had before is over
        (3, "b", 9.99, False),  # the lease still runs
        (3, "b", 10.0, True),
        (2, "b", 99.0, False),  # that term was given to another for ever
        (1, "b", 99.0, False),
    ],
)
def test_a_vote_moves_on_with_a_higher_term_after_the_lease(term: int, holder: str, now: float, granted: bool) -> None:
    before = voted(2, "a")
    after, answer = vote(before, claim(term, holder), now)
    assert answer.granted is granted
    if granted:
        assert (answer.term, answer.holder, answer.remaining_seconds) == (term, holder, LEASE)
        assert after.grants[EPOCH] == Grant(term=term, holder=holder, until=now + LEASE, seconds=LEASE)
    else:
        assert after == before
        assert (answer.term, answer.holder) == (2, "a")
        assert answer.remaining_seconds == pytest.approx(max(0.0, LEASE - now))


def test_epochs_do_not_meet_and_are_bounded() -> None:
    voter, answer = vote(voted(7, "a"), claim(1, "b", "other"), 0.0)
    assert answer.granted
    assert {epoch: grant.term for epoch, grant in voter.grants.items()} == {EPOCH: 7, "other": 1}
    full = Voter(grants={str(number): voter.grants[EPOCH] for number in range(EPOCHS_MAXIMUM)})
    assert not vote(full, claim(1, "a", "one more"), 0.0)[1].granted
    assert vote(full, claim(7, "a", "0"), 0.0)[1].granted
    after, answer = vote(full, claim(1, "a", "one more"), 2 * 86_400.0)
    assert answer.granted, "what ended a day ago makes room"
    assert list(after.grants) == ["one more"]


def test_a_voter_that_may_have_forgotten_grants_nothing_at_first() -> None:
    voter = Voter(quiet_until=4.0)
    assert vote(voter, claim(1, "a"), 3.0) == (voter, Vote(granted=False, term=0, remaining_seconds=1.0))
    assert vote(voter, claim(1, "a"), 4.0)[1].granted


def test_a_voter_that_was_started_again_keeps_its_word_for_one_more_lease() -> None:
    voter = woken(voted(2, "a").grants, 100.0)
    assert not vote(voter, claim(3, "b"), 109.9)[1].granted
    assert vote(voter, claim(2, "a"), 101.0)[1].granted, "whom it voted for may renew at once"
    assert vote(voter, claim(3, "b"), 110.0)[1].granted


# --- a holder -------------------------------------------------------------------------------------------------


def test_the_right_to_write_ends_before_the_vote_does() -> None:
    tenure = Tenure(term=2, seconds=LEASE, renewed=100.0, voted=True)
    assert [right(tenure, now) for now in (100.0, 108.9, 109.0, 500.0)] == [
        Right.WRITE,
        Right.WRITE,
        Right.WAIT,
        Right.WAIT,
    ]
    again = counted(tenure, Vote(granted=True, term=2), sent=500.0)
    assert right(again, 501.0) is Right.WRITE, "nobody else was active meanwhile"
    assert counted(again, Vote(granted=True, term=2), sent=400.0) == again, "answers may overtake each other"
    assert right(msgspec.structs.replace(tenure, voted=False), 500.0) is Right.WRITE


def test_a_higher_term_ends_it_for_good() -> None:
    tenure = Tenure(term=2, seconds=LEASE, renewed=100.0, voted=False)
    assert right(counted(tenure, Vote(granted=False, term=2), 0.0), 100.0) is Right.WRITE
    fenced = counted(tenure, Vote(granted=False, term=3), 0.0)
    assert right(fenced, 100.0) is Right.NONE
    assert right(counted(fenced, Vote(granted=True, term=2), 101.0), 101.0) is Right.NONE
    assert right(counted(tenure, Vote(granted=True, term=3), 101.0), 101.0) is Right.NONE, "a vote of another life"


@pytest.mark.parametrize(
    ("voter", "now", "term"),
    [
        (Voter(), 0.0, 6),
        (Voter(quiet_until=1.0), 0.9, None),
        (voted(5, "a"), 9.9, None),
        (voted(5, "a"), 10.0, 6),
        (voted(8, "a"), 10.0, 9),
        (voted(5, "me"), 0.0, 6),
    ],
)
def test_a_standby_stands_once_its_own_vote_is_free(voter: Voter, now: float, term: int | None) -> None:
    found = candidacy(voter, EPOCH, 5, "me", LEASE, now)
    assert found == (None if term is None else claim(term, "me"))


# --- all three together ---------------------------------------------------------------------------------------


class _Node(msgspec.Struct):
    """A coordinator: its log's term, what it is, and what a message to it finds."""

    name: str
    active: bool
    term: int
    tenure: Tenure
    voter: Voter = Voter()
    standing_for: Claim | None = None


class _World:
    """Coordinators a and b and the witness w on one clock; messages are lost, delayed and reordered."""

    def __init__(self) -> None:
        self.now = 0.0
        self.witness = Voter()
        tenure = Tenure(term=1, seconds=LEASE, renewed=float("-inf"), voted=True)
        self.nodes = {
            "a": _Node(name="a", active=True, term=1, tenure=tenure),
            "b": _Node(name="b", active=False, term=1, tenure=tenure, voter=Voter(quiet_until=LEASE)),
        }
        self.sent: list[Callable[[], None]] = []  #: what happens if the message arrives
        self.wrote: dict[int, str] = {}  #: who has written in each term

    def renew(self, name: str, at_witness: bool, at_once: bool = False) -> None:
        node = self.nodes[name]
        if not node.active:
            return
        asked, sent = claim(node.tenure.term, name), self.now
        tenure = node.tenure

        def answered(answer: Vote) -> None:
            if node.active and node.tenure.term == tenure.term:
                node.tenure = counted(node.tenure, answer, sent)

        self._send(lambda: self._reply(answered, self._vote("w" if at_witness else _other(name), asked)), at_once)

    def stand(self, name: str, at_once: bool = False) -> None:
        node = self.nodes[name]
        if node.active or node.standing_for is not None:
            return
        asked, sent = candidacy(node.voter, EPOCH, node.term, name, LEASE, self.now), self.now
        if asked is None:
            return
        node.standing_for = asked

        def answered(answer: Vote) -> None:
            if node.standing_for is not asked or node.active:
                return
            node.standing_for = None
            if answer.granted:
                node.active = True
                node.tenure = Tenure(term=asked.term, seconds=LEASE, renewed=sent, voted=True)

        self._send(lambda: self._reply(answered, self._vote("w", asked)), at_once)

    def _send(self, message: Callable[[], None], at_once: bool) -> None:
        if not at_once:
            self.sent.append(message)
            return
        before = len(self.sent)
        message()
        while len(self.sent) > before:  # the answer, past everything that is still on its way
            self.sent.pop()()

    def give_up(self, name: str) -> None:
        """The witness has not answered in time."""
        self.nodes[name].standing_for = None

    def replicate(self, name: str) -> None:
        node, other = self.nodes[name], self.nodes[_other(name)]
        if not node.active and other.active and right(other.tenure, self.now) is Right.WRITE:
            node.term = max(node.term, other.tenure.term)

    def restart(self, name: str) -> None:
        """As the same again, or as a standby where it was fenced."""
        node = self.nodes[name]
        if node.active and right(node.tenure, self.now) is not Right.NONE:
            node.tenure = msgspec.structs.replace(node.tenure, renewed=float("-inf"))
        else:
            node.active = False
        node.voter = Voter(quiet_until=self.now + LEASE)
        node.standing_for = None

    def restart_witness(self) -> None:
        self.witness = woken(self.witness.grants, self.now)

    def deliver(self, index: int, lost: bool) -> None:
        if self.sent:
            message = self.sent.pop(index % len(self.sent))
            if not lost:
                message()

    def check(self) -> None:
        writing = [node for node in self.nodes.values() if node.active and right(node.tenure, self.now) is Right.WRITE]
        assert len(writing) <= 1, f"both write at {self.now}"
        for node in writing:
            assert self.wrote.setdefault(node.tenure.term, node.name) == node.name, "one term has two coordinators"

    def _reply(self, take: Callable[[Vote], None], answer: Vote | None) -> None:
        if answer is not None:
            self.sent.append(lambda: take(answer))

    def _vote(self, of: str, asked: Claim) -> Vote | None:
        if of == "w":
            self.witness, answer = vote(self.witness, asked, self.now)
            return answer
        node = self.nodes[of]
        if node.active:
            return Vote(granted=False, term=node.tenure.term)
        if asked.term < node.term or node.standing_for is not None:
            return Vote(granted=False, term=node.term)
        node.voter, answer = vote(node.voter, asked, self.now)
        return answer


def _other(name: str) -> str:
    return "b" if name == "a" else "a"


_names = st.sampled_from(("a", "b"))
_steps = st.one_of(
    st.tuples(st.just("pass"), st.sampled_from((0.1, 1.0, 4.0, 5.0, 9.0, 10.0))),
    st.tuples(st.just("renew"), _names, st.booleans(), st.booleans()),
    st.tuples(st.just("renew"), _names, st.booleans(), st.just(True)),
    st.tuples(st.just("deliver"), st.integers(0, 5), st.booleans()),
    st.tuples(st.just("deliver"), st.just(0), st.just(False)),
    st.tuples(st.just("stand"), _names, st.booleans()),
    st.tuples(st.just("stand"), _names, st.just(True)),
    st.tuples(st.just("give_up"), _names),
    st.tuples(st.just("replicate"), _names),
    st.tuples(st.just("restart"), _names),
    st.tuples(st.just("restart_witness")),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(_steps, min_size=40, max_size=100))
def test_there_are_never_two_that_write(steps: list[tuple[str, ...]]) -> None:
    world = _World()
    for what, *arguments in steps:
        if what == "pass":
            # In small steps, so that no moment at which both may write is jumped over.
            for _ in range(10):
                world.now += float(arguments[0]) / 10
                world.check()
        else:
            getattr(world, what)(*arguments)
            world.check()


def test_when_the_active_one_is_gone_the_standby_writes_a_lease_later() -> None:
    world = _World()
    for _ in range(12):
        world.renew("a", True)
        world.renew("a", False)
        _settle(world)
        world.now += 1.0
    lost_at = world.now
    while not world.nodes["b"].active:
        world.stand("b")
        _settle(world)
        world.check()
        world.now += 0.25
        assert world.now < lost_at + LEASE + 1.0
    assert world.now >= lost_at + 0.9 * LEASE - 1.0
    world.renew("a", True)
    _settle(world)
    assert right(world.nodes["a"].tenure, world.now) is Right.NONE, "and when it comes back it is fenced"


def _settle(world: _World) -> None:
    while world.sent:
        world.deliver(0, False)


def test_one_dead_voter_changes_nothing() -> None:
    for at_witness in (True, False):
        world = _World()
        world.now = LEASE  # the standby has been up for a while
        for _ in range(40):
            world.renew("a", at_witness)
            _settle(world)
            if not at_witness:
                world.stand("b")  # it hears the active one, and would not: its vote is not free
            _settle(world)
            assert right(world.nodes["a"].tenure, world.now) is Right.WRITE
            world.now += 1.0


# --- how a process begins ---------------------------------------------------------------------------------------

PRIMARY, STANDBY, EITHER = Wish(), Wish(leads=False, follows=True), Wish(leads=True, follows=True)


def role(what: Literal["active", "standby", "fenced"], term: int, *, epoch: str = EPOCH, head: int = 50) -> Role:
    return Role(role=what, epoch=epoch, term=term, boot=BootId("other"), head=head, version="1")


_NEW = Standing(role="standby")
_LED = Standing(role="active", epoch=EPOCH, term=2)
_FENCED = Standing(role="fenced", epoch=EPOCH, term=3)


@pytest.mark.parametrize(
    ("standing", "peer", "primary", "standby", "either"),
    [
        # Nobody else answers.
        (_NEW, None, Start.LEAD, Start.FOLLOW, Start.LEAD),
        (_LED, None, Start.LEAD, Start.LEAD, Start.LEAD),
        (_FENCED, None, Start.REFUSE, Start.FOLLOW, Start.FOLLOW),
        # The other one is active.
        (_LED, role("active", 3), Start.REFUSE, Start.FOLLOW, Start.FOLLOW),
        (_LED, role("active", 2), Start.REFUSE, Start.FOLLOW, Start.FOLLOW),
        (_LED, role("active", 1), Start.LEAD, Start.LEAD, Start.LEAD),  # and that one will be fenced
        (_NEW, role("active", 1), Start.LEAD, Start.FOLLOW, Start.LEAD),
        (_LED, role("active", 1, epoch="other"), Start.REFUSE, Start.FOLLOW, Start.FOLLOW),
        # The other one is not active.
        (_LED, role("standby", 2), Start.LEAD, Start.LEAD, Start.LEAD),
        (_NEW, role("standby", 2), Start.LEAD, Start.FOLLOW, Start.LEAD),
        (_LED, role("standby", 3), Start.REFUSE, Start.FOLLOW, Start.FOLLOW),
        (_LED, role("fenced", 2), Start.LEAD, Start.LEAD, Start.LEAD),
        (_FENCED, role("standby", 2), Start.REFUSE, Start.FOLLOW, Start.FOLLOW),
        (_LED, role("standby", 9, epoch="other"), Start.LEAD, Start.LEAD, Start.LEAD),
    ],
)
def test_how_a_coordinator_begins(
    standing: Standing, peer: Role | None, primary: Start, standby: Start, either: Start
) -> None:
    begun = [begin(standing, EPOCH, 2, 40, peer, wish) for wish in (PRIMARY, STANDBY, EITHER)]
    assert begun == [primary, standby, either]


def test_a_new_disk_does_not_begin_an_empty_cluster_beside_a_standby_that_has_the_log() -> None:
    other = role("standby", 1, epoch="other")
    assert begin(_NEW, EPOCH, 1, 0, other, PRIMARY) is Start.REFUSE
    assert begin(_NEW, EPOCH, 1, 0, msgspec.structs.replace(other, head=0), PRIMARY) is Start.LEAD


def test_what_was_fenced_in_another_log_does_not_count_in_this_one() -> None:
    assert begin(msgspec.structs.replace(_FENCED, epoch="other"), EPOCH, 2, 40, None, PRIMARY) is Start.LEAD
    assert begin(msgspec.structs.replace(_LED, epoch="other"), EPOCH, 2, 40, None, STANDBY) is Start.FOLLOW
