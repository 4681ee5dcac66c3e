"""Sampling parameters out of range are refused by name, also when they come over the wire."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from muster.sampling import Message, SamplingParams


def test_the_defaults_are_greedy() -> None:
    params = SamplingParams()
    assert params.temperature == 0.0
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 1.01),
        ("top_p", -0.01),
        ("top_k", -1),
        ("min_p", 1.5),
        ("seed", -1),
        ("seed", 2**63),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 101.0),
        ("frequency_penalty", float("-inf")),
        ("penalty_context_tokens", 0),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field} is "):
        SamplingParams(**{field: value})
    with pytest.raises(msgspec.ValidationError, match=f"{field} is |range"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({field: value}), type=SamplingParams)


@pytest.mark.parametrize(
    ("field", "value"), [("top_p", 0.0), ("top_p", 1.0), ("min_p", 1.0), ("seed", 2**63 - 1), ("max_tokens", 1)]
)
def test_the_ends_of_a_range_belong_to_it(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_a_chat_message_has_a_known_role() -> None:
    with pytest.raises(msgspec.ValidationError, match="role"):
        msgspec.json.decode(b'{"role": "boss", "content": "x"}', type=Message)
