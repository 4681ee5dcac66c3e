"""The commands that measure: `bench formation`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    bench = typer.Typer(
        name="bench",
        help="Measure muster beside its peers, on a cluster of its own. Exits 0 whether or not the bars hold.",
        no_args_is_help=True,
    )
    bench.callback()(_group)
    bench.command("formation")(formation)
    app.add_typer(bench)


def _group() -> None:
    """Keeps the sub-command's name while there is only one."""


def formation(
    rounds: Annotated[int, typer.Option(help="Rounds beside the peer.", min=1, max=1000)] = 15,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Two rounds of everything: to see that it works.")] = False,
) -> None:
    """How fast groups come up, beside mlx.launch; what 20 at once leave behind; what an idle one costs."""
    import anyio
    from rich.console import Console

    from muster.bench.formation import QUICK, FormationSettings, measure
    from muster.bench.report import render
    from muster.cli.processes import configure_logs

    configure_logs("warning")
    settings = QUICK if quick else FormationSettings(rounds=rounds)
    progress = Console(stderr=True)
    # The addresses of sockets are short, so the directory has to be, too.
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as directory, progress.status("") as status:
        report = anyio.run(measure, settings, Path(directory), status.update)
    if json:
        typer.echo(report.to_json())
    else:
        Console().print(render(report))
