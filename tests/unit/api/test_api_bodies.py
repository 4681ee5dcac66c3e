"""Bodies are decoded strictly, and refused with the name of what is wrong."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest

from muster.api.bodies import Limit, decode, refuse, sampling_params
from muster.api.errors import ApiError


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant"]
    parts: list[int] = []


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    turns: list[Inner] = []
    bias: dict[int, float] = {}
    count: int = 0
    ratio: float = 1.0
    odd: object = None


def refusal(body: bytes | str) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decode(body.encode() if isinstance(body, str) else body, Outer)
    assert (caught.value.status, caught.value.kind) == (400, "request-invalid")
    return caught.value


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ('{"model": 1}', "model"),
        ('{"model": null}', "model"),
        ("{}", "model"),
        ('{"model": "m", "turns": [{"role": "user"}, {"role": "robot"}]}', "turns[1].role"),
        ('{"model": "m", "turns": [{}]}', "turns[0].role"),
        ('{"model": "m", "turns": [{"role": "user", "parts": [1, "2"]}]}', "turns[0].parts[1]"),
        ('{"model": "m", "turns": [{"role": "user", "mood": 1}]}', "turns[0].mood"),
        ('{"model": "m", "turns": {}}', "turns"),
        ('{"model": "m", "modle": 1}', "modle"),
        ('{"model": "m", "count": true}', "count"),
        ('{"model": "m", "count": 1.5}', "count"),
        ('{"model": "m", "count": "1"}', "count"),
        ('{"model": "m", "ratio": "high"}', "ratio"),
        ('{"model": "m", "bias": {"x": 1}}', "bias"),
        ('{"model": "m", "bias": {"1": "x"}}', "bias[...]"),
    ],
)
def test_the_field_that_is_wrong_is_named(body: str, field: str) -> None:
    error = refusal(body)
    assert error.field == field
    assert field in error.message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"  \n",
        b"{",
        b"model=m",
        b"[1, 2]",
        b'"text"',
        b"null",
        b'{"model": "m"} {"model": "n"}',
        b'{"model": "\xff\xfe"}',
        b'{"model": "\\ud800"}',
        b'{"model": "m", "ratio": NaN}',
        b'{"model": "m", "ratio": Infinity}',
        b'{"model": "m", "ratio": 1e999}',
        b'{"model": "m", "turns": ' + b"[" * 100_000 + b"}",
        b'{"model": "m", "odd": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=lambda body: body[:24].decode(errors="replace"),
)
def test_what_is_no_object_of_json_is_refused_with_a_sentence(body: bytes) -> None:
    assert len(refusal(body).message) > 20


def test_what_fits_is_decoded() -> None:
    body = b'{"model": "m", "turns": [{"role": "user"}], "bias": {"3": -1}, "ratio": 2, "count": 5}'
    assert decode(body, Outer) == Outer("m", [Inner("user")], {3: -1.0}, 5, 2.0)


def test_a_sampling_parameter_out_of_range_has_the_name_that_the_client_gave() -> None:
    with pytest.raises(ApiError, match=r"num_predict is -1; it must be between 0 and") as caught:
        sampling_params({"max_tokens": -1, "top_p": None}, {"max_tokens": "num_predict"})
    assert (caught.value.field, caught.value.status) == ("num_predict", 400)
    assert sampling_params({"max_tokens": 3, "top_p": None}).max_tokens == 3


def test_an_integer_beyond_all_bounds_is_refused() -> None:
    with pytest.raises(ApiError, match="more than 64 bits") as caught:
        sampling_params({"seed": 10**400})
    assert caught.value.field == "seed"


class Known(msgspec.Struct):
    audio: object = None


@pytest.mark.parametrize("value", [None, False, []])
def test_a_field_that_changes_nothing_is_accepted(value: object) -> None:
    refuse(Known(audio=value), {"audio": Limit("there is no sound", (False, []))})


def test_a_field_that_cannot_be_is_refused_with_its_path_and_the_reason() -> None:
    with pytest.raises(ApiError, match=r"^options.audio is not supported: there is no sound$") as caught:
        refuse(Known(audio={}), {"audio": Limit("there is no sound", (False,))}, "options")
    assert caught.value.field == "options.audio"
