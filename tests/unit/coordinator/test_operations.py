"""What operators ask: drain, resume, retry; what is so already is no new event, what cannot be is refused by name."""

from __future__ import annotations

import pytest
from books import Books, create

from muster.coordinator.intake import change
from muster.events import AttemptEnding, InstanceFailed, InstanceRetried, kind_of
from muster.protocol import Create, Drain, Resume, Retry
from muster.replies import Accepted, Created, Noted, Refused
from muster.spec import Failure, GroupWorkload, InstanceId, InstanceSpec, NodeId
from muster.state import Draining, Ending, Serving

A = NodeId("a")
SPEC = InstanceSpec(workload=GroupWorkload(), ranks=2)


def made(books: Books) -> InstanceId:
    reply = create(books.ledger, Create(spec=SPEC))
    assert isinstance(reply, Created)
    return reply.instance


def logged(books: Books) -> list[str]:
    return [kind_of(envelope.event()) for envelope in books.published]


def test_a_node_is_drained_and_resumed_once() -> None:
    books = Books("a", "b")
    first = change(books.ledger, Drain(node=A, reason="new disk"))
    assert isinstance(first, Noted)
    assert books.ledger.state.nodes[A].duty == Draining("new disk")
    assert change(books.ledger, Drain(node=A)) == first
    assert isinstance(change(books.ledger, Drain(node=A, now=True)), Noted)
    assert books.ledger.state.nodes[A].duty == Draining("asked for", now=True)
    change(books.ledger, Resume(node=A))
    again = change(books.ledger, Resume(node=A))
    assert isinstance(again, Noted)
    assert isinstance(books.ledger.state.nodes[A].duty, Serving)
    assert logged(books)[-3:] == ["node.draining", "node.draining", "node.resumed"]


@pytest.mark.parametrize("request_", [Drain(node=NodeId("z")), Resume(node=NodeId("z"))])
def test_an_unknown_node_is_named_with_those_that_are_there(request_: Drain | Resume) -> None:
    reply = change(Books("a", "b").ledger, request_)
    assert isinstance(reply, Refused)
    assert "'z'" in reply.failure.message
    assert "a, b" in reply.failure.message


def test_a_failed_instance_is_tried_again() -> None:
    books = Books("a", "b")
    instance = made(books)
    failure = Failure(kind="rank-killed", message="x", rank=0, node=A)
    books.ledger.commit(InstanceFailed(instance=instance, attempt=1, failure=failure))
    reply = change(books.ledger, Retry(instance=instance))
    assert isinstance(reply, Accepted)
    assert isinstance(books.published[-1].event(), InstanceRetried)


def test_one_that_is_up_is_only_moved_and_only_once() -> None:
    books = Books("a", "b")
    instance = made(books)
    refused = change(books.ledger, Retry(instance=instance))
    assert isinstance(refused, Refused)
    assert "--move" in refused.failure.remedy
    assert isinstance(change(books.ledger, Retry(instance=instance, move=True)), Accepted)
    assert isinstance(books.published[-1].event(), AttemptEnding)
    assert isinstance(books.ledger.state.instances[instance].status, Ending)
    before = books.ledger.state.sequence
    assert change(books.ledger, Retry(instance=instance, move=True)) == Accepted(instance=instance, sequence=before)


def test_an_instance_that_is_not_there_is_refused() -> None:
    reply = change(Books("a").ledger, Retry(instance="nope"))
    assert isinstance(reply, Refused)
    assert "nope" in reply.failure.message
