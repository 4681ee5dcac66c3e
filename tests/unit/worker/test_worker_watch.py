"""Waiting for the state to say something, and finding one's own rank in it."""

from __future__ import annotations

import anyio
import msgspec
import pytest

from muster.spec import Assignment, BootId, GroupWorkload, InstanceId, InstanceSpec, NodeId
from muster.state import Assigned, Broken, Deleting, Failure, Gone, Instance, Rank, Running, Starting, State
from muster.worker.watch import Place, StateWatch

ONE = InstanceId("one")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def instance(attempt: int = 1, ranks: int = 2) -> Instance:
    return Instance(
        id=ONE,
        spec=InstanceSpec(workload=GroupWorkload(), ranks=ranks),
        created_ns=0,
        attempt=attempt,
        backend="ring",
        status=Starting(),
        since_ns=0,
        ranks=tuple(Rank(rank=r, node=NodeId("a"), boot="b", state=Assigned(), since_ns=0) for r in range(ranks)),
        created_by=7,
        caused_by=7,
    )


def state(*instances: Instance, sequence: int = 1) -> State:
    return State(sequence=sequence, instances={item.id: item for item in instances})


def place(rank: int = 1) -> Place:
    return Place(instance(), Assignment(rank=rank, node=NodeId("a"), boot=BootId("b")))


@pytest.mark.anyio
async def test_waiting_ends_in_the_state_that_was_waited_for() -> None:
    watch = StateWatch()
    found: list[int] = []

    async def wait() -> None:
        found.append(await watch.until(lambda state: state.sequence >= 3))

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            group.start_soon(wait)
            for sequence in (1, 2, 3):
                await anyio.wait_all_tasks_blocked()
                assert found == []
                watch.update(State(sequence=sequence))
    assert found == [3, 3]
    assert await watch.until(lambda state: True) == 3


def test_a_place_knows_its_attempt() -> None:
    mine = place()
    assert (mine.id, mine.attempt, mine.rank, mine.world_size, mine.caused_by) == (ONE, 1, 1, 2, 7)
    assert str(mine) == "one attempt 1 rank 1"
    assert mine.ranks(state(instance())) == instance().ranks
    assert mine.ranks(state(instance(attempt=2))) == ()
    assert mine.ranks(State()) == ()


def test_a_rank_is_wanted_while_its_attempt_is() -> None:
    mine, now = place(), instance()
    broken = Broken(Failure(kind="k", message="m"))
    assert mine.wanted(state(now))
    assert mine.wanted(state(msgspec.structs.replace(now, status=Running())))
    assert not mine.wanted(State())
    assert not mine.wanted(state(instance(attempt=2)))
    for status in (broken, Deleting()):
        assert not mine.wanted(state(msgspec.structs.replace(now, status=status)))


def test_a_rank_that_counts_as_gone_is_not_wanted() -> None:
    """The coordinator believed this node lost: what still runs here must end."""
    now = instance()
    gone = tuple(msgspec.structs.replace(rank, state=Gone()) if rank.rank == 1 else rank for rank in now.ranks)
    lost = state(msgspec.structs.replace(now, ranks=gone))
    assert not place(1).wanted(lost)
    assert place(0).wanted(lost)
