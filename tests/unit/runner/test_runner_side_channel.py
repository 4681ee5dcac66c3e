"""The exchange over the bus as MLX calls it: bytes in, everybody's bytes out, or an error that names who is missing."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from muster.errors import FormationError
from muster.rank_protocol import GatheredFrame, GatherFrame, Stop, ToRank
from muster.runner.frames import HEADER_BYTES, Channel, encode_frame, frame_length
from muster.runner.side_channel import SideChannelError, bus_gather
from muster.spec import Failure


def gathering(*answers: ToRank) -> tuple[Callable[[bytes, int], bytes], Callable[[], list[bytes]]]:
    """The callable of rank 1 of 2 whose worker answers so, and what it was sent."""
    ours, theirs = socket.socketpair()
    for answer in answers:
        theirs.sendall(encode_frame(answer))

    def sent() -> list[bytes]:
        found: list[bytes] = []
        theirs.setblocking(False)
        try:
            while header := theirs.recv(HEADER_BYTES):
                found.append(theirs.recv(frame_length(header)))
        except BlockingIOError:
            pass
        finally:
            ours.close()
            theirs.close()
        return found

    return bus_gather(Channel(ours))(1, 2), sent


def test_the_rounds_are_counted_and_the_parts_joined_in_rank_order() -> None:
    gather, sent = gathering(GatheredFrame(parts=(b"aa", b"bb")), GatheredFrame(parts=(b"x", b"y")))
    assert gather(b"bb", 2) == b"aabb"
    assert gather(b"y", 1) == b"xy"
    frames = [encode_frame(GatherFrame(round=number, data=data)) for number, data in enumerate((b"bb", b"y"))]
    assert sent() == [frame[HEADER_BYTES:] for frame in frames]


def test_a_refusal_keeps_who_is_to_blame() -> None:
    failure = Failure(kind="formation-timeout", message="rank 0 is missing", secondary=True)
    gather, sent = gathering(GatheredFrame(failure=failure))
    with pytest.raises(SideChannelError) as caught:
        gather(b"y", 1)
    assert caught.value.failure == failure
    sent()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (GatheredFrame(parts=(b"x",)), "exchange 0 brought"),
        (GatheredFrame(parts=(b"xx", b"y")), "exchange 0 brought"),
        (GatheredFrame(parts=(b"y", b"x")), "exchange 0 brought"),
        (Stop(), "the worker said Stop"),
    ],
)
def test_what_does_not_fit_is_refused(answer: ToRank, reason: str) -> None:
    gather, sent = gathering(answer)
    with pytest.raises(FormationError, match=reason):
        gather(b"y", 1)
    sent()
