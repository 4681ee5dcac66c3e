"""Clock offsets from heartbeats: within their own error of the truth, whatever the network does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from muster.coordinator.comparing import Clocks
from muster.protocol import Beat
from muster.spec import BootId, NodeId

A = NodeId("a")
SECOND = 1_000_000_000
travel = st.integers(1_000, 3 * SECOND)


def beat(offset_ns: int, pulse_ns: int, there_ns: int, waited_ns: int, boot: str = "boot") -> Beat:
    """A heartbeat of a node whose clock is ahead by `offset_ns`, sent `waited_ns` after the pulse came."""
    return Beat(
        node=A, boot=BootId(boot), time_ns=there_ns + waited_ns + offset_ns, pulse_ns=pulse_ns, pulse_age_ns=waited_ns
    )


@given(
    offset=st.integers(-(10**15), 10**15),
    trips=st.lists(st.tuples(travel, travel, st.integers(0, SECOND)), min_size=1, max_size=40),
)
def test_the_estimate_is_within_its_error_of_the_truth(offset: int, trips: list[tuple[int, int, int]]) -> None:
    clocks = Clocks()
    now = 10**18
    for there, back, waited in trips:
        clocks.note(beat(offset, now, now + there, waited), now + there + waited + back)
        now += SECOND
    found = clocks.of(A)
    assert found is not None
    assert abs(found.offset_ns - offset) <= found.error_ns + 1
    assert found.error_ns <= min((there + back) for there, back, _ in trips[-16:]) // 2 + 1
    assert abs(clocks.here_ns(A, BootId("boot"), now + offset) - now) <= found.error_ns + 1


def test_a_clock_that_was_set_is_noticed_at_once() -> None:
    clocks = Clocks()
    now = 10**18
    for offset in (0, 0, 0, 3600 * SECOND):
        clocks.note(beat(offset, now, now + 1000, 0), now + 2000)
        now += SECOND
    found = clocks.of(A)
    assert found is not None
    assert found.offset_ns == 3600 * SECOND


def test_another_boot_begins_again_and_has_no_say_about_the_old_one() -> None:
    clocks = Clocks()
    clocks.note(beat(5, 10**18, 10**18 + 10, 0), 10**18 + 20)
    clocks.note(beat(900, 10**18, 10**18 + 10, 0, boot="next"), 10**18 + 20)
    found = clocks.of(A)
    assert found is not None
    assert found.offset_ns == 900
    assert clocks.here_ns(A, BootId("boot"), 10**18) == 0


def test_what_says_nothing_is_no_sample() -> None:
    clocks = Clocks()
    clocks.note(Beat(node=A, boot=BootId("boot")), 10**18)
    clocks.note(beat(0, 10**18, 10**18 + 10, 0), 10**18 - 5)
    clocks.note(beat(0, 10**18, 10**18 + 10, 11 * SECOND), 10**18 + 12 * SECOND)
    assert clocks.of(A) is None
    assert clocks.all() == ()
    assert clocks.here_ns(A, BootId("boot"), 10**18) == 0
