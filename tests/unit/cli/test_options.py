"""How options are read, and what bad ones say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.cli import options
from muster.errors import RequestError
from muster.spec import NeverRestart, RestartOnFailure


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("never", NeverRestart()),
        ("on-failure", RestartOnFailure()),
        ("on-failure:7", RestartOnFailure(maximum=7)),
    ],
)
def test_a_restart_policy_is_read(text: str, policy: object) -> None:
    assert options.parse_restart(text) == policy


@pytest.mark.parametrize(
    "text", ["", "always", "never:2", "on-failure:", "on-failure:0", "on-failure:-1", "on-failure:x", "on-failure:²"]
)
def test_another_restart_policy_is_bad_input(text: str) -> None:
    with pytest.raises(RequestError, match="--restart") as caught:
        options.parse_restart(text)
    assert "on-failure:3" in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200), ("1d", 86_400), ("500ms", 0.5)]
)
def test_a_length_of_time_is_read(text: str, seconds: float) -> None:
    assert options.parse_seconds("--since", text) == seconds


@given(st.text())
def test_any_other_text_is_no_length_of_time(text: str) -> None:
    try:
        assert options.parse_seconds("--since", text) >= 0
    except RequestError as error:
        assert "--since" in error.message
        assert error.remedy


def test_deadlines_change_only_the_phases_that_are_named() -> None:
    found = options.parse_deadlines(["form=30", "load=10m"])
    assert (found.form_seconds, found.load_seconds, found.warm_seconds) == (30, 600, 60)


@pytest.mark.parametrize("text", ["form", "form=", "form=x", "form=0", "dance=3", "form=-1", "form=100000"])
def test_a_bad_deadline_names_itself(text: str) -> None:
    with pytest.raises(RequestError, match="deadline") as caught:
        options.parse_deadlines([text])
    assert caught.value.remedy


def test_nodes_keep_their_order() -> None:
    assert options.parse_nodes("b,a") == ("b", "a")
    assert options.parse_nodes(None) == ()


@pytest.mark.parametrize("text", ["", "a,,b", "a, b", "a b", "-a", "a,\n"])
def test_what_is_no_node_id_is_bad_input(text: str) -> None:
    with pytest.raises(RequestError, match="no node id"):
        options.parse_nodes(text)


def test_a_variable_may_have_an_equals_sign_in_its_value() -> None:
    assert options.parse_environment(["A=1=2", "B="]) == {"A": "1=2", "B": ""}


@pytest.mark.parametrize("text", ["A", "=1", "1A=2", "A B=3"])
def test_what_is_no_variable_is_bad_input(text: str) -> None:
    with pytest.raises(RequestError, match="--env"):
        options.parse_environment([text])


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_only_numbers_above_zero_are_positive(value: float) -> None:
    with pytest.raises(RequestError, match="--timeout"):
        options.check_positive("--timeout", value)


def test_a_failed_check_of_a_message_is_bad_input() -> None:
    with pytest.raises(RequestError, match="ranks is 0"), options.input_errors():
        raise ValueError("ranks is 0")
