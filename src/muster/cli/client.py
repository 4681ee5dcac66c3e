"""Running a command's coroutine with a connected client: the address, signals, and what every command asks first."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import msgspec

from muster import paths
from muster.bus import ControlClient, Endpoint, RefusedError, parse_endpoint
from muster.cli.errors import InterruptedBySignalError, bare_errors
from muster.errors import MusterError, ProtocolError, UnreachableError
from muster.events import Envelope, decode_envelope
from muster.protocol import (
    Beat,
    CancelGenerate,
    Chunk,
    Done,
    Generate,
    Get,
    Prefilled,
    Query,
    Refused,
    Snapshot,
    Started,
)
from muster.protocol import Found as FoundReply
from muster.state import State

#: How long one answer of the coordinator may take.
CALL_SECONDS = 5.0
#: How long a TCP connection to the coordinator may take.
CONNECT_SECONDS = 3.0
#: How long shell completion may keep the user waiting.
_COMPLETION_SECONDS = 0.7
#: Events in one answer of the log.
_PAGE_EVENTS = 1_000

T = TypeVar("T")

_state_decoder = msgspec.msgpack.Decoder(State)


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What the coordinator says of the cluster now, logged or not."""

    state: State
    beats: tuple[Beat, ...]
    memory_bytes: int
    log_bytes: int


def run(address: str, function: Callable[[ControlClient], Awaitable[T]]) -> T:
    """Connect to the coordinator, run the coroutine function, and give its result.

    SIGINT and SIGTERM cancel it; its shielded cleanup still runs. A second signal ends the process at once.

    Raises:
        RequestError: the address is none.
        UnreachableError: nobody listens there.
        InterruptedBySignalError: a signal ended it.
    """
    return anyio.run(_run, parse_endpoint(address), function)


async def _run(endpoint: Endpoint, function: Callable[[ControlClient], Awaitable[T]]) -> T:
    result: list[T] = []
    received: list[int] = []
    with bare_errors():
        # The client stays outside of what a signal cancels: shielded cleanup still needs it.
        async with anyio.create_task_group() as group, ControlClient(endpoint) as client:
            with anyio.CancelScope() as scope:

                async def watch() -> None:
                    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                        async for number in signals:
                            received.append(number)
                            scope.cancel()
                            return

                group.start_soon(watch)
                await knock(endpoint)
                result.append(await function(client))
            group.cancel_scope.cancel()
    if received and not result:
        raise InterruptedBySignalError(received[0])
    return result[0]


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
            f"no coordinator can be reached at {endpoint.host}:{endpoint.port} ({_reason(error)})",
            remedy="Start one on this machine with `muster up`, or give the address of another with --coordinator "
            f"or {paths.COORDINATOR_VARIABLE}.",
        ) from error


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"no connection within {CONNECT_SECONDS:g} s"
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    if isinstance(cause, OSError) and cause.errno is not None and not isinstance(cause, socket.gaierror):
        return os.strerror(cause.errno).lower()  # asyncio's own text names the call
    return (getattr(cause, "strerror", None) or str(cause)).lower()


async def view(client: ControlClient, timeout_seconds: float = CALL_SECONDS) -> View:
    """The cluster as it is now."""
    snapshot = await client.ask(Get(), timeout_seconds, Snapshot)
    try:
        state = _state_decoder.decode(snapshot.state)
    except msgspec.DecodeError as error:
        raise ProtocolError(
            f"the coordinator's state cannot be read: {error}", remedy="Use the same version of muster on both ends."
        ) from error
    return View(state=state, beats=snapshot.beats, memory_bytes=snapshot.memory_bytes, log_bytes=snapshot.log_bytes)


async def query_all(client: ControlClient, query: Query) -> list[Envelope]:
    """Every event of the log that the query matches, whatever the query's limit."""
    found: list[Envelope] = []
    while True:
        page = msgspec.structs.replace(query, limit=_PAGE_EVENTS, newest=False)
        reply = await client.ask(page, CALL_SECONDS, FoundReply)
        found.extend(map(decode_envelope, reply.envelopes))
        if len(reply.envelopes) < _PAGE_EVENTS:
            return found
        query = msgspec.structs.replace(query, after=found[-1].sequence)


def instance_names(address: str, incomplete: str) -> list[str]:
    """Ids and names of instances that begin so, for the shell; none where the coordinator does not answer at once."""

    async def ask() -> list[str]:
        with anyio.fail_after(_COMPLETION_SECONDS), bare_errors():
            async with ControlClient(address) as client:
                state = (await view(client, _COMPLETION_SECONDS)).state
        names = [instance.spec.name for instance in state.instances.values() if instance.spec.name]
        return sorted(name for name in [*names, *state.instances] if name.startswith(incomplete))

    try:
        return anyio.run(ask)
    except (MusterError, TimeoutError, OSError):
        return []


async def generation(
    client: ControlClient,
    request: Generate,
    silence_seconds: float,
    take: Callable[[Started | Prefilled | Chunk], None],
) -> Done:
    """Stream one generation: `take` gets every piece but the last, which is answered.

    Raises:
        RefusedError: the coordinator or rank 0 refused it, or the instance ended meanwhile.
        ProtocolError: something else came.
    """
    stream = client.stream(request, timeout_seconds=silence_seconds)
    ended = False
    try:
        async with stream as replies:
            async for reply in replies:
                match reply:
                    case Started() | Prefilled() | Chunk():
                        take(reply)
                    case Done():
                        ended = True
                        return reply
                    case Refused(failure=failure):
                        ended = True
                        raise RefusedError(failure)
                    case _:
                        break
    finally:
        if not ended:  # nobody reads on: without this the ranks would go on to the last token
            client.send(CancelGenerate(id=stream.id))
    raise ProtocolError("the answer ended without an end", remedy="Use the same version of muster on both ends.")
