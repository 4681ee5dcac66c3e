"""Tables and lines for people."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import PurePath

from rich.console import Console
from rich.table import Table
from rich.text import Text

from muster.spec import (
    Failure,
    GroupWorkload,
    InstanceSpec,
    ModelWorkload,
    Phase,
    RestartOnFailure,
    ScriptWorkload,
)
from muster.state import (
    Broken,
    Ending,
    Instance,
    Ready,
    all_gone,
    counted_failures,
    status_name,
)

#: Columns where nobody looks at a terminal: lines must not be cut for `grep`.
_WIDE_COLUMNS = 500

STATE_STYLES = {
    "ready": "green",
    "starting": "yellow",
    "ending": "yellow",
    "deleting": "yellow",
    "suspect": "yellow",
    "draining": "yellow",
    "failed": "red",
    "lost": "red",
    "set aside": "red",
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


def rate(mbps: float | None) -> str:
    """A rate for people: "94 Mbit/s", "9.4 Gbit/s"; empty where there is none."""
    if mbps is None:
        return ""
    return f"{mbps:.0f} Mbit/s" if mbps < 1_000 else f"{mbps / 1_000:.1f} Gbit/s"


def trip(rtt_us: float | None) -> str:
    """A round trip for people: "85 µs", "1.2 ms"; empty where there is none."""
    if rtt_us is None:
        return ""
    return f"{rtt_us:.0f} µs" if rtt_us < 1_000 else f"{rtt_us / 1_000:.1f} ms"


def coordinator_text(memory_bytes: int, log_bytes: int, fenced: Mapping[str, int]) -> str:
    """The coordinator's own figures; `fenced` are messages that came too late, by what they were too old in."""
    text = f"coordinator: {size(memory_bytes)}, its log: {size(log_bytes)}"
    late = ", ".join(f"{count} by {what}" for what, count in sorted(fenced.items()) if count)
    return f"{text}, too old and ignored: {late}" if late else text


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


def cell(text: str, style: str = "") -> Text:
    """A text for a table, as it is: no markup, and nothing that moves the cursor."""
    return Text(printable(text), style=style)


def state_cell(name: str) -> Text:
    """A state in its colour."""
    return cell(name, STATE_STYLES.get(name, ""))


def table(*columns: str) -> Table:
    """An empty table with these columns, which may wrap."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


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
    found = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        found.add_column(
            column,
            no_wrap=column not in _LEAST_COLUMNS,
            overflow="fold" if column == "CAUSE" else "ellipsis",
            max_width=_LEAST_COLUMNS[column] + spare if column == "WORKLOAD" else None,
        )
    for row in rows:
        found.add_row(*(row[column] for column in columns))
    return found


def _shortened(nodes: Text) -> Text:
    """The first of many nodes, and how many more there are."""
    first, *others = nodes.plain.split(",")
    return cell(f"{first},+{len(others)}") if len(others) > 1 else nodes


def _least_width(columns: Sequence[str], rows: Sequence[Mapping[str, Text]]) -> int:
    widths = (max([len(column), *(row[column].cell_len for row in rows)]) for column in columns)
    least = (min(width, _LEAST_COLUMNS.get(column, width)) for column, width in zip(columns, widths, strict=True))
    return sum(least) + len(columns) - 1


def _instance_cells(instance: Instance, now_ns: int | None) -> dict[str, Text]:
    ready = sum(isinstance(rank.state, Ready) for rank in instance.ranks)
    cause = cell("")
    if isinstance(instance.status, Broken):
        failure, again = instance.status.failure, next_attempt_text(instance, now_ns)
        words = failure.kind + (f" (rank {failure.rank} on {failure.node})" if failure.rank >= 0 else "")
        cause = cell(words + (f", again {again}" if again else ""), "red")
    elif isinstance(instance.status, Ending):
        cause = cell(instance.status.reason, "yellow")
    workload = cell(workload_text(instance.spec))
    workload.no_wrap = True
    return {
        "INSTANCE": cell(instance.id),
        "NAME": cell(instance.spec.name or ""),
        "WORKLOAD": workload,
        "STATE": state_cell(status_name(instance.status)),
        "RANKS": cell(f"{ready}/{len(instance.ranks)}"),
        "NODES": cell(",".join(dict.fromkeys(rank.node for rank in instance.ranks))),
        "BACKEND": cell(instance.backend),
        "ATTEMPT": cell(str(instance.attempt)),
        "AGE": cell(age(instance.created_ns, now_ns)),
        "CAUSE": cause,
    }


def budget(instance: Instance) -> int | None:
    """Failures of one rank that the restart policy forgives; `None` where none is."""
    restart = instance.spec.restart
    return restart.maximum if isinstance(restart, RestartOnFailure) else None


def budget_left(instance: Instance, rank: int, now_ns: int | None = None) -> int | None:
    """How many more failures of this rank are forgiven; `None` where none ever is."""
    maximum = budget(instance)
    if maximum is None:
        return None
    return max(0, maximum - counted_failures(instance, rank, now_ns or time.time_ns()))


def next_attempt_text(instance: Instance, now_ns: int | None = None) -> str:
    """When the next attempt of one that has failed begins, for people; "" where there is none."""
    match instance.status:
        case Broken(retry_at_ns=None):
            return ""
        case Broken(failure=Failure(phase=Phase.PLACING)):
            return "as soon as there is room"
        case Broken(retry_at_ns=int(retry_at_ns)):
            seconds = (retry_at_ns - (now_ns or time.time_ns())) / 1e9
            if seconds > 0:
                return f"in {seconds:.0f}s" if seconds >= 1 else f"in {seconds:.1f}s"
            return "now" if all_gone(instance) else "once every process is gone"
        case _:
            return ""
