"""Instances that the log has never heard of: adopted where they run whole, else cleared by name."""

from __future__ import annotations

import msgspec
import pytest
from books import Books, info

from muster.coordinator.adoption import Adoption
from muster.events import AdoptedRank, Event, InstanceAdopted, InstanceCleared, NodeJoined, NodeLost
from muster.lifecycle import SECOND, Settings
from muster.protocol import Held
from muster.spec import BootId, GroupWorkload, InstanceId, InstanceSpec, NodeId
from muster.state import Gone, Ready, Running

ONE = InstanceId("one")
SPEC = InstanceSpec(workload=GroupWorkload(), ranks=2, name="g", memory_bytes=1)


def held(rank: int, *, ready: bool = True, attempt: int = 3, boot: str = "boot-1", spec: InstanceSpec = SPEC) -> Held:
    found = AdoptedRank(
        rank=rank, node=NodeId("ab"[rank]), boot=BootId(boot), pid=100 + rank, process_started=1.0, steps="h:1"
    )
    return Held(
        instance=ONE, attempt=attempt, spec=spec, backend="ring", world_size=2, rank=found, ready=ready, key="k"
    )


def judge(adoption: Adoption, books: Books, now_ns: int) -> list[InstanceAdopted | InstanceCleared]:
    events = adoption.due(books.ledger.state, now_ns)
    for event in events:
        books.ledger.commit(event)
    return events


def test_an_instance_is_adopted_once_every_rank_was_found_ready() -> None:
    books, adoption = Books("a", "b"), Adoption(Settings())
    assert adoption.note([held(0)], 0) == (ONE,)
    assert judge(adoption, books, 0) == []
    adoption.note([held(1)], SECOND)
    (event,) = judge(adoption, books, SECOND)
    assert isinstance(event, InstanceAdopted)
    instance = books.ledger.state.instances[ONE]
    assert (instance.attempt, instance.key, instance.spec) == (3, "k", SPEC)
    assert isinstance(instance.status, Running)
    assert [(rank.pid, rank.state, rank.steps) for rank in instance.ranks] == [
        (100, Ready(), "h:1"),
        (101, Ready(), "h:1"),
    ]
    assert judge(adoption, books, 100 * SECOND) == []
    assert adoption.wake_ns() is None


def test_what_is_not_whole_within_a_lease_is_cleared_and_the_missing_ranks_are_named() -> None:
    books, adoption = Books("a", "b"), Adoption(Settings(lease_seconds=5.0))
    adoption.note([held(0)], 0)
    assert adoption.wake_ns() == 5 * SECOND
    assert judge(adoption, books, 5 * SECOND - 1) == []
    (event,) = judge(adoption, books, 5 * SECOND)
    assert isinstance(event, InstanceCleared)
    assert event.attempt == 3
    assert "ranks 1" in event.reason
    assert ONE not in books.ledger.state.instances


def test_one_rank_that_was_not_ready_is_enough_to_clear_it() -> None:
    books, adoption = Books("a", "b"), Adoption(Settings())
    adoption.note([held(0), held(1, ready=False)], 0)
    (event,) = judge(adoption, books, 0)
    assert isinstance(event, InstanceCleared)
    assert "rank 1 on node b" in event.reason


@pytest.mark.parametrize(
    "spoil",
    [NodeLost(node=NodeId("b"), boot=BootId("boot-1"), reason="x"), NodeJoined(info=info("b", boot="boot-2"))],
)
def test_a_rank_of_a_node_that_is_lost_or_was_started_again_is_not_there(spoil: Event) -> None:
    books, adoption = Books("a", "b"), Adoption(Settings())
    adoption.note([held(0), held(1)], 0)
    books.ledger.commit(spoil)
    assert judge(adoption, books, 0) == []
    (event,) = judge(adoption, books, 5 * SECOND)
    assert isinstance(event, InstanceCleared)


def test_of_two_attempts_that_were_found_one_is_adopted_and_the_other_cleared() -> None:
    books, adoption = Books("a", "b"), Adoption(Settings())
    adoption.note([held(0), held(1), held(0, attempt=2), held(1, attempt=2)], 0)
    first, second = judge(adoption, books, 0), judge(adoption, books, 0)
    assert isinstance(first[0], InstanceAdopted)
    assert isinstance(second[0], InstanceCleared)
    assert "attempt 3" in second[0].reason


def test_a_name_that_was_given_away_meanwhile_is_not_given_twice() -> None:
    books, adoption = Books("a", "b"), Adoption(Settings())
    adoption.note([held(0), held(1)], 0)
    judge(adoption, books, 0)
    other = InstanceId("two")
    adoption.note(
        [msgspec.structs.replace(held(0), instance=other), msgspec.structs.replace(held(1), instance=other)], 0
    )
    judge(adoption, books, 0)
    names = [instance.spec.name for instance in books.ledger.state.instances.values()]
    assert names == ["g", None]


def test_a_script_of_which_a_rank_has_ended_well_is_adopted_with_that() -> None:
    books, adoption = Books("a", "b"), Adoption(Settings())
    ended = msgspec.structs.replace(held(1).rank, exit_code=0)
    adoption.note([msgspec.structs.replace(held(0), ended=(ended,))], 0)
    (event,) = judge(adoption, books, 0)
    assert isinstance(event, InstanceAdopted)
    assert [rank.state for rank in books.ledger.state.instances[ONE].ranks] == [Ready(), Gone(0)]


@pytest.mark.parametrize(
    ("field", "value"), [("world_size", 4_000_000), ("world_size", 0), ("attempt", -1), ("instance", "\x1b[31m")]
)
def test_what_no_worker_can_hold_is_refused(field: str, value: object) -> None:
    fields = {**msgspec.to_builtins(held(0)), field: value}
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert(fields, Held)
