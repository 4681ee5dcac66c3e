"""`muster model`: what a model needs, and what each rank of it would take."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.cli.options import DEFAULT_ADDRESS, CoordinatorOption, JsonOption, absolute
from muster.errors import RequestError, UnreachableError

if TYPE_CHECKING:
    from muster.bus import ControlClient
    from muster.needs import ModelNeeds

#: As long as the coordinator may take: its own files, nodes', and twice the hub.
_INSPECT_SECONDS = 35.0
#: Numbers of ranks that are shown where none are named.
_RANKS = "1,2,4,8"
#: Tokens where nothing else is said, as a served model's.
_CONTEXT_TOKENS = 8192
_MOST_RANKS = 1024


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("model")(model)


def model(
    model: Annotated[str, typer.Argument(help="A directory, or a hub id.", metavar="MODEL")],
    revision: Annotated[
        str | None, typer.Option(help="Of a hub id: branch, tag or commit.", metavar="REVISION")
    ] = None,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks to predict for.", metavar="N,N,…")] = _RANKS,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens of a sequence; by default 8192, or the model's own.", metavar="TOKENS", min=1),
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Sequences at the same time.", metavar="N", min=1, max=1024)] = 1,
    prefill_chunk: Annotated[
        int, typer.Option(help="Prompt tokens per step, as of `create`.", metavar="TOKENS", min=1)
    ] = 512,
    json: JsonOption = False,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
) -> None:
    """Show what a model needs, from its config.json and the headers of its weights alone, and how it can be shared out.

    A directory of this machine is read here. Of any other model the coordinator is asked, which asks its nodes and
    the hub; where there is no coordinator, the hub is asked from here. No weights are read or downloaded.

    The memory is predicted for each rank: weights, the cache of --concurrency sequences of --context tokens, what
    computing takes at its highest, and the process. Of a pipeline the rank that takes most is shown.

    --json prints a map: model, model_type, parameters, bits, hidden_size, heads, kv_heads, vocabulary, experts,
    context_tokens, weights_bytes, outside_bytes, kv_token_bytes, layers (weights_bytes, tensor_bytes, kv_token_bytes,
    window, state_bytes, … of each), tensor, pipeline, tensor_sizes, no_tensor, no_pipeline, …, and ranks: a list of
    maps of ranks, sharding, why_not (empty where it is possible), split, and by_rank (weights, cache, workspace,
    process, total).
    """
    from muster.cli import documents, render
    from muster.cli.render_needs import Forecast, forecasts, needs_view

    wanted = parse_ranks(ranks)
    needs = _find(model, revision, coordinator)
    tokens = context if context is not None else min(_CONTEXT_TOKENS, needs.context_tokens or _CONTEXT_TOKENS)
    asked = Forecast(context_tokens=tokens, sequences=concurrency, prefill_chunk_tokens=prefill_chunk)
    found = forecasts(needs, wanted, asked)
    if json:
        import msgspec

        document = msgspec.to_builtins(needs)
        more = {"weights_bytes": needs.weights_bytes, "kv_token_bytes": needs.kv_token_bytes}
        documents.write(
            document | more | {"asked": msgspec.to_builtins(asked), "ranks": [one.document() for one in found]}
        )
        return
    render.console().print(needs_view(needs, found, asked))


def parse_ranks(text: str) -> tuple[int, ...]:
    """Read "1,2,4".

    Raises:
        RequestError: it is no list of numbers of ranks.
    """
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1 or max(numbers) > _MOST_RANKS:
        raise RequestError(f"--ranks is {text!r}", remedy=f"Give numbers from 1 to {_MOST_RANKS}, as in 1,2,4.")
    return numbers


def _find(model: str, revision: str | None, coordinator: str) -> ModelNeeds:
    """The model's needs, from whoever knows first.

    Raises:
        ModelError: it is no model that can be used, or nobody knows it.
        RefusedError: the coordinator says so.
    """
    from muster.cli.client import run
    from muster.fetch.survey import Survey
    from muster.protocol import Inspect
    from muster.replies import Needs
    from muster.spec import is_hub_id

    survey = Survey()
    if (here := survey.here(model, revision)) is not None:
        return here
    named = model if is_hub_id(model) else absolute(Path(model))

    async def ask(client: ControlClient) -> ModelNeeds:
        reply = await client.ask(Inspect(model=named, revision=revision or ""), _INSPECT_SECONDS, Needs)
        return reply.needs

    try:
        return run(coordinator, ask)
    except UnreachableError:
        return survey.hub(model, revision)
