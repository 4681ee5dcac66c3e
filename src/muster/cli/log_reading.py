"""Reading the event log and what ranks printed, once or as it grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
import msgspec

from muster.bus import Applied, ControlClient, Disconnected, Follower, RefusedError, Synchronised
from muster.cli.client import CALL_SECONDS, query_all, view
from muster.cli.errors import show_note
from muster.cli.watch import is_over
from muster.coordinator.find import find
from muster.errors import RequestError
from muster.eventlog.api import index_of
from muster.events import EVENT_TYPES, Envelope, InstanceCreated, decode_envelope
from muster.protocol import Query, ReadOutput
from muster.replies import Found, OutputLine, Outputs
from muster.spec import InstanceId, NodeId

#: How long the coordinator may hold an answer back until something is printed.
WAIT_SECONDS = 5.0
#: Between two questions that are answered at once because the instance has ended.
_PAUSE_SECONDS = 0.2
#: Events in one answer.
_PAGE_EVENTS = 1_000

ShowLines = Callable[[tuple[OutputLine, ...]], None]


# --- events -----------------------------------------------------------------------------------------------------


async def instance_id(client: ControlClient, wanted: str) -> InstanceId:
    """The id of an instance that is there, or that the log remembers.

    Raises:
        RequestError: neither, or more than one.
    """
    state = (await view(client)).state
    try:
        return find(state, wanted).id
    except RequestError as error:
        created = await query_all(client, Query(kinds=("instance.created",)))
        events = [event for envelope in created if isinstance(event := envelope.event(), InstanceCreated)]
        if any(event.instance == wanted for event in events):
            return InstanceId(wanted)
        named = [event.instance for event in events if event.spec.name == wanted]
        if named:
            return named[-1]
        begun = {event.instance for event in events if wanted and event.instance.startswith(wanted)}
        if len(begun) == 1:
            return begun.pop()
        if begun:
            raise RequestError(
                f"{wanted!r} may be any of {', '.join(sorted(begun))}", remedy="Give more of the id."
            ) from error
        raise


def parse_kinds(texts: Sequence[str]) -> tuple[str, ...]:
    """Kinds of events as `Query.kinds` has them: "rank.ready" as it is, "rank" as "rank.", for all that begin so.

    Raises:
        RequestError: there is no such kind.
    """
    known = sorted(str(event.__struct_config__.tag) for event in EVENT_TYPES)
    kinds = tuple(text if "." in text else f"{text}." for text in texts)
    for text, kind in zip(texts, kinds, strict=True):
        if not any(_is_kind(name, kind) for name in known):
            groups = sorted({name.partition(".")[0] for name in known})
            raise RequestError(
                f"--kind is {text!r}, which is no kind of event",
                remedy=f"Use {', '.join(groups)} for all of a sort, or one of: {', '.join(known)}.",
            )
    return kinds


async def note_unknown_node(client: ControlClient, node: NodeId) -> None:
    """Say so if the cluster has no such node, and the log no event of it."""
    if node in (await view(client)).state.nodes:
        return
    found = await client.ask(Query(node=node, limit=1), CALL_SECONDS, Found)
    if not found.envelopes:
        show_note(f"there is no node {node}, and the log has no event of one; see: muster nodes")


async def read_events(client: ControlClient, query: Query) -> list[Envelope]:
    """The newest events of the log that match, at most `query.limit`, the oldest first."""
    if query.limit > _PAGE_EVENTS:
        return (await query_all(client, query))[-query.limit :]
    found = await client.ask(msgspec.structs.replace(query, newest=True), CALL_SECONDS, Found)
    return [decode_envelope(payload) for payload in found.envelopes]


async def follow_events(client: ControlClient, query: Query, show: Callable[[Envelope], None]) -> None:
    """Show the newest events and then each new one, without a gap, until cancelled."""
    shown = 0
    lost = False
    async with Follower(client) as follower:
        async for change in follower.changes():
            match change:
                case Synchronised():
                    # What the log had before the snapshot; the follower gives what came after it.
                    after = msgspec.structs.replace(query, after=shown)
                    missed = await (query_all(client, after) if shown else read_events(client, after))
                    for envelope in missed:
                        show(envelope)
                    shown = max([change.state.sequence, *(envelope.sequence for envelope in missed)])
                    lost = False
                case Applied(envelope=envelope):
                    if envelope.sequence > shown and matches(query, envelope):
                        show(envelope)
                    shown = max(shown, envelope.sequence)
                case Disconnected():
                    if not lost:
                        show_note("the coordinator does not answer; waiting for it")
                    lost = True


def matches(query: Query, envelope: Envelope) -> bool:
    """Whether a new event is one of those that the query asks for."""
    index = index_of(envelope)
    return (
        (query.instance is None or index.instance == query.instance)
        and (query.node is None or index.node == query.node)
        and (not query.kinds or any(_is_kind(index.kind, wanted) for wanted in query.kinds))
        and envelope.time_ns >= query.since_ns
    )


def _is_kind(kind: str, wanted: str) -> bool:
    return kind.startswith(wanted) if wanted.endswith(".") else kind == wanted


# --- output -----------------------------------------------------------------------------------------------------


async def read_output(client: ControlClient, instance: str, rank: int | None, show: ShowLines, after: int = 0) -> int:
    """Show what was printed so far, from position `after` on; returns the position to go on at.

    Raises:
        RefusedError: there is no such instance.
    """
    while True:
        found = await client.ask(ReadOutput(instance=instance, after=after, rank=rank), CALL_SECONDS, Outputs)
        _show(found, show)
        if found.position == after:
            return after
        after = found.position


async def stream_output(client: ControlClient, instance: str, rank: int | None, show: ShowLines, after: int = 0) -> int:
    """Show what comes next, waiting for it a while; returns the position to go on at."""
    request = ReadOutput(instance=instance, after=after, rank=rank, wait_seconds=WAIT_SECONDS)
    found = await client.ask(request, WAIT_SECONDS + CALL_SECONDS, Outputs)
    _show(found, show)
    if found.position == after:
        await anyio.sleep(_PAUSE_SECONDS)
    return found.position


async def follow_output(client: ControlClient, instance: str, rank: int | None, show: ShowLines) -> None:
    """Show what was printed and what comes, until the instance is over or deleted.

    Raises:
        RefusedError: there is no such instance to begin with.
    """
    wanted = find((await view(client)).state, instance).id
    position = await read_output(client, wanted, rank, show)
    try:
        while True:
            ended = is_over((await view(client)).state, wanted)
            before, position = position, await stream_output(client, wanted, rank, show, position)
            if ended and position == before:
                return
    except RefusedError as error:
        if error.failure.kind != RequestError.kind:
            raise  # deleted meanwhile: that is the end of it


def _show(found: Outputs, show: ShowLines) -> None:
    if found.dropped:
        show_note(f"{found.dropped} older lines are no longer kept")
    if found.lines:
        show(found.lines)
