"""What clients of the HTTP API see when a rank or the coordinator dies before, at and after the first token.

What the coordinator does then, `test_serving_failures` shows.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import psutil
import pytest
from kit import kill, stopped
from kit.serving import ENDLESS, Serving, openai_messages, serving

from muster.demo.answers import CONVERSATIONS
from muster.events import CoordinatorStarted, InstanceReady, RankPrepared
from muster.spec import RestartOnFailure
from muster.state import Running

pytestmark = [pytest.mark.process, pytest.mark.mlx, pytest.mark.timeout(90)]

PLAIN = CONVERSATIONS[0]
BOTH = pytest.mark.parametrize("rank", [0, 1])
RESTART = RestartOnFailure(maximum=50, backoff_seconds=0.01, backoff_max_seconds=0.05)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """The model "pair" on two ranks, that is brought up again each time a test has broken it."""
    with serving(tmp_path_factory.mktemp("failures"), ()) as made:
        made.create("pair", 2, spec={"restart": RESTART})
        yield made


@pytest.fixture
def attempt(served: Serving) -> int:
    """The attempt of "pair" that is ready now."""
    instance = served.instances["pair"]

    def number() -> int | None:
        found = served.client.latest.instances.get(instance)
        return found.attempt if found is not None and isinstance(found.status, Running) else None

    return served.client.wait_for(number, "a ready pair")


def runner(served: Serving, attempt: int, rank: int, model: str = "pair") -> psutil.Process:
    return psutil.Process(served.client.wait(RankPrepared, served.instances[model], attempt=attempt, rank=rank).pid)


def endless(served: Serving) -> Any:
    """A stream that goes on until it is closed."""
    return served.openai.chat.completions.create(
        model="pair", messages=openai_messages(PLAIN.prompt), stream=True, max_tokens=1900, logit_bias=ENDLESS
    )


# --- ranks --------------------------------------------------------------------------------------------------


@BOTH
def test_rank_killed_before_the_first_token_costs_a_client_only_time(served: Serving, attempt: int, rank: int) -> None:
    with ThreadPoolExecutor(2) as pool:
        # The other rank stands still, so that there can be no token yet.
        with stopped(runner(served, attempt, 1 - rank)):
            whole = pool.submit(served.ask, "pair", PLAIN)
            pieced = pool.submit(
                lambda: list(
                    served.openai.chat.completions.create(
                        model="pair", messages=openai_messages(PLAIN.prompt), stream=True
                    )
                )
            )
            served.wait_running("pair", 2)
            kill(runner(served, attempt, rank))
            served.client.failure_of(served.instances["pair"], attempt=attempt)
        assert whole.result(60) == PLAIN.answer
        assert "".join(chunk.choices[0].delta.content or "" for chunk in pieced.result(60)) == PLAIN.answer


@BOTH
def test_rank_killed_after_the_first_token_ends_the_answer_with_an_error(
    served: Serving, attempt: int, rank: int
) -> None:
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(served.ask, "pair", PLAIN, max_tokens=1900, logit_bias=ENDLESS)
        served.wait_running("pair")
        with endless(served) as stream:
            chunks = iter(stream)
            text = ""
            while not text:
                text += next(chunks).choices[0].delta.content or ""
            kill(runner(served, attempt, rank))
            with pytest.raises(openai.APIError, match=f"rank {rank}"):
                for chunk in chunks:
                    text += chunk.choices[0].delta.content or ""
        assert PLAIN.answer.startswith(text[: len(PLAIN.answer)])
        # The other, which came first, has seen no token, and yet its answer had begun.
        with pytest.raises(openai.InternalServerError, match=f"rank {rank}") as caught:
            whole.result(60)
        assert caught.value.status_code == 502
    assert served.ask("pair", PLAIN) == PLAIN.answer  # of the next attempt


@BOTH
def test_rank_killed_as_the_first_tokens_come_gives_right_answers_or_errors(
    served: Serving, attempt: int, rank: int
) -> None:
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(served.ask, "pair", each) for each in CONVERSATIONS[:8]]
        served.wait_running("pair")
        kill(runner(served, attempt, rank))
        for future, conversation in zip(asked, CONVERSATIONS, strict=False):
            with contextlib.suppress(openai.InternalServerError):
                assert future.result(60) == conversation.answer
            error = future.exception()
            assert error is None or "502" in str(error)
    served.wait_free("pair")
    assert served.ask("pair", PLAIN) == PLAIN.answer


def test_model_that_is_not_brought_up_again_is_unavailable(served: Serving) -> None:
    instance = served.create("once", 2)
    served.client.ready(instance)
    with ThreadPoolExecutor(1) as pool:
        with stopped(runner(served, 1, 0, "once")):
            asked = pool.submit(served.ask, "once", PLAIN)
            served.wait_running("once")
            kill(runner(served, 1, 1, "once"))
            served.client.failure_of(instance)
        with pytest.raises(openai.InternalServerError, match="rank 1") as caught:
            asked.result(60)
        assert caught.value.status_code == 503
    served.client.delete(instance)
    with pytest.raises(openai.NotFoundError, match="pair"):
        served.ask("once", PLAIN)


# --- the coordinator ----------------------------------------------------------------------------------------


def test_coordinator_restarted_under_load(served: Serving, attempt: int) -> None:
    instance = served.instances["pair"]
    with endless(served) as stream:
        next(iter(stream))
        boots = [event.boot for event in served.client.events if isinstance(event, CoordinatorStarted)]
        served.stage.cluster.kill("coordinator")
        with pytest.raises((openai.APIConnectionError, httpx.TransportError)):
            for _ in stream:
                pass
    with pytest.raises(openai.APIConnectionError):
        served.ask("pair", PLAIN)
    before = served.client.latest.coordinator_boot or boots[-1]
    served.stage.cluster.start_coordinator()
    served.client.wait_for(lambda: served.client.latest.coordinator_boot != before, "the new coordinator")
    assert served.ask("pair", PLAIN) == PLAIN.answer
    served.wait_free("pair")
    assert isinstance(served.client.instance(instance).status, Running)
    readies = [event for event in served.client.events if isinstance(event, InstanceReady)]
    assert max(event.attempt for event in readies if event.instance == instance) == attempt


def test_events_tell_of_it_all(served: Serving) -> None:
    """The stream of server-sent events, from the beginning of the log."""
    wanted = {"instance.created", "instance.ready", "instance.failed"}
    with served.http.stream("GET", "/api/events", params={"after": 0}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: "):
                wanted.discard(json.loads(line.removeprefix("data: "))["kind"])
            if not wanted:
                break
