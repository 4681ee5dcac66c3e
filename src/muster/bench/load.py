"""The load client: one for all servers. It streams chat completions as OpenAI has them, and looks at the clock.

While a stream runs, only its bytes are kept with the time of their arrival; they are read when it is over. So the
client takes little of the machine that it measures on, and every server is read in the same way.
"""

from __future__ import annotations

import asyncio
import bisect
import time
from collections.abc import Sequence
from typing import Any

import anyio
import msgspec

from muster.bench.observer import BenchError

#: A stream that takes longer has hung.
STREAM_SECONDS = 300.0
_PATH = "/v1/chat/completions"
_DATA = b"data: "
#: How much of an error is kept: its code comes last.
_SHOWN = 1000


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where a server listens, and what it calls the model."""

    port: int
    model: str
    host: str = "127.0.0.1"


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request. A client with `leave_after_pieces` goes away, without a word, once so many have arrived."""

    messages: tuple[tuple[str, str], ...]  #: (role, content)
    max_tokens: int
    leave_after_pieces: int | None = None


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a request; seconds from just before the connection was made.

    `error` is empty for a stream that came whole. `tokens` are by the server's usage, or else as many as were asked.
    """

    error: str
    text: str
    tokens: int
    cached_tokens: int
    began_seconds: float  #: monotonic clock
    first_seconds: float | None  #: until the first piece of the answer
    last_seconds: float  #: until the last piece of it
    left: bool = False


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta = _Delta()
    finish_reason: str | None = None


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_event_decoder = msgspec.json.Decoder(_Event)


async def ask(target: Target, request: Ask) -> Reading:
    """Send one request and read its answer to the end. An error is in the reading, never raised."""
    loop = asyncio.get_running_loop()
    began = time.perf_counter()
    over: asyncio.Future[None] = loop.create_future()
    wire = _Wire(encode(target, request), request.leave_after_pieces, over)
    try:
        with anyio.fail_after(STREAM_SECONDS):
            await loop.create_connection(lambda: wire, target.host, target.port)
            await over
    except (OSError, TimeoutError) as error:
        wire.trouble = f"{type(error).__name__}: {error}"
    finally:
        wire.abort()
    return read(wire.received, wire.arrivals, began, request, left=wire.left, trouble=wire.trouble)


async def ask_all(target: Target, requests: Sequence[Ask]) -> list[Reading]:
    """All at once; the readings in the order of the requests."""
    readings: dict[int, Reading] = {}

    async def one(number: int, request: Ask) -> None:
        readings[number] = await ask(target, request)

    async with anyio.create_task_group() as group:
        for number, request in enumerate(requests):
            group.start_soon(one, number, request)
    return [readings[number] for number in range(len(requests))]


def encode(target: Target, request: Ask) -> bytes:
    """The request as HTTP; the server closes the connection when it has answered."""
    body = msgspec.json.encode(
        {
            "model": target.model,
            "messages": [{"role": role, "content": content} for role, content in request.messages],
            "max_tokens": request.max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    head = (
        f"POST {_PATH} HTTP/1.1\r\nHost: {target.host}:{target.port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


class _Wire(asyncio.Protocol):
    """Keeps what arrives, and when."""

    def __init__(self, payload: bytes, leave_after_pieces: int | None, over: asyncio.Future[None]) -> None:
        self.received = bytearray()
        self.arrivals: list[tuple[int, float]] = []
        self.left = False
        self.trouble = ""
        self._payload = payload
        self._leave_after = leave_after_pieces
        self._pieces = 0
        self._over = over
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._payload)

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.arrivals.append((len(self.received), time.perf_counter()))
        if self._leave_after is not None:
            self._pieces += data.count(_DATA)
            if self._pieces >= self._leave_after:
                self.left = True
                self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and not self.left:
            self.trouble = f"{type(exc).__name__}: {exc}"
        if not self._over.done():
            self._over.set_result(None)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


# --- reading ------------------------------------------------------------------------------------------------


def read(
    received: bytes | bytearray,
    arrivals: Sequence[tuple[int, float]],
    began: float,
    request: Ask,
    *,
    left: bool = False,
    trouble: str = "",
) -> Reading:
    """Make a reading of what arrived.

    Args:
        received: The response, headers and all.
        arrivals: How many bytes were there, and at what time, in order.
        began: The time just before the request.
        request: For the length that was asked for.
        left: The client went away by itself.
        trouble: What ended the connection, other than the server's closing it.
    """
    head, blank, _ = bytes(received).partition(b"\r\n\r\n")
    body, places = _body(bytes(received), len(head) + len(blank), chunked=b"chunked" in head.lower())
    events: list[tuple[int, _Event | None]] = []
    try:
        events = _events(body)
    except msgspec.DecodeError as error:
        trouble = trouble or f"an event that cannot be read: {error}"
    content = [(end, text) for end, event in events if event is not None and (text := _text(event))]
    usage = next((event.usage for _, event in reversed(events) if event is not None and event.usage is not None), None)
    asked_seconds = [arrivals[_arrival(arrivals, places, end)][1] - began for end, _ in (content[:1] + content[-1:])]
    details = usage.prompt_tokens_details if usage is not None else None
    return Reading(
        error="" if left else trouble or _error(head, body, events),
        text="".join(text for _, text in content),
        tokens=usage.completion_tokens if usage is not None else request.max_tokens,
        cached_tokens=(details.cached_tokens or 0) if details is not None else 0,
        began_seconds=began,
        first_seconds=asked_seconds[0] if asked_seconds else None,
        last_seconds=asked_seconds[-1] if asked_seconds else 0.0,
        left=left,
    )


def _body(received: bytes, start: int, *, chunked: bool) -> tuple[bytes, list[tuple[int, int]]]:
    """The body, and where it lies in what was received: (end in the body, end in the bytes), in order."""
    if not chunked:
        return received[start:], [(len(received) - start, len(received))]
    parts: list[bytes] = []
    places: list[tuple[int, int]] = []
    length = 0
    while (line_end := received.find(b"\r\n", start)) >= 0:
        size = int(received[start:line_end].partition(b";")[0] or b"0", 16)
        if size == 0:
            break
        start = line_end + 2
        parts.append(received[start : start + size])
        length += len(parts[-1])
        places.append((length, min(start + size, len(received))))
        start += size + 2
    return b"".join(parts), places


def _arrival(arrivals: Sequence[tuple[int, float]], places: Sequence[tuple[int, int]], end: int) -> int:
    """Which arrival brought the body's byte before `end`."""
    body_end, received_end = places[bisect.bisect_left(places, (end, 0))]
    # Without chunks there is one place, which is the whole body.
    position = received_end - (body_end - end)
    return bisect.bisect_left(arrivals, (position, 0.0))


def _events(body: bytes) -> list[tuple[int, _Event | None]]:
    """Each event with where it ends in the body; `None` for one that says only that the stream is over."""
    found: list[tuple[int, _Event | None]] = []
    start = 0
    while (end := body.find(b"\n\n", start)) >= 0:
        block = body[start:end]
        start = end + 2
        if block.startswith(_DATA):
            payload = block[len(_DATA) :]
            found.append((start, None if payload == b"[DONE]" else _event_decoder.decode(payload)))
    return found


def _text(event: _Event) -> str:
    return "".join(
        part
        for choice in event.choices
        for part in (choice.delta.content, choice.delta.reasoning or choice.delta.reasoning_content)
        if part
    )


def _error(head: bytes, body: bytes, events: Sequence[tuple[int, _Event | None]]) -> str:
    """Why this is no whole answer; empty if it is one."""
    status = head.split(b" ", 2)[1:2]
    if status != [b"200"]:
        return f"status {status[0].decode() if status else 'missing'}: {body[:_SHOWN].decode(errors='replace')}"
    failed = [event.error for _, event in events if event is not None and event.error is not None]
    if failed:
        return f"error event: {str(failed[0])[:_SHOWN]}"
    if not events or events[-1][1] is not None:
        return "the stream was cut before [DONE]"
    return ""


def checked(readings: Sequence[Reading], server: str) -> Sequence[Reading]:
    """The readings, all of them whole.

    Raises:
        BenchError: one is not.
    """
    for reading in readings:
        if reading.error or reading.first_seconds is None:
            raise BenchError(f"{server}: {reading.error or 'an answer without text'}", remedy="See its log.")
    return readings
