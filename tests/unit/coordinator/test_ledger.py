"""Log before publish; the state is what the log says; a full disk stops, and does not break, the books."""

from __future__ import annotations

import math
from unittest.mock import Mock

import pytest
from books import A, B, Books, info

from muster.coordinator import ledger as ledger_module
from muster.errors import LogError
from muster.events import Envelope, Event, NodeJoined, NodeLost, Unknown, kind_of
from muster.lifecycle import SECOND, Decision, Observed, Settings
from muster.spec import COORDINATOR, BootId
from muster.state import State

LOST = NodeLost(node=A, boot=BootId("boot-1"), reason="test")


def test_an_event_is_logged_then_folded_then_published_then_told() -> None:
    books = Books()
    seen: list[tuple[int, str]] = []

    def told(envelope: Envelope, event: Event | Unknown) -> None:
        seen.append((envelope.sequence, kind_of(event)))
        assert books.order == ["log 1", "publish 1"]
        assert books.ledger.state.sequence == 1
        assert "a" in books.ledger.state.nodes

    books.ledger.on_event = told
    envelope = books.ledger.commit(NodeJoined(info=info()))
    assert seen == [(1, "node.joined")]
    assert (envelope.origin, envelope.cause) == (COORDINATOR, 0)
    assert books.published == [envelope] == books.log.read(0, 10)


def test_what_cannot_be_logged_has_not_happened() -> None:
    books = Books("a")
    before = books.ledger.state
    books.log.full = True
    with pytest.raises(LogError, match="disk is full"):
        books.ledger.commit(LOST)
    assert books.ledger.state is before
    assert len(books.published) == 1
    assert books.ledger.trouble is not None
    books.log.full = False
    assert books.ledger.commit(LOST).sequence == 2
    assert books.ledger.trouble is None


def test_a_new_coordinator_continues_the_log() -> None:
    books = Books("a", "b")
    again = books.open()
    assert again.state == books.ledger.state
    assert again.commit(LOST).sequence == 3
    assert set(again.heard_ns) == {A, B}, "a node has a whole lease to come back to a new coordinator"
    assert again.seconds_to_wake() <= books.settings.lease_seconds


def test_time_never_goes_back_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    books = Books("a")
    last = books.published[-1].time_ns
    monkeypatch.setattr("time.time_ns", lambda: last - 3600 * SECOND)
    assert books.open().commit(LOST).time_ns >= last


def test_settling_carries_out_what_the_state_demands() -> None:
    books = Books("a", "b")
    books.ledger.heard_ns[A] -= 6 * SECOND
    books.ledger.settle()
    assert [kind_of(event) for event in map(Envelope.event, books.published)][2:] == ["node.lost"]
    assert books.published[-1].cause == 2
    assert books.ledger.state.nodes[A].lost is not None
    assert books.ledger.state.nodes[B].lost is None
    books.ledger.settle()
    assert len(books.published) == 3


def test_a_full_disk_ends_settling_without_a_spin() -> None:
    books = Books("a")
    books.log.full = True
    books.ledger.heard_ns[A] -= 60 * SECOND
    books.ledger.settle()
    assert books.ledger.state.nodes[A].lost is None
    assert books.ledger.seconds_to_wake() > 0.01
    books.log.full = False
    books.ledger.settle()
    assert books.ledger.state.nodes[A].lost is not None


def test_rules_that_do_not_come_to_rest_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    books = Books("a")
    monkeypatch.setattr(ledger_module, "_MAX_ROUNDS", 7)
    monkeypatch.setattr(ledger_module, "decide", Mock(return_value=[Decision(LOST)]))
    books.ledger.settle()
    assert len(books.published) == 1 + 7


def test_an_empty_cluster_sleeps_for_ever() -> None:
    books = Books()
    assert books.ledger.seconds_to_wake() == math.inf
    books.ledger.commit(NodeJoined(info=info()))
    books.ledger.heard_ns[A] = books.ledger.clock.now_ns()
    assert 2 < books.ledger.seconds_to_wake() <= Settings().suspect_seconds


def test_the_decisions_of_one_round_have_one_cause() -> None:
    books = Books("a", "b")
    head = books.ledger.state.sequence
    for node in (A, B):
        books.ledger.heard_ns[node] -= 60 * SECOND
    books.ledger.settle()
    assert [envelope.cause for envelope in books.published[2:]] == [head, head]


def test_a_coordinator_that_is_stopped_while_it_settles_takes_no_node_for_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sees an event may stop this process before it looks at the state again."""
    books = Books("a", "b")
    books.ledger.heard_ns[A] -= 60 * SECOND
    now_ns, stood_ns = books.ledger.clock.now_ns, 0
    monkeypatch.setattr(books.ledger.clock, "now_ns", lambda: now_ns() + stood_ns)

    def stop(envelope: Envelope, event: Event | Unknown) -> None:
        nonlocal stood_ns
        stood_ns = 60 * SECOND

    books.ledger.on_event = stop
    books.ledger.settle()
    assert [kind_of(event) for event in map(Envelope.event, books.published)][2:] == ["node.lost"]
    assert books.ledger.state.nodes[B].lost is None


def test_heartbeats_alone_make_nobody_look_for_room_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    books = Books("a", "b")
    crowded: list[bool] = []

    def decide(state: State, observed: Observed, now_ns: int, settings: Settings) -> list[Decision]:
        del state, now_ns, settings
        crowded.append(observed.crowded)
        return []

    monkeypatch.setattr(ledger_module, "decide", decide)
    now_ns, later_ns = books.ledger.clock.now_ns, 0
    monkeypatch.setattr(books.ledger.clock, "now_ns", lambda: now_ns() + later_ns)
    for _ in range(3):
        books.ledger.settle()
    later_ns = 2 * SECOND
    for _ in range(2):
        books.ledger.settle()
    books.ledger.commit(LOST)
    books.ledger.settle()
    assert crowded == [False, True, True, False, True, False]
