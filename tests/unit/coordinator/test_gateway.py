"""The generation socket with runners of a few lines: what comes in at one end comes out at the other."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import anyio
import msgspec
import pytest
import zmq
import zmq.asyncio
from fleet import DONE, Fleet

from muster.coordinator.gateway import Gateway
from muster.coordinator.streams import AnswerStream
from muster.protocol import Generate
from muster.rank_protocol import Ask, Cancel, Piece, ToRunner
from muster.replies import AnyPiece, Chunk, Done, Refused, Started
from muster.state import State

pytestmark = [pytest.mark.process, pytest.mark.anyio]

_decoder: msgspec.msgpack.Decoder[ToRunner] = msgspec.msgpack.Decoder(ToRunner)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Runner:
    """A DEALER with the name of a rank 0."""

    def __init__(self, context: zmq.asyncio.Context, port: int, identity: bytes = b"one/1") -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.set(zmq.IDENTITY, identity)
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    async def hear(self) -> ToRunner:
        with anyio.fail_after(10):
            return _decoder.decode(await self._socket.recv())

    async def asked(self) -> int:
        message = await self.hear()
        assert isinstance(message, Ask)
        return message.request

    async def say(self, *pieces: tuple[int, AnyPiece]) -> None:
        await self.say_bytes(
            msgspec.msgpack.encode(tuple(Piece(request=number, reply=reply) for number, reply in pieces))
        )

    async def say_bytes(self, *frames: bytes) -> None:
        await self._socket.send_multipart(frames)

    def close(self) -> None:
        self._socket.close()


class Bed:
    def __init__(self, gateway: Gateway, context: zmq.asyncio.Context) -> None:
        self.gateway = gateway
        self.fleet = Fleet()
        self._context = context
        self.runners: list[Runner] = []

    def runner(self, identity: bytes = b"one/1") -> Runner:
        self.runners.append(Runner(self._context, self.gateway.port, identity))
        return self.runners[-1]

    def ready(self, name: str = "one", attempt: int = 1) -> None:
        self.fleet.ready(name, attempt=attempt)
        self.update()

    def update(self) -> None:
        self.gateway.update(State(sequence=self.fleet.sequence, instances=dict(self.fleet.instances)))

    def stream(self, wanted: str = "m", wait_seconds: float = 20.0) -> AnswerStream:
        request = Generate(instance=wanted, prompt="hi", wait_seconds=wait_seconds)
        return AnswerStream(lambda answer: self.gateway.ask(request, answer), self.gateway.cancel)


@pytest.fixture
async def bed() -> AsyncIterator[Bed]:
    with zmq.asyncio.Context() as context:
        async with Gateway("127.0.0.1") as gateway:
            made = Bed(gateway, context)
            yield made
            for runner in made.runners:
                runner.close()


async def next_of(stream: AnswerStream) -> AnyPiece:
    with anyio.fail_after(10):
        return await anext(stream)


async def all_of(stream: AnswerStream) -> list[AnyPiece]:
    with anyio.fail_after(10):
        return [piece async for piece in stream]


async def test_pieces_of_one_message_go_to_those_who_asked(bed: Bed) -> None:
    bed.ready()
    runner = bed.runner()
    first, second = bed.stream(), bed.stream()
    one, two = await runner.asked(), await runner.asked()
    await runner.say((one, Started(prompt_tokens=1)), (two, Started(prompt_tokens=2)), (one, Chunk(text="a")))
    await runner.say((two, Chunk(text="b")), (two, DONE), (one, DONE))
    assert await all_of(first) == [Started(prompt_tokens=1), Chunk(text="a"), DONE]
    assert await all_of(second) == [Started(prompt_tokens=2), Chunk(text="b"), DONE]


async def test_a_slow_reader_gets_what_it_missed_at_once(bed: Bed) -> None:
    bed.ready()
    runner = bed.runner()
    slow, quick = bed.stream(), bed.stream()
    one, two = await runner.asked(), await runner.asked()
    words = [f"{number} " for number in range(1000)]
    for position, word in enumerate(words):
        await runner.say((one, Chunk(text=word, tokens=(position,))), (two, Chunk(text=word)))
    await runner.say((two, DONE), (one, DONE))
    assert "".join(piece.text for piece in await all_of(quick) if isinstance(piece, Chunk)) == "".join(words)
    pieces = await all_of(slow)
    assert pieces == [Chunk(text="".join(words), tokens=tuple(range(1000))), DONE]


async def test_a_reader_that_is_cancelled_loses_nothing(bed: Bed) -> None:
    bed.ready()
    runner = bed.runner()
    stream = bed.stream()
    number = await runner.asked()
    with anyio.move_on_after(0.02):
        await anext(stream)
    await runner.say((number, Chunk(text="a")))
    assert await next_of(stream) == Chunk(text="a")


async def test_a_cancelled_stream_ends_and_its_runner_hears_it(bed: Bed) -> None:
    bed.ready()
    runner = bed.runner()
    stream = bed.stream()
    number = await runner.asked()
    await runner.say((number, Chunk(text="a")))
    assert await next_of(stream) == Chunk(text="a")
    async with anyio.create_task_group() as group:
        group.start_soon(all_of, stream)
        await anyio.sleep(0.01)
        stream.cancel()
    assert await runner.hear() == Cancel(request=number)
    stream.cancel()
    await runner.say((number, Chunk(text="late")), (number, DONE))
    assert await all_of(stream) == []


async def test_a_runner_that_dials_in_late_is_found(bed: Bed) -> None:
    bed.ready()
    stream = bed.stream()
    await anyio.sleep(0.15)
    runner = bed.runner()
    await runner.say((await runner.asked(), DONE))
    assert await all_of(stream) == [DONE]


async def test_a_runner_that_was_cut_off_and_dials_again_goes_on(bed: Bed) -> None:
    bed.ready()
    runner = bed.runner()
    stream = bed.stream()
    number = await runner.asked()
    runner.close()
    again = bed.runner()
    await again.say((number, Chunk(text="a")), (number, DONE))
    assert await all_of(stream) == [Chunk(text="a"), DONE]


async def test_time_alone_ends_a_request(bed: Bed) -> None:
    bed.fleet.starting("one")
    bed.update()
    begin = time.monotonic()
    long, short = bed.stream(wait_seconds=30), bed.stream(wait_seconds=0.2)
    (piece,) = await all_of(short)
    assert isinstance(piece, Refused)
    assert piece.failure.kind == "wait-exceeded"
    assert 0.2 <= time.monotonic() - begin < 5
    long.cancel()


async def test_a_refused_request_is_one_piece(bed: Bed) -> None:
    (piece,) = await all_of(bed.stream("nobody"))
    assert isinstance(piece, Refused)
    assert piece.failure.kind == "model-unknown"


async def test_another_attempts_runner_gets_what_the_first_did_not_answer(bed: Bed) -> None:
    bed.ready()
    first = bed.runner()
    stream = bed.stream()
    await first.say((await first.asked(), Started(prompt_tokens=1)))
    assert await next_of(stream) == Started(prompt_tokens=1)
    bed.fleet.broken("one")
    bed.update()
    second = bed.runner(b"one/2")
    bed.ready(attempt=2)
    await second.say(*((number := await second.asked(), Started(prompt_tokens=1)), (number, DONE)))
    assert await all_of(stream) == [DONE]


async def test_garbage_and_strangers_harm_nobody(bed: Bed) -> None:
    bed.ready()
    runner, stranger = bed.runner(), bed.runner(b"two/1")
    stream = bed.stream()
    number = await runner.asked()
    await stranger.say((number, Chunk(text="stolen")), (number, DONE))
    assert await stranger.hear() == Cancel(request=number)
    for body in (b"", b"\xc1", msgspec.msgpack.encode([1]), msgspec.msgpack.encode({"request": 1}), bytes(10_000)):
        await runner.say_bytes(body)
        await runner.say_bytes(body, body)
    await runner.say((number, Chunk(text="a")), (number, DONE))
    assert await all_of(stream) == [Chunk(text="a"), DONE]


async def test_a_flood_is_taken_in_turns_and_in_order(bed: Bed) -> None:
    bed.ready()
    runner = bed.runner()
    stream = bed.stream()
    number = await runner.asked()
    for position in range(1500):
        await runner.say((number, Chunk(tokens=(position,))))
    await runner.say((number, DONE))
    pieces = await all_of(stream)
    assert isinstance(pieces[-1], Done)
    tokens = [token for piece in pieces if isinstance(piece, Chunk) for token in piece.tokens]
    assert tokens == list(range(1500))


async def test_nothing_is_kept_of_what_is_over(bed: Bed) -> None:
    bed.ready()
    runner = bed.runner()
    for _ in range(20):
        kept, left = bed.stream(), bed.stream()
        one, two = await runner.asked(), await runner.asked()
        left.cancel()
        assert await runner.hear() == Cancel(request=two)
        await runner.say((one, Chunk(text="a")), (one, DONE))
        await all_of(kept)
    dispatcher = bed.gateway.dispatcher
    assert list(dispatcher.open_requests()) == []
    load = dispatcher.load_of(next(iter(bed.fleet.instances.values())))
    assert load is not None
    assert (load.requests, load.outstanding_tokens) == ({}, 0)
