"""`muster place`: where a model would go, without creating anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from muster.cli.hostfile_commands import HostfileOption, wished
from muster.cli.options import (
    DEFAULT_ADDRESS,
    BackendOption,
    CoordinatorOption,
    JsonOption,
    NodesOption,
    SideChannelOption,
)
from muster.cli.specs import Placing, Serving, model_workload
from muster.cli.wishes import (
    PLACING_SECONDS,
    ConcurrencyOption,
    ContextOption,
    DeadlineOption,
    MaxBatchOption,
    MemoryOption,
    NameOption,
    NetworkOption,
    PrefillChunkOption,
    PromptCacheOption,
    RanksOption,
    RestartOption,
    RevisionOption,
    ServedNameOption,
    ShardingOption,
    SplitOption,
    TrustOption,
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
    backend: BackendOption = "auto",
    side_channel: SideChannelOption = "tcp",
    hostfile: HostfileOption = None,
    sharding: ShardingOption = "auto",
    served_name: ServedNameOption = None,
    context: ContextOption = None,
    concurrency: ConcurrencyOption = None,
    network: NetworkOption = None,
    max_batch: MaxBatchOption = None,
    prefill_chunk: PrefillChunkOption = None,
    prompt_cache: PromptCacheOption = None,
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    restart: RestartOption = None,
    name: NameOption = None,
    memory: MemoryOption = None,
    deadline: DeadlineOption = None,
    json: JsonOption = False,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
) -> None:
    """Show where a model would go with `muster create`, what else would do, and what would not and why.

    Nothing is created or reserved. It takes the options of `create`, and the first is what that would choose. Ends
    with 1 where nothing fits, and says what would.

    --json prints {"options", "needs", "remedies", "unknown"}. An option has assignments (rank, node, boot), backend,
    layout (sharding, ranks with memory_bytes, weights_bytes, cache_bytes, layers and next, …) and refusal, which is
    empty where it is one. Where nothing fits, the first has shortfalls: by node what it was short of (node, what,
    reason, needed_bytes, available_bytes, missing_bytes).
    """
    from muster.cli.client import run
    from muster.protocol import Preview
    from muster.replies import Previewed

    if not model.strip():
        raise RequestError("MODEL is empty", remedy="Give a directory or a hub id.")
    placing = Placing(
        ranks=ranks,
        nodes=nodes,
        split=split,
        backend=backend,
        side_channel=side_channel,
        hostfile=hostfile,
        network=network,
        memory=memory,
        name=name,
        restart=restart,
        deadline=deadline,
    )
    serving = Serving(
        revision=revision,
        trust_remote_code=trust_remote_code,
        served_name=served_name,
        context=context,
        concurrency=concurrency,
        max_batch=max_batch,
        prefill_chunk=prefill_chunk,
        prompt_cache=prompt_cache,
    )
    given = placing.given()
    workload = model_workload(model, sharding)
    spec = placing.spec(serving.upon(workload))

    async def ask(client: ControlClient) -> Previewed:
        return await client.ask(Preview(spec=await wished(client, spec, given)), PLACING_SECONDS, Previewed)

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
