"""Instances that workers hold and the log has never heard of: kept where they run whole, else cleared by name.

A log may be new, or a standby's that lacks the last moments of the coordinator before it. What runs is worth more than
what is written: an instance is adopted, its runners untouched, once every one of its ranks was found, all ready.
What is not ready, or not whole within one lease, is cleared, which is an event with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from muster.events import AdoptedRank, InstanceAdopted, InstanceCleared
from muster.lifecycle import SECOND, Settings
from muster.protocol import Held
from muster.spec import InstanceId, InstanceSpec
from muster.state import State


class _Find(msgspec.Struct):
    """An attempt that was found, with the ranks that were found of it."""

    held: Held
    until_ns: int
    ranks: dict[int, AdoptedRank]
    flaw: str = ""


class Adoption:
    """The finds that are being judged. Pure but for its own memory: time and state come in."""

    def __init__(self, settings: Settings) -> None:
        self._lease_ns = int(settings.lease_seconds * SECOND)
        self._finds: dict[tuple[InstanceId, int], _Find] = {}

    def note(self, found: Iterable[Held], now_ns: int) -> tuple[InstanceId, ...]:
        """Take what a worker holds of unknown instances; those that are judged now."""
        judging: list[InstanceId] = []
        for held in found:
            key = (held.instance, held.attempt)
            find = self._finds.setdefault(key, _Find(held, now_ns + self._lease_ns, {}))
            find.ranks |= {rank.rank: rank for rank in (*held.ended, held.rank)}
            if not held.ready and not find.flaw:
                find.flaw = f"rank {held.rank.rank} on node {held.rank.node} was found, and not all ranks were ready"
            judging.append(held.instance)
        return tuple(judging)

    def due(self, state: State, now_ns: int) -> list[InstanceAdopted | InstanceCleared]:
        """What must be logged now. Each instance is judged once."""
        events: list[InstanceAdopted | InstanceCleared] = []
        for key, find in list(self._finds.items()):
            event = _verdict(find, state, now_ns)
            if event is not None:
                del self._finds[key]
                events.append(event)
                break  # the next one must see what this one changes
        return events

    def wake_ns(self) -> int | None:
        """When something is due by itself; `None` for never."""
        return min((find.until_ns for find in self._finds.values()), default=None)


def _verdict(find: _Find, state: State, now_ns: int) -> InstanceAdopted | InstanceCleared | None:
    held = find.held
    if held.instance in state.instances:
        other = state.instances[held.instance].attempt
        return _cleared(held, f"attempt {other} of it was adopted")
    if find.flaw:
        return _cleared(held, find.flaw)
    gone = [rank for rank in find.ranks.values() if rank.exit_code is None and not _is_there(rank, state)]
    missing = sorted(set(range(held.world_size)) - set(find.ranks) | {rank.rank for rank in gone})
    if not missing:
        ranks = tuple(find.ranks[number] for number in range(held.world_size))
        return InstanceAdopted(
            instance=held.instance,
            attempt=held.attempt,
            spec=_with_free_name(held.spec, state),
            backend=held.backend,
            ranks=ranks,
            key=held.key,
            layout=held.layout,
            needs=held.needs,
        )
    if now_ns >= find.until_ns:
        return _cleared(held, f"no node that is there holds its ranks {', '.join(map(str, missing))}")
    return None


def _cleared(held: Held, flaw: str) -> InstanceCleared:
    reason = f"it was found running and this log has never heard of it; {flaw}"
    return InstanceCleared(instance=held.instance, attempt=held.attempt, reason=reason)


def _is_there(rank: AdoptedRank, state: State) -> bool:
    node = state.nodes.get(rank.node)
    return node is not None and node.lost is None and node.info.boot == rank.boot


def _with_free_name(spec: InstanceSpec, state: State) -> InstanceSpec:
    """Its name may have been given to another instance meanwhile; the id still finds it."""
    taken = spec.name is not None and any(other.spec.name == spec.name for other in state.instances.values())
    return msgspec.structs.replace(spec, name=None) if taken else spec
