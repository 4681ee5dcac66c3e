"""Many streams for minutes, a third of whose clients leave midway: what goes wrong, and what is left of it."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence

import anyio
import anyio.to_thread
import msgspec
import psutil

from muster.bench.load import Ask, Reading, Target, ask
from muster.bench.report import AtLeast, AtMost, Figure, figure
from muster.bench.shapes import prompt

_MEGABYTE = 1e6
#: Answers are so long, by the number of the client.
_TOKENS = (16, 32, 48)
#: Every third client leaves each time after so many pieces.
_LEAVERS, _LEAVE_AFTER = 3, 6
#: Until what was closed is gone, and what was freed is given back.
_REST_SECONDS = 3.0
#: What memory may grow by: allocators keep some of what they once had.
_GROWTH = 1.1


class Soak(msgspec.Struct, frozen=True, kw_only=True):
    """How many clients, for how long; `warm_seconds` of the same go before what is compared with."""

    streams: int = 200
    seconds: float = 120.0
    warm_seconds: float = 15.0


class Weight(msgspec.Struct, frozen=True, kw_only=True):
    """What processes hold: resident memory, and open sockets and files."""

    memory_bytes: int
    descriptors: int


class Tally(msgspec.Struct):
    """What came of all requests."""

    whole: int = 0
    left: int = 0
    tokens: int = 0
    errors: list[str] = []


async def run_streams(target: Target, streams: int, seconds: float, numbers: itertools.count[int]) -> Tally:
    """Keep so many clients asking for so long, and let the last answers come to their end."""
    tally = Tally()
    deadline = time.monotonic() + seconds

    async def client(number: int) -> None:
        while time.monotonic() < deadline:
            request = Ask(
                messages=(("user", prompt(next(numbers))),),
                max_tokens=_TOKENS[number % len(_TOKENS)],
                leave_after_pieces=_LEAVE_AFTER if number % _LEAVERS == 0 else None,
            )
            count(tally, request, await ask(target, request))

    async with anyio.create_task_group() as group:
        for number in range(streams):
            group.start_soon(client, number)
    return tally


def count(tally: Tally, request: Ask, reading: Reading) -> None:
    """Add what came of one request."""
    if reading.left:
        tally.left += 1
    elif reading.error:
        tally.errors.append(reading.error)
    elif reading.tokens != request.max_tokens:
        tally.errors.append(f"{reading.tokens} tokens instead of {request.max_tokens}")
    else:
        tally.whole += 1
        tally.tokens += reading.tokens


def weigh(roles: Mapping[str, Sequence[int]]) -> dict[str, Weight]:
    """What the processes of each role hold together."""
    found: dict[str, Weight] = {}
    for role, pids in roles.items():
        memory = descriptors = 0
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                memory += process.memory_info().rss
                descriptors += process.num_fds()
        found[role] = Weight(memory_bytes=memory, descriptors=descriptors)
    return found


def roles_of(roots: Mapping[str, int], ranks: Sequence[int]) -> dict[str, Sequence[int]]:
    """The coordinator, the workers, and the instance's runners; warm runners do not count.

    Args:
        roots: The processes of the cluster by name, one of which is "coordinator".
        ranks: The process of each rank.
    """
    return {
        "coordinator": [roots["coordinator"]],
        "workers": [pid for name, pid in roots.items() if name != "coordinator"],
        "runners": list(ranks),
    }


async def soak(
    target: Target, roles: Mapping[str, Sequence[int]], settings: Soak, open_requests: Callable[[], int]
) -> list[Figure]:
    """Run it, and compare with how it was after a short run of the same.

    Args:
        target: The server.
        roles: Whose memory and sockets are looked at.
        settings: How much.
        open_requests: How many requests wait or run by the server's own account; may block.
    """
    numbers = itertools.count()
    await run_streams(target, settings.streams, settings.warm_seconds, numbers)
    await anyio.sleep(_REST_SECONDS)
    before = weigh(roles)
    tally = await run_streams(target, settings.streams, settings.seconds, numbers)
    await anyio.sleep(_REST_SECONDS)
    after = weigh(roles)
    return soak_figures(settings, tally, before, after, await anyio.to_thread.run_sync(open_requests))


def soak_figures(
    settings: Soak, tally: Tally, before: Mapping[str, Weight], after: Mapping[str, Weight], waiting: int
) -> list[Figure]:
    """The rows of the soak."""
    name = f"{settings.streams} streams for {settings.seconds:g} s"
    none = AtMost(limit=0, text="0")
    rows = [
        figure(f"{name}: whole answers", "", tally.whole, bar=AtLeast(limit=1, text="some")),
        figure(f"{name}: clients that left", "", tally.left, bar=AtLeast(limit=1, text="a third leaves")),
        figure(f"{name}: errors", "", len(tally.errors), bar=none),
        figure(f"{name}: requests that wait or run afterwards", "", waiting, bar=none),
    ]
    for role in before:
        grown = (after[role].memory_bytes - before[role].memory_bytes) / _MEGABYTE
        limit = (_GROWTH - 1) * before[role].memory_bytes / _MEGABYTE
        bar = AtMost(limit=limit, text=f"≤ 10 % ({limit:.0f} MB)")
        rows.append(figure(f"{name}: growth of memory, {role}", "MB", grown, bar=bar))
        more = after[role].descriptors - before[role].descriptors
        rows.append(figure(f"{name}: more sockets and files, {role}", "", more, bar=none))
    return rows
