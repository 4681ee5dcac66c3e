"""Sampling parameters out of range are refused by name, also when they come over the wire."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from muster.sampling import MAX_STOPS, MAX_TOP_LOGPROBS, Alternative, Message, SamplingParams, TokenLogprob


def test_the_defaults_are_greedy() -> None:
    params = SamplingParams()
    assert params.temperature == 0.0
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("top_logprobs", 21),
        ("top_logprobs", -1),
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
    ("field", "value"),
    [("top_p", 0.0), ("top_p", 1.0), ("min_p", 1.0), ("seed", 2**63 - 1), ("max_tokens", 1), ("max_tokens", 0)],
)
def test_the_ends_of_a_range_belong_to_it(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


def refused(**fields: Any) -> str:
    """The message for these fields, the same from the constructor and from the wire."""
    with pytest.raises(ValueError) as made:
        SamplingParams(**fields)
    with pytest.raises(msgspec.ValidationError) as decoded:
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=SamplingParams)
    assert str(made.value) in str(decoded.value)
    return str(made.value)


@pytest.mark.parametrize("bias", [1000.5, -1001.0, float("inf"), float("nan")])
def test_a_bias_out_of_range_is_refused_with_its_token(bias: float) -> None:
    assert refused(logit_bias={7: 1.0, 12: bias}).startswith(f"logit_bias[12] is {bias}")


def test_the_ends_of_a_bias_s_range_belong_to_it() -> None:
    assert SamplingParams(logit_bias={0: -1000.0, 1: 1000.0}).logit_bias == {0: -1000.0, 1: 1000.0}


def test_stop_strings_are_bounded_and_not_empty() -> None:
    assert len(SamplingParams(stop=("x",) * MAX_STOPS).stop) == MAX_STOPS
    assert str(MAX_STOPS + 1) in refused(stop=("x",) * (MAX_STOPS + 1))
    assert "empty" in refused(stop=("x", ""))


def test_alternatives_need_the_log_probabilities() -> None:
    assert SamplingParams(logprobs=True, top_logprobs=MAX_TOP_LOGPROBS).top_logprobs == MAX_TOP_LOGPROBS
    assert "logprobs is off" in refused(top_logprobs=1)


def test_everything_survives_the_wire() -> None:
    params = SamplingParams(
        max_tokens=0, logit_bias={3: -1.5}, stop=("a", "b"), logprobs=True, top_logprobs=2, json_schema="{}", seed=1
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    entry = TokenLogprob(token=1, text="\ufffd", data=b"\xe6", logprob=-1.0, top=(Alternative(2, "b", -2.0),))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(entry), type=TokenLogprob) == entry


def test_a_chat_message_has_a_known_role() -> None:
    with pytest.raises(msgspec.ValidationError, match="role"):
        msgspec.json.decode(b'{"role": "boss", "content": "x"}', type=Message)


def test_a_stop_string_has_its_bound() -> None:
    assert SamplingParams(stop=("a" * 1000,)).stop
    with pytest.raises(ValueError, match=r"stop\[1\] has 1001 characters"):
        SamplingParams(stop=("a", "a" * 1001))
