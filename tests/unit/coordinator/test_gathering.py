"""Ranks exchange bytes through the coordinator: all get all, or hear at the deadline who is missing."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from books import Books, info
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.coordinator import gathering
from muster.coordinator.gathering import Gathering
from muster.events import InstanceCreated, InstanceDeleting
from muster.protocol import Gather
from muster.replies import Gathered, Refused
from muster.spec import Assignment, GroupWorkload, InstanceId, InstanceSpec
from muster.state import State

ONE = InstanceId("one")


def started(ranks: int = 2) -> Books:
    """An instance whose last rank is on node b, and all others on node a."""
    books = Books("a", "b")
    nodes = [info("a")] * (ranks - 1) + [info("b")]
    assignments = tuple(Assignment(rank=rank, node=one.node, boot=one.boot) for rank, one in enumerate(nodes))
    spec = InstanceSpec(workload=GroupWorkload(), ranks=ranks)
    books.ledger.commit(InstanceCreated(instance=ONE, attempt=1, spec=spec, assignments=assignments, backend="jaccl"))
    return books


class Exchange:
    """A gathering with the answers that ranks got, in order of their asking."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.gathering = Gathering(lambda: self.state)
        self.heard: dict[str, list[Gathered | Refused]] = {}

    def ask(
        self, rank: int, *, round: int = 0, data: bytes = b"", who: str = "", now: float = 0.0, **changes: object
    ) -> str:
        name = who or f"{rank}/{round}"
        size = len(self.state.instances[ONE].ranks)
        request = Gather(
            instance=ONE, attempt=1, rank=rank, world_size=size, round=round, data=data or bytes([rank]), seconds=5.0
        )
        request = msgspec.structs.replace(request, **changes)
        self.gathering.take(request, self.heard.setdefault(name, []).append, now)
        return name

    def refusal(self, name: str) -> str:
        (reply,) = self.heard[name]
        assert isinstance(reply, Refused)
        return reply.failure.message


@settings(max_examples=60)
@given(st.integers(2, 5), st.integers(1, 3), st.data())
def test_every_rank_gets_every_part_in_rank_order_whenever_it_comes(
    size: int, rounds: int, data: st.DataObject
) -> None:
    exchange = Exchange(started(size).ledger.state)
    for number in range(rounds):
        for rank in data.draw(st.permutations(range(size))):
            assert all(not heard for name, heard in exchange.heard.items() if name.endswith(f"/{number}"))
            exchange.ask(rank, round=number, data=bytes([number, rank]))
    parts = [Gathered(parts=tuple(bytes([number, rank]) for rank in range(size))) for number in range(rounds)]
    assert exchange.heard == {
        f"{rank}/{number}": [parts[number]] for rank, number in itertools.product(range(size), range(rounds))
    }
    assert exchange.gathering.bytes <= 2 * 2 * size


def test_at_the_deadline_the_missing_ranks_are_named_with_their_nodes() -> None:
    exchange = Exchange(started(3).ledger.state)
    first = exchange.ask(1, now=10.0)
    second = exchange.ask(0, now=11.0)
    assert exchange.gathering.next_due() == 15.0
    exchange.gathering.expire(14.9)
    assert exchange.heard[first] == []
    exchange.gathering.expire(15.0)
    for name in (first, second):
        assert exchange.refusal(name) == "rank 2 on node b did not send connection data in time (exchange 0)"
    (reply,) = exchange.heard[first]
    assert isinstance(reply, Refused)
    assert reply.failure.secondary, "the rank that is late may say itself why"
    assert reply.failure.kind == "formation-timeout"
    assert exchange.gathering.next_due() == float("inf")


def test_a_rank_that_asks_again_gets_the_answer_and_its_part_counts_once() -> None:
    exchange = Exchange(started().ledger.state)
    exchange.ask(0, who="lost")
    exchange.ask(0, who="again")
    exchange.ask(1, who="other")
    exchange.ask(1, who="other again")
    parts = Gathered(parts=(b"\0", b"\1"))
    assert exchange.heard == {"lost": [], "again": [parts], "other": [parts], "other again": [parts]}


def test_a_new_coordinator_is_told_of_the_exchange_before_by_those_that_are_further() -> None:
    """Rank 0 had its answer when the coordinator was killed, rank 1 had not."""
    exchange = Exchange(started().ledger.state)
    exchange.ask(1, round=0, who="behind")
    exchange.ask(0, round=0, who="reminder")
    exchange.ask(0, round=1, who="further")
    exchange.ask(1, round=1, who="behind, now there")
    assert [isinstance(heard[0], Gathered) for heard in exchange.heard.values()] == [True] * 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attempt": 2}, "attempt 2 of one is over"),
        ({"instance": InstanceId("other")}, "attempt 1 of other is over"),
        ({"world_size": 3}, "the attempt has 2 ranks, not 3"),
    ],
)
def test_what_does_not_belong_is_refused(changes: dict[str, Any], reason: str) -> None:
    exchange = Exchange(started().ledger.state)
    assert reason in exchange.refusal(exchange.ask(0, **changes))
    assert exchange.gathering.bytes == 0


def test_an_attempt_that_is_over_is_forgotten_and_whoever_waits_is_told() -> None:
    books = started()
    exchange = Exchange(books.ledger.state)
    name = exchange.ask(0)
    books.ledger.commit(InstanceDeleting(instance=ONE, attempt=1))
    exchange.state = books.ledger.state
    exchange.gathering.expire(0.1)
    assert exchange.refusal(name) == "attempt 1 of one is over"
    assert exchange.gathering.bytes == 0


def test_parts_of_different_sizes_are_another_version_of_mlx() -> None:
    exchange = Exchange(started().ledger.state)
    names = [exchange.ask(0, data=b"12"), exchange.ask(1, data=b"123")]
    assert all("different sizes in round 0 (rank 0: 2, rank 1: 3 bytes)" in exchange.refusal(name) for name in names)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "MAX_BYTES", 10)
    exchange = Exchange(started().ledger.state)
    exchange.ask(0, data=b"12345678")
    assert "exchanges hold 8 bytes already" in exchange.refusal(exchange.ask(1, data=b"12345678"))
    for number in range(1, 20):
        exchange.ask(0, round=number, data=b"1")
    assert exchange.gathering.bytes <= 10
