"""What a worker tells of its ranks in a hello, and what becomes of ranks that a log has never heard of."""

from __future__ import annotations

import msgspec

from muster.events import AdoptedRank, RankFailed, RankGone
from muster.spec import Address, Assignment, BootId, Failure, GroupWorkload, InstanceId, InstanceSpec, NodeId
from muster.state import (
    Assigned,
    Deleting,
    Failed,
    Gone,
    Instance,
    InstanceStatus,
    Rank,
    RankState,
    Ready,
    Running,
    Starting,
    State,
)
from muster.worker.census import endings, holdings
from muster.worker.watch import Place, StateWatch

ONE, BOOT = InstanceId("one"), BootId("b")
FAILURE = Failure(kind="k", message="m")


def instance(*states: RankState, status: InstanceStatus | None = None, attempt: int = 3) -> Instance:
    """Rank 0 is on another node; the last one is what the tests are about."""
    ranks = tuple(
        Rank(
            rank=number,
            node=NodeId("a" if number else "z"),
            boot=BOOT if number else "z",
            state=state,
            since_ns=0,
            pid=100 + number,
            process_started=1.5,
            addresses=(Address("h", 1, "n"),),
            steps="h:2",
            layers=(0, 4),
            sharding="pipeline",
            weights_bytes=9,
        )
        for number, state in enumerate(states)
    )
    return Instance(
        id=ONE,
        spec=InstanceSpec(workload=GroupWorkload(), ranks=len(states)),
        created_ns=0,
        attempt=attempt,
        backend="ring",
        status=status or Running(),
        since_ns=0,
        ranks=ranks,
        created_by=7,
        caused_by=7,
        key="key",
    )


READY = instance(Ready(), Ready())


def state(*instances: Instance, sequence: int = 1) -> State:
    return State(sequence=sequence, instances={item.id: item for item in instances})


def place(found: Instance = READY, rank: int = 1) -> Place:
    return Place(found, Assignment(rank=rank, node=NodeId("a"), boot=BOOT))


# --- what a hello tells -------------------------------------------------------------------------------------


def test_a_ready_rank_is_held_with_all_that_is_needed_to_adopt_it() -> None:
    (held,) = holdings([place()], state(READY), State(), BOOT)
    assert held.rank == AdoptedRank(
        rank=1,
        node=NodeId("a"),
        boot=BOOT,
        pid=101,
        process_started=1.5,
        addresses=(Address("h", 1, "n"),),
        steps="h:2",
        layers=(0, 4),
        sharding="pipeline",
        weights_bytes=9,
    )
    assert (held.instance, held.attempt, held.world_size, held.key, held.ready) == (ONE, 3, 2, "key", True)
    assert (held.spec, held.backend) == (READY.spec, "ring")


def test_an_instance_is_ready_only_as_a_whole() -> None:
    for known in (instance(Assigned(), Ready()), instance(Ready(), Ready(), status=Starting())):
        (held,) = holdings([place()], state(known), State(), BOOT)
        assert not held.ready


def test_what_is_on_the_way_out_is_not_held() -> None:
    for known in (
        instance(Ready(), Failed(FAILURE)),
        instance(Ready(), Gone()),
        instance(Ready(), Ready(), status=Deleting()),
        instance(Ready(), Ready(), attempt=4),
    ):
        assert holdings([place()], state(known), state(READY), BOOT) == ()


def test_another_log_takes_nothing_from_what_the_worker_remembers() -> None:
    (held,) = holdings([place()], State(), state(READY), BOOT)
    assert held.ready
    assert holdings([place()], State(), State(), BOOT) == ()


# --- while it is judged -------------------------------------------------------------------------------------


def test_what_is_judged_stays_until_the_verdict() -> None:
    watch, mine = StateWatch(), place()
    watch.update(state(READY, sequence=50))
    watch.update(State(sequence=1), [ONE, InstanceId("unknown")])
    assert mine.wanted(watch.state)
    assert mine.ranks(watch.state) == READY.ranks
    watch.update(State(sequence=2))
    assert mine.wanted(watch.state)
    assert watch.state.sequence == 2
    assert len(holdings([mine], State(), watch.state, BOOT)) == 1
    assert not watch.clear(ONE, 2)
    assert watch.clear(ONE, 3)
    assert not watch.clear(ONE, 3)
    watch.update(State(sequence=3))
    assert not mine.wanted(watch.state)


def test_what_is_adopted_is_in_the_state_itself_from_then_on() -> None:
    watch, mine = StateWatch(), place()
    watch.update(state(READY))
    watch.update(State(), [ONE])
    watch.update(state(READY))
    assert mine.wanted(watch.state)
    watch.update(State())
    assert not mine.wanted(watch.state)


def test_a_snapshot_that_neither_has_nor_judges_it_ends_it() -> None:
    watch, mine = StateWatch(), place()
    watch.update(state(READY))
    watch.update(State(), [ONE])
    watch.update(State(), [ONE])
    assert mine.wanted(watch.state)
    watch.update(State(), [])
    assert not mine.wanted(watch.state)


def test_a_state_that_knows_better_goes_before_what_is_judged() -> None:
    watch, mine = StateWatch(), place()
    watch.update(state(READY))
    watch.update(state(instance(Ready(), Ready(), attempt=4)), [ONE])
    assert not mine.wanted(watch.state)


# --- what is no longer there --------------------------------------------------------------------------------


def ended(known: Instance, *, live: bool = False, begun: bool = False) -> list[type[RankFailed | RankGone]]:
    key = (ONE, known.attempt, 1)
    found = list(endings(state(known), BOOT, [key] if live else [], [key] if begun else []))
    assert all((event.instance, event.attempt, event.rank, event.boot) == (*key, BOOT) for event in found)
    return [type(event) for event in found]


def test_a_rank_that_is_taken_for_alive_and_is_not_is_reported() -> None:
    assert ended(READY) == [RankFailed, RankGone]
    assert ended(READY, live=True) == []
    assert ended(instance(Ready(), Gone())) == []
    assert ended(instance(Ready(), Failed(FAILURE))) == [RankGone]
    assert ended(instance(Ready(), Ready(), status=Deleting())) == [RankGone]


def test_a_rank_that_was_never_begun_here_is_not_missing() -> None:
    new = instance(Assigned(), Assigned(), status=Starting())
    assert ended(new) == []
    assert ended(new, begun=True) == [RankFailed, RankGone]


def test_a_rank_that_this_worker_hears_of_only_when_it_is_not_wanted_any_more_is_gone() -> None:
    """It was cut off while the instance was created and deleted: who else should say that nothing is there?"""
    assert ended(instance(Ready(), Assigned(), status=Deleting())) == [RankGone]


def test_ranks_of_an_earlier_boot_are_not_this_ones_to_speak_of() -> None:
    earlier = msgspec.structs.replace(READY, ranks=tuple(msgspec.structs.replace(r, boot="c") for r in READY.ranks))
    assert list(endings(state(earlier), BOOT, [], [])) == []
    assert holdings([place()], state(earlier), State(), BOOT) == ()
