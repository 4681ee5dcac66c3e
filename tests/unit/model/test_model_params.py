"""Sampling parameters refuse what no sampler can do, by field and value."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from muster.sampling import Message, SamplingParams


def test_the_defaults_are_greedy_and_survive_the_wire() -> None:
    params = SamplingParams()
    assert (params.temperature, params.max_tokens) == (0.0, 256)
    assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("top_logprobs", 21),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 2.0),
        ("seed", -1),
        ("seed", 2**63),
        ("repetition_penalty", 0.0),
        ("presence_penalty", math.inf),
        ("frequency_penalty", -101.0),
        ("penalty_context_tokens", 0),
    ],
)
def test_a_bad_value_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        SamplingParams(**{field: value})


def test_a_bad_value_from_the_wire_is_a_validation_error() -> None:
    with pytest.raises(msgspec.ValidationError, match="top_p is 3"):
        msgspec.json.decode(b'{"top_p": 3.0}', type=SamplingParams)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"role": "robot", "content": ""}', type=Message)
