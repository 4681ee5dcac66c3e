"""A request that no runner could read is refused before it is queued, and holds nobody up."""

from __future__ import annotations

from typing import Any

import pytest
from fleet import Asked, Fleet

from muster.coordinator.admissible import MAX_DEPTH, fault_of
from muster.protocol import Generate
from muster.sampling import SamplingParams, Tool


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    "generate",
    [
        Generate(instance="m", template={"a": 2**70}),
        Generate(instance="m", prompt=(2**70,)),
        Generate(instance="m", tools=(Tool(name="f", parameters={"a": [-(2**70)]}),)),
        Generate(instance="m", sampling=SamplingParams(logit_bias={2**70: 1.0})),
    ],
)
def test_numbers_that_no_message_holds_are_refused_by_value(generate: Generate) -> None:
    fault = fault_of(generate)
    assert fault is not None
    assert fault.kind == "request-invalid"
    assert "2**63" in fault.remedy


def test_values_may_be_nested_deeply_but_not_without_end() -> None:
    assert fault_of(Generate(instance="m", template=nested(MAX_DEPTH - 1))) is None
    for generate, field in (
        (Generate(instance="m", template=nested(MAX_DEPTH + 1)), "template"),
        (Generate(instance="m", tools=(Tool(name="f", parameters=nested(5000)),)), "tools[0]"),
        (Generate(instance="m", template={"a": [[nested(MAX_DEPTH)]]}), "template"),
    ):
        fault = fault_of(generate)
        assert fault is not None
        assert fault.field == field


def test_one_that_cannot_be_sent_holds_nobody_up() -> None:
    fleet = Fleet()
    fleet.starting("one")
    bad = Asked("m")
    bad.request = fleet.dispatcher.submit(Generate(instance="m", template={"a": 2**70}), bad.take, fleet.now)
    assert bad.kind == "request-invalid"
    fleet.ready("one")
    good = fleet.ask()
    assert fleet.home(good) == "one/1"


def test_whatever_fails_in_handing_over_ends_that_request_alone() -> None:
    fleet = Fleet()
    fleet.starting("one")
    first, second = fleet.ask(prompt="first"), fleet.ask(prompt="second")

    def fail(identity: bytes, generate: Any) -> None:
        if generate.prompt == "first":
            fleet.held.clear()
            raise OverflowError("too large")

    fleet.on_sent = fail
    fleet.ready("one")
    assert first.kind == "internal"
    assert fleet.home(second) == "one/1"
