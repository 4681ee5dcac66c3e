"""What a worker holds, for a coordinator that may never have heard of it; and what it no longer holds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from muster.events import AdoptedRank, RankFailed, RankGone
from muster.protocol import Held
from muster.spec import BootId, Failure, InstanceId
from muster.state import Assigned, Failed, Gone, Instance, Rank, Ready, Running, State, is_script, phase_of, wants_ranks
from muster.worker.watch import Place

#: An instance's id, the attempt, and the rank.
RankKey = tuple[InstanceId, int, int]


def holdings(places: Iterable[Place], state: State, kept: State, boot: BootId) -> tuple[Held, ...]:
    """The ranks in these places that live and are wanted, as they were last known.

    `state` is the newest of any coordinator; `kept` is the worker's own, which also has the instances that are judged.
    """
    found: list[Held] = []
    for place in places:
        view = state if place.id in state.instances else kept
        known = place.instance(view)
        if known is None or not place.wanted(view):
            continue
        rank = known.ranks[place.rank]
        if rank.boot != boot or isinstance(rank.state, Failed):
            continue
        script = is_script(known)
        ended = [one for one in known.ranks if script and isinstance(one.state, Gone)]
        found.append(
            Held(
                instance=known.id,
                attempt=known.attempt,
                spec=known.spec,
                backend=known.backend,
                world_size=len(known.ranks),
                rank=_adoptable(rank),
                ready=isinstance(known.status, Running) and all(_is_up(one, script=script) for one in known.ranks),
                ended=tuple(map(_adoptable, ended)),
                key=known.key,
                layout=known.layout,
                needs=known.needs,
            )
        )
    return tuple(found)


def _is_up(rank: Rank, *, script: bool) -> bool:
    """Whether the rank is ready, or is one of a script and has ended well."""
    return isinstance(rank.state, Ready) or (script and isinstance(rank.state, Gone) and rank.state.exit_code == 0)


def _adoptable(rank: Rank) -> AdoptedRank:
    return AdoptedRank(
        rank=rank.rank,
        node=rank.node,
        boot=BootId(rank.boot),
        pid=rank.pid,
        process_started=rank.process_started,
        addresses=rank.addresses,
        steps=rank.steps,
        layers=rank.layers,
        sharding=rank.sharding,
        weights_bytes=rank.weights_bytes,
        exit_code=rank.state.exit_code if isinstance(rank.state, Gone) else None,
    )


def endings(
    state: State, boot: BootId, live: Collection[RankKey], begun: Collection[RankKey]
) -> Iterator[RankFailed | RankGone]:
    """What to report of the ranks of this boot that the state takes for alive and that are not.

    One that was adopted may have ended while nobody knew of it; and a log may lack the end of one that it began. What
    the log learns by itself meanwhile makes these stale.
    """
    for instance in state.instances.values():
        for rank in instance.ranks:
            key = (instance.id, instance.attempt, rank.rank)
            if rank.boot != boot or isinstance(rank.state, Gone) or key in live:
                continue
            if key in begun or not isinstance(rank.state, Assigned) or not wants_ranks(instance):
                yield from _ending(instance, rank, boot)


def _ending(instance: Instance, rank: Rank, boot: BootId) -> Iterator[RankFailed | RankGone]:
    if wants_ranks(instance) and not isinstance(rank.state, Failed):
        failure = Failure(
            kind="rank-exited",
            message="the rank ended while the coordinator did not know of it",
            remedy=f"See the log of the worker on node {rank.node}.",
            phase=phase_of(instance, rank),
            rank=rank.rank,
            node=rank.node,
            retryable=True,
        )
        yield RankFailed(
            instance=instance.id,
            attempt=instance.attempt,
            rank=rank.rank,
            node=rank.node,
            boot=boot,
            failure=failure,
        )
    yield RankGone(instance=instance.id, attempt=instance.attempt, rank=rank.rank, node=rank.node, boot=boot)
