"""Waiting for drained nodes to be empty: what is still there, and what will not leave by itself."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import anyio

from muster.cli.errors import EXIT_FAILED, show_note
from muster.cli.watch import Seen, Watched, doing
from muster.spec import InstanceId, NodeId, Phase
from muster.state import (
    Broken,
    Draining,
    Ending,
    Gone,
    Instance,
    Rank,
    State,
    is_script,
    wants_ranks,
)


def left_on(state: State, node: NodeId) -> Iterator[tuple[Instance, Rank]]:
    """The ranks whose processes may still be on the node, each with its instance."""
    for instance in state.instances.values():
        for rank in instance.ranks:
            if rank.node == node and not isinstance(rank.state, Gone):
                yield instance, rank


def stays(state: State, instance: Instance, node: NodeId) -> str:
    """Why the instance does not leave the node by itself; "" where it does."""
    duty = state.nodes[node].duty if node in state.nodes else None
    if is_script(instance) and wants_ranks(instance) and not (isinstance(duty, Draining) and duty.now):
        return f"a script is left to its end, unless: muster drain {node} --now"
    return ""


def undrained(state: State, nodes: Collection[NodeId]) -> list[NodeId]:
    """Those of the nodes that nobody wants to be empty any more, or that are not known."""
    return [name for name in nodes if name not in state.nodes or not isinstance(state.nodes[name].duty, Draining)]


def displaced(state: State, instances: Collection[InstanceId]) -> list[Instance]:
    """Those of the instances that have no place now, and wait for one."""
    return [
        found
        for name in sorted(instances)
        if (found := state.instances.get(name)) is not None
        and isinstance(found.status, Broken)
        and found.status.failure.phase is Phase.PLACING
    ]


class Drained:
    """Follows nodes until they are empty. Of what it has seen there, it says what became of it."""

    def __init__(self, watched: Watched, nodes: Collection[NodeId], *, quiet: bool = False) -> None:
        self._watched = watched
        self._nodes = nodes
        self._quiet = quiet
        self._said: set[str] = set()
        self._moved: set[InstanceId] = set()  #: instances that were seen on the nodes
        self._note(watched.state)

    async def wait(self, sequence: int, seconds: float | None) -> State:
        """Wait until the nodes are empty; without `seconds`, no longer than something leaves by itself.

        The state then. `sequence` is that of the wish for it. Nodes that somebody resumed meanwhile are not waited for.
        """
        patient = seconds is not None
        with anyio.move_on_after(seconds):
            await self._watched.until(lambda state: self._look(state, sequence) and self._is_over(state, patient))
        return self._watched.state

    def _look(self, state: State, sequence: int) -> bool:
        """Say what is new. Whether the state is new enough to be judged."""
        self._note(state)
        if not self._watched.reached(sequence):
            return False
        for node in self._nodes:
            for instance, _ in left_on(state, node):
                if reason := stays(state, instance, node):
                    self._say(f"{instance.id} stays on {node}: {reason}")
        for instance in displaced(state, self._moved):
            self._watched.say_what_follows(instance)
        return True

    def _note(self, state: State) -> None:
        self._moved |= {instance.id for node in self._nodes for instance, _ in left_on(state, node)}
        if not self._quiet:
            self._watched.shown |= self._moved

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            show_note(text)

    def _is_over(self, state: State, patient: bool) -> bool:
        moved = (state.instances[name] for name in self._moved if name in state.instances)
        if any(isinstance(instance.status, Ending) for instance in moved):
            return False  # in a moment it has a place, or not
        gone = set(undrained(state, self._nodes))
        left = [(item, node) for node in self._nodes if node not in gone for item, _ in left_on(state, node)]
        return all(not patient and stays(state, instance, node) for instance, node in left)


def conclude(state: State, nodes: Collection[NodeId], seconds: float | None) -> int:
    """Say what is left on the nodes. The exit code: 0 where they are empty."""
    code = 0
    for name in undrained(state, nodes):
        show_note(f"{name} is not being drained any more: somebody said `muster resume {name}`")
        code = EXIT_FAILED
    for name in nodes:
        left = list(left_on(state, name))
        if not left:
            continue
        code = EXIT_FAILED
        texts = [
            f"rank {rank.rank} of {instance.id} (pid {rank.pid}) is {doing(Seen(instance=instance), rank.rank)}"
            for instance, rank in left
        ]
        when = f" after {seconds:g} s" if seconds is not None else ""
        show_note(f"{name} is not empty{when}: {'; '.join(texts)}")
        show_note(f"it is given nothing new until `muster resume {name}`; see what is left: muster ps")
    return code
