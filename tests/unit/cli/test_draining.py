"""Waiting for a drained node: what is still there, what stays, and when the waiting ends."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import msgspec
import pytest
from cluster_states import FAILURE, MODEL, NOW, ONE, instance, node, state

from muster.cli.draining import Drained, conclude, left_on, stays
from muster.cli.watch import Watched
from muster.spec import GroupWorkload, InstanceId, NodeId, Phase, ScriptWorkload, Workload
from muster.state import (
    Broken,
    Deleting,
    Draining,
    Ending,
    Finished,
    Gone,
    Instance,
    InstanceStatus,
    Ready,
    Running,
    Serving,
    State,
)

B = NodeId("b")
SCRIPT = ScriptWorkload(path="/x/train.py")
GROUP = GroupWorkload()
NO_PLACE = msgspec.structs.replace(
    FAILURE, kind="placement-refused", phase=Phase.PLACING, rank=-1, node=NodeId(""), message="no node has room"
)
HERE, AWAY = (Ready(), Ready()), (Ready(), Gone(0))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def seen(found: Instance | None, *, now: bool = False, draining: bool = True, sequence: int = 9) -> State:
    """The instance has rank 0 on node a and rank 1 on node b, which is drained."""
    duty = Draining("new memory", now) if draining else Serving()
    nodes = (node("a"), msgspec.structs.replace(node("b"), duty=duty))
    return msgspec.structs.replace(state(*([found] if found else []), nodes=nodes), sequence=sequence)


def of(status: InstanceStatus, ranks: tuple[Ready | Gone, ...], workload: Workload = GROUP) -> Instance:
    return instance(status, *ranks, workload=workload)


@pytest.mark.parametrize(
    ("workload", "status", "now", "reason"),
    [
        (SCRIPT, Running(), False, "a script is left to its end, unless: muster drain b --now"),
        (SCRIPT, Running(), True, ""),
        (SCRIPT, Ending("drained"), False, ""),
        (SCRIPT, Deleting(), False, ""),
        (MODEL, Running(), False, ""),
        (GROUP, Running(), False, ""),
    ],
)
def test_a_script_stays_unless_it_may_be_ended(
    workload: Workload, status: InstanceStatus, now: bool, reason: str
) -> None:
    found = of(status, HERE, workload)
    assert stays(seen(found, now=now), found, B) == reason


def test_what_is_left_is_what_may_have_a_process() -> None:
    assert [rank.rank for _, rank in left_on(seen(of(Running(), HERE)), B)] == [1]
    assert not list(left_on(seen(of(Ending("drained"), AWAY)), B))


#: The instance in each state that follows, and after how many of them the waiting is over.
STORIES: list[tuple[list[State], bool, int]] = [
    # what was known before does not count
    ([seen(None, sequence=4), seen(of(Running(), HERE), sequence=5), seen(None)], False, 3),
    # the instance leaves, and has a place, or none
    ([seen(of(Running(), HERE)), seen(of(Ending("x"), HERE)), seen(of(Ending("x"), AWAY)), seen(None)], False, 4),
    ([seen(of(Ending("x"), AWAY)), seen(of(Broken(NO_PLACE, NOW), AWAY))], False, 2),
    # a script: at once, or at its end for who has the time
    ([seen(of(Running(), HERE, SCRIPT))], False, 1),
    ([seen(of(Running(), HERE, SCRIPT)), seen(of(Finished(), (Gone(0), Gone(0)), SCRIPT))], True, 2),
    # it is not to be empty any more
    ([seen(of(Running(), HERE)), seen(of(Running(), HERE), draining=False)], False, 2),
]


def watched(found: State) -> Watched:
    made = Watched()
    made.take(found)
    return made


@pytest.mark.anyio
@pytest.mark.parametrize(("story", "patient", "count"), STORIES)
async def test_waiting_ends_when_nothing_leaves_any_more(story: list[State], patient: bool, count: int) -> None:
    watcher = watched(seen(of(Running(), HERE), sequence=4))
    drained = Drained(watcher, [B])
    ended_with: list[State] = []

    async def wait() -> None:
        ended_with.append(await drained.wait(6, 60.0 if patient else None))

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        for number, found in enumerate(story, start=1):
            watcher.take(found)
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            assert bool(ended_with) == (number >= count), number
            if ended_with:
                break
    assert ended_with == [story[count - 1]]


@pytest.mark.anyio
async def test_the_time_to_wait_may_be_over() -> None:
    found = seen(of(Running(), HERE))
    assert await Drained(watched(found), [B]).wait(6, 0.001) == found


@pytest.mark.anyio
async def test_it_says_once_what_stays_and_what_has_no_place(capsys: pytest.CaptureFixture[str]) -> None:
    two = InstanceId("two")
    script = seen(of(Running(), HERE, SCRIPT))
    before, after = (
        msgspec.structs.replace(script, instances={**script.instances, two: msgspec.structs.replace(found, id=two)})
        for found in (of(Running(), HERE), of(Broken(NO_PLACE, NOW), AWAY))
    )
    watcher = watched(before)
    drained = Drained(watcher, [B])
    watcher.take(after)
    for _ in range(2):
        await drained.wait(6, None)
    assert sorted(capsys.readouterr().err.splitlines()) == [
        f"muster: {ONE} stays on b: a script is left to its end, unless: muster drain b --now",
        f"muster: two waits for a place: {NO_PLACE.sentence()}",
    ]
    assert watcher.shown == {ONE, two}
    quiet = watched(before)
    drained = Drained(quiet, [B], quiet=True)
    quiet.take(after)
    await drained.wait(6, None)
    assert quiet.shown == set()
    assert len(capsys.readouterr().err.splitlines()) == 2
    failed = msgspec.structs.replace(
        after, instances={two: msgspec.structs.replace(of(Broken(FAILURE, NOW), AWAY), id=two)}
    )
    quiet.take(failed)
    await drained.wait(6, None)
    assert not capsys.readouterr().err, "it has left, and what fails elsewhere is another matter"


@pytest.mark.parametrize(
    ("found", "code", "words"),
    [
        (seen(None), 0, ""),
        (seen(of(Ending("x"), AWAY)), 0, ""),
        (seen(of(Running(), HERE, SCRIPT)), 1, f"b is not empty after 5 s: rank 1 of {ONE} (pid 101) is ready"),
        (seen(None, draining=False), 1, "b is not being drained any more: somebody said `muster resume b`"),
    ],
)
def test_the_end_says_what_is_left(found: State, code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert conclude(found, [B], 5.0) == code
    shown = capsys.readouterr().err
    assert words in shown
    assert bool(shown) == bool(words)
