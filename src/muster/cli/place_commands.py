"""`muster place`: where a model would go, without creating anything."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.cli.options import (
    DEFAULT_ADDRESS,
    BackendOption,
    CoordinatorOption,
    JsonOption,
    NodesOption,
    absolute,
    input_errors,
    parse_choice,
    parse_gib,
    parse_nodes,
)
from muster.cli.wishes import (
    PLACING_SECONDS,
    ConcurrencyOption,
    ContextOption,
    NetworkOption,
    RanksOption,
    RevisionOption,
    SplitOption,
    choose_ranks,
    parse_network,
    parse_split,
)
from muster.errors import RequestError

if TYPE_CHECKING:
    from muster.bus import ControlClient
    from muster.replies import Previewed


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("place")(place)


def place(
    model: Annotated[str, typer.Argument(help="A directory that exists on every node, or a hub id.", metavar="MODEL")],
    ranks: RanksOption = None,
    nodes: NodesOption = None,
    split: SplitOption = None,
    sharding: Annotated[str, typer.Option(help="auto, pipeline or tensor.", metavar="SHARDING")] = "auto",
    backend: BackendOption = "auto",
    context: ContextOption = None,
    concurrency: ConcurrencyOption = None,
    network: NetworkOption = None,
    memory: Annotated[
        float | None, typer.Option(help="GiB that each rank needs; by default as predicted.", metavar="GIB")
    ] = None,
    revision: RevisionOption = None,
    json: JsonOption = False,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
) -> None:
    """Show where a model would go with `muster create`, what else would do, and what would not and why.

    Nothing is created or reserved. The first is what `create` would choose with the same options. Ends with 1 where
    nothing fits, and says what would.

    --json prints {"options", "needs", "remedies", "unknown"}. An option has assignments (rank, node, boot), backend,
    layout (sharding, ranks with memory_bytes, weights_bytes, cache_bytes, layers and next, …) and refusal, which is
    empty where it is one.
    """
    from muster.cli.client import run
    from muster.protocol import Preview
    from muster.replies import Previewed
    from muster.spec import InstanceSpec, ModelWorkload

    if not model.strip():
        raise RequestError("MODEL is empty", remedy="Give a directory or a hub id.")
    path = Path(model)
    is_path = model.startswith((".", "~", "/")) or path.expanduser().is_dir()
    chosen = parse_nodes(nodes)
    layers = parse_split(split)
    number, auto = choose_ranks(
        str(len(layers)) if layers and ranks is None else ranks, len(chosen), model=True, group=False
    )
    with input_errors():
        workload = ModelWorkload(
            model=absolute(path) if is_path else model,
            revision=revision,
            sharding=parse_choice("--sharding", sharding, ("auto", "pipeline", "tensor")),  # pyright: ignore[reportArgumentType]
            context_tokens=context,
            concurrency=concurrency or 1,
        )
        spec = InstanceSpec(
            workload=workload,
            ranks=number,
            auto_ranks=auto,
            nodes=chosen,
            backend=parse_choice("--backend", backend, ("auto", "ring", "jaccl")),  # pyright: ignore[reportArgumentType]
            split=layers,
            network=parse_network(network),
            memory_bytes=parse_gib("--memory", memory),
        )

    async def ask(client: ControlClient) -> Previewed:
        return await client.ask(Preview(spec=spec), PLACING_SECONDS, Previewed)

    found = run(coordinator, ask)
    fits = any(not option.refusal for option in found.options)
    if json:
        import msgspec

        from muster.cli import documents

        documents.write(msgspec.to_builtins(found))
    else:
        from muster.cli import render
        from muster.cli.render_place import preview_view

        render.console().print(preview_view(workload.model, found))
    raise typer.Exit(0 if fits and not (found.options and found.options[0].refusal) else 1)
