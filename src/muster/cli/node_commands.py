"""`muster drain` and `muster resume`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from muster.cli.options import (
    DEFAULT_ADDRESS,
    CoordinatorOption,
    JsonOption,
    NodesArgument,
    check_node,
    check_positive,
)
from muster.errors import RequestError

if TYPE_CHECKING:
    from muster.bus import ControlClient
    from muster.protocol import Drain, Resume
    from muster.replies import Noted
    from muster.state import State


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("drain")(drain)
    app.command("resume")(resume)


def drain(
    nodes: NodesArgument = None,
    now: Annotated[
        bool, typer.Option("--now", help="Also end scripts, and cut off the requests that models have begun.")
    ] = False,
    reason: Annotated[str, typer.Option(help="Why, for those who look: muster nodes.", metavar="TEXT")] = "",
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until no rank is left there.")] = True,
    timeout: Annotated[
        float | None, typer.Option(help="Wait no longer than this, also for scripts to end.", metavar="SECONDS")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not show how, while waiting.")] = False,
    json: JsonOption = False,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
) -> None:
    """Empty nodes: they are given nothing new, and what they have is placed elsewhere. Prints the nodes.

    Models first finish the requests that they have begun, for as long as their spec's drain_seconds allow. Scripts are
    left to their end. What fits nowhere else waits until there is room. `muster resume` ends it.

    It ends with 0 once no rank is left there; with 1 once only scripts are left, or with --timeout after that time.
    --json prints a list of maps: node, sequence, empty, and left (instance, rank, pid, reason), which are null
    with --no-wait.
    """
    from muster.cli.client import run
    from muster.protocol import Drain
    from muster.spec import NodeId

    check_positive("--timeout", timeout)
    if timeout is not None and not wait:
        raise RequestError("--timeout and --no-wait exclude each other", remedy="Leave one of them out.")
    names = _checked(nodes, "drain")
    requests = [Drain(node=NodeId(name), reason=reason, now=now) for name in names]

    async def work(client: ControlClient) -> int:
        from muster.cli import documents

        if wait:
            noted, state, code = await _drain(client, requests, timeout, quiet)
        else:
            noted, state, code = await _ask(client, requests, await _state(client)), None, 0
        found = [_document(item, state) for item in noted]
        if json:
            documents.write(found)
        else:
            _echo(one["node"] for one in found if one["empty"] is not False)
        return code

    raise typer.Exit(run(coordinator, work))


def resume(
    nodes: NodesArgument = None, json: JsonOption = False, coordinator: CoordinatorOption = DEFAULT_ADDRESS
) -> None:
    """Let nodes that were drained or set aside take instances again. Prints the nodes.

    What was moved away stays where it is; to have it placed afresh: muster retry --move INSTANCE.
    --json prints a list of maps: node, sequence.
    """
    from muster.cli.client import run
    from muster.protocol import Resume
    from muster.spec import NodeId

    names = _checked(nodes, "resume")

    async def work(client: ControlClient) -> int:
        from muster.cli import documents

        noted = await _ask(client, [Resume(node=NodeId(name)) for name in names], await _state(client))
        if json:
            documents.write([{"node": item.node, "sequence": item.sequence} for item in noted])
        else:
            _echo(names)
        return 0

    raise typer.Exit(run(coordinator, work))


def _checked(nodes: list[str] | None, command: str) -> list[str]:
    if not nodes:
        raise RequestError(f"there is no node to {command}", remedy="Give nodes; see: muster nodes")
    for name in nodes:
        check_node(name, "NODE")
    return list(dict.fromkeys(nodes))


async def _state(client: ControlClient) -> State:
    from muster.cli.client import view

    return (await view(client)).state


async def _ask(client: ControlClient, requests: Sequence[Drain | Resume], before: State) -> list[Noted]:
    """Ask for all of them, or, where one of the nodes is not known, for none."""
    from muster.cli.client import CALL_SECONDS
    from muster.replies import Noted

    for request in requests:
        if request.node not in before.nodes:
            raise RequestError(
                f"there is no node {request.node!r}; the nodes are: {', '.join(sorted(before.nodes)) or 'none'}",
                remedy="See: muster nodes",
            )
    return [await client.ask(request, CALL_SECONDS, Noted) for request in requests]


async def _drain(
    client: ControlClient, requests: Sequence[Drain], seconds: float | None, quiet: bool
) -> tuple[list[Noted], State, int]:
    """Ask for it and wait; with the state in the end, and the exit code."""
    from muster.cli.draining import Drained, conclude
    from muster.cli.watch import Quiet, display, watching

    nodes = [request.node for request in requests]
    shown = Quiet() if quiet else display()
    async with watching(client, shown) as watcher:
        drained = Drained(watcher, nodes, quiet=quiet)
        noted = await _ask(client, requests, watcher.state)
        with shown:
            state = await drained.wait(max(item.sequence for item in noted), seconds)
    return noted, state, conclude(state, nodes, seconds)


def _document(noted: Noted, state: State | None) -> dict[str, object]:
    from muster.cli.draining import left_on, stays

    found: dict[str, object] = {"node": noted.node, "sequence": noted.sequence, "empty": None, "left": None}
    if state is not None:
        left = list(left_on(state, noted.node))
        found["empty"] = not left
        found["left"] = [
            {
                "instance": instance.id,
                "rank": rank.rank,
                "pid": rank.pid or None,
                "reason": stays(state, instance, noted.node) or None,
            }
            for instance, rank in left
        ]
    return found


def _echo(lines: Iterable[object]) -> None:
    for line in lines:
        typer.echo(line)
