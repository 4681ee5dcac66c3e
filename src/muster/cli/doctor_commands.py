"""`muster doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.cli.errors import EXIT_FAILED, show_note
from muster.cli.options import DEFAULT_ADDRESS, CoordinatorOption, JsonOption
from muster.errors import RequestError

if TYPE_CHECKING:
    from muster.bus import ControlClient
    from muster.doctor.checks import Check


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("doctor")(doctor)


def doctor(
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Check every node that the coordinator knows, and compare them.")
    ] = False,
    explain: Annotated[
        str | None, typer.Option(help="Say what an error text of MLX, JACCL or RDMA means.", metavar="TEXT")
    ] = None,
    ports: Annotated[
        str | None, typer.Option(help="Also try the ports that a worker here is to have.", metavar="FIRST-LAST")
    ] = None,
    copies: Annotated[
        Path | None,
        typer.Option(help="Also look at the disk of a worker's --copies, where it is elsewhere.", metavar="DIRECTORY"),
    ] = None,
    no_hub: Annotated[bool, typer.Option("--no-hub", help="Do not ask the hub whether it answers.")] = False,
    json: JsonOption = False,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
) -> None:
    """Check this machine, or with --cluster all nodes: what is wrong, how that is known, and what helps.

    Without --cluster no coordinator is needed. Ends with 1 where a check failed; warnings alone end with 0. --explain
    ends with 1 where nothing is known of the text.
    --json prints a list of maps: check, verdict (OK, WARNING, FAILURE), evidence, help, nodes (a list).
    """
    if explain is not None:
        if cluster or ports is not None:
            raise RequestError("--explain goes with no other check", remedy="Leave --cluster and --ports out.")
        _explain(explain, json)
    elif cluster:
        if ports is not None or copies is not None:
            given = "--ports" if ports is not None else "--copies"
            raise RequestError(f"{given} is for this machine only", remedy="Leave it or --cluster out.")
        _show(_cluster(coordinator), json)
    else:
        _show(_local(ports, copies, hub=not no_hub), json)


def _local(ports: str | None, copies: Path | None, *, hub: bool) -> tuple[Check, ...]:
    from muster.doctor.examination import check_local
    from muster.doctor.local import examine
    from muster.worker.ports import parse_ports

    chosen = parse_ports(ports) if ports is not None else None
    span = (chosen.first, chosen.last) if chosen is not None else None
    return check_local(examine(span, hub=hub, copies=copies))


def _cluster(coordinator: str) -> tuple[Check, ...]:
    from muster.cli.client import run, view
    from muster.doctor.cluster import Evidence, check_cluster

    async def ask(client: ControlClient) -> tuple[Check, ...]:
        seen = await view(client, links=True)
        evidence = Evidence(
            nodes=seen.state.nodes,
            facts={facts.node: facts for facts in seen.facts},
            links={links.node: links for links in seen.links},
            clocks=seen.clocks,
        )
        return check_cluster(evidence)

    return run(coordinator, ask)


def _show(checks: Sequence[Check], json: bool) -> None:
    from muster.cli import documents, render
    from muster.cli.render_doctor import checks_table, summary
    from muster.doctor.checks import failed

    if json:
        documents.write(
            [
                {
                    "check": check.name,
                    "verdict": check.verdict.value,
                    "evidence": check.evidence,
                    "help": check.help,
                    "nodes": check.node.split(", ") if check.node else [],
                }
                for check in checks
            ]
        )
    else:
        console = render.console()
        console.print(checks_table(checks, console.width))
        typer.echo(summary(checks), err=True)
    raise typer.Exit(EXIT_FAILED if failed(checks) else 0)


def _explain(text: str, json: bool) -> None:
    from muster.cli import documents
    from muster.group.remedies import explain

    found = explain(text)
    if found is None:
        show_note("nothing is known of this text; give the line that MLX printed, or see: muster describe INSTANCE")
        raise typer.Exit(EXIT_FAILED)
    if json:
        documents.write({"cause": found.cause, "remedy": found.remedy, "lasting": found.lasting})
        return
    typer.echo(f"{found.cause[0].upper()}{found.cause[1:]}.")
    typer.echo(f"→ {found.remedy[0].upper()}{found.remedy[1:]}.")
    if found.lasting:
        typer.echo("Trying again does not help before that.")
