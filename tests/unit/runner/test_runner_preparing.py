"""Requests are prepared in a thread of their own, in order, and whatever they raise is their own failure."""

from __future__ import annotations

import select
from collections.abc import Iterator
from typing import Any

import pytest

from muster.errors import ContextError
from muster.protocol import Generate
from muster.runner.preparing import Preparer, failure_of
from muster.spec import Failure, Phase

LIMIT_SECONDS = 10.0


def fake_prepare(loaded: Any, generate: Generate) -> Any:
    if generate.prompt == "long":
        raise ContextError("too long", remedy="shorten it", field="prompt")
    if generate.prompt == "odd":
        raise ZeroDivisionError("by zero")
    return f"{loaded}:{generate.prompt}"


@pytest.fixture
def preparer() -> Iterator[Preparer]:
    loaded: Any = "model"
    made = Preparer(loaded, fake_prepare)
    yield made
    made.close()


def taken(preparer: Preparer, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        assert select.select([preparer], [], [], LIMIT_SECONDS)[0], "nothing was prepared in time"
        found += preparer.take()
    return found


def test_results_come_in_order_and_wake_whoever_polls(preparer: Preparer) -> None:
    assert preparer.take() == []
    for number in range(50):
        preparer.submit(number, Generate(instance="m", prompt=str(number)))
    assert taken(preparer, 50) == [(number, f"model:{number}") for number in range(50)]
    assert preparer.take() == []


def test_an_error_is_the_failure_of_its_request(preparer: Preparer, capfd: pytest.CaptureFixture[str]) -> None:
    for number, prompt in enumerate(("long", "odd", "good")):
        preparer.submit(number, Generate(instance="m", prompt=prompt))
    (_, long), (_, odd), good = taken(preparer, 3)
    assert long == Failure(
        kind="context-exceeded", message="too long", remedy="Shorten it.", phase=Phase.RUNNING, field="prompt"
    )
    assert (odd.kind, odd.message) == ("internal", "the request failed: ZeroDivisionError: by zero")
    assert good == (2, "model:good")
    assert "fake_prepare" in capfd.readouterr().err, "the operator sees where it came from"


def test_a_failure_keeps_the_error_s_own_words() -> None:
    assert failure_of(ContextError("too long", field="messages")).field == "messages"
