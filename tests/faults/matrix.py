"""The fault matrix as a table: `make faults`, or `python tests/faults/matrix.py --help`.

Each fault in each phase on each target, on real processes and, where this machine has network namespaces, real hosts.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
from cells import SHORT, Cell, Fault, Outcome, Phase, Target, cells, expected
from experiment import Laboratory, Result, laboratory
from grounds import Loopback, best_ground
from rich.console import Console
from rich.table import Table

_COLUMNS = ("fault", "phase", "target", "outcome", "seconds", "promised", "again", "request", "cause")
#: Of the table where it is written to no terminal, in characters.
_WIDTH = 200
#: By so much a worker may have grown from its first cell to the last.
GROWTH_BYTES = 30 * 2**20


def chosen(arguments: argparse.Namespace) -> list[Cell]:
    """The cells that the options ask for."""
    found = list(SHORT) if arguments.short else cells()
    for name in ("fault", "phase", "target"):
        wanted: list[str] | None = getattr(arguments, name)
        found = [cell for cell in found if not wanted or getattr(cell, name).value in wanted]
    return found


def row(result: Result) -> tuple[str, ...]:
    """A line of the table."""
    cell = result.cell
    cause = "; ".join([*(f"WRONG: {text}" for text in result.wrong), *filter(None, [result.cause])])
    return (
        cell.fault.value,
        cell.phase.value,
        cell.target.value,
        result.outcome.value,
        f"{result.seconds:.2f}",
        f"{expected(cell).seconds:g}",
        f"{result.again_seconds:.2f}" if result.again_seconds else "-",
        result.answer.value,
        cause,
    )


def markdown(results: list[Result], summary: list[str]) -> str:
    """The same table in Markdown."""
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|" + "---|" * len(_COLUMNS)]
    lines += ["| " + " | ".join(text.replace("|", "\\|") for text in row(result)) + " |" for result in results]
    return "\n".join([*lines, "", *summary, ""])


def summary(results: list[Result], growth: dict[str, int], skipped: dict[str, int]) -> list[str]:
    """What the table comes to, in sentences."""
    counts = {outcome: sum(result.outcome is outcome for result in results) for outcome in Outcome}
    told = ", ".join(f"{count} {outcome.value}" for outcome, count in counts.items() if count)
    lines = [f"{len(results)} cells: {told}."]
    lines += [f"Not played: {count} cells, {reason}." for reason, count in skipped.items()]
    grown = ", ".join(f"{name} {size / 2**20:+.0f} MiB" for name, size in sorted(growth.items()))
    lines.append(f"Memory since the first cell of each process: {grown or 'no process lived through two cells'}.")
    return lines


class Memory:
    """How far the long-lived processes have grown since each was first looked at."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, int], int] = {}
        self.growth: dict[str, int] = {}

    def look(self, made: Laboratory) -> None:
        """Look at every worker and the coordinator; a new process begins afresh."""
        for name, member in made.ground.cluster.members.items():
            with contextlib.suppress(psutil.Error):
                size = int(psutil.Process(member.process.pid).memory_info().rss)
                first = self._first.setdefault((name, member.process.pid), size)
                self.growth[name] = size - first


def play(wanted: list[Cell], made: Laboratory, skipped: dict[str, int], memory: Memory) -> Iterator[Result]:
    """Play the cells that can be played here, one after the other."""
    for cell in wanted:
        reason = made.ground.lacks(cell)
        if reason is not None:
            skipped[reason] = skipped.get(reason, 0) + 1
            continue
        yield made.play(cell)
        memory.look(made)


def options() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, kind in (("fault", Fault), ("phase", Phase), ("target", Target)):
        parser.add_argument(f"--{name}", action="append", choices=[item.value for item in kind], help="only this")
    parser.add_argument("--short", action="store_true", help="a few cells that cover every fault, phase and target")
    parser.add_argument("--loopback", action="store_true", help="no hosts of their own, and so no faults of links")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there, too")
    parser.add_argument("--slack", type=float, default=1.0, metavar="SECONDS", help="by how much a verdict may be late")
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="for logs and the events of what went wrong")
    return parser.parse_args()


def show(console: Console, results: list[Result], told: list[str]) -> None:
    """Print the table."""
    table = Table(*_COLUMNS[:-1])
    table.add_column(_COLUMNS[-1], overflow="fold")
    for result in results:
        table.add_row(*row(result), style="red" if result.wrong else None)
    console.print(table)
    for line in told:
        console.print(line)


def leave(number: int, frame: object) -> None:
    """End on a signal as on Ctrl-C: the cluster ends, too, and what there is of the table is shown."""
    del number, frame
    raise KeyboardInterrupt


def main() -> int:
    """Play, print, and answer 1 where a cell did not come out as promised."""
    arguments = options()
    signal.signal(signal.SIGTERM, leave)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    results: list[Result] = []
    skipped: dict[str, int] = {}
    memory = Memory()
    wanted = chosen(arguments)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(KeyboardInterrupt))
        directory: Path = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-")))
        place = directory / "cluster"
        ground, reason = (Loopback(place), "as asked") if arguments.loopback else best_ground(place)
        if reason is not None:
            console.print(f"Played on loopback: {reason}.")
        made = stack.enter_context(laboratory(ground, directory / "gates", arguments.slack))
        for result in play(wanted, made, skipped, memory):
            results.append(result)
            mark = "WRONG" if result.wrong else "ok"
            if result.wrong and arguments.keep is not None:
                (directory / f"cell-{len(results)}.txt").write_text("\n".join([str(result.cell), *result.story]))
            sys.stderr.write(f"{len(results):4}  {mark:5}  {result.cell}  {'; '.join(result.wrong)}\n")
    told = summary(results, memory.growth, skipped)
    show(console, results, told)
    if arguments.markdown is not None:
        arguments.markdown.write_text(markdown(results, told))
    missing = len(wanted) - len(results) - sum(skipped.values())
    if missing:
        console.print(f"{missing} cells were not reached.")
    grown = any(size > GROWTH_BYTES for size in memory.growth.values())
    return int(bool(missing) or grown or any(result.wrong for result in results))


if __name__ == "__main__":
    sys.exit(main())
