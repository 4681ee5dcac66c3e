"""`muster retry`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from muster.cli.options import DEFAULT_ADDRESS, CoordinatorOption, InstancesArgument, JsonOption, check_positive
from muster.errors import RequestError

if TYPE_CHECKING:
    from muster.bus import ControlClient
    from muster.cli.waiting import Waiting


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("retry")(retry)


def retry(
    instances: InstancesArgument = None,
    move: Annotated[
        bool, typer.Option("--move", help="Also end an attempt that starts or runs, and place it afresh.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until it is ready, a script until its end, and show how.")
    ] = False,
    wait_seconds: Annotated[float | None, typer.Option(help="Wait no longer than this.", metavar="SECONDS")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not show how, while waiting.")] = False,
    json: JsonOption = False,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
) -> None:
    """Try failed instances again, now and with all retries of their restart policy. Prints the ids.

    --move also ends an attempt that starts or runs, and places it afresh: back on a node that takes instances again,
    for example. A model first finishes the requests that it has begun.

    --wait ends as that of `muster create` does; with several instances, with 1 where one of them has failed.
    --json prints a list of maps: instance, sequence; with --wait the keys of `muster ps --json`.
    """
    from muster.cli.client import run
    from muster.cli.waiting import Waiting

    check_positive("--wait-seconds", wait_seconds)
    if not instances:
        raise RequestError("there is nothing to try again", remedy="Give instances; see: muster ps")
    names = list(dict.fromkeys(instances))
    waiting = Waiting(seconds=wait_seconds, quiet=quiet) if wait or wait_seconds is not None else None

    async def work(client: ControlClient) -> int:
        return await _retry(client, names, move, waiting, json)

    raise typer.Exit(run(coordinator, work))


async def _retry(client: ControlClient, names: list[str], move: bool, waiting: Waiting | None, json: bool) -> int:
    from muster.cli import documents
    from muster.cli.client import CALL_SECONDS, view
    from muster.cli.waiting import conclude, goal_of, until_awaited
    from muster.cli.watch import watching
    from muster.coordinator.find import find
    from muster.protocol import Retry
    from muster.replies import Accepted

    state = (await view(client)).state
    wanted = {found.id: goal_of(found.spec) for found in (find(state, name) for name in names)}
    asked: list[Accepted] = []
    for name in wanted:
        asked.append(await client.ask(Retry(instance=name, move=move), CALL_SECONDS, Accepted))
        if not json:
            typer.echo(name)
    if waiting is None:
        if json:
            documents.write([{"instance": one.instance, "sequence": one.sequence} for one in asked])
        return 0
    shown = waiting.display()
    async with watching(client, shown) as watcher:
        watcher.shown.update(() if waiting.quiet else wanted)
        with shown:
            last = max(one.sequence for one in asked)
            state = await until_awaited(client, watcher, wanted, last, waiting.seconds)
    if json:
        there = [state.instances[name] for name in wanted if name in state.instances]
        documents.write([documents.instance_summary(instance) for instance in there])
    return max(conclude(state, name, goal, waiting) for name, goal in wanted.items())
