"""The nodes as people see them: one word for the state of each, and what is to be done about it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from muster.cli.render import age, cell, clock, size, state_cell, table
from muster.protocol import Beat
from muster.replies import NodeClock
from muster.spec import NodeId
from muster.state import FAULTS_NS, Aside, Draining, Gone, Node, Serving, State, reserved_bytes

#: From here on a clock that differs is more than a matter of measuring: a second, in ns.
CLOCK_NS = 1_000_000_000


def node_state(node: Node) -> str:
    """What people call a node's state: ready, suspect, lost, stopped, draining or set aside.

    It is `stopped` where its worker was stopped on purpose. What is there no longer counts before what is to become
    of it.
    """
    if node.lost is not None:
        return "stopped" if "was stopped" in node.lost else "lost"
    if node.suspect is not None:
        return "suspect"
    return "ready" if isinstance(node.duty, Serving) else duty_name(node)


def duty_name(node: Node) -> str:
    """Whether a node may be given instances while it is there: serving, draining or set aside."""
    match node.duty:
        case Serving():
            return "serving"
        case Draining():
            return "draining"
        case Aside():
            return "set aside"


def faults(node: Node, now_ns: int | None = None) -> int:
    """Failures of late that are blamed on the node."""
    now = now_ns or time.time_ns()
    return sum(now - fault < FAULTS_NS for fault in node.faults_ns)


def ranks_in_use(state: State, node: Node) -> int:
    """Ranks whose processes may be on the node."""
    return len(_needs(state, node))


def memory_in_use_bytes(state: State, node: Node) -> int:
    """What those ranks were placed with."""
    return sum(_needs(state, node))


def _needs(state: State, node: Node) -> list[int]:
    return [
        reserved_bytes(instance, rank.rank)
        for instance in state.instances.values()
        for rank in instance.ranks
        if rank.node == node.info.node and rank.boot == node.info.boot and not isinstance(rank.state, Gone)
    ]


def clock_text(found: NodeClock) -> str:
    """How a node's clock compares with the coordinator's: "ahead by 1.2 ms ± 0.3 ms"."""
    side = "behind" if found.offset_ns < 0 else "ahead"
    return f"{side} by {_length(abs(found.offset_ns))} ± {_length(found.error_ns)}"


def _length(duration_ns: int) -> str:
    milliseconds = duration_ns / 1e6
    return f"{milliseconds:.1f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:,.1f} s"


def nodes_table(
    state: State,
    beats: Mapping[NodeId, Beat],
    now_ns: int | None = None,
    *,
    wide: bool = False,
    clocks: Iterable[NodeClock] = (),
) -> RenderableType:
    """What `muster nodes` shows. RESERVED is what ranks were placed with, of what the node may give to ranks."""
    known = {found.node: found for found in clocks}
    columns = ["NODE", "STATE", "RANKS", "RESERVED OF BUDGET", "WARM RUNNERS", "BACKENDS"]
    faulty = any(faults(node, now_ns) for node in state.nodes.values())
    if faulty:
        columns.append("FAULTS")
    if wide:
        columns += ["SINCE", "WORKER", "WORKER MEMORY", "MACHINE FREE", "CLOCK", "VERSIONS"]
    found = table(*columns)
    found.columns[0].no_wrap = found.columns[1].no_wrap = True
    notes: list[Text] = []
    for name, node in sorted(state.nodes.items()):
        beat = beats.get(name) if node.lost is None else None
        offset = known.get(name) if node.lost is None else None
        warm = "" if beat is None else str(beat.warm_runners)
        if beat is not None and beat.warm_runners:
            warm += f" ({size(beat.warm_memory_bytes)} each)"
        cells = [
            cell(name),
            state_cell(node_state(node)),
            cell(f"{ranks_in_use(state, node)}/{node.info.max_ranks}"),
            cell(f"{size(memory_in_use_bytes(state, node))} of {size(node.info.memory_bytes)}"),
            cell(warm),
            cell(",".join(node.info.backends)),
        ]
        if faulty:
            cells.append(cell(str(faults(node, now_ns) or ""), "yellow"))
        if wide:
            cells += [
                cell(age(node.since_ns, now_ns)),
                cell(f"pid {node.info.pid} on {node.info.hostname}"),
                cell("" if beat is None else size(beat.memory_used_bytes)),
                cell("" if beat is None else size(beat.memory_available_bytes)),
                cell("" if offset is None else clock_text(offset), "yellow" if _is_off(offset) else ""),
                cell(_versions_text(node)),
            ]
        found.add_row(*cells)
        notes.extend(_notes(node, offset, now_ns))
    notes.extend(_version_notes(state))
    return Group(found, *notes)


def _is_off(found: NodeClock | None) -> bool:
    return found is not None and abs(found.offset_ns) > CLOCK_NS


def _notes(node: Node, offset: NodeClock | None, now_ns: int | None) -> Iterator[Text]:
    """What is the matter with a node, why, and what to do."""
    name = node.info.node
    if node.lost is not None:
        yield cell(f"{name} {node_state(node)} {age(node.since_ns, now_ns)} ago: {node.lost}", "red")
    elif node.suspect is not None:
        yield cell(f"{name} suspect: {node.suspect}; it keeps what it has and is given nothing new", "yellow")
    match node.duty:
        case Draining(reason=reason, now=now):
            scripts = ", scripts too" if now else ""
            yield cell(f"{name} draining{scripts}: {reason}; to take it back: muster resume {name}", "yellow")
        case Aside(reason=reason, remedy=remedy, until_ns=until_ns):
            until = "" if until_ns is None else f" until {clock(until_ns)}"
            what = remedy or f"To use it again: muster resume {name}"
            yield cell(f"{name} set aside{until}: {reason.rstrip('.')}. {what}", "red")
        case Serving():
            pass
    if offset is not None and _is_off(offset):
        side = "behind" if offset.offset_ns < 0 else "ahead of"
        yield cell(
            f"the clock of {name} is {_length(abs(offset.offset_ns))} {side} the coordinator's "
            f"(± {_length(offset.error_ns)}); set both by NTP",
            "yellow",
        )


def _versions_text(node: Node) -> str:
    return " ".join(f"{key} {value}" for key, value in sorted(node.info.versions.items()))


def _version_notes(state: State) -> Iterator[Text]:
    """A line for each package that has not the same version on all nodes that are there."""
    alive = [node for _, node in sorted(state.nodes.items()) if node.lost is None]
    for package in sorted({package for node in alive for package in node.info.versions}):
        owners: dict[str, list[str]] = {}
        for node in alive:
            owners.setdefault(node.info.versions.get(package, "missing"), []).append(node.info.node)
        if len(owners) > 1:
            text = "; ".join(f"{version} on {', '.join(names)}" for version, names in sorted(owners.items()))
            yield cell(f"versions of {package} differ: {text}", "yellow")
