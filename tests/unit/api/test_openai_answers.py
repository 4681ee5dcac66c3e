"""Several generations at a time: begun together, merged, and cancelled together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
import pytest
from fake_backend import MODEL, FakeBackend, answer, done, refused, started

from muster.api.errors import ApiError, in_words_of
from muster.api.openai_answers import begin_all, gather_all, variants
from muster.protocol import Generate
from muster.replies import AnyPiece, Chunk
from muster.sampling import SamplingParams

Script = Callable[[Generate], Sequence[AnyPiece]]


def requests(count: int) -> tuple[Generate, ...]:
    return variants(Generate(instance=MODEL, prompt="Hi", sampling=SamplingParams(seed=0)), count)


def by_seed(*scripts: Sequence[AnyPiece]) -> Script:
    return lambda request: scripts[request.sampling.seed or 0]


def test_whole_answers_come_in_the_order_of_their_requests() -> None:
    backend = FakeBackend(by_seed(answer("a", "b", "c"), answer("d")))

    async def main() -> list[str]:
        return [collected.text for collected in await gather_all(backend, requests(2))]

    assert anyio.run(main) == ["abc", "d"]


def test_one_refusal_ends_all() -> None:
    backend = FakeBackend(by_seed([started()], [refused("queue-full", "full")]))

    async def main() -> None:
        with anyio.fail_after(5):
            await gather_all(backend, requests(2))

    with pytest.raises(ApiError, match="full"):
        anyio.run(main)
    assert backend.streams[0].cancelled


def test_a_stream_begins_as_soon_as_one_was_taken() -> None:
    backend = FakeBackend(by_seed([], answer("b")))
    pieces: list[tuple[int, AnyPiece]] = []

    async def main() -> None:
        with anyio.fail_after(5):
            answers = await begin_all(backend, requests(2))
            async for index, piece in answers:
                pieces.append((index, piece))
                if len(pieces) == 3:
                    backend.streams[0].add(*answer("a"))

    anyio.run(main)
    assert [index for index, _ in pieces] == [1, 1, 1, 0, 0, 0]
    assert [piece.text for _, piece in pieces if isinstance(piece, Chunk)] == ["b", "a"]


@pytest.mark.parametrize("count", [1, 2])
def test_a_generation_that_ends_without_a_word_is_an_error(count: int) -> None:
    backend = FakeBackend([started(), Chunk(text="Hel")])

    async def main() -> None:
        with anyio.fail_after(5):
            async for _, piece in await begin_all(backend, requests(count)):
                if isinstance(piece, Chunk):
                    backend.streams[0].cancel()

    with pytest.raises(ApiError, match="without saying why") as caught:
        anyio.run(main)
    assert caught.value.status == 502


@pytest.mark.parametrize("count", [1, 2])
def test_a_generation_that_somebody_cancelled_is_an_error(count: int) -> None:
    backend = FakeBackend([started(), done("cancelled")])

    async def main() -> None:
        with anyio.fail_after(5):
            async for _ in await begin_all(backend, requests(count)):
                pass

    with pytest.raises(ApiError, match="cancelled"):
        anyio.run(main)


def test_closing_leaves_no_task_behind() -> None:
    backend = FakeBackend([started()])
    left: list[int] = []

    async def main() -> None:
        answers = await begin_all(backend, requests(3))
        answers.close()
        await anyio.wait_all_tasks_blocked()
        left.append(len(anyio.get_running_tasks()))

    anyio.run(main)
    assert left == [1]
    assert all(stream.cancelled for stream in backend.streams)


def test_cancelling_the_wait_for_the_beginning_cancels_all() -> None:
    backend = FakeBackend([])

    async def main() -> None:
        with anyio.move_on_after(0.05):
            await begin_all(backend, requests(3))

    anyio.run(main)
    assert [stream.cancelled for stream in backend.streams] == [True] * 3


def test_fields_have_the_dialects_names() -> None:
    with pytest.raises(ApiError) as caught, in_words_of({"json_schema": "response_format"}):
        raise ApiError("request-invalid", "no", field="json_schema")
    assert caught.value.field == "response_format"
    with pytest.raises(ApiError) as caught, in_words_of({"json_schema": "response_format"}):
        raise ApiError("request-invalid", "no", field="prompt")
    assert caught.value.field == "prompt"
