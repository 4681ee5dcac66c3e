"""How instances come up, on a terminal: one table that is drawn again and again."""

from __future__ import annotations

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from muster.cli.render import STATE_STYLES, printable
from muster.cli.watch import Seen, doing
from muster.state import phase_of, status_name


class LiveTable:
    """A row per rank with a bar where its phase has progress."""

    def __init__(self, console: Console | None = None) -> None:
        self._seen: dict[str, Seen] = {}
        self._live = Live(console=console or Console(stderr=True), auto_refresh=False)

    def __enter__(self) -> LiveTable:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def show(self, seen: Seen) -> None:
        """Draw this instance anew."""
        self._seen[seen.instance.id] = seen
        self._live.update(Group(*map(block_of, self._seen.values())), refresh=True)


def block_of(seen: Seen) -> Group:
    """One instance: a line, and its ranks."""
    instance = seen.instance
    state = status_name(instance.status)
    title = Text(f"{instance.id}, attempt {instance.attempt}: ").append(state, style=STATE_STYLES.get(state, ""))
    table = Table(box=None, pad_edge=False, show_header=False)
    for rank in instance.ranks:
        progress = seen.progress.get(rank.rank)
        bar = ""
        if progress is not None and progress.total > 0 and progress.phase is phase_of(instance, rank):
            bar = ProgressBar(total=progress.total, completed=progress.done, width=24)
        table.add_row(
            Text(f"  rank {rank.rank}"), Text(printable(f"on {rank.node}")), Text(doing(seen, rank.rank)), bar
        )
    return Group(title, table)
