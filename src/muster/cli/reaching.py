"""Which coordinator a command talks to, and whether anybody is there at all."""

from __future__ import annotations

import os
import socket

import anyio

from muster import paths
from muster.bus import ControlClient, Endpoint, Terms, seek
from muster.cli.errors import show_note
from muster.errors import UnreachableError
from muster.protocol import Who
from muster.replies import Role

#: How long a TCP connection to the coordinator may take.
CONNECT_SECONDS = 3.0

_REMEDY = (
    "Start one on this machine with `muster up`, or give the address of another with --coordinator "
    f"or {paths.COORDINATOR_VARIABLE}."
)


async def reach(client: ControlClient) -> None:
    """Make sure that somebody is there, at once; of several addresses take the active one, else a standby.

    Raises:
        UnreachableError: nobody is, or none of them is active or follows one that was.
    """
    if len(client.endpoints) == 1:
        await knock(client.endpoint)
        return
    found = await seek(client.endpoints, Terms(), CONNECT_SECONDS, standby=True, other=True)
    if found is None:
        addresses = ", ".join(f"{endpoint.host}:{endpoint.port}" for endpoint in client.endpoints)
        raise UnreachableError(f"there is no active coordinator at any of {addresses}", remedy=_REMEDY)
    client.move(found)
    role = await client.ask(Who(), CONNECT_SECONDS, Role)
    if role.role != "active":
        show_note(f"answered by the {role.role} coordinator at {found.host}:{found.port}; {role.reason}".rstrip("; "))


async def knock(endpoint: Endpoint) -> None:
    """Find out at once whether anybody listens: ZeroMQ itself would go on dialling.

    Raises:
        UnreachableError: nobody does.
    """
    try:
        with anyio.fail_after(CONNECT_SECONDS):
            stream = await anyio.connect_tcp(endpoint.host, endpoint.port)
        await stream.aclose()
    except (OSError, TimeoutError) as error:
        raise UnreachableError(
            f"no coordinator can be reached at {endpoint.host}:{endpoint.port} ({_reason(error)})", remedy=_REMEDY
        ) from error


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"no connection within {CONNECT_SECONDS:g} s"
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    if isinstance(cause, OSError) and cause.errno is not None and not isinstance(cause, socket.gaierror):
        return os.strerror(cause.errno).lower()  # asyncio's own text names the call
    return (getattr(cause, "strerror", None) or str(cause)).lower()
