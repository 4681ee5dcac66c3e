"""A worker reports that its own addresses changed, and no other's."""

from __future__ import annotations

import msgspec
import pytest
from books import A, B, Books

from muster.coordinator.comparing import Clocks
from muster.coordinator.outputs import OutputStore
from muster.coordinator.reports import Reports
from muster.events import NodeChanged, encode_event
from muster.protocol import Report
from muster.replies import Acked, Refused
from muster.spec import BootId, NodeAddress

NEW = NodeAddress(host="10.0.0.7", network="10.0.0.0/24")
CHANGE = NodeChanged(node=A, boot=BootId("boot-1"), candidates=(NEW,), new=("10.0.0.7",))


@pytest.fixture
def books() -> Books:
    return Books("a", "b")


def report(books: Books, event: NodeChanged) -> Acked | Refused | None:
    reports = Reports(books.ledger, OutputStore(), Clocks(), {"boot": 0, "attempt": 0})
    raw = msgspec.Raw(encode_event(event))
    return reports.take(Report(node=A, boot=BootId("boot-1"), n=1, cause=0, event=raw))


def test_the_change_is_logged_and_the_node_has_the_addresses_of_now(books: Books) -> None:
    assert isinstance(report(books, CHANGE), Acked)
    assert books.ledger.state.nodes[A].info.candidates == (NEW,)
    assert [envelope.event() for envelope in books.published][-1] == CHANGE


@pytest.mark.parametrize(
    "change",
    [
        {"node": B},
        {"boot": BootId("boot-0")},
        {"candidates": (NodeAddress(host="::1", network="::1/128"),)},
        {"candidates": (NEW,) * 600},
    ],
)
def test_anothers_change_or_what_is_no_address_is_refused(books: Books, change: dict[str, object]) -> None:
    before = books.ledger.state
    answer = report(books, msgspec.structs.replace(CHANGE, **change))
    assert isinstance(answer, Refused)
    assert answer.failure.kind == "request-invalid"
    assert books.ledger.state == before
