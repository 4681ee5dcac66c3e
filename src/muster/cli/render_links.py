"""Links between nodes as people see them, and as `--json` prints them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from muster.cli.render import cell, rate, table, trip
from muster.links import LinkMap, Trial
from muster.spec import NodeId

#: More nodes than this are listed pair by pair.
MATRIX_NODES: Final = 12
#: Columns of a matrix beside its cells.
_MARGIN_COLUMNS: Final = 2


def links_view(links: LinkMap, nodes: Sequence[NodeId], width: int) -> RenderableType:
    """What `muster links` shows in `width` columns: a matrix where it fits, and why pairs have no link."""
    matrix = _matrix(links, nodes) if len(nodes) <= MATRIX_NODES else None
    if matrix is None or _width(links, nodes) > width:
        return _list(links, nodes)
    notes = [cell(f"{a} - {b}: {why}", "yellow") for a, b in pairs_of(nodes) if (why := links.why_not(a, b))]
    return Group(matrix, *([Text(), *notes] if notes else []))


def pairs_of(nodes: Sequence[NodeId]) -> Iterable[tuple[NodeId, NodeId]]:
    """Each pair of nodes once, in order."""
    return itertools.combinations(sorted(nodes), 2)


def _matrix(links: LinkMap, nodes: Sequence[NodeId]) -> Table:
    found = Table(box=None, pad_edge=False, header_style="bold")
    found.add_column("FROM", no_wrap=True)
    for name in sorted(nodes):
        found.add_column(f"TO {name}", no_wrap=True)
    for a in sorted(nodes):
        found.add_row(cell(a, "bold"), *(_cell(links, a, b) for b in sorted(nodes)))
    return found


def _width(links: LinkMap, nodes: Sequence[NodeId]) -> int:
    first = max(len(name) for name in (*nodes, "FROM"))
    columns = (max(len(f"TO {b}"), *(_cell(links, a, b).cell_len for a in nodes)) for b in nodes)
    return first + sum(columns) + len(nodes) * _MARGIN_COLUMNS


def _cell(links: LinkMap, a: NodeId, b: NodeId) -> Text:
    """What goes from `a` to `b`: that direction's rate."""
    if a == b:
        return cell("·", "dim")
    best = next(iter(links.trials(a, b)), None)
    if best is None or best.fault:
        return cell("no link", "red")
    return cell(_trial_text(best), "" if best.measured or best.link.kind == "loopback" else "dim")


def _trial_text(trial: Trial) -> str:
    """Such as "ethernet 9.4 Gbit/s 0.21 ms"."""
    if trial.link.kind == "loopback":
        return "loopback"
    if not trial.measured:
        return f"{trial.link.kind}, not measured"
    return " ".join(filter(None, (trial.link.kind, rate(trial.mbps_out), trip(trial.link.rtt_us))))


def _list(links: LinkMap, nodes: Sequence[NodeId]) -> Table:
    found = table("FROM", "TO", "LINK", "BACK", "ADDRESSES")
    for a, b in pairs_of(nodes):
        link = links.between(a, b)
        if link is None:
            found.add_row(cell(a), cell(b), cell("no link", "red"), cell(""), cell(links.why_not(a, b), "yellow"))
        else:
            hosts = cell(f"{link.a_host} → {link.b_host}")
            found.add_row(cell(a), cell(b), _cell(links, a, b), cell(rate(links.trials(b, a)[0].mbps_out)), hosts)
    return found


def trials_view(links: LinkMap, a: NodeId, b: NodeId) -> RenderableType:
    """What `muster links A B` shows: every pair of addresses, the one that is used first."""
    trials = links.trials(a, b)
    if not trials:
        return cell(links.why_not(a, b), "yellow")
    found = table("", f"ON {a}", f"ON {b}", "KIND", "OUT", "IN", "ROUND TRIP", "WHY NOT")
    for position, trial in enumerate(trials):
        link = trial.link
        used = "used" if position == 0 and not trial.fault else ""
        unmeasured = "not measured" if not trial.measured and link.kind != "loopback" else ""
        found.add_row(
            cell(used, "green"),
            cell(link.a_host),
            cell(link.b_host),
            cell(link.kind),
            cell(rate(trial.mbps_out)),
            cell(rate(trial.mbps_in)),
            cell(trip(link.rtt_us)),
            cell(trial.fault or unmeasured, "yellow" if trial.fault else "dim"),
        )
    return found


def pair_document(links: LinkMap, a: NodeId, b: NodeId) -> dict[str, object]:
    """A pair of nodes for `--json`."""
    link = links.between(a, b)
    return {
        "a": a,
        "b": b,
        "link": None if link is None else _link_document(links.trials(a, b)[0]),
        "why_not": links.why_not(a, b) or None,
        "pairs": [
            {**_link_document(trial), "measured": trial.measured, "fault": trial.fault or None}
            for trial in links.trials(a, b)
        ],
    }


def _link_document(trial: Trial) -> dict[str, object]:
    return {
        "a_host": trial.link.a_host,
        "b_host": trial.link.b_host,
        "kind": trial.link.kind,
        "mbps_out": trial.mbps_out,
        "mbps_in": trial.mbps_in,
        "rtt_us": trial.link.rtt_us,
    }
