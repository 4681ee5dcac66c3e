"""Tables and lines for people."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import PurePath

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from muster.events import (
    Envelope,
    InstanceCreated,
    InstanceFact,
    InstanceFailed,
    NodeJoined,
    NodeLost,
    RankFact,
    RankFailed,
    RankGone,
    kind_of,
)
from muster.protocol import Beat
from muster.spec import Failure, GroupWorkload, InstanceSpec, ModelWorkload, NodeId, ScriptWorkload
from muster.state import Broken, Gone, Instance, Node, Rank, Ready, State, status_name

#: Columns where nobody looks at a terminal: lines must not be cut for `grep`.
_WIDE_COLUMNS = 500

STATE_STYLES = {
    "ready": "green",
    "alive": "green",
    "starting": "yellow",
    "deleting": "yellow",
    "failed": "red",
    "lost": "red",
    "finished": "cyan",
    "gone": "bright_black",
    "stopped": "bright_black",
}


def console(columns: int = _WIDE_COLUMNS) -> Console:
    """Standard output: as wide as the terminal, or where there is none, as `columns`."""
    return Console(width=None if sys.stdout.isatty() else columns, highlight=False, markup=False)


def exit_text(code: int) -> str:
    """How a process ended: "exit code 3", or for one that a signal ended (below 0) the signal's name."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def printable(text: str) -> str:
    """The text without what could move the cursor: others named it."""
    return "".join(character if character.isprintable() else "�" for character in text)


def size(count_bytes: int) -> str:
    """Bytes for people: "512 MiB", "3.2 GiB"."""
    if count_bytes < 2**20:
        return f"{count_bytes / 2**10:.0f} KiB"
    if count_bytes < 2**30:
        return f"{count_bytes / 2**20:.0f} MiB"
    return f"{count_bytes / 2**30:.1f} GiB"


def age(since_ns: int, now_ns: int | None = None) -> str:
    """How long ago, for people: "3s", "12m", "5h", "9d"."""
    seconds = max(0, ((now_ns or time.time_ns()) - since_ns) // 1_000_000_000)
    for limit, unit, length in ((120, "s", 1), (7200, "m", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{seconds // length}{unit}"
    return f"{seconds // 86_400}d"


def clock(time_ns: int) -> str:
    """The local time of day, to the millisecond; with the date where that is not today's."""
    moment = datetime.fromtimestamp(time_ns / 1e9).astimezone()
    today = datetime.now().astimezone().date()
    return moment.strftime("%H:%M:%S.%f" if moment.date() == today else "%Y-%m-%d %H:%M:%S.%f")[:-3]


def workload_text(spec: InstanceSpec) -> str:
    """The workload in a few words: "model qwen3-4b", "script train.py"."""
    match spec.workload:
        case ModelWorkload() as workload:  # what clients call it
            return f"model {workload.public_name}"
        case ScriptWorkload(path=path):
            return f"script {PurePath(path).name}"
        case GroupWorkload():
            return "group"


def _cell(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style)


def _state_cell(name: str) -> Text:
    return _cell(name, STATE_STYLES.get(name, ""))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


#: What `muster ps` leaves out, first to last, where a terminal is too narrow.
_EXPENDABLE_COLUMNS = ("BACKEND", "ATTEMPT", "NAME", "AGE")
#: The least that is left of the columns of `muster ps` that may wrap or be cut.
_LEAST_COLUMNS = {"WORKLOAD": 12, "CAUSE": 16}


def instances_table(instances: Iterable[Instance], now_ns: int | None = None, width: int = _WIDE_COLUMNS) -> Table:
    """What `muster ps` shows in `width` columns. Only CAUSE wraps: all else is for finding and copying."""
    rows = [_instance_cells(instance, now_ns) for instance in instances]
    columns = ["INSTANCE", "NAME", "WORKLOAD", "STATE", "RANKS", "NODES", "BACKEND", "ATTEMPT", "AGE", "CAUSE"]
    if not any(row["CAUSE"].plain for row in rows):
        columns.remove("CAUSE")
    for expendable in _EXPENDABLE_COLUMNS:
        if _least_width(columns, rows) <= width:
            break
        columns.remove(expendable)
    if _least_width(columns, rows) > width:
        for row in rows:
            row["NODES"] = _shortened(row["NODES"])
    spare = max(0, width - _least_width(columns, rows))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(
            column,
            no_wrap=column not in _LEAST_COLUMNS,
            overflow="fold" if column == "CAUSE" else "ellipsis",
            max_width=_LEAST_COLUMNS[column] + spare if column == "WORKLOAD" else None,
        )
    for row in rows:
        table.add_row(*(row[column] for column in columns))
    return table


def _shortened(nodes: Text) -> Text:
    """The first of many nodes, and how many more there are."""
    first, *others = nodes.plain.split(",")
    return _cell(f"{first},+{len(others)}") if len(others) > 1 else nodes


def _least_width(columns: Sequence[str], rows: Sequence[Mapping[str, Text]]) -> int:
    widths = (max([len(column), *(row[column].cell_len for row in rows)]) for column in columns)
    least = (min(width, _LEAST_COLUMNS.get(column, width)) for column, width in zip(columns, widths, strict=True))
    return sum(least) + len(columns) - 1


def _instance_cells(instance: Instance, now_ns: int | None) -> dict[str, Text]:
    ready = sum(isinstance(rank.state, Ready) for rank in instance.ranks)
    cause = ""
    if isinstance(instance.status, Broken):
        failure = instance.status.failure
        cause = failure.kind + (f" (rank {failure.rank} on {failure.node})" if failure.rank >= 0 else "")
    workload = _cell(workload_text(instance.spec))
    workload.no_wrap = True
    return {
        "INSTANCE": _cell(instance.id),
        "NAME": _cell(instance.spec.name or ""),
        "WORKLOAD": workload,
        "STATE": _state_cell(status_name(instance.status)),
        "RANKS": _cell(f"{ready}/{len(instance.ranks)}"),
        "NODES": _cell(",".join(dict.fromkeys(rank.node for rank in instance.ranks))),
        "BACKEND": _cell(instance.backend),
        "ATTEMPT": _cell(str(instance.attempt)),
        "AGE": _cell(age(instance.created_ns, now_ns)),
        "CAUSE": _cell(cause, "red"),
    }


def ranks_in_use(state: State, node: Node) -> int:
    """Ranks whose processes may be on the node."""
    return len(_needs(state, node))


def memory_in_use_bytes(state: State, node: Node) -> int:
    """What those ranks were placed with."""
    return sum(_needs(state, node))


def _needs(state: State, node: Node) -> list[int]:
    return [
        instance.spec.memory_bytes or 0
        for instance in state.instances.values()
        for rank in instance.ranks
        if rank.node == node.info.node and rank.boot == node.info.boot and not isinstance(rank.state, Gone)
    ]


def node_state(node: Node) -> str:
    """What people call a node's state: alive, lost, or stopped where its worker was stopped on purpose."""
    if node.lost is None:
        return "alive"
    return "stopped" if "was stopped" in node.lost else "lost"


def nodes_table(
    state: State, beats: Mapping[NodeId, Beat], now_ns: int | None = None, *, wide: bool = False
) -> RenderableType:
    """What `muster nodes` shows. RESERVED is what ranks were placed with, of what the node may give to ranks."""
    columns = ["NODE", "STATE", "RANKS", "RESERVED OF BUDGET", "WARM RUNNERS", "BACKENDS"]
    if wide:
        columns += ["SINCE", "WORKER", "WORKER MEMORY", "MACHINE FREE", "VERSIONS"]
    table = _table(*columns)
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    notes: list[Text] = []
    for name, node in sorted(state.nodes.items()):
        beat = beats.get(name) if node.lost is None else None
        warm = "" if beat is None else str(beat.warm_runners)
        if beat is not None and beat.warm_runners:
            warm += f" ({size(beat.warm_memory_bytes)} each)"
        cells = [
            _cell(name),
            _state_cell(node_state(node)),
            _cell(f"{ranks_in_use(state, node)}/{node.info.max_ranks}"),
            _cell(f"{size(memory_in_use_bytes(state, node))} of {size(node.info.memory_bytes)}"),
            _cell(warm),
            _cell(",".join(node.info.backends)),
        ]
        if wide:
            cells += [
                _cell(age(node.since_ns, now_ns)),
                _cell(f"pid {node.info.pid} on {node.info.hostname}"),
                _cell("" if beat is None else size(beat.memory_used_bytes)),
                _cell("" if beat is None else size(beat.memory_available_bytes)),
                _cell(_versions_text(node)),
            ]
        table.add_row(*cells)
        if node.lost is not None:
            notes.append(_cell(f"{name} {node_state(node)} {age(node.since_ns, now_ns)} ago: {node.lost}", "red"))
    notes.extend(_version_notes(state))
    return Group(table, *notes)


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
            yield _cell(f"versions of {package} differ: {text}", "yellow")


def instance_details(instance: Instance, events: Sequence[Envelope], now_ns: int | None = None) -> RenderableType:
    """What `muster describe` shows."""
    spec = instance.spec
    facts = Table.grid(padding=(0, 2))
    rows: list[tuple[str, str | Text]] = [
        ("instance", instance.id),
        ("name", spec.name or "-"),
        ("workload", _workload_details(spec)),
        ("state", _state_cell(status_name(instance.status)).append(f" for {age(instance.since_ns, now_ns)}")),
        ("attempt", f"{instance.attempt} (failed so far: {instance.failed_attempts})"),
        ("backend", f"{instance.backend} (asked for: {spec.backend})"),
        ("restart", _restart_text(spec)),
        ("memory", "-" if spec.memory_bytes is None else f"{size(spec.memory_bytes)} per rank"),
        ("created", f"{clock(instance.created_ns)} ({age(instance.created_ns, now_ns)} ago)"),
    ]
    if isinstance(instance.status, Broken) and instance.status.retry_at_ns is not None:
        rows.append(("next attempt", clock(instance.status.retry_at_ns)))
    for label, value in rows:
        facts.add_row(_cell(label, "bold"), _cell(value) if isinstance(value, str) else value)
    parts: list[RenderableType] = [facts, Text(), _ranks_table(instance.ranks, now_ns)]
    for position, failure in enumerate(reversed(instance.failures)):
        parts.append(Text())
        parts.extend(failure_lines(failure, "last failure" if position == 0 else "earlier failure"))
    if events:
        parts.append(Text("\nevents", style="bold"))
        parts.extend(event_line(envelope) for envelope in events)
    return Group(*parts)


def failure_lines(failure: Failure, title: str) -> Iterator[Text]:
    """The failure with its remedy, and the last that was printed."""
    yield _cell(f"{title}: {failure.kind}", "bold red")
    yield _cell(f"  {failure.sentence()}")
    if failure.log_tail:
        yield Text("  the last lines that it printed:")
        for line in failure.log_tail:
            yield _cell(f"    {line}", "dim")


def _workload_details(spec: InstanceSpec) -> str:
    match spec.workload:
        case ModelWorkload() as model:
            revision = f" at {model.revision}" if model.revision else ""
            served = f", served as {model.served_name}" if model.served_name is not None else ""
            return f"model {model.model}{revision}{served}, sharding {model.sharding}"
        case ScriptWorkload() as script:
            return " ".join(["script", script.path, *script.arguments])
        case GroupWorkload():
            return "group"


def _restart_text(spec: InstanceSpec) -> str:
    maximum = getattr(spec.restart, "maximum", None)
    return "never" if maximum is None else f"on failure, at most {maximum} times"


def _ranks_table(ranks: Sequence[Rank], now_ns: int | None) -> Table:
    table = _table("RANK", "NODE", "STATE", "SINCE", "PID", "ADDRESSES", "LAYERS", "WEIGHTS")
    for rank in ranks:
        state = status_name(rank.state)
        cell = _state_cell(state)
        if isinstance(rank.state, Gone) and rank.state.exit_code is not None:
            cell.append(f" ({exit_text(rank.state.exit_code)})")
        layers = "" if rank.layers is None else f"{rank.layers[0]}-{rank.layers[1] - 1}"
        table.add_row(
            _cell(str(rank.rank)),
            _cell(rank.node),
            cell,
            _cell(age(rank.since_ns, now_ns)),
            _cell(str(rank.pid or "")),
            _cell(" ".join(map(str, rank.addresses))),
            _cell(f"{layers} ({rank.sharding})" if layers else ""),
            _cell(size(rank.weights_bytes) if rank.weights_bytes else ""),
        )
    return table


def event_line(envelope: Envelope) -> Text:
    """One event: time, sequence, kind, whom it is about, and what else matters."""
    event = envelope.event()
    kind = kind_of(event)
    line = Text(no_wrap=True, overflow="ellipsis" if sys.stdout.isatty() else "ignore")
    line.append(f"{clock(envelope.time_ns)}  ", style="dim").append(f"{envelope.sequence:>6}  ", style="dim")
    failed = kind.endswith((".failed", ".lost"))
    line.append(f"{printable(kind):<18}", style="red" if failed else "green" if kind.endswith(".ready") else "")
    whom: list[str] = []
    if isinstance(event, InstanceFact):
        whom.append(event.instance + (f" #{event.attempt}" if event.attempt > 1 else ""))
    if isinstance(event, RankFact):
        whom.append(f"rank {event.rank} on {event.node}")
    match event:
        case NodeJoined(info=info):
            whom.append(f"{info.node} from {info.hostname}")
        case NodeLost(node=node, reason=reason):
            whom.append(f"{node}: {reason}")
        case InstanceCreated(spec=spec):
            whom.append(f"{workload_text(spec)} over {spec.ranks} rank{'s' if spec.ranks > 1 else ''}")
        case InstanceFailed(failure=failure) | RankFailed(failure=failure):
            whom.append(f"{failure.kind}: {failure.message}")
        case RankGone(exit_code=int(code)):
            whom.append(exit_text(code))
        case _:
            pass
    return line.append("  " + printable(", ".join(whom)))
