"""Whom to follow of several coordinators."""

from __future__ import annotations

from typing import Literal

from muster.bus import Endpoint, Terms
from muster.bus.seeking import preferred
from muster.replies import Role
from muster.spec import BootId

A, B, C = (Endpoint(host, 1) for host in "abc")


def role(term: int = 1, kind: Literal["active", "standby", "fenced"] = "active", epoch: str = "e") -> Role:
    return Role(role=kind, epoch=epoch, term=term, boot=BootId("b"), head=0, version="0")


def terms(*followed: tuple[str, int]) -> Terms:
    made = Terms()
    for epoch, term in followed:
        made.note(epoch, term)
    return made


def test_the_active_one_with_the_highest_term_is_followed() -> None:
    roles = {A: role(1), B: role(3), C: role(2)}
    assert preferred((A, B, C), roles, terms()) == B
    roles[B] = role(3, "fenced")
    assert preferred((A, B, C), roles, terms()) == C
    roles[C] = role(9, "standby")
    assert preferred((A, B, C), roles, terms()) == A
    assert preferred((A, B, C), {}, terms()) is None


def test_of_two_that_are_equal_the_first_address_is_taken() -> None:
    assert preferred((B, A), {A: role(), B: role()}, terms()) == B


def test_one_that_was_replaced_is_not_followed() -> None:
    roles = {A: role(1)}
    assert preferred((A, B), roles, terms(("e", 1))) == A
    assert preferred((A, B), roles, terms(("e", 2))) is None
    assert preferred((A, B), roles, terms(("e", 2), ("other", 1))) is None


def test_the_epoch_that_was_followed_goes_before_an_empty_log() -> None:
    roles = {A: role(7, epoch="new"), B: role(1)}
    assert preferred((A, B), roles, terms(("e", 1))) == B
    assert preferred((A, B), roles, terms(("e", 2))) == A
    assert preferred((A, B), roles, terms()) == A


def test_terms_only_rise_and_are_counted_when_they_do_not() -> None:
    followed = terms(("e", 2), ("f", 1), ("e", 1))
    assert (followed.epoch, followed.term) == ("e", 2)
    assert not followed.fences("e", 2)
    assert not followed.fences("unknown", 0)
    assert followed.fences("e", 1)
    assert followed.fenced == 1
    assert followed.is_promoted(role(3))
    assert not followed.is_promoted(role(2))
    assert not followed.is_promoted(role(3, "standby"))
    assert not followed.is_promoted(role(3, epoch="f"))


def test_the_epochs_that_are_remembered_are_bounded() -> None:
    followed = terms(("e", 5), *((f"n{number}", 1) for number in range(20)))
    assert not followed.is_behind("e", 1)
    assert followed.is_behind("n19", 0)
