"""Rank 0's loop between gateway, worker and batch: what each request hears at each moment of its life."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from serving_kit import DEADLINE_SECONDS, Server, of
from tiny_models import LLAMA, make_model

import muster.runner.serving
from muster.errors import RequestError
from muster.model.answer import Answer
from muster.model.load import LoadedModel
from muster.model.request import PreparedRequest, prepare
from muster.protocol import Generate
from muster.rank_protocol import Step
from muster.replies import Chunk, Prefilled, Started

pytestmark = pytest.mark.mlx

LONG = bytes(range(65, 91)) * 12
MANY = 3000
END = 256


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "m", LLAMA | {"max_position_embeddings": 8192})


def endless(prompt: bytes) -> Generate:
    """A request whose answer does not end by itself."""
    return of(prompt, MANY, logit_bias={END: -100.0})


class Gate:
    """Prepares requests, but those that begin with "slow" only once it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.prompts: list[object] = []

    def __call__(self, loaded: LoadedModel, generate: Generate) -> PreparedRequest:
        self.prompts.append(generate.prompt)
        if isinstance(generate.prompt, str) and generate.prompt.startswith("slow"):
            assert self.open.wait(DEADLINE_SECONDS)
        return prepare(loaded, generate)


def test_answers_side_by_side_are_those_alone(path: Path) -> None:
    with Server(path) as server:
        asked = [of(b"Say it.", 20), of(b"Say it in order, and slowly.", 9), of(b"?", 30), of(b"Say it.", 1)]
        alone: list[Any] = []
        for generate in asked:
            number = server.ask(generate)
            alone.append((server.end_of(number).reason, server.tokens(number)))
        numbers = [server.ask(generate) for generate in asked]
        beside = [(server.end_of(number).reason, server.tokens(number)) for number in numbers]
        assert beside == alone
        assert [len(tokens) for _, tokens in alone] == [20, 9, 30, 1]
        assert len({tokens for _, tokens in alone}) == 4


def test_a_request_hears_its_start_its_tokens_and_its_end(path: Path) -> None:
    with Server(path) as server:
        number = server.ask(of("Say it.", 5))
        done = server.end_of(number)
        started, *chunks, last = server.replies(number)
        assert started == Started(prompt_tokens=7)
        assert len(chunks) == 5
        assert all(isinstance(chunk, Chunk) for chunk in chunks)
        assert last == done
        assert (done.reason, done.prompt_tokens, done.completion_tokens) == ("length", 7, 5)
        assert 0 < done.seconds_to_first_token <= done.seconds


def test_a_step_s_tokens_travel_in_one_message(path: Path) -> None:
    with Server(path) as server:
        first = server.ask(endless(b"A"))
        others = [server.ask(endless(b"B" * count)) for count in (2, 3, 4)]
        for number in (first, *others):
            server.until_reply(number, Chunk)
        server.messages.clear()
        server.until(lambda: len(server.messages) >= 10)
        assert all(len({piece.request for piece in message}) == 4 for message in server.messages)


def test_text_waits_for_more_of_it_but_the_first_and_the_end_do_not(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muster.runner.serving, "_FLUSH_SECONDS", DEADLINE_SECONDS)
    with Server(path) as server:
        number = server.ask(of(b"A", 40, logit_bias={END: -100.0}))
        done = server.end_of(number)
        sizes = [sum(isinstance(piece.reply, Chunk) for piece in message) for message in server.messages]
        assert done.completion_tokens == 40
        # The start, the first token, then all the others with the end.
        assert [size for size in sizes if size] == [1, 39]


def test_text_travels_at_once_where_it_is_not_to_wait(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muster.runner.serving, "_FLUSH_SECONDS", 0.0)
    with Server(path) as server:
        number = server.ask(of(b"A", 40, logit_bias={END: -100.0}))
        server.end_of(number)
        assert sum(any(isinstance(piece.reply, Chunk) for piece in message) for message in server.messages) == 40


def test_a_step_holds_several_passes_while_nothing_is_to_change(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muster.runner.serving, "_STEP_SECONDS", DEADLINE_SECONDS)
    with Server(path, followed=True) as server:
        first = server.ask(endless(b"A"))
        server.until_reply(first, Chunk)
        alone = len(server.steps)
        server.until(lambda: len(server.steps) >= alone + 5)
        second = server.ask(of(b"Say it in order, and slowly.", 9))
        done = server.end_of(second)
        server.cancel(first)
        server.end_of(first)
        steps = [step for step in server.steps if isinstance(step, Step)]
    assert max(step.passes for step in steps) == 8
    entered = next(step for step in steps[1:] if step.admit)
    assert entered.passes == 1
    # A chunk of the prompt is a step of its own.
    assert all(step.passes == 1 for step in steps[steps.index(entered) :][:3])
    assert done.completion_tokens == 9
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))


def test_slow_passes_are_steps_of_their_own(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muster.runner.serving, "_STEP_SECONDS", 0.0)
    with Server(path, followed=True) as server:
        server.end_of(server.ask(of(b"A", 30, logit_bias={END: -100.0})))
        steps = [step for step in server.steps if isinstance(step, Step)]
    assert len(steps) >= 30
    assert {step.passes for step in steps} == {1}


def test_ids_come_back_as_text(path: Path) -> None:
    with Server(path) as server:
        numbers = [server.ask(of(bytes(range(60, 70)), count)) for count in (0, 3)]
        for number in numbers:
            server.end_of(number)
            started = server.replies(number)[0]
            assert isinstance(started, Started)
            assert started.prompt is not None
            assert len(started.prompt) == 10


def test_counting_the_prompt_leaves_the_model_alone(path: Path) -> None:
    with Server(path) as server:
        number = server.ask(of("Say it.", 0))
        done = server.end_of(number)
        assert server.replies(number) == [Started(prompt_tokens=7), done]
        assert (done.reason, done.completion_tokens, done.prompt_tokens) == ("length", 0, 7)
        assert server.silent()


def test_the_worker_hears_when_the_rank_is_busy_and_idle(path: Path) -> None:
    with Server(path) as server:
        server.end_of(server.ask(of(b"Say it.", 5)))
        busy, *between, idle = server.idle()
        assert (busy.active, idle.active) == (1, 0)
        assert busy.step < idle.step
        assert len(between) <= 2
        server.end_of(server.ask(of(b"Say it.", 5)))
        assert server.idle()[0].step > idle.step


def test_a_long_prompt_reports_progress_and_a_short_one_does_not(path: Path) -> None:
    with Server(path, chunk=1) as server:
        number = server.ask(of(LONG, 2))
        server.end_of(number)
        reports = [reply for reply in server.replies(number) if isinstance(reply, Prefilled)]
        assert reports
        assert [report.done for report in reports] == sorted({report.done for report in reports})
        assert {report.total for report in reports} == {len(LONG)}
        assert len(reports) < 60, "at most about four a second"
    with Server(path, chunk=512) as server:
        number = server.ask(of(LONG, 2))
        server.end_of(number)
        assert not [reply for reply in server.replies(number) if isinstance(reply, Prefilled)]


def test_requests_beyond_the_batch_wait_in_order(path: Path) -> None:
    with Server(path, sequences=2) as server:
        numbers = [server.ask(of(b"A" * count, 5)) for count in range(1, 8)]
        for number in numbers:
            server.end_of(number)
        starts = [piece.request for message in server.messages for piece in message if isinstance(piece.reply, Started)]
        assert starts == numbers
        ends = [piece.request for message in server.messages for piece in message if piece.request == numbers[0]]
        assert ends


def test_a_later_request_finds_the_cache_of_an_earlier_one(path: Path) -> None:
    with Server(path, cache_bytes=2**20) as server:
        first = server.ask(of(LONG, 5))
        assert server.end_of(first).cached_tokens == 0
        second = server.ask(of(LONG, 5))
        assert server.end_of(second).cached_tokens == len(LONG) - 2
        assert server.tokens(second) == server.tokens(first)
        started = server.replies(second)[0]
        assert isinstance(started, Started)
        assert started.cached_tokens == len(LONG) - 2


# --- preparing --------------------------------------------------------------------------------------------


def test_a_request_that_takes_long_to_prepare_holds_no_answer_up(path: Path) -> None:
    gate = Gate()
    with Server(path, prepare_request=gate) as server:
        running = server.ask(of("Say it", 60))
        server.until_reply(running, Chunk)
        slow = server.ask(of("slow", 3))
        server.end_of(running)
        assert server.replies(slow) == []
        gate.open.set()
        server.end_of(slow)


def test_what_cannot_be_prepared_is_refused_with_its_field(path: Path) -> None:
    def refuse(loaded: LoadedModel, generate: Generate) -> PreparedRequest:
        if generate.prompt == "bad":
            raise RequestError("no", remedy="yes", field="prompt")
        if generate.prompt == "worse":
            raise KeyError("a template's own bug")
        return prepare(loaded, generate)

    with Server(path, prepare_request=refuse) as server:
        bad, worse, good = (server.ask(of(text, 3)) for text in ("bad", "worse", "good"))
        failure = server.refusal_of(bad).failure
        assert (failure.kind, failure.message, failure.remedy, failure.field) == (
            "request-invalid",
            "no",
            "Yes.",
            "prompt",
        )
        assert server.refusal_of(worse).failure.kind == "internal"
        assert "a template's own bug" in server.refusal_of(worse).failure.message
        server.end_of(good)


# --- cancelling -------------------------------------------------------------------------------------------


def test_cancelled_while_it_is_prepared(path: Path) -> None:
    gate = Gate()
    with Server(path, prepare_request=gate) as server:
        slow = server.ask(of("slow", 3))
        server.cancel(slow)
        assert server.end_of(slow).reason == "cancelled"
        gate.open.set()
        server.end_of(server.ask(of("next", 3)))
        assert len(server.replies(slow)) == 1


def test_cancelled_before_it_is_prepared_it_costs_nothing_more(path: Path) -> None:
    gate = Gate()
    with Server(path, prepare_request=gate) as server:
        slow, long = server.ask(of("slow", 3)), server.ask(of("long", 3))
        server.cancel(long)
        assert server.end_of(long).reason == "cancelled"
        gate.open.set()
        server.end_of(slow)
        server.end_of(server.ask(of("next", 3)))
    assert gate.prompts == ["slow", "next"]


def test_cancelled_while_it_waits_for_a_place(path: Path) -> None:
    with Server(path, sequences=1) as server:
        running = server.ask(endless(b"A"))
        server.until_reply(running, Chunk)
        waiting, third = server.ask(of(b"B", 3)), server.ask(of(b"C", 3))
        server.cancel(waiting)
        assert server.end_of(waiting).reason == "cancelled"
        server.cancel(running)
        server.end_of(third)
        assert len(server.replies(waiting)) == 1


def test_cancelled_during_prefill(path: Path) -> None:
    with Server(path, chunk=1) as server:
        running = server.ask(of(b"Say it", 30))
        number = server.ask(of(LONG * 10, 3))
        server.until_reply(number, Started)
        server.cancel(number)
        assert server.end_of(number).reason == "cancelled"
        assert server.tokens(number) == ()
        assert server.end_of(running).reason == "length"
        assert server.idle()[-1].step < len(LONG) * 5
        assert len(server.batch) == 0


def test_cancelled_while_it_runs_and_twice(path: Path) -> None:
    with Server(path) as server:
        number = server.ask(endless(b"A"))
        other = server.ask(of(b"B", 40))
        server.until_reply(number, Chunk)
        server.cancel(number)
        server.cancel(number)
        server.cancel(99)
        assert server.end_of(number).reason == "cancelled"
        assert len(server.tokens(number)) < MANY
        server.end_of(other)
        assert server.idle()[-1].active == 0
        assert len(server.batch) == 0


def full(pieces: Any) -> bool:
    """A queue with no room for another message."""
    return False


def test_a_gateway_that_takes_nothing_loses_its_requests(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Server(path) as server:
        number = server.ask(endless(b"A"))
        server.until_reply(number, Chunk)
        monkeypatch.setattr(server.line, "send", full)
        assert server.idle()[-1].active == 0
        monkeypatch.undo()
        server.end_of(server.ask(of(b"B", 3)))


# --- a request that fails ---------------------------------------------------------------------------------


class Fragile(Answer):
    """Fails at the third token of an answer to a prompt that ends in an exclamation mark."""

    def __init__(self, loaded: LoadedModel, prepared: PreparedRequest, params: Any) -> None:
        super().__init__(loaded, prepared, params)
        self._fragile = prepared.tokens[-1] == ord("!")
        if prepared.tokens[-1] == ord("#"):
            raise ValueError("no such grammar")
        if prepared.tokens[-1] == ord("%"):
            self.processors.append(self._break)

    def _break(self, tokens: Any, logits: Any) -> Any:
        raise ValueError("bad processor")

    def take(self, token: int, logprobs: Any, *, at_limit: bool) -> Chunk:
        if self._fragile and self.completion_tokens == 2:
            raise ValueError("bad tool call")
        return super().take(token, logprobs, at_limit=at_limit)


def test_a_request_that_fails_ends_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muster.runner.serving, "Answer", Fragile)
    with Server(path) as server:
        alone = server.ask(of(b"Say it", 40))
        server.end_of(alone)
        good = server.ask(of(b"Say it", 40))
        for prompt, cause in ((b"!", "bad tool call"), (b"#", "no such grammar"), (b"%", "bad processor")):
            failure = server.refusal_of(server.ask(of(prompt, 20))).failure
            assert failure.kind == "internal"
            assert cause in failure.message
        server.end_of(good)
        assert server.tokens(good) == server.tokens(alone)
        assert len(server.batch) == 0


# --- the end ----------------------------------------------------------------------------------------------


def test_stop_ends_at_once_and_says_so(path: Path) -> None:
    with Server(path, sequences=1) as server:
        running, waiting = server.ask(endless(b"A")), server.ask(of(b"B", 3))
        server.until_reply(running, Chunk)
        server.stop()
        assert server.ended() == 0
        assert server.refusal_of(waiting).failure.kind == "instance-deleted"
        assert server.refusal_of(running).failure.kind == "answer-lost"


def test_draining_finishes_what_has_begun_and_takes_nothing_new(path: Path) -> None:
    with Server(path, sequences=1) as server:
        running, waiting = server.ask(of(b"A", 40)), server.ask(of(b"B", 3))
        server.until_reply(running, Chunk)
        server.stop(DEADLINE_SECONDS)
        refused = server.refusal_of(waiting).failure
        assert (refused.kind, refused.retryable) == ("instance-deleted", True)
        late = server.ask(of(b"C", 3))
        assert server.refusal_of(late).failure.kind == "instance-deleted"
        assert server.end_of(running).completion_tokens == 40
        assert server.ended() == 0


def test_draining_has_an_end(path: Path) -> None:
    with Server(path) as server:
        running = server.ask(endless(b"A"))
        server.until_reply(running, Chunk)
        server.stop(0.1)
        failure = server.refusal_of(running).failure
        assert (failure.kind, failure.retryable) == ("answer-lost", True)
        assert server.ended() == 0


def test_an_idle_rank_that_is_told_to_drain_ends(path: Path) -> None:
    with Server(path) as server:
        server.stop(DEADLINE_SECONDS)
        assert server.ended() == 0
