"""Frames between worker and runner: whole or not at all, bounded, and never mistaken for anything else."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.errors import ProtocolError
from muster.rank_protocol import FailedFrame, Form, LoadedFrame, Prepare, ReadyFrame, Stop, ToRank
from muster.runner.frames import HEADER_BYTES, MAX_FRAME_BYTES, Channel, encode_frame, frame_length
from muster.spec import Failure, GroupWorkload, InstanceId, ModelWorkload, ScriptWorkload

PREPARE = Prepare(
    instance=InstanceId("one"),
    attempt=2,
    rank=1,
    world_size=4,
    workload=ScriptWorkload(path="x.py", arguments=("-v",), directory="/d"),
    host="127.0.0.1",
    directory="/tmp/x",
    generation="tcp://127.0.0.1:1",
    shared_seconds=3.0,
)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    theirs.settimeout(10)
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def worker(pair: tuple[socket.socket, socket.socket]) -> socket.socket:
    """The worker's end."""
    return pair[0]


@pytest.fixture
def channel(pair: tuple[socket.socket, socket.socket]) -> Channel:
    """The runner's end."""
    return Channel(pair[1])


def test_a_frame_says_its_length_first() -> None:
    encoded = encode_frame(Stop())
    assert frame_length(encoded[:HEADER_BYTES]) == len(encoded) - HEADER_BYTES
    assert HEADER_BYTES == 4


def test_a_length_beyond_the_limit_is_refused_before_anything_is_read() -> None:
    assert frame_length(struct.pack(">I", MAX_FRAME_BYTES)) == MAX_FRAME_BYTES
    with pytest.raises(ProtocolError, match=f"{MAX_FRAME_BYTES + 1} bytes"):
        frame_length(struct.pack(">I", MAX_FRAME_BYTES + 1))


def test_frames_arrive_in_order_and_whole(worker: socket.socket, channel: Channel) -> None:
    sent: list[ToRank] = [PREPARE, Form(payload=b"\x00" * 5000, steps="h:1"), Form(), Stop()]
    worker.sendall(b"".join(map(encode_frame, sent)))
    assert [channel.receive() for _ in sent] == sent


def test_a_frame_may_come_in_pieces(worker: socket.socket, channel: Channel) -> None:
    encoded = encode_frame(PREPARE)
    for begin in range(0, len(encoded), 50):  # fewer pieces than a socket pair holds
        worker.sendall(encoded[begin : begin + 50])
    assert channel.receive() == PREPARE


def test_what_the_runner_sends_is_a_frame(worker: socket.socket, channel: Channel) -> None:
    frames = [
        ReadyFrame(),
        LoadedFrame(layers=(0, 3), sharding="pipeline", weights_bytes=7, seconds=0.5),
        FailedFrame(failure=Failure(kind="k", message="m")),
    ]
    for frame in frames:
        channel.send(frame)
    expected = b"".join(map(encode_frame, frames))
    assert worker.recv(len(expected) + 1) == expected


@pytest.mark.parametrize("sent", [b"", b"\x00\x00", encode_frame(PREPARE)[:-1], encode_frame(Stop())[:4]])
def test_a_worker_that_is_gone_is_the_end_and_not_an_error(
    worker: socket.socket, channel: Channel, sent: bytes
) -> None:
    worker.sendall(sent)
    worker.close()
    assert channel.receive() is None


@pytest.mark.parametrize(
    "body", [b"\xc1", b"", b"\x80", b"\x81\xa4type\xa7unknown", encode_frame(ReadyFrame())[4:], b"\xff" * 100]
)
def test_what_is_no_frame_is_refused(worker: socket.socket, channel: Channel, body: bytes) -> None:
    worker.sendall(struct.pack(">I", len(body)) + body)
    with pytest.raises(ProtocolError, match="cannot be decoded"):
        channel.receive()


def test_sending_to_a_worker_that_is_gone_raises(worker: socket.socket, channel: Channel) -> None:
    worker.close()
    with pytest.raises(OSError, match=r"[Pp]ipe|reset"):
        channel.send(ReadyFrame())


def test_a_channel_can_be_polled(worker: socket.socket, channel: Channel) -> None:
    assert channel.fileno() >= 0
    assert channel.fileno() != worker.fileno()


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(st.binary(max_size=200))
def test_random_bytes_never_do_anything_else_than_fail(noise: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(noise)
        ours.close()
        try:
            frame = Channel(theirs).receive()
        except ProtocolError:
            return
        assert frame is None or isinstance(frame, Prepare | Form | Stop)


def test_the_workload_keeps_its_kind(worker: socket.socket, channel: Channel) -> None:
    for workload in (GroupWorkload(), ModelWorkload(model="/m"), ScriptWorkload(path="/x.py")):
        worker.sendall(encode_frame(msgspec.structs.replace(PREPARE, workload=workload)))
        received = channel.receive()
        assert isinstance(received, Prepare)
        assert received.workload == workload
