"""`muster demo`."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("demo")(demo)


def demo() -> None:
    """Two instances at once on two workers of this machine, shown from creation to nothing left. No network."""
    from rich.console import Console

    from muster.demo.show import run

    run(Console(soft_wrap=True))
