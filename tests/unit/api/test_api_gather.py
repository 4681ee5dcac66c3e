"""Reading a generation: whole, or from its first piece on; however it ends, its stream is done with."""

from __future__ import annotations

import anyio
import pytest
from fake_backend import FakeStream, answer, done, refused, started

from muster.api.errors import ApiError, of_failure
from muster.api.gather import first, gather, rest
from muster.replies import Chunk, Done, Prefilled
from muster.sampling import ToolCall
from muster.spec import Failure

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_whole_answer_is_joined() -> None:
    call = ToolCall(id="1", name="f", arguments="{}")
    script = [
        started(),
        Prefilled(done=3, total=7),
        Chunk(reasoning="hm", tokens=(1,)),
        Chunk(text="a", tokens=(2, 3)),
        Chunk(text="b", tool_calls=(call,)),
        done(),
    ]
    found = await gather(FakeStream(script))
    assert (found.text, found.reasoning, found.tool_calls, found.tokens) == ("ab", "hm", (call,), (1, 2, 3))
    assert (found.started, found.done) == (script[0], script[-1])


@pytest.mark.parametrize("before", [[], [started()], answer("a")[:-1]])
async def test_a_refusal_is_raised_wherever_it_comes(before: list[Chunk]) -> None:
    stream = FakeStream([*before, refused("answer-lost", "the instance failed")])
    with pytest.raises(ApiError, match="the instance failed") as caught:
        await gather(stream)
    assert caught.value.status == 502


async def test_a_generation_that_somebody_cancelled_is_no_answer() -> None:
    with pytest.raises(ApiError, match="cancelled"):
        await gather(FakeStream([started(), done("cancelled")]))


async def test_a_stream_that_just_stops_is_an_error() -> None:
    stream = FakeStream([started()])
    await first(stream)
    stream.cancel()
    with pytest.raises(ApiError, match="without saying why"):
        await anext(rest(stream))


async def test_whoever_stops_waiting_cancels_the_generation() -> None:
    for reader in (gather, first):
        stream = FakeStream([])
        async with anyio.create_task_group() as group:
            group.start_soon(reader, stream)
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
        assert stream.cancelled, reader


async def test_the_rest_begins_where_the_first_ended() -> None:
    stream = FakeStream(answer("a", "b"))
    assert await first(stream) == started()
    found = [piece async for piece in rest(stream)]
    assert [piece.text for piece in found if isinstance(piece, Chunk)] == ["a", "b"]
    assert isinstance(found[-1], Done)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("request-invalid", 400),
        ("context-exceeded", 400),
        ("model-unknown", 404),
        ("queue-full", 429),
        ("answer-lost", 502),
        ("model-unavailable", 503),
        ("instance-deleted", 503),
        ("wait-exceeded", 504),
        ("something-new", 500),
    ],
)
def test_every_failure_has_a_status(kind: str, status: int) -> None:
    error = of_failure(Failure(kind=kind, message="It is so", remedy="Do that.", field="messages"))
    assert (error.status, error.message, error.field) == (status, "It is so. Do that.", "messages")
    assert (error.retry_after_seconds is not None) == (kind in {"queue-full", "model-unavailable"})
