"""Running a command's coroutine with a connected client: the address, signals, and what every command asks first."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import msgspec

from muster.bus import ControlClient, Endpoint, parse_endpoints
from muster.cli.errors import InterruptedBySignalError, bare_errors
from muster.cli.reaching import reach
from muster.errors import MusterError, ProtocolError
from muster.events import Envelope, decode_envelope
from muster.facts import NodeFacts
from muster.links import NodeLinks
from muster.protocol import Beat, Get, Query
from muster.replies import Found as FoundReply
from muster.replies import NodeClock, Snapshot
from muster.state import State

#: How long one answer of the coordinator may take.
CALL_SECONDS = 5.0
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
    clocks: tuple[NodeClock, ...] = ()
    fenced: dict[str, int] = {}
    facts: tuple[NodeFacts, ...] = ()
    links: tuple[NodeLinks, ...] = ()
    measure_round: int = 0


def run(address: str, function: Callable[[ControlClient], Awaitable[T]]) -> T:
    """Connect to the coordinator, run the coroutine function, and give its result.

    SIGINT and SIGTERM cancel it; its shielded cleanup still runs. A second signal ends the process at once.

    Raises:
        RequestError: the address is none.
        UnreachableError: nobody listens there, or none of several is active.
        InterruptedBySignalError: a signal ended it.
    """
    return anyio.run(_run, parse_endpoints(address), function)


async def _run(endpoints: tuple[Endpoint, ...], function: Callable[[ControlClient], Awaitable[T]]) -> T:
    result: list[T] = []
    received: list[int] = []
    with bare_errors():
        # The client stays outside of what a signal cancels: shielded cleanup still needs it.
        async with anyio.create_task_group() as group, ControlClient(endpoints) as client:
            with anyio.CancelScope() as scope:

                async def watch() -> None:
                    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                        async for number in signals:
                            received.append(number)
                            scope.cancel()
                            return

                group.start_soon(watch)
                await reach(client)
                result.append(await function(client))
            group.cancel_scope.cancel()
    if received and not result:
        raise InterruptedBySignalError(received[0])
    return result[0]


async def view(client: ControlClient, timeout_seconds: float = CALL_SECONDS, *, links: bool = False) -> View:
    """The cluster as it is now; with what nodes measured of their `links`, which is by far the most, where wanted."""
    snapshot = await client.ask(Get(links=links), timeout_seconds, Snapshot)
    try:
        state = _state_decoder.decode(snapshot.state)
    except msgspec.DecodeError as error:
        raise ProtocolError(
            f"the coordinator's state cannot be read: {error}", remedy="Use the same version of muster on both ends."
        ) from error
    return View(
        state=state,
        beats=snapshot.beats,
        memory_bytes=snapshot.memory_bytes,
        log_bytes=snapshot.log_bytes,
        clocks=snapshot.clocks,
        fenced=snapshot.fenced,
        facts=snapshot.facts,
        links=snapshot.links,
        measure_round=snapshot.measure_round,
    )


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

    def names(state: State) -> list[str]:
        return [*(one.spec.name for one in state.instances.values() if one.spec.name), *state.instances]

    return _complete(address, incomplete, names)


def node_names(address: str, incomplete: str) -> list[str]:
    """Nodes that begin so, for the shell; none where the coordinator does not answer at once."""
    return _complete(address, incomplete, lambda state: [*state.nodes])


def _complete(address: str, incomplete: str, names: Callable[[State], list[str]]) -> list[str]:
    async def ask() -> list[str]:
        with anyio.fail_after(_COMPLETION_SECONDS), bare_errors():
            async with ControlClient(address) as client:
                await reach(client)
                state = (await view(client, _COMPLETION_SECONDS)).state
        return sorted(name for name in names(state) if name.startswith(incomplete))

    try:
        return anyio.run(ask)
    except (MusterError, TimeoutError, OSError):
        return []
