"""Requests find an instance, wait for one, move on when it fails, and end exactly once."""

from __future__ import annotations

import pytest
from fleet import DONE, KILLED, Fleet, done

from muster.coordinator.dispatcher import MAX_LOSSES
from muster.rank_protocol import Piece
from muster.replies import Chunk, Done, Prefilled, Refused, Started
from muster.spec import Failure, Phase
from muster.state import Broken, Deleting, Failed, Finished, Gone, Ready, Running, Starting

# --- names ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", ["m", "one", "on"])
def test_a_model_is_found_by_its_name_and_by_its_instance(wanted: str) -> None:
    fleet = Fleet()
    fleet.ready("one")
    assert fleet.home(fleet.ask(wanted)) == "one/1"


def test_an_unknown_model_is_refused_with_those_that_there_are() -> None:
    fleet = Fleet()
    fleet.ready("one", served="llama")
    fleet.starting("two", served="qwen")
    fleet.broken("three", served="dead", retries=False)
    failure = fleet.ask("zebra").refusal
    assert (failure.kind, failure.field) == ("model-unknown", "model")
    assert "'zebra'; the models are: llama, qwen" in failure.message
    assert "dead" not in failure.message
    assert failure.remedy


def test_what_is_no_model_and_what_is_not_one_name_are_refused() -> None:
    fleet = Fleet()
    fleet.group("ring")
    fleet.ready("m-1")
    fleet.ready("m-2")
    assert fleet.ask("ring").kind == "request-invalid"
    assert "may be any of m-1, m-2" in fleet.ask("m-").refusal.message


# --- waiting --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [Starting(), Broken(KILLED, 5), Running()])
def test_a_request_waits_for_an_instance_that_may_come_up(status: Starting | Broken | Running) -> None:
    fleet = Fleet()
    fleet.put("one", status, Ready(), Failed(KILLED))
    asked = fleet.ask()
    assert not asked.replies
    assert fleet.home(asked) == ""
    fleet.ready("one", attempt=2)
    assert fleet.home(asked) == "one/2"


@pytest.mark.parametrize("status", [Broken(KILLED), Deleting(), Finished()])
def test_a_request_is_refused_at_once_where_nothing_will_answer(status: Broken | Deleting | Finished) -> None:
    fleet = Fleet()
    fleet.put("one", status)
    asked = fleet.ask()
    assert asked.kind == "model-unavailable"
    assert "one" in asked.refusal.message
    if isinstance(status, Broken):
        assert KILLED.message in asked.refusal.message


def test_a_request_that_waits_is_refused_when_its_last_hope_goes() -> None:
    fleet = Fleet()
    fleet.starting("one")
    first, second = fleet.ask(), fleet.ask("one")
    fleet.broken("one", retries=False)
    assert [first.kind, second.kind] == ["model-unavailable"] * 2
    fleet.starting("one", attempt=2)
    third = fleet.ask()
    fleet.remove("one")
    assert third.kind == "model-unavailable"
    assert "deleted" in third.refusal.message


def test_no_more_wait_than_may() -> None:
    fleet = Fleet(max_waiting=2)
    fleet.starting("one")
    fleet.starting("other", served="n")
    asked = [fleet.ask() for _ in range(3)]
    assert [item.kind for item in asked] == ["", "", "queue-full"]
    assert asked[2].refusal.retryable
    assert fleet.ask("n").kind == ""
    fleet.cancel(asked[0])
    assert fleet.ask().kind == ""


def test_the_first_token_is_waited_for_no_longer_than_asked() -> None:
    fleet = Fleet()
    fleet.starting("one")
    fleet.ready("two", served="n")
    asked, running = fleet.ask(wait_seconds=5), fleet.ask("n", wait_seconds=7)
    fleet.start(running)
    fleet.pass_time(4.9)
    assert not asked.ended
    fleet.pass_time(0.2)
    assert asked.kind == "wait-exceeded"
    assert "within 5 s" in asked.refusal.message
    number = fleet.number(running)
    fleet.pass_time(2)
    assert running.kind == "wait-exceeded"
    assert fleet.cancels == [(b"two/1", number)]


def test_after_the_first_token_only_silence_ends_it() -> None:
    fleet = Fleet()
    fleet.ready("one")
    asked = fleet.ask(wait_seconds=5)
    fleet.token(asked)
    fleet.pass_time(69)
    fleet.token(asked)
    fleet.pass_time(69)
    assert not asked.ended
    fleet.pass_time(2)
    assert asked.kind == "answer-lost"
    assert "nothing more came from one for 70 s" in asked.refusal.message
    assert fleet.cancels


# --- choosing -------------------------------------------------------------------------------------------------


def test_the_instance_with_the_least_to_do_gets_it() -> None:
    fleet = Fleet()
    fleet.ready("one")
    fleet.ready("two")
    large = fleet.ask(max_tokens=500)
    small = [fleet.ask(max_tokens=10) for _ in range(3)]
    assert [fleet.home(item) for item in (large, *small)] == ["one/1", "two/1", "two/1", "two/1"]
    for _ in range(480):
        fleet.token(large)
    assert fleet.home(fleet.ask()) == "one/1"


def test_a_prompt_counts_as_what_the_runner_says_of_it() -> None:
    fleet = Fleet()
    fleet.ready("one")
    fleet.ready("two")
    first, second = fleet.ask(), fleet.ask()
    fleet.say(first, Started(prompt_tokens=1000, cached_tokens=999))
    fleet.say(second, Started(prompt_tokens=1000))
    assert fleet.home(fleet.ask()) == "one/1"
    fleet.say(second, Prefilled(done=1000, total=1000))
    assert fleet.home(fleet.ask()) == "two/1"


def test_an_instance_is_given_little_more_than_its_batch_and_the_rest_in_order() -> None:
    fleet = Fleet()
    fleet.ready("one", max_batch=4)
    asked = [fleet.ask() for _ in range(15)]
    assert [bool(fleet.home(item)) for item in asked] == [True] * 12 + [False] * 3
    fleet.say(asked[5], DONE)
    assert [bool(fleet.home(item)) for item in asked[12:]] == [True, False, False]
    fleet.ready("two")
    assert [fleet.home(item) for item in asked[13:]] == ["two/1", "two/1"]


def test_a_request_for_one_instance_holds_nobody_else_up() -> None:
    fleet = Fleet()
    fleet.starting("one")
    fleet.ready("two")
    pinned, free = fleet.ask("one"), fleet.ask()
    assert (fleet.home(pinned), fleet.home(free)) == ("", "two/1")


def test_a_runner_that_has_not_dialled_in_is_tried_again() -> None:
    fleet = Fleet()
    fleet.unreachable.add(b"one/1")
    fleet.ready("one")
    asked = fleet.ask()
    fleet.pass_time(3)
    assert not asked.replies
    fleet.unreachable.clear()
    fleet.pass_time(0.11)
    assert fleet.home(asked) == "one/1"


# --- failures -------------------------------------------------------------------------------------------------


def test_before_its_first_token_a_request_survives_the_attempt() -> None:
    fleet = Fleet()
    fleet.ready("one")
    first, second = fleet.ask(), fleet.ask()
    fleet.say(first, Started(prompt_tokens=7), Prefilled(done=5, total=7))
    fleet.broken("one")
    later = fleet.ask()
    assert [fleet.home(item) for item in (first, second, later)] == ["", "", ""]
    fleet.starting("one", attempt=2)
    fleet.ready("one", attempt=2)
    assert [generate for _, generate in fleet.sent[2:]] == [
        item.request.generate for item in (first, second, later) if item.request
    ]
    fleet.say(first, Started(prompt_tokens=7), Prefilled(done=5, total=7), Prefilled(done=7, total=7))
    fleet.token(first)
    fleet.say(first, DONE)
    assert [type(reply) for reply in first.replies] == [Started, Prefilled, Prefilled, Chunk, Done]


def test_a_request_that_instance_after_instance_fails_with_is_not_tried_for_ever() -> None:
    fleet = Fleet()
    fleet.ready("one")
    one = fleet.ask()
    for attempt in range(1, MAX_LOSSES + 1):
        fleet.broken("one", attempt=attempt)
        assert not one.ended
        fleet.ready("one", attempt=attempt + 1)
    fleet.broken("one", attempt=MAX_LOSSES + 1)
    assert one.kind == "answer-lost"
    assert "as others did before it" in one.refusal.message


def test_what_comes_back_goes_before_what_came_later() -> None:
    fleet = Fleet()
    fleet.ready("one", max_batch=1)
    asked = [fleet.ask(prompt=str(number)) for number in range(11)]
    fleet.broken("one")
    fleet.ready("one", attempt=2, max_batch=1)
    assert [generate.prompt for identity, generate in fleet.sent if identity == b"one/2"] == list("012345678")
    assert [fleet.home(item) for item in asked[9:]] == ["", ""]


def test_another_instance_takes_over_at_once() -> None:
    fleet = Fleet()
    fleet.ready("one")
    asked = fleet.ask()
    fleet.ready("two")
    fleet.broken("one", retries=False)
    assert fleet.home(asked) == "two/1"
    assert not asked.replies


def test_after_the_first_token_the_client_hears_that_and_why() -> None:
    fleet = Fleet()
    fleet.ready("one")
    fleet.ready("two")
    asked = fleet.ask()
    fleet.token(asked)
    fleet.broken("one")
    failure = asked.refusal
    assert failure.kind == "answer-lost"
    assert "one failed after the first token" in failure.message
    assert KILLED.sentence() in failure.message
    assert (failure.rank, failure.node) == (1, "b")
    assert failure.retryable


def test_late_pieces_of_an_attempt_that_is_over_are_not_passed_on() -> None:
    fleet = Fleet()
    fleet.ready("one")
    asked = fleet.ask()
    number = fleet.number(asked)
    fleet.broken("one")
    fleet.ready("one", attempt=2)
    fleet.dispatcher.receive(b"one/1", [Piece(request=number, reply=Chunk(text="old", tokens=(1,)))], fleet.now)
    fleet.dispatcher.receive(b"one/2", [Piece(request=number, reply=Chunk(text="old", tokens=(1,)))], fleet.now)
    assert not asked.replies


def test_a_refusal_of_the_runner_is_passed_on() -> None:
    fleet = Fleet()
    fleet.ready("one")
    asked = fleet.ask()
    fleet.say(asked, Refused(failure=Failure(kind="context-exceeded", message="too long")))
    assert asked.kind == "context-exceeded"


def test_a_runner_that_takes_nothing_more_is_not_asked_again() -> None:
    fleet = Fleet()
    fleet.ready("one")
    busy = Refused(failure=Failure(kind="instance-deleted", message="draining", phase=Phase.STOPPING, retryable=True))
    first = fleet.ask()
    fleet.say(first, busy)
    assert first.kind == "model-unavailable"
    fleet.ready("two")
    second = fleet.ask("one")
    fleet.say(second, busy)
    third = fleet.ask()
    fleet.say(third, busy)
    assert (second.kind, fleet.home(third)) == ("model-unavailable", "two/1")


def test_nobody_else_can_go_on_with_an_answer_that_has_begun() -> None:
    fleet = Fleet()
    fleet.ready("one")
    asked = fleet.ask()
    fleet.ready("two")
    fleet.token(asked)
    fleet.say(asked, Refused(failure=Failure(kind="internal", message="broken", retryable=True)))
    assert asked.kind == "internal"


@pytest.mark.parametrize(("said", "whole"), [(5, True), (6, True), (7, False)])
def test_an_answer_that_lost_tokens_on_the_way_is_not_passed_off_as_whole(said: int, whole: bool) -> None:
    fleet = Fleet()
    fleet.ready("one")
    asked = fleet.ask()
    for _ in range(5):
        fleet.token(asked)
    fleet.say(asked, done("stop", said))
    assert isinstance(asked.replies[-1], Done) is whole
    if not whole:
        assert asked.kind == "answer-lost"
        assert "2 of the answer's 7 tokens were lost" in asked.refusal.message


# --- cancelling -----------------------------------------------------------------------------------------------


def test_a_cancelled_request_leaves_its_queue_and_its_runner() -> None:
    fleet = Fleet()
    fleet.ready("one", max_batch=1)
    asked = [fleet.ask() for _ in range(11)]
    fleet.cancel(asked[9])
    number = fleet.number(asked[0])
    fleet.cancel(asked[0])
    assert fleet.cancels == [(b"one/1", number)]
    assert fleet.home(asked[10]) == "one/1"
    fleet.cancel(asked[0])
    assert len(fleet.cancels) == 1


def test_a_runner_that_works_for_nobody_is_told_once() -> None:
    fleet = Fleet()
    fleet.ready("one")
    for reply in (Started(prompt_tokens=1), Chunk(text="a", tokens=(1,)), DONE):
        fleet.dispatcher.receive(b"one/1", [Piece(request=4711, reply=reply)], fleet.now)
    assert fleet.cancels == [(b"one/1", 4711)]
    asked = fleet.ask()
    number = fleet.number(asked)
    fleet.cancel(asked)
    fleet.dispatcher.receive(b"one/1", [Piece(request=number, reply=Chunk(text="a", tokens=(1,)))], fleet.now)
    assert len(fleet.cancels) == 2


# --- draining -------------------------------------------------------------------------------------------------


def test_an_instance_that_drains_finishes_what_it_has_begun_and_gets_nothing_new() -> None:
    fleet = Fleet()
    fleet.ready("one", max_batch=1)
    begun = fleet.ask()
    fleet.start(begun)
    sent = fleet.ask()
    rest = [fleet.ask() for _ in range(8)]
    fleet.put("one", Deleting(10.0))
    assert [item.kind for item in rest[7:]] == ["model-unavailable"]
    assert not sent.ended  # nobody else could answer it: its runner may still take it
    assert fleet.ask().kind == "model-unavailable"
    fleet.token(begun)
    fleet.put("one", Deleting(10.0), Gone(0), Ready())
    fleet.say(begun, done("stop"))
    assert isinstance(begun.replies[-1], Done)
    fleet.remove("one")
    fleet.pass_time(1)
    assert sent.kind == "model-unavailable"


def test_what_has_not_begun_moves_from_an_instance_that_drains() -> None:
    fleet = Fleet()
    fleet.ready("one")
    begun, sent = fleet.ask(), fleet.ask()
    fleet.start(begun)
    number = fleet.number(sent)
    fleet.ready("two")
    fleet.put("one", Deleting(10.0))
    assert (fleet.home(begun), fleet.home(sent)) == ("one/1", "two/1")
    assert fleet.cancels == [(b"one/1", number)]


@pytest.mark.parametrize("told", [False, True])
def test_an_answer_that_the_drain_cuts_off_says_so(told: bool) -> None:
    fleet = Fleet()
    fleet.ready("one")
    asked = fleet.ask()
    fleet.token(asked)
    fleet.put("one", Deleting(10.0))
    if told:
        fleet.say(asked, done("cancelled"))
    else:
        fleet.put("one", Deleting(10.0), Gone(0), Gone(0))
        fleet.remove("one")
        fleet.pass_time(0.5)
    assert asked.kind == "instance-deleted"
    assert "after the first token" in asked.refusal.message


def test_deleting_at_once_cuts_at_once() -> None:
    fleet = Fleet()
    fleet.ready("one")
    answering, begun = fleet.ask(), fleet.ask()
    fleet.token(answering)
    fleet.start(begun)
    fleet.put("one", Deleting())
    assert [answering.kind, begun.kind] == ["instance-deleted", "model-unavailable"]


def test_a_runner_that_could_not_be_told_to_stop_is_told_when_it_answers() -> None:
    fleet = Fleet()
    fleet.ready("one")
    asked = fleet.ask()
    number = fleet.number(asked)
    fleet.unreachable.add(b"one/1")
    fleet.cancel(asked)
    assert fleet.cancels == []
    fleet.unreachable.clear()
    fleet.go_on()
    assert fleet.cancels == [(b"one/1", number)]
    assert fleet.held[b"one/1"] == {}
