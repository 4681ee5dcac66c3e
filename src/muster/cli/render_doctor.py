"""What `muster doctor` shows: a line per check, and below what is wrong the one thing that helps."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from muster.cli.render import cell, table
from muster.doctor.checks import Check, Verdict

_STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILURE: "red"}
#: From so many columns on help has a column of its own.
_WIDE_COLUMNS = 140


def checks_table(checks: Iterable[Check], width: int) -> Table:
    """The checks, in `width` columns; a narrow one has the help below the evidence."""
    shown = list(checks)
    of_nodes, wide = any(check.node for check in shown), width >= _WIDE_COLUMNS
    made = table("VERDICT", "CHECK", *(["NODES"] if of_nodes else []), "EVIDENCE", *(["HELP"] if wide else []))
    made.columns[0].no_wrap = made.columns[1].no_wrap = True
    for check in shown:
        evidence, help = cell(check.evidence), cell(check.help)
        if check.help and not wide:
            evidence = Text.assemble(evidence, "\n", ("→ ", "bold"), help)
        cells = [cell(check.verdict.value, _STYLES[check.verdict]), cell(check.name)]
        cells += [cell(check.node)] if of_nodes else []
        made.add_row(*cells, evidence, *([help] if wide else []))
    return made


def summary(checks: Iterable[Check]) -> str:
    """How many of each verdict there are: "1 failure, 2 warnings, 12 OK"."""
    verdicts = [check.verdict for check in checks]
    parts: list[str] = []
    for verdict, word in ((Verdict.FAILURE, "failure"), (Verdict.WARNING, "warning")):
        count = verdicts.count(verdict)
        parts += [f"{count} {word}" + ("s" if count > 1 else "")] if count else []
    return ", ".join([*parts, f"{verdicts.count(Verdict.OK)} OK"])
