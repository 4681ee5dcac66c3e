"""The load client reads every server's stream in the same way, and knows when each piece came."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from muster.bench.load import Ask, Reading, Target, ask, ask_all, checked, encode, read
from muster.bench.observer import BenchError

REQUEST = Ask(messages=(("user", "Hello"),), max_tokens=3)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
PLAIN = HEAD + b"\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


def event(content: str | None = None, **more: Any) -> bytes:
    choices = [] if content is None else [{"index": 0, "delta": {"content": content}}]
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


ROLE = event("")
USAGE = event(usage={"completion_tokens": 7, "prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}})
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def reading_of(parts: Sequence[bytes], **options: Any) -> Reading:
    """The parts arrive one second after the other, the first one second after the request."""
    received = b"".join(parts)
    arrivals = [(len(b"".join(parts[: number + 1])), 101.0 + number) for number in range(len(parts))]
    return read(received, arrivals, 100.0, REQUEST, **options)


def test_the_first_piece_with_text_is_the_first() -> None:
    reading = reading_of([PLAIN, ROLE, event("a"), event("b"), USAGE, DONE])
    assert (reading.error, reading.text, reading.first_seconds, reading.last_seconds) == ("", "ab", 3.0, 4.0)
    assert (reading.tokens, reading.cached_tokens) == (7, 4)


def test_chunks_do_not_change_what_is_read_nor_when() -> None:
    reading = reading_of(
        [CHUNKED, chunk(ROLE), chunk(event("a")), chunk(event("b")) + chunk(USAGE + DONE), b"0\r\n\r\n"]
    )
    assert (reading.error, reading.text, reading.first_seconds, reading.last_seconds) == ("", "ab", 3.0, 4.0)
    assert reading.tokens == 7


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_piece_counts_when_all_of_it_is_there(cut: int) -> None:
    piece = event("a")
    for head, framed in ((PLAIN, piece), (CHUNKED, chunk(piece))):
        reading = reading_of(
            [head, framed[:cut], framed[cut:], b"0\r\n\r\n"] if head is CHUNKED else [head, framed[:cut], framed[cut:]]
        )
        assert reading.first_seconds == 3.0


def test_reasoning_and_keepalives_are_no_hindrance() -> None:
    thinking = b'data: {"choices": [{"delta": {"reasoning_content": "hm"}}]}\n\n'
    reading = reading_of([PLAIN, b": keepalive 1/2\n\n", thinking, event("a"), DONE])
    assert (reading.error, reading.text, reading.first_seconds) == ("", "hma", 3.0)


def test_without_usage_as_many_tokens_count_as_were_asked_for() -> None:
    assert reading_of([PLAIN, event("a"), DONE]).tokens == REQUEST.max_tokens


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([b"HTTP/1.1 429 Too Many Requests\r\n\r\nlater"], "status 429: later"),
        ([b""], "status missing"),
        ([PLAIN, event("a")], "cut before [DONE]"),
        ([PLAIN, b"data: {\n\n", DONE], "cannot be read"),
        ([PLAIN, event("a"), event(error={"message": "lost"}), DONE], "lost"),
    ],
)
def test_what_is_no_whole_answer_is_an_error(parts: list[bytes], expected: str) -> None:
    reading = reading_of(parts)
    assert expected in reading.error
    with pytest.raises(BenchError, match="server"):
        checked([reading], "server")


def test_a_client_that_left_is_no_error() -> None:
    assert reading_of([PLAIN, event("a")], left=True).error == ""


def test_a_connection_that_broke_is_an_error() -> None:
    assert reading_of([PLAIN, event("a"), DONE], trouble="reset").error == "reset"


def test_the_request_is_what_every_server_understands() -> None:
    head, _, body = encode(Target(port=80, model="m"), REQUEST).partition(b"\r\n\r\n")
    sent = json.loads(body)
    assert f"content-length: {len(body)}".encode() in head.lower()
    assert sent["messages"] == [{"role": "user", "content": "Hello"}]
    assert (sent["model"], sent["max_tokens"], sent["temperature"], sent["stream"]) == ("m", 3, 0.0, True)


class Server:
    """Answers each connection with these parts, and notes who left before the end."""

    def __init__(self, parts: Sequence[bytes], *, endless: bool = False) -> None:
        self.left = asyncio.Event()
        self._parts = parts
        self._endless = endless

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            for part in self._parts:
                writer.write(part)
                await writer.drain()
            while self._endless and not reader.at_eof():
                writer.write(event("x"))
                await writer.drain()
                await anyio.sleep(0.001)
        except ConnectionError:
            pass
        self.left.set()
        writer.close()


def ask_server(server: Server, *requests: Ask) -> list[Reading]:
    async def run() -> list[Reading]:
        listening = await asyncio.start_server(server.answer, "127.0.0.1", 0)
        async with listening:
            port: int = listening.sockets[0].getsockname()[1]
            with anyio.fail_after(20):
                found = await ask_all(Target(port=port, model="m"), requests)
                await server.left.wait()
            return found

    return anyio.run(run)


def test_all_are_asked_at_once_and_read_in_their_order() -> None:
    readings = ask_server(Server([PLAIN, event("a"), DONE]), REQUEST, REQUEST)
    assert [reading.text for reading in readings] == ["a", "a"]
    assert all(reading.first_seconds is not None and reading.error == "" for reading in readings)


def test_a_client_leaves_in_the_middle_when_it_is_told_to() -> None:
    (reading,) = ask_server(
        Server([PLAIN], endless=True), Ask(messages=(("user", "x"),), max_tokens=9, leave_after_pieces=3)
    )
    assert reading.left and reading.error == "" and 3 <= len(reading.text) < 9_000


def test_nobody_there_is_an_error_in_the_reading() -> None:
    async def run() -> Reading:
        return await ask(Target(port=1, model="m"), REQUEST)

    assert "ConnectionRefusedError" in anyio.run(run).error
