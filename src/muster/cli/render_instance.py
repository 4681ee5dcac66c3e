"""What `muster describe` shows of an instance."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from muster import stranded
from muster.cli.render import (
    age,
    budget,
    budget_left,
    cell,
    clock,
    exit_text,
    next_attempt_text,
    rate,
    size,
    state_cell,
    table,
    trip,
)
from muster.device_matrix import cables
from muster.spec import Failure, GroupWorkload, InstanceSpec, ModelWorkload, NodeId, Phase, ScriptWorkload
from muster.state import Broken, Ending, Gone, Instance, Node, counted_failures, reserved_bytes, status_name


def instance_details(
    instance: Instance,
    events: Sequence[Text],
    now_ns: int | None = None,
    nodes: Mapping[NodeId, Node] | None = None,
    in_use: Mapping[int, int] | None = None,
) -> RenderableType:
    """What `muster describe` shows; `events` are lines, `nodes` are those that there are now.

    `in_use` is how much memory ranks have in use, in bytes.
    """
    spec = instance.spec
    facts = Table.grid(padding=(0, 2))
    rows: list[tuple[str, str | Text]] = [
        ("instance", instance.id),
        ("name", spec.name or "-"),
        ("workload", _workload_details(spec)),
        ("state", state_cell(status_name(instance.status)).append(f" for {age(instance.since_ns, now_ns)}")),
        ("attempt", _attempt_text(instance, now_ns)),
        ("backend", f"{backend_text(instance)} (asked for: {spec.backend})"),
        *(("", one) for one in (*cables(instance.layout.devices), *instance.layout.steps_down)),
        ("restart", _restart_text(spec)),
        ("memory", "as predicted" if spec.memory_bytes is None else f"{size(spec.memory_bytes)} per rank"),
        ("created", f"{clock(instance.created_ns)} ({age(instance.created_ns, now_ns)} ago)"),
    ]
    if isinstance(instance.status, Broken) and instance.status.retry_at_ns is not None:
        when = "" if instance.status.failure.phase is Phase.PLACING else f" ({clock(instance.status.retry_at_ns)})"
        rows.append(("next attempt", next_attempt_text(instance, now_ns) + when))
    if isinstance(instance.status, Ending):
        rows.append(("ends because", f"{instance.status.reason}; the next attempt follows"))
    for label, value in rows:
        facts.add_row(cell(label, "bold"), cell(value) if isinstance(value, str) else value)
    parts: list[RenderableType] = [facts, Text(), _ranks_table(instance, now_ns, in_use or {})]
    if any(rank.next is not None for rank in instance.layout.ranks):
        parts += [Text(), _links_table(instance)]
    parts += [cell(line, "yellow") for line in gone_addresses(instance, nodes)]
    for position, failure in enumerate(reversed(instance.failures)):
        parts.append(Text())
        parts.extend(failure_lines(failure, "last failure" if position == 0 else "earlier failure"))
    if events:
        parts.append(Text("\nevents", style="bold"))
        parts.extend(events)
    return Group(*parts)


def failure_lines(failure: Failure, title: str) -> Iterator[Text]:
    """The failure with its remedy, and the last that was printed."""
    yield cell(f"{title}: {failure.kind}", "bold red")
    yield cell(f"  {failure.sentence()}")
    if failure.log_tail:
        yield Text("  the last lines that it printed:")
        for line in failure.log_tail:
            yield cell(f"    {line}", "dim")


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
    return "never" if maximum is None else f"on failure, at most {maximum} times for each rank"


def _attempt_text(instance: Instance, now_ns: int | None) -> str:
    text = f"{instance.attempt} (failed so far: {instance.failed_attempts})"
    nobodys, left = counted_failures(instance, -1, now_ns or time.time_ns()), budget_left(instance, -1, now_ns)
    if left is None or not nobodys:
        return text
    return f"{text}; {nobodys} of no rank's making, {left} of {budget(instance)} retries left for those"


def gone_addresses(instance: Instance, nodes: Mapping[NodeId, Node] | None) -> list[str]:
    """Which addresses the ranks were given that their nodes do not have any more."""
    return [
        f"rank {rank.rank} uses {', '.join(gone)}, which node {rank.node} does not have any more"
        for rank, gone in stranded.gone_addresses(instance, nodes or {})
    ]


def _links_table(instance: Instance) -> Table:
    """How each rank dials the next one of the ring."""
    found = table("LINK", "KIND", "RATE", "ROUND TRIP", "ADDRESSES")
    for number, rank in enumerate(instance.layout.ranks):
        if (link := rank.next) is None:
            continue
        measured = rate(link.mbps) or ("" if link.kind == "loopback" else "not measured")
        found.add_row(
            cell(f"{number} → {(number + 1) % len(instance.layout.ranks)}"),
            cell(link.kind),
            cell(measured),
            cell(trip(link.rtt_us)),
            cell(f"{_end(link.own, link.own_interface)} → {_end(link.host, link.host_interface)}"),
        )
    return found


def _end(host: str, interface: str) -> str:
    return f"{host} ({interface})" if interface else host


def backend_text(instance: Instance) -> str:
    """The backend with how it is connected, where there are two ways."""
    if instance.backend == "ring":
        return "ring"
    return f"jaccl {'ring' if instance.layout.jaccl_ring else 'mesh'}"


def _ranks_table(instance: Instance, now_ns: int | None, in_use: Mapping[int, int]) -> Table:
    columns = ["RANK", "NODE", "STATE", "SINCE", "PID", "ADDRESSES", "LAYERS", "WEIGHTS", "PREDICTED", "IN USE"]
    maximum = budget(instance)
    if maximum is not None:
        columns += ["BLAMED", "RETRIES LEFT"]
    found = table(*columns)
    for rank in instance.ranks:
        shown = state_cell(status_name(rank.state))
        if isinstance(rank.state, Gone) and rank.state.exit_code is not None:
            shown.append(f" ({exit_text(rank.state.exit_code)})")
        layers = "" if rank.layers is None else f"{rank.layers[0]}-{rank.layers[1] - 1}"
        cells = [
            cell(str(rank.rank)),
            cell(rank.node),
            shown,
            cell(age(rank.since_ns, now_ns)),
            cell(str(rank.pid or "")),
            cell(" ".join(map(str, rank.addresses))),
            cell(f"{layers} ({rank.sharding})" if layers else ""),
            cell(size(rank.weights_bytes) if rank.weights_bytes else ""),
            cell(size(reserved) if (reserved := reserved_bytes(instance, rank.rank)) else ""),
            cell(size(in_use[rank.rank]) if in_use.get(rank.rank) else ""),
        ]
        if maximum is not None:
            left = budget_left(instance, rank.rank, now_ns)
            blamed = counted_failures(instance, rank.rank, now_ns or time.time_ns())
            cells.append(cell(str(blamed), "yellow" if blamed else ""))
            cells.append(cell(f"{left} of {maximum}", "" if left else "red"))
        found.add_row(*cells)
    return found
