"""The commands that stay: `up`, `coordinator` and `worker`."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Annotated

import typer

from muster import paths
from muster.api.settings import ApiSettings
from muster.cli.options import check_positive, parse_choice, parse_gib
from muster.errors import RequestError

#: The HTTP API's port is so far above the control port.
_HTTP_OFFSET = 3
_LAST_PORT = 65_535 - _HTTP_OFFSET

LogLevel = Annotated[str, typer.Option(help="trace, debug, info, warning or error.")]
StopWithStdin = Annotated[bool, typer.Option(help="Stop when standard input ends.", hidden=True)]
HttpPort = Annotated[
    int | None,
    typer.Option(help="Port of the HTTP API; by default the control port + 3. 0: any free.", min=0, max=65_535),
]
HttpHost = Annotated[
    str | None, typer.Option(help="Address of the HTTP API; by default that of --host. 0.0.0.0 for all.")
]
HttpName = Annotated[
    list[str] | None, typer.Option(help="A further name that clients reach the HTTP API by; again for each.")
]
NoHttp = Annotated[bool, typer.Option("--no-http", help="Serve no HTTP API.")]
ApiKey = Annotated[
    str | None,
    typer.Option(help="Key that HTTP clients must send.", envvar="MUSTER_API_KEY", show_envvar=True),
]
StandbyOf = Annotated[
    str | None,
    typer.Option(
        envvar="MUSTER_STANDBY_OF",
        help="Follow the coordinator there, and take over when told to.",
        metavar="HOST[:PORT]",
    ),
]
Peer = Annotated[
    str | None,
    typer.Option(
        envvar="MUSTER_PEER",
        help="This coordinator's standby: do not lead where that one does.",
        metavar="HOST[:PORT]",
    ),
]
WitnessAddress = Annotated[
    str | None,
    typer.Option(
        "--witness",
        envvar="MUSTER_WITNESS",
        help="A third vote, with which a standby takes over by itself.",
        metavar="HOST[:PORT]",
    ),
]
ReadyFile = Annotated[Path | None, typer.Option(help="Written once the process is up.", hidden=True)]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("up")(up)
    app.command("coordinator")(coordinator)
    app.command("worker")(worker)


def up(
    nodes: Annotated[int, typer.Option(help="Workers to start.", metavar="N")] = 2,
    port: Annotated[
        int, typer.Option(help="Control port; the next two, and for HTTP the third, are used too. 0: any free.")
    ] = 5710,
    http_port: HttpPort = None,
    http_host: Annotated[str, typer.Option(help="Address of the HTTP API; 0.0.0.0 for all.")] = "127.0.0.1",
    http_name: HttpName = None,
    no_http: NoHttp = False,
    api_key: ApiKey = None,
    directory: Annotated[
        Path | None, typer.Option(help="Where event log, state and logs are; by default in muster's own.")
    ] = None,
    pool: Annotated[int, typer.Option(help="Warm runners that each worker keeps.", metavar="N")] = 2,
    heartbeat: Annotated[float, typer.Option(help="Seconds between heartbeats.")] = 1.0,
    lease: Annotated[float, typer.Option(help="Seconds of silence that make a node lost.")] = 5.0,
    log_level: Annotated[str, typer.Option(help="trace, debug, info, warning or error.")] = "info",
) -> None:
    """Run a coordinator and workers n1, n2, … on this machine until Ctrl-C.

    Ends with 0 after Ctrl-C or SIGTERM, with 1 when the port is taken or one of the processes ends by itself.
    """
    from muster.cli.up import UpSettings, run_up

    check_positive("--heartbeat", heartbeat)
    check_positive("--lease", lease)
    if not 1 <= nodes <= 64:
        raise RequestError(f"--nodes is {nodes}", remedy="Give the number of workers to start, 1 to 64.")
    if not 0 <= port <= _LAST_PORT:
        raise RequestError(f"--port is {port}", remedy=f"Give 1 to {_LAST_PORT}, or 0 for any free port.")
    if not 0 <= pool <= 64:
        raise RequestError(f"--pool is {pool}", remedy="Give 0 to 64 warm runners for each worker.")
    parse_choice("--log-level", log_level, ("trace", "debug", "info", "warning", "error"))
    settings = UpSettings(
        nodes=nodes,
        port=port,
        http=None if no_http else _api_settings(http_host, _http_port(http_port, port), http_name, api_key),
        directory=directory or paths.home() / "up",
        pool=pool,
        heartbeat_seconds=heartbeat,
        lease_seconds=lease,
        log_level=log_level,
    )
    raise typer.Exit(run_up(settings))


def coordinator(
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all of this machine.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Control port; events and generation take the next two. 0: any free.")
    ] = 5710,
    http_port: HttpPort = None,
    http_host: HttpHost = None,
    http_name: HttpName = None,
    no_http: NoHttp = False,
    api_key: ApiKey = None,
    directory: Annotated[Path | None, typer.Option(help="Where the event log is.")] = None,
    heartbeat: Annotated[float, typer.Option(help="Seconds between heartbeats.", min=0.05, max=60)] = 1.0,
    lease: Annotated[float, typer.Option(help="Seconds of silence that make a node lost.", min=0.2, max=3600)] = 5.0,
    standby_of: StandbyOf = None,
    peer: Peer = None,
    witness: WitnessAddress = None,
    log_level: LogLevel = "info",
    generation_port: Annotated[int, typer.Option(hidden=True)] = 0,
    ready_file: ReadyFile = None,
    stop_with_stdin: StopWithStdin = False,
) -> None:
    """Run the coordinator: it owns the event log, places instances and publishes events.

    A second one, with --standby-of, follows it and takes over when told to (`muster promote`) or, where both have a
    --witness, by itself. With --peer the first one does not lead where the second one took over; with both options it
    then becomes the standby.
    """
    from muster.bus import parse_endpoint
    from muster.cli.processes import Attendance, configure_logs, run_coordinator, run_process
    from muster.cli.standby_commands import DEFAULT_WITNESS_PORT
    from muster.coordinator.role import Partners
    from muster.coordinator.service import CoordinatorSettings
    from muster.lifecycle import Settings

    configure_logs(log_level)
    settings = CoordinatorSettings(
        directory=directory or paths.coordinator_directory(),
        host=host,
        control_port=port,
        events_port=port + 1 if port else 0,
        generation_port=generation_port or (port + 2 if port else 0),
        clocks=Settings(heartbeat_seconds=heartbeat, lease_seconds=max(lease, 2 * heartbeat)),
    )
    partners = Partners(
        standby_of=parse_endpoint(standby_of) if standby_of is not None else None,
        peer=parse_endpoint(peer) if peer is not None else None,
        witness=parse_endpoint(witness, DEFAULT_WITNESS_PORT) if witness is not None else None,
    )
    itself = (host if host != "0.0.0.0" else "127.0.0.1", port)
    for option, other in (("--standby-of", partners.standby_of), ("--peer", partners.peer)):
        if other is not None and (other.host, other.port) == itself:
            raise RequestError(f"{option} is this coordinator's own address", remedy="Give the other coordinator's.")
    if partners.peer is not None and partners.standby_of not in (None, partners.peer):
        raise RequestError(
            f"--peer is {peer} and --standby-of is {standby_of}", remedy="There are two coordinators: name the other."
        )
    api = None if no_http else _api_settings(http_host or host, _http_port(http_port, port), http_name, api_key)
    attendance = Attendance(ready_file=ready_file, stop_with_stdin=stop_with_stdin)
    run_process(run_coordinator, settings, partners, attendance, api)


def _models_directory(path: Path) -> Path:
    """The directory from the root.

    Raises:
        RequestError: it is none.
    """
    found = path.expanduser().absolute()
    if not str(path).strip() or not found.is_dir():
        raise RequestError(
            f"--models is {str(path)!r}, which is no directory", remedy="Give the directory that models lie in."
        )
    return found


def _copies_directory(chosen: Path | None, directory: Path | None) -> Path:
    """Where copies go: all workers of a machine share them, but one with a directory of its own keeps to it."""
    found = chosen or (directory / "models" if directory is not None else paths.models_directory())
    return found.expanduser().absolute()


def worker(
    join: Annotated[
        str,
        typer.Option(help="The coordinator's address, and its standby's after a comma.", metavar="HOST[:PORT][,…]"),
    ],
    node_id: Annotated[str | None, typer.Option(help="Name of this node; by default the host's.")] = None,
    address: Annotated[
        list[str] | None, typer.Option(help="An address that other nodes dial; again for each further link.")
    ] = None,
    ports: Annotated[str | None, typer.Option(help="FIRST-LAST: ports that a firewall lets through.")] = None,
    memory: Annotated[float | None, typer.Option(help="GiB that instances may use; by default 90 % of all.")] = None,
    max_ranks: Annotated[int, typer.Option(help="Ranks at once on this node.", min=1, max=1024)] = 32,
    pool: Annotated[int, typer.Option(help="Warm runners to keep.", min=0, max=64)] = 2,
    pool_memory: Annotated[float, typer.Option(help="GiB that all warm runners together may use.")] = 4.0,
    directory: Annotated[Path | None, typer.Option(help="Where this worker keeps its files.")] = None,
    models: Annotated[
        list[Path] | None,
        typer.Option(help="A directory with models, only read; other nodes may copy from it.", metavar="DIR"),
    ] = None,
    copies: Annotated[
        Path | None, typer.Option(help="Where models go that are copied from other nodes.", metavar="DIR")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Never ask the hub for a model.")] = False,
    share: Annotated[bool, typer.Option("--share/--no-share", help="Give models to other nodes.")] = True,
    log_level: LogLevel = "info",
    ready_file: ReadyFile = None,
    stop_with_stdin: StopWithStdin = False,
) -> None:
    """Run the worker of this node: it joins the coordinator and runs the ranks given to it."""
    from muster.bus import parse_endpoints
    from muster.cli.processes import Attendance, configure_logs, run_process, run_worker
    from muster.spec import NodeId
    from muster.worker.pool import PoolSettings
    from muster.worker.ports import parse_ports
    from muster.worker.settings import WorkerSettings

    configure_logs(log_level)
    name = node_id or re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname().split(".")[0])
    settings = WorkerSettings(
        node=NodeId(name),
        coordinators=parse_endpoints(join),
        directory=directory or paths.worker_directory(name),
        addresses=tuple(address or ()),
        ports=parse_ports(ports) if ports is not None else None,
        memory_bytes=parse_gib("--memory", memory),
        max_ranks=max_ranks,
        pool=PoolSettings(size=pool, memory_bytes=parse_gib("--pool-memory", pool_memory) or 0),
        models=tuple(_models_directory(path) for path in models or ()),
        copies=_copies_directory(copies, directory),
        offline=offline,
        share=share,
    )
    run_process(run_worker, settings, Attendance(ready_file=ready_file, stop_with_stdin=stop_with_stdin))


def _http_port(chosen: int | None, control_port: int) -> int:
    """The port of the HTTP API, 0 for any free one."""
    if chosen is not None:
        return chosen
    if control_port > _LAST_PORT:
        raise RequestError(
            f"--port is {control_port}, and the HTTP API's would be {control_port + _HTTP_OFFSET}",
            remedy="Give --http-port, or --no-http",
        )
    return control_port + _HTTP_OFFSET if control_port else 0


def _api_settings(host: str, port: int, names: list[str] | None, key: str | None) -> ApiSettings:
    try:
        return ApiSettings(host=host, port=port, api_key=key, names=tuple(names or ()))
    except ValueError as error:
        raise RequestError(str(error), remedy="See --api-key and MUSTER_API_KEY.") from error
