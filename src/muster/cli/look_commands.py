"""The commands that look: `ps`, `nodes`, `describe`, `events`, `trace`, `logs` and `schema`."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from muster.cli.options import (
    DEFAULT_ADDRESS,
    CoordinatorOption,
    InstanceArgument,
    JsonOption,
    NodesArgument,
    check_node,
    check_positive,
    parse_seconds,
)
from muster.errors import RequestError

if TYPE_CHECKING:
    from muster.bus import ControlClient
    from muster.cli.client import View
    from muster.events import Envelope
    from muster.spec import InstanceId
    from muster.state import Instance

#: Events that `muster describe` shows.
_DESCRIBED_EVENTS = 12


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("ps")(ps)
    app.command("nodes")(nodes)
    app.command("describe")(describe)
    app.command("events")(events)
    app.command("trace")(trace)
    app.command("logs")(logs)
    app.command("schema")(schema)


def ps(
    every: Annotated[bool, typer.Option("--all", help="Also scripts that have finished.")] = False,
    json: JsonOption = False,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
) -> None:
    """List the instances.

    --json prints a list of maps: instance, name, workload, state (starting, ready, ending, failed, finished, deleting),
    reason (why its attempt is ended, though nothing failed), ranks, ranks_ready, nodes (by rank), backend, attempt,
    created_ns, since_ns, retry_at_ns, failure (null, or kind, message, remedy, …).
    """
    from muster.cli import documents, render
    from muster.cli.progress_text import progress_lines
    from muster.state import Finished

    seen = _view(coordinator)
    known = sorted(seen.state.instances.values(), key=lambda instance: instance.created_ns)
    shown = [instance for instance in known if every or not isinstance(instance.status, Finished)]
    if json:
        documents.write([documents.instance_summary(instance) for instance in shown])
        return
    if shown:
        console = render.console()
        console.print(render.instances_table(shown, width=console.width))
        for line in progress_lines(seen.beats):
            console.print(line, highlight=False, markup=False)
    hidden = len(known) - len(shown)
    if hidden:
        typer.echo(f"{hidden} finished, not shown; see: muster ps --all", err=True)
    elif not known:
        typer.echo("No instances. Create one: muster create MODEL", err=True)


def nodes(
    names: NodesArgument = None,
    wide: Annotated[
        bool, typer.Option("--wide", help="Also each worker's process, the machine's free memory, and versions.")
    ] = False,
    json: JsonOption = False,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
) -> None:
    """List the nodes, with what they have and what is in use; of those that are named, all about their machines.

    RESERVED OF BUDGET is the memory given to instances, of what the node may give. FAULTS are the failures of the last
    ten minutes that are blamed on the node.

    A node is `stopped` when its worker was stopped on purpose, `lost` when it fell silent or was replaced, `suspect`
    when it is late with its heartbeat, `draining` when an operator wants it empty, and `set aside` when it failed too
    often, or has something left that cannot be ended. Only a node that is `ready` is given anything new; one that is
    set aside for its failures also what asks for it by name (--nodes).

    --json prints a list of maps: node, state, reason, remedy, duty (serving, draining, set aside), until_ns (when one
    that is set aside is tried again), takes_instances, faults, since_ns, hostname, pid, addresses, backends, versions,
    ranks, max_ranks, memory_bytes, memory_in_use_bytes, memory_available_bytes, worker_memory_bytes, warm_runners,
    warm_runner_memory_bytes, clock_offset_ns (how far its clock is ahead of the coordinator's), clock_error_ns, and
    facts (null, or chip, os, memory, disks, interfaces, thunderbolt, rdma, models, …, and unknown: what could not be
    found out, and why).
    """
    from muster.cli import documents, render
    from muster.cli.render_nodes import nodes_table

    for name in names or ():
        check_node(name, "NODE")
    seen = _view(coordinator)
    beats = {beat.node: beat for beat in seen.beats}
    known = [node for name, node in sorted(seen.state.nodes.items()) if not names or name in names]
    if missing := sorted(set(names or ()) - set(seen.state.nodes)):
        raise RequestError(
            f"there is no node {missing[0]!r}; the nodes are: {', '.join(sorted(seen.state.nodes)) or 'none'}",
            remedy="See: muster nodes",
        )
    facts = {one.node: one for one in seen.facts}
    if json:
        documents.write([documents.node_document(seen.state, node, beats, seen.clocks, facts=facts) for node in known])
        return
    if names:
        from muster.cli.render_facts import node_details

        for place, node in enumerate(known):
            if place:
                typer.echo()
            render.console().print(node_details(seen.state, node, facts, beats.get(node.info.node)))
        return
    if known:
        render.console().print(nodes_table(seen.state, beats, wide=wide, clocks=seen.clocks))
    else:
        typer.echo("No nodes. Start a worker on each: muster worker --join HOST[:PORT]", err=True)
    typer.echo(render.coordinator_text(seen.memory_bytes, seen.log_bytes, seen.fenced), err=True)


def describe(
    instance: InstanceArgument, json: JsonOption = False, coordinator: CoordinatorOption = DEFAULT_ADDRESS
) -> None:
    """Everything about one instance: spec, ranks, failures with remedy and log, last events.

    BLAMED counts the failed attempts that a rank is to blame for, RETRIES LEFT what its restart policy still forgives.

    --json prints one map: the keys of `muster ps --json`, with ranks as a list of maps (with blamed, and retries_left:
    null where failures are never forgiven, and next, how it dials the next rank: null, or own, host, kind, mbps,
    rtt_us), and spec, failed_attempts, failures, events, layout (sharding, devices, jaccl_ring,
    steps_down, and ranks with memory_bytes as predicted, weights_bytes, cache_bytes, layers, sources, …),
    gone_addresses (what ranks use and their nodes have no more), memory_in_use_bytes (by rank).
    """
    from muster.cli import documents, render
    from muster.cli.client import CALL_SECONDS, run, view
    from muster.cli.progress_text import progress_lines
    from muster.cli.render_events import event_line
    from muster.cli.render_instance import gone_addresses, instance_details
    from muster.coordinator.find import find
    from muster.events import decode_envelope
    from muster.protocol import Query
    from muster.replies import Found

    async def ask(client: ControlClient) -> tuple[View, Instance, list[Envelope]]:
        seen = await view(client)
        found = find(seen.state, instance)
        query = Query(instance=found.id, limit=_DESCRIBED_EVENTS, newest=True)
        reply = await client.ask(query, CALL_SECONDS, Found)
        return seen, found, [decode_envelope(payload) for payload in reply.envelopes]

    seen, found, last = run(coordinator, ask)
    nodes = seen.state.nodes
    uses = [use for beat in seen.beats for use in beat.ranks if use.instance == found.id]
    in_use = {use.rank: use.memory_bytes for use in uses if use.attempt == found.attempt}
    if json:
        more = {"gone_addresses": gone_addresses(found, nodes), "memory_in_use_bytes": in_use}
        documents.write({**documents.instance_document(found, last), **more})
    else:
        lines = [event_line(envelope) for envelope in last]
        console = render.console()
        console.print(instance_details(found, lines, nodes=nodes, in_use=in_use))
        for line in progress_lines(seen.beats, found.id):
            console.print(line, highlight=False, markup=False)


def events(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with each new event until Ctrl-C.")] = False,
    instance: Annotated[str | None, typer.Option(help="Only of this instance, also a deleted one.")] = None,
    node: Annotated[str | None, typer.Option(help="Only of this node.")] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(help="Only of this kind, as rank.ready, or rank for all of ranks; again for more."),
    ] = None,
    since: Annotated[str | None, typer.Option(help="Only newer than this: 90s, 10m, 2h, 1d.", metavar="TIME")] = None,
    limit: Annotated[int, typer.Option(help="The last N of the log.", metavar="N")] = 200,
    json: JsonOption = False,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
) -> None:
    """Show the event log.

    --json prints one map per line: sequence, time_ns, time, happened_ns (null, or when it happened, where that is
    known), origin, cause, kind, event (with its own fields).
    """
    from muster.cli import documents, render
    from muster.cli.client import run
    from muster.cli.log_reading import follow_events, instance_id, note_unknown_node, parse_kinds, read_events
    from muster.cli.render_events import event_line
    from muster.protocol import Query
    from muster.spec import NodeId

    check_positive("--limit", limit)
    if node is not None:
        check_node(node, "--node")
    kinds = parse_kinds(kind or ())
    since_ns = 0 if since is None else time.time_ns() - int(parse_seconds("--since", since) * 1e9)
    console = render.console()

    def show(envelope: Envelope) -> None:
        if json:
            documents.write(documents.event_document(envelope), pretty=False)
        else:
            console.print(event_line(envelope))
            sys.stdout.flush()

    async def work(client: ControlClient) -> None:
        wanted = None if instance is None else await instance_id(client, instance)
        query = Query(
            instance=wanted, node=None if node is None else NodeId(node), kinds=kinds, since_ns=since_ns, limit=limit
        )
        if query.node is not None:
            await note_unknown_node(client, query.node)
        if follow:
            await follow_events(client, query, show)
        else:
            for envelope in await read_events(client, query):
                show(envelope)

    run(coordinator, work)


def trace(
    instance: InstanceArgument,
    attempt: Annotated[int | None, typer.Option(help="Which attempt; by default the last.", metavar="N")] = None,
    json: JsonOption = False,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
) -> None:
    """Show how an attempt went: per rank, phase by phase, with durations and what waited for whom.

    Also of instances that are deleted. --json prints one map: instance, attempt, started_ns, ended_ns, outcome,
    failure, and spans (rank, node, name, start_ns, end_ns, waited_for, waited_ns, delay_ns, failure).
    """
    from muster.cli import documents, render
    from muster.cli.client import query_all, run
    from muster.cli.log_reading import instance_id
    from muster.protocol import Query
    from muster.render_trace import render as render_timeline
    from muster.trace import timeline

    check_positive("--attempt", attempt)

    async def ask(client: ControlClient) -> tuple[InstanceId, list[Envelope]]:
        wanted = await instance_id(client, instance)
        found = await query_all(client, Query(instance=wanted))
        if found:
            # The loss of a node ends its ranks, and belongs to no instance.
            lost = Query(kinds=("node.lost",), after=found[0].sequence, until_ns=found[-1].time_ns + 1)
            found += await query_all(client, lost)
        return wanted, sorted(found, key=lambda envelope: envelope.sequence)

    wanted, envelopes = run(coordinator, ask)
    story = timeline(envelopes, wanted, attempt)
    if json:
        documents.write(documents.plain(story))
    elif sys.stdout.isatty():
        render.console().print(render_timeline(story))
    else:
        render.console(columns=120).print(render_timeline(story))


def logs(
    instance: InstanceArgument,
    rank: Annotated[int | None, typer.Option(help="Only of this rank.", metavar="RANK")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the instance is over.")] = False,
    json: JsonOption = False,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
) -> None:
    """Show what the ranks of an instance printed, each line as `\\[rank] text`.

    --json prints one map per line: attempt, rank, text.
    """
    from muster.cli import documents
    from muster.cli.client import run, view
    from muster.cli.errors import show_note
    from muster.cli.log_reading import follow_output, read_output
    from muster.coordinator.find import find
    from muster.replies import OutputLine

    if rank is not None and rank < 0:
        raise RequestError(f"--rank is {rank}", remedy="Ranks count from 0.")

    printed = False

    def show(lines: tuple[OutputLine, ...]) -> None:
        nonlocal printed
        printed = True
        if json:
            for line in lines:
                documents.write(documents.plain(line), pretty=False)
        else:
            sys.stdout.writelines(f"[{line.rank}] {line.text}\n" for line in lines)
            sys.stdout.flush()

    async def work(client: ControlClient) -> None:
        found = find((await view(client)).state, instance)
        if rank is not None and rank >= len(found.ranks):
            raise RequestError(
                f"--rank is {rank}, but {found.id} has {len(found.ranks)} rank{'s' if len(found.ranks) > 1 else ''}",
                remedy=f"Ranks count from 0: give 0 to {len(found.ranks) - 1}.",
            )
        if follow:
            await follow_output(client, found.id, rank, show)
        else:
            await read_output(client, found.id, rank, show)
        if not printed:
            show_note((found.id if rank is None else f"rank {rank} of {found.id}") + " has printed nothing")

    run(coordinator, work)


def schema() -> None:
    """Print the JSON Schema of every message, and which socket it travels on."""
    from muster.cli import documents
    from muster.schema import schema as all_messages

    documents.write(all_messages())


def _view(coordinator: str) -> View:
    from muster.cli.client import run, view

    return run(coordinator, view)
