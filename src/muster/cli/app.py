"""The `muster` command: one Typer application, its commands in the modules beside it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from muster import __version__
from muster.cli import (
    bench_commands,
    chat_commands,
    demo_commands,
    doctor_commands,
    hostfile_commands,
    instance_commands,
    link_commands,
    look_commands,
    model_commands,
    needs_commands,
    node_commands,
    place_commands,
    retry_commands,
    run_commands,
    serve_commands,
    standby_commands,
)
from muster.cli.errors import EXIT_INTERRUPTED, SIGNAL_EXIT_BASE, InterruptedBySignalError, exit_code_of, show_error
from muster.errors import MusterError

_EPILOG = "\n\n".join(
    (
        "Exit codes:",
        "0: done.",
        "1: it failed or was refused; the cause is on standard error.",
        "2: bad input, nothing was done.",
        "3: no coordinator at the address.",
        "130: Ctrl-C. 143: SIGTERM.",
        "`muster exec` ends with the exit code of the script.",
    )
)

app = typer.Typer(
    name="muster",
    help="Brings MLX distributed groups up across machines, and keeps them up.",
    epilog=_EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"muster {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """What `muster` itself takes, before a command."""
    del version  # its callback has ended the command


for _commands in (
    model_commands,
    serve_commands,
    needs_commands,
    place_commands,
    instance_commands,
    retry_commands,
    run_commands,
    chat_commands,
    look_commands,
    node_commands,
    link_commands,
    standby_commands,
    hostfile_commands,
    doctor_commands,
    bench_commands,
    demo_commands,
):
    _commands.register(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `muster` command. Always ends with `SystemExit`."""
    try:
        app(args=None if arguments is None else list(arguments))
    except MusterError as error:
        show_error(error)
        sys.exit(exit_code_of(error))
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has seen enough; Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except InterruptedBySignalError as interruption:
        sys.exit(SIGNAL_EXIT_BASE + interruption.number)
