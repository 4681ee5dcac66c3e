"""`muster serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from muster import paths
from muster.cli.options import absolute, input_errors, parse_choice
from muster.cli.wishes import ConcurrencyOption, ContextOption, TrustOption, choose_ranks
from muster.errors import RequestError

#: So that one that passes, such as a node's short absence, does not end the service.
_RESTART = "on-failure:5"


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("serve")(serve)


def serve(
    model: Annotated[str, typer.Argument(help="An mlx-lm model: a directory, or a hub id.", metavar="MODEL")],
    ranks: Annotated[
        str, typer.Option(help="Over how many ranks; auto: as few as it fits on.", metavar="N|auto")
    ] = "auto",
    sharding: Annotated[str, typer.Option(help="auto, pipeline or tensor.", metavar="SHARDING")] = "auto",
    context: ContextOption = None,
    concurrency: ConcurrencyOption = None,
    served_name: Annotated[
        str | None,
        typer.Option(
            help="What clients call the model; by default the hub id or the directory's name.", metavar="NAME"
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of the HTTP API; by default 5713, or any free one.", min=1, max=65_535)
    ] = None,
    join: Annotated[
        str | None,
        typer.Option(
            help="Serve on a cluster that runs, by its coordinator's address; by default everything is started here.",
            envvar=paths.COORDINATOR_VARIABLE,
            metavar="HOST[:PORT]",
        ),
    ] = None,
    trust_remote_code: TrustOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not show how it comes up.")] = False,
) -> None:
    """Serve a model over HTTP until Ctrl-C, and say how to ask it.

    Starts a coordinator and a worker on this machine, or joins a cluster that runs. Ctrl-C lets answers that are under
    way end, up to 10 s, deletes the instance and stops what was started; a second Ctrl-C cuts them off. Ends with 1 and
    the cause if the model does not become ready or fails for good.
    """
    from muster.cli.options import parse_restart
    from muster.cli.serve_model import ServeSettings, check_directory, run_serve
    from muster.spec import InstanceSpec, ModelWorkload

    parse_choice("--sharding", sharding, ("auto", "pipeline", "tensor"))
    if not model.strip():
        raise RequestError("MODEL is empty", remedy="Give a directory or a hub id, as in `muster serve ./model`.")
    path = Path(model)
    is_path = model.startswith((".", "~", "/")) or path.expanduser().is_dir()
    if join is None and (is_path or "/" not in model):
        check_directory(path)
    number, auto = choose_ranks(ranks, 0, model=True, group=False)
    with input_errors():
        spec = InstanceSpec(
            workload=ModelWorkload(
                model=absolute(path) if is_path else model,
                sharding=sharding,  # pyright: ignore[reportArgumentType]
                served_name=served_name,
                context_tokens=context,
                concurrency=concurrency or 1,
                trust_remote_code=trust_remote_code,
            ),
            ranks=number,
            auto_ranks=auto,
            restart=parse_restart(_RESTART),
        )
    raise typer.Exit(run_serve(ServeSettings(spec=spec, http_port=port, join=join, quiet=quiet)))
