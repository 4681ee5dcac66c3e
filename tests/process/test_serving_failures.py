"""What a request sees when its instance fails, is deleted, or stands still; and when the coordinator does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit import DEMO_MODEL, Client, Stage, assert_blames, kill, spec_of, stage, stopped

from muster.demo.answers import CONVERSATIONS, ENDLESS_PROMPT
from muster.events import InstanceFailed, InstanceReady
from muster.protocol import Delete, Generate
from muster.replies import Accepted, AnyReply, Chunk, Done, Refused, Started
from muster.sampling import SamplingParams
from muster.spec import Deadlines, Failure, InstanceSpec, ModelWorkload, RestartOnFailure

pytestmark = [pytest.mark.process, pytest.mark.mlx, pytest.mark.timeout(90)]

PLAIN = CONVERSATIONS[4]
NODES = ("a", "b")
RESTART = RestartOnFailure(maximum=3, backoff_seconds=0.05)
BOTH = pytest.mark.parametrize("rank", [0, 1])
#: For a process to be stopped, found, reported, and blamed.
VERDICT_SECONDS = 6.0


def served(ranks: int = 1, name: str = "demo", *, max_batch: int = 32, node: str = "a", **options: Any) -> InstanceSpec:
    """The demo model under a public name."""
    workload = ModelWorkload(model=str(DEMO_MODEL), served_name=name, max_batch=max_batch, sharding="pipeline")
    return spec_of(workload, ranks, NODES if ranks == 2 else (node,), **options)


def question(name: str = "demo", **options: Any) -> Generate:
    return Generate(instance=name, messages=PLAIN.prompt, **options)


def endless(name: str = "demo", tokens: int = 100_000) -> Generate:
    """An answer that takes seconds: it goes on to the end of the context."""
    return Generate(instance=name, prompt=ENDLESS_PROMPT, sampling=SamplingParams(max_tokens=tokens))


def text(replies: list[AnyReply]) -> str:
    return "".join(reply.text for reply in replies if isinstance(reply, Chunk))


def ended(client: Client, replies: list[AnyReply], seconds: float = 20.0) -> AnyReply:
    return client.wait_for(
        lambda: replies[-1] if replies and isinstance(replies[-1], Done | Refused) else None, "the end", seconds
    )


def refusal(client: Client, replies: list[AnyReply]) -> Failure:
    last = ended(client, replies)
    assert isinstance(last, Refused), last
    return last.failure


def first_token(client: Client, replies: list[AnyReply]) -> None:
    client.wait_for(lambda: any(isinstance(reply, Chunk) for reply in replies), "the first token")


def assert_answered(client: Client, replies: list[AnyReply]) -> None:
    last = ended(client, replies)
    assert isinstance(last, Done), last
    assert text(replies) == PLAIN.answer
    assert sum(isinstance(reply, Started) for reply in replies) == 1


# --- before the first token ------------------------------------------------------------------------------------


def test_a_request_may_come_before_its_instance_is_ready(shared: Stage) -> None:
    instance = shared.client.create(served())
    replies = shared.client.begin(question())
    assert_answered(shared.client, replies)
    shared.clean(instance)


@BOTH
def test_a_rank_that_is_killed_before_the_first_token_costs_only_time(shared: Stage, rank: int) -> None:
    instance = shared.client.create(served(2, restart=RESTART))
    shared.client.ready(instance)
    with stopped(shared.runner(instance, rank)) as runner:  # it can bring no token to an end
        replies = shared.client.begin(question())
        if rank:
            shared.client.wait_for(lambda: replies, "the start")
        kill(runner)
    shared.client.wait(InstanceReady, instance, attempt=2)
    assert_answered(shared.client, replies)
    assert_blames(shared.client.failure_of(instance), kind="rank-killed", rank=rank, node=NODES[rank], phase="running")
    shared.clean(instance)


def test_another_instance_of_the_model_takes_over(shared: Stage) -> None:
    first, second = shared.client.create(served()), shared.client.create(served(node="b"))
    shared.client.ready(first)
    shared.client.ready(second)
    begun = [shared.client.begin(endless()), shared.client.begin(endless())]
    for replies in begun:
        first_token(shared.client, replies)
    with stopped(shared.runner(first, 0)) as runner:
        waiting = [shared.client.begin(question()) for _ in range(4)]
        kill(runner)
    for replies in waiting:
        assert_answered(shared.client, replies)
    lost = shared.client.wait_for(
        lambda: next((item[-1] for item in begun if isinstance(item[-1], Refused)), None), "the lost answer"
    )
    assert_blames(lost.failure, kind="answer-lost", rank=0, node="a", phase="running")
    assert "failed after the first token" in lost.failure.message
    assert sum(isinstance(item[-1], Refused) for item in begun) == 1
    for instance in (first, second):
        shared.client.call(Delete(instance=instance, now=True))
        shared.client.gone(instance)


def test_a_request_whose_last_instance_failed_hears_the_cause(shared: Stage) -> None:
    instance = shared.client.create(served())
    shared.client.ready(instance)
    with stopped(shared.runner(instance, 0)) as runner:
        replies = shared.client.begin(question())
        kill(runner)
    failure = refusal(shared.client, replies)
    assert failure.kind == "model-unavailable"
    assert "the runner was ended by SIGKILL" in failure.message
    assert shared.client.refusal(question()).kind == "model-unavailable"
    shared.clean(instance)
    unknown = shared.client.refusal(question())
    assert unknown.kind == "model-unknown"
    assert "the models are: none" in unknown.message


# --- cancelling ------------------------------------------------------------------------------------------------


def test_a_cancelled_answer_makes_room_at_once(shared: Stage) -> None:
    instance = shared.client.create(served(max_batch=1))
    shared.client.ready(instance)
    replies = shared.client.begin(endless())
    first_token(shared.client, replies)
    waiting = shared.client.begin(question())
    shared.client.cancel(replies)
    assert_answered(shared.client, waiting)
    assert not isinstance(replies[-1], Done)
    shared.clean(instance)


# --- deleting --------------------------------------------------------------------------------------------------


def test_an_instance_that_is_deleted_finishes_what_it_has_begun(shared: Stage) -> None:
    instance = shared.client.create(served(2, deadlines=Deadlines(drain_seconds=60)))
    shared.client.ready(instance)
    replies = shared.client.begin(endless(tokens=100))
    first_token(shared.client, replies)
    assert isinstance(shared.client.call(Delete(instance=instance)), Accepted)
    assert shared.client.refusal(question()).kind == "model-unavailable"
    done = ended(shared.client, replies)
    assert isinstance(done, Done)
    assert (done.reason, done.completion_tokens) == ("length", 100)
    begin = time.monotonic()
    shared.client.gone(instance)
    assert time.monotonic() - begin < 10.0, "the other rank waited for the end of the drain"
    shared.assert_nothing_left(instance)


def test_an_idle_instance_is_deleted_at_once(shared: Stage) -> None:
    instance = shared.client.create(served(2))
    shared.client.ready(instance)
    begin = time.monotonic()
    shared.clean(instance)
    assert time.monotonic() - begin < 10.0


@pytest.mark.parametrize("later", [False, True])
def test_deleting_now_cuts_what_runs(shared: Stage, later: bool) -> None:
    instance = shared.client.create(served(2, deadlines=Deadlines(drain_seconds=60)))
    shared.client.ready(instance)
    replies = shared.client.begin(endless())
    first_token(shared.client, replies)
    if later:
        shared.client.call(Delete(instance=instance))
    begin = time.monotonic()
    shared.client.call(Delete(instance=instance, now=True))
    failure = refusal(shared.client, replies)
    assert failure.kind == "instance-deleted"
    assert "after the first token" in failure.message
    shared.client.gone(instance)
    assert time.monotonic() - begin < 10.0
    shared.assert_nothing_left(instance)


def test_a_drain_has_an_end(shared: Stage) -> None:
    instance = shared.client.create(served(deadlines=Deadlines(drain_seconds=0.5)))
    shared.client.ready(instance)
    replies = shared.client.begin(endless())
    first_token(shared.client, replies)
    shared.client.call(Delete(instance=instance))
    assert refusal(shared.client, replies).kind in ("instance-deleted", "answer-lost")
    shared.client.gone(instance)
    shared.assert_nothing_left(instance)


@BOTH
def test_a_rank_that_dies_while_draining_ends_the_drain(shared: Stage, rank: int) -> None:
    instance = shared.client.create(served(2, deadlines=Deadlines(drain_seconds=60)))
    shared.client.ready(instance)
    replies = shared.client.begin(endless())
    first_token(shared.client, replies)
    shared.client.call(Delete(instance=instance))
    begin = time.monotonic()
    kill(shared.runner(instance, rank))
    assert refusal(shared.client, replies).kind in ("instance-deleted", "answer-lost")
    shared.client.gone(instance)
    assert time.monotonic() - begin < 15.0
    shared.assert_nothing_left(instance)


# --- standing still --------------------------------------------------------------------------------------------


@BOTH
def test_a_rank_that_is_stopped_while_it_answers_is_named_and_the_attempt_made_again(shared: Stage, rank: int) -> None:
    seconds = 1.5
    deadlines = Deadlines(step_seconds=seconds, stop_seconds=0.5)
    instance = shared.client.create(served(2, restart=RESTART, deadlines=deadlines))
    shared.client.ready(instance)
    replies = shared.client.begin(endless())
    first_token(shared.client, replies)
    with stopped(shared.runner(instance, rank)):
        begin = time.monotonic()
        failed = shared.client.wait(InstanceFailed, instance)
        took = time.monotonic() - begin
        assert_blames(failed.failure, kind="step-timeout", rank=rank, node=NODES[rank], phase="running")
        assert "stopped (SIGSTOP)" in failed.failure.message
        assert took < seconds + VERDICT_SECONDS
        shared.client.wait(InstanceReady, instance, attempt=2)
    assert refusal(shared.client, replies).kind == "answer-lost"
    assert_answered(shared.client, shared.client.begin(question()))
    shared.clean(instance)


def test_a_rank_that_was_stopped_while_idle_is_named_when_a_request_comes(shared: Stage) -> None:
    deadlines = Deadlines(step_seconds=2, stop_seconds=0.5)
    instance = shared.client.create(served(2, restart=RESTART, deadlines=deadlines))
    shared.client.ready(instance)
    with stopped(shared.runner(instance, 1)):
        replies = shared.client.begin(question())
        failed = shared.client.wait(InstanceFailed, instance)
        assert_blames(failed.failure, kind="step-timeout", rank=1, node="b", phase="running")
        assert "stopped (SIGSTOP)" in failed.failure.message
    assert_answered(shared.client, replies)
    shared.clean(instance)


# --- the coordinator -------------------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Stage]:
    with stage(tmp_path / "cluster", ("a",)) as made:
        yield made


def test_a_runner_does_not_go_on_for_a_coordinator_that_was_killed(own: Stage) -> None:
    instance = own.client.create(served(max_batch=1))
    own.client.ready(instance)
    begun = [own.client.begin(endless(), seconds=4) for _ in range(8)]  # seconds each, one after the other
    own.client.wait_for(lambda: any(len(replies) > 1 for replies in begun), "the first token")
    own.cluster.kill("coordinator")
    before = own.client.latest.coordinator_boot
    own.cluster.start_coordinator()
    own.client.wait_for(lambda: own.client.latest.coordinator_boot != before, "the new coordinator")
    replies = own.client.begin(question())
    assert isinstance(ended(own.client, replies, 10), Done)
    own.clean(instance)
