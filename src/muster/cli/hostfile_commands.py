"""`muster hostfile`, and what `create` and `exec` do with a hostfile of `mlx.launch`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.cli.options import DEFAULT_ADDRESS, CoordinatorOption, InstanceArgument
from muster.errors import RequestError

if TYPE_CHECKING:
    from muster.bus import ControlClient
    from muster.group.hostfile import Hostfile
    from muster.spec import InstanceSpec

#: More than any list of hosts has: a model that was given by mistake is not read into memory.
_MOST_BYTES = 4 * 2**20

HostfileOption = Annotated[
    Path | None,
    typer.Option(
        "--hostfile",
        help="Nodes, addresses, devices, backend and variables as mlx.launch's hostfile has them.",
        metavar="FILE",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("hostfile")(hostfile)


def hostfile(instance: InstanceArgument, coordinator: CoordinatorOption = DEFAULT_ADDRESS) -> None:
    """Print the hostfile with which mlx.launch forms the group that an instance has.

    It is JSON. `muster create --hostfile` reads it again; a "node" in it is for muster, and passed over by mlx.launch.
    """
    from muster.cli.client import run, view
    from muster.coordinator.find import find
    from muster.group.hostfile import write
    from muster.group.hosts import hostfile_of

    async def ask(client: ControlClient) -> str:
        state = (await view(client)).state
        nodes = [node.info for node in state.nodes.values() if node.lost is None]
        return write(hostfile_of(find(state, instance), nodes))

    typer.echo(run(coordinator, ask), nl=False)


def read_hostfile(path: Path | None, *, ranks: int | None, nodes: str | None, backend: str) -> Hostfile | None:
    """The hostfile that was given with --hostfile; the options are those that it stands for.

    Raises:
        RequestError: one of them was given too, or the file cannot be read, or is none.
    """
    if path is None:
        return None
    from muster.group.hostfile import parse

    given = (("--ranks", ranks is not None), ("--nodes", nodes is not None), ("--backend", backend != "auto"))
    if also := [option for option, is_given in given if is_given]:
        raise RequestError(
            f"--hostfile and {also[0]} exclude each other", remedy=f"Leave {also[0]} out: the hostfile has it."
        )
    try:
        with path.expanduser().open("rb") as file:
            payload = file.read(_MOST_BYTES + 1)
        if len(payload) > _MOST_BYTES:
            raise RequestError(f"{path} has more than {_MOST_BYTES} bytes", remedy="Give a hostfile of mlx.launch.")
        text = payload.decode()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RequestError(f"the hostfile {path} cannot be read: {reason}", remedy="Give a JSON file.") from error
    return parse(text)


async def wished(client: ControlClient, spec: InstanceSpec, given: Hostfile | None) -> InstanceSpec:
    """The spec with what the hostfile asks for, over the nodes that are there now.

    Raises:
        RequestError: a host is no node, or its addresses are not the node's.
    """
    from muster.cli.client import view
    from muster.group.hosts import resolve

    if given is None:
        return spec
    seen = await view(client)
    nodes = [node.info for node in seen.state.nodes.values() if node.lost is None]
    return resolve(given, nodes, {facts.node: facts for facts in seen.facts}).upon(spec)
