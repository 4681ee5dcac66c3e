"""`muster links`: which nodes reach which, by what, and how fast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from muster.cli.options import DEFAULT_ADDRESS, CoordinatorOption, JsonOption, NodesArgument, check_node, check_positive
from muster.cli.wishes import parse_network
from muster.errors import RequestError

if TYPE_CHECKING:
    from muster.bus import ControlClient
    from muster.cli.client import View
    from muster.links import LinkMap
    from muster.spec import NodeId

#: Between two looks whether all nodes have measured.
_POLL_SECONDS = 0.2


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("links")(links)


def links(
    nodes: NodesArgument = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure all links again first, and wait for it.")] = False,
    network: Annotated[str | None, typer.Option(help="Only what goes over this network.", metavar="CIDR")] = None,
    timeout: Annotated[float, typer.Option(help="Wait no longer than this for --measure.", metavar="SECONDS")] = 60.0,
    json: JsonOption = False,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
) -> None:
    """Show the link that each pair of nodes would use: its kind, its rate in each direction, and its round trip.

    Of several nodes only the pairs between them; of exactly two, every pair of their addresses, the one that is used
    first, and why the others are not. Nodes measure by themselves when they join, when an address comes or goes, and
    when a link breaks; --measure does it now, and ends with 1 where a node has not done so in time. Each node then also
    measures its memory again, and keeps the best: see muster nodes NODE.

    --json prints one map: round (how often it was asked to measure), late (nodes that have not answered --measure),
    and links, a list of maps: a, b, link (null, or a_host, b_host, kind, mbps_out, mbps_in, rtt_us), why_not, and pairs
    (every pair of addresses: the same keys, with measured and fault).
    """
    from muster.cli import documents, render
    from muster.cli.client import run
    from muster.cli.render_links import links_view, pair_document, pairs_of, trials_view

    check_positive("--timeout", timeout)
    only = parse_network(network)
    wanted = tuple(dict.fromkeys(nodes or ()))
    for name in wanted:
        check_node(name, "NODE")
    if len(wanted) == 1:
        raise RequestError("links are between two nodes, and one is named", remedy="Name another one, or none.")

    async def work(client: ControlClient) -> tuple[View, tuple[NodeId, ...]]:
        return await _look(client, timeout if measure else None)

    seen, late = run(coordinator, work)
    found = _link_map(seen, only)
    known = _shown(seen, wanted)
    if json:
        pairs = [pair_document(found, a, b) for a, b in pairs_of(known)]
        documents.write({"round": seen.measure_round, "late": list(late), "links": pairs})
    elif len(wanted) == 2:
        render.console().print(trials_view(found, known[0], known[1]))
    elif len(known) > 1:
        console = render.console()
        console.print(links_view(found, known, console.width))
    else:
        typer.echo("No two nodes are there. Start a worker on each: muster worker --join HOST[:PORT]", err=True)
    gone = {name: node.lost for name, node in sorted(seen.state.nodes.items()) if node.lost is not None}
    for name, reason in gone.items() if not json and not wanted else ():
        typer.echo(f"node {name} is lost: {reason}", err=True)
    if late:
        typer.echo(f"after {timeout:g} s these nodes still measure: {', '.join(late)}", err=True)
        raise typer.Exit(1)


async def _look(client: ControlClient, measure_seconds: float | None) -> tuple[View, tuple[NodeId, ...]]:
    """The cluster, and with a limit for measuring, those nodes that were not done by then."""
    import anyio

    from muster.cli.client import CALL_SECONDS, view
    from muster.protocol import Measure
    from muster.replies import Measuring

    if measure_seconds is None:
        return await view(client, links=True), ()
    asked = await client.ask(Measure(), CALL_SECONDS, Measuring)
    deadline = anyio.current_time() + measure_seconds
    while True:
        seen = await view(client, links=True)
        done = {one.node: one.round for one in seen.links if one.round >= asked.round}
        late = tuple(
            name
            for name, node in sorted(seen.state.nodes.items())
            if node.lost is None and node.info.peer_port and name not in done
        )
        if not late or anyio.current_time() >= deadline:
            return seen, late
        await anyio.sleep(_POLL_SECONDS)


def _link_map(seen: View, network: str) -> LinkMap:
    from muster.links import LinkMap

    return LinkMap(
        {name: node.info for name, node in seen.state.nodes.items() if node.lost is None},
        {one.node: one for one in seen.links},
        {one.node: one for one in seen.facts},
        network,
    )


def _shown(seen: View, wanted: tuple[str, ...]) -> tuple[NodeId, ...]:
    from muster.spec import NodeId

    there = {name for name, node in seen.state.nodes.items() if node.lost is None}
    for name in wanted:
        known = seen.state.nodes.get(NodeId(name))
        if NodeId(name) not in there:
            what = "is unknown" if known is None else f"is lost: {known.lost}"
            raise RequestError(f"node {name} {what}", remedy="See: muster nodes", field="nodes")
    return tuple(map(NodeId, wanted)) or tuple(sorted(there))
