"""A runner that is to end may finish what it has begun, and for no longer than that makes sense."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import anyio
import msgspec
import pytest

from muster.rank_protocol import Stop, ToRank
from muster.spec import Assignment, BootId, Failure, InstanceId, InstanceSpec, ModelWorkload, NodeId
from muster.state import (
    Deleting,
    Ending,
    Failed,
    Gone,
    Instance,
    InstanceStatus,
    Rank,
    RankState,
    Ready,
    Running,
    State,
)
from muster.worker.drain import drain, drain_seconds
from muster.worker.process import RunnerProcess
from muster.worker.watch import Place, StateWatch

pytestmark = pytest.mark.anyio

ONE = InstanceId("one")
LONG = 60.0
KILLED = Failure(kind="rank-killed", message="killed")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Stand:
    """Rank 0 of two, and a runner that only remembers what it was told."""

    def __init__(self) -> None:
        self.sent: list[ToRank] = []
        self.gone = anyio.Event()
        self.hurry = anyio.Event()
        self.watch = StateWatch()
        self.become(Running())
        self.place = Place(self.watch.state.instances[ONE], Assignment(rank=0, node=NodeId("a"), boot=BootId("b")))

    @property
    def ended(self) -> bool:
        return self.gone.is_set()

    async def send(self, frame: ToRank) -> None:
        self.sent.append(frame)

    async def wait_ended(self) -> int:
        await self.gone.wait()
        return 0

    def become(self, status: InstanceStatus, other: RankState | None = None, *, attempt: int = 1) -> None:
        """What the worker hears of the instance; `other` is the state of rank 1."""
        states = (Ready(), other or Ready())
        ranks = tuple(
            Rank(rank=number, node=NodeId("a"), boot="b", state=state, since_ns=1)
            for number, state in enumerate(states)
        )
        instance = Instance(
            id=ONE,
            spec=InstanceSpec(workload=ModelWorkload(model="m"), ranks=2),
            created_ns=1,
            attempt=attempt,
            backend="ring",
            status=status,
            since_ns=1,
            ranks=ranks,
            created_by=1,
            caused_by=1,
        )
        self.watch.update(State(instances={ONE: instance}))

    async def drain(self) -> None:
        with anyio.fail_after(10):
            await drain(cast(RunnerProcess, self), self.place, self.watch, self.hurry)


@pytest.fixture
def stand() -> Stand:
    return Stand()


@pytest.mark.parametrize(
    ("status", "other"),
    [(Running(), None), (Deleting(0.0), None), (Deleting(LONG), Gone(0)), (Deleting(LONG), Failed(KILLED))],
)
async def test_there_is_nothing_to_drain(stand: Stand, status: InstanceStatus, other: RankState | None) -> None:
    stand.become(status, other)
    await stand.drain()
    assert stand.sent == []


async def test_another_attempt_is_no_concern_of_this_one(stand: Stand) -> None:
    stand.become(Deleting(LONG), attempt=2)
    await stand.drain()
    assert stand.sent == []


async def test_a_runner_is_told_how_long_it_has(stand: Stand) -> None:
    stand.become(Deleting(0.05))
    begin = anyio.current_time()
    await stand.drain()
    assert stand.sent == [Stop(drain_seconds=0.05)]
    assert anyio.current_time() - begin >= 0.05


def runner_ends(stand: Stand) -> None:
    stand.gone.set()


def worker_stops(stand: Stand) -> None:
    stand.hurry.set()


def deletion_is_hurried(stand: Stand) -> None:
    stand.become(Deleting(0.0))


def other_rank_ends(stand: Stand) -> None:
    stand.become(Deleting(LONG), Gone(-9))


def instance_is_forgotten(stand: Stand) -> None:
    stand.watch.update(msgspec.structs.replace(stand.watch.state, instances={}))


@pytest.mark.parametrize(
    "happens", [runner_ends, worker_stops, deletion_is_hurried, other_rank_ends, instance_is_forgotten]
)
async def test_the_drain_ends_when_it_makes_no_sense_any_more(stand: Stand, happens: Callable[[Stand], None]) -> None:
    stand.become(Deleting(LONG))
    async with anyio.create_task_group() as group:
        group.start_soon(stand.drain)
        await anyio.wait_all_tasks_blocked()
        assert stand.sent == [Stop(drain_seconds=LONG)]
        happens(stand)


async def test_an_attempt_that_is_moved_may_finish_too() -> None:
    stand = Stand()
    stand.become(Ending("node a is being drained", LONG))
    stand.gone.set()
    stand.sent.clear()
    assert drain_seconds(stand.place, stand.watch.state) == LONG
