"""`muster promote` and `muster witness`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster import paths
from muster.cli.options import DEFAULT_ADDRESS, CoordinatorOption, check_positive, parse_choice

if TYPE_CHECKING:
    from muster.bus import ControlClient, Endpoint

#: Where a witness listens unless it is told otherwise: behind the coordinator's ports and its HTTP API's.
DEFAULT_WITNESS_PORT = 5714
#: How long a promotion may take: the other coordinator and the witness are asked, and a last event is fetched.
_PROMOTE_SECONDS = 30.0


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("promote")(promote)
    app.command("witness")(witness)


def promote(
    force: Annotated[
        bool,
        typer.Option("--force", help="Also while the active one answers, which is fenced, or without the witness."),
    ] = False,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
) -> None:
    """Let a standby take over from the coordinator that it follows. Instances run on, untouched.

    Give the standby's address, or those of both. It is refused while the active coordinator answers, unless --force
    is given: then that one is fenced, and changes nothing any more. Workers and clients that know both addresses find
    the new one by themselves.
    """
    import anyio

    from muster.bus import parse_endpoints
    from muster.cli.client import run
    from muster.cli.errors import show_note
    from muster.protocol import Promote
    from muster.replies import Role

    endpoints = parse_endpoints(coordinator)
    endpoint = endpoints[0] if len(endpoints) == 1 else anyio.run(_find_standby, endpoints)

    async def work(client: ControlClient) -> None:
        role = await client.ask(Promote(force=force), _PROMOTE_SECONDS, Role)
        show_note(f"the coordinator at {endpoint} leads, with term {role.term}, from event {role.head} on")

    run(str(endpoint), work)


async def _find_standby(endpoints: tuple[Endpoint, ...]) -> Endpoint:
    """The one of several addresses that has a standby."""
    from muster.coordinator.authority import ask_role
    from muster.errors import UnreachableError

    for endpoint in endpoints:
        role = await ask_role(endpoint)
        if role is not None and role.role == "standby":
            return endpoint
    raise UnreachableError(
        f"there is no standby at any of {', '.join(map(str, endpoints))}",
        remedy="Give the standby's address with --coordinator.",
    )


def witness(
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all of this machine.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on. 0: any free.", min=0, max=65_535)
    ] = DEFAULT_WITNESS_PORT,
    directory: Annotated[Path | None, typer.Option(help="Where the votes are; by default in muster's own.")] = None,
    lease: Annotated[
        float, typer.Option(help="The coordinators' own: without a memory, nothing is granted for so many seconds.")
    ] = 5.0,
    log_level: Annotated[str, typer.Option(help="trace, debug, info, warning or error.")] = "info",
    ready_file: Annotated[Path | None, typer.Option(help="Written once the process is up.", hidden=True)] = None,
    stop_with_stdin: Annotated[bool, typer.Option(help="Stop when standard input ends.", hidden=True)] = False,
) -> None:
    """Run a witness, on a third machine: with its vote a standby takes over by itself.

    It knows nothing but which coordinator leads, and for how long. Start both coordinators with --witness.
    """
    import anyio

    from muster.cli.processes import Attendance, configure_logs, run_witness
    from muster.coordinator.witness import WitnessSettings

    check_positive("--lease", lease)
    parse_choice("--log-level", log_level, ("trace", "debug", "info", "warning", "error"))
    configure_logs(log_level)
    settings = WitnessSettings(
        directory=directory or paths.home() / "witness", host=host, port=port, quiet_seconds=lease
    )
    anyio.run(run_witness, settings, Attendance(ready_file=ready_file, stop_with_stdin=stop_with_stdin))
