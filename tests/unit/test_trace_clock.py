"""When an event happened, from what its worker says and from what the log says."""

from __future__ import annotations

import msgspec
import pytest
from stories import BOOT, NAMES, envelope, rank_event

from muster.events import Envelope, ReportId
from muster.spec import BootId
from muster.trace_clock import Clock, Mark


def logged(
    sequence: int, at: int, happened: int = 0, *, cause: int = 0, boot: BootId = BOOT, rank: int = 0
) -> Envelope:
    """An event of a worker; the coordinator's own where `happened` is -1."""
    report = ReportId(node=NAMES[rank], boot=boot, n=sequence, happened_ns=happened) if happened >= 0 else None
    found = envelope(sequence, rank_event("ready", rank, boot=boot), time_ns=at, report=report)
    return msgspec.structs.replace(found, cause=cause)


@pytest.mark.parametrize(
    ("before", "event", "marked"),
    [
        ([], logged(9, 50, 30), Mark(30, 9, 20)),
        ([], logged(9, 50, 70), Mark(50, 9, 0)),  # not after it was logged
        ([], logged(9, 50), Mark(50, 9, 0)),  # not known
        ([], logged(9, 50, -1), Mark(50, 9, 0)),  # the coordinator's own
        ([logged(1, 40, -1)], logged(9, 50, 30, cause=1), Mark(40, 9, 10)),  # not before what led to it
        ([logged(1, 40, 35)], logged(9, 50, 30, cause=1, rank=1), Mark(35, 9, 15)),  # which has its own time
        ([logged(1, 40, -1)], logged(9, 50, 30), Mark(30, 9, 20)),  # what is only before it in the log is no limit
        ([logged(1, 40, 35)], logged(9, 50, 30), Mark(35, 9, 15)),  # not before what the same worker reported
        ([logged(1, 40, 35, rank=1)], logged(9, 50, 30), Mark(30, 9, 20)),
        ([logged(1, 40, 35, boot=BootId("old"))], logged(9, 50, 30), Mark(30, 9, 20)),
        ([logged(1, 60, -1)], logged(9, 50, 30, cause=1), Mark(50, 9, 0)),  # whatever the clocks did
    ],
)
def test_an_event_happened_between_what_led_to_it_and_the_log(
    before: list[Envelope], event: Envelope, marked: Mark
) -> None:
    clock = Clock()
    for earlier in before:
        clock.mark(earlier)
    assert clock.mark(event) == marked


def test_what_happened_at_one_time_has_the_order_of_the_log() -> None:
    assert sorted([Mark(5, 3), Mark(5, 2, 9), Mark(4, 7)]) == [Mark(4, 7), Mark(5, 2, 9), Mark(5, 3)]


@pytest.mark.parametrize(
    ("mark", "moved"),
    [
        (Mark(5, 2, 9), Mark(8, 2, 6)),
        (Mark(5, 2, 1), Mark(8, 2, 0)),
        (Mark(8, 2, 9), Mark(8, 2, 9)),
        (Mark(9, 2), Mark(9, 2)),
    ],
)
def test_a_mark_is_moved_behind_another(mark: Mark, moved: Mark) -> None:
    assert mark.not_before(Mark(8, 1)) == moved
