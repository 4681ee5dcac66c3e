"""Listeners and strangers, seen without a connection."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from muster.group.listening import is_listening, strangers
from muster.group.ports import reserve

HOST = "127.0.0.1"
ME = os.getpid()


@pytest.fixture(params=["kernel", "psutil"], autouse=True)
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test holds for the fast way of Linux and for the one that other systems have."""
    if request.param == "psutil":
        monkeypatch.setattr("muster.group.sockdiag.listening_inodes", lambda: None)
    elif sys.platform != "linux":
        pytest.skip("Linux only")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as opened:
        opened.bind((HOST, 0))
        opened.listen()
        yield opened


def test_only_a_listener_on_that_address_of_that_process_counts(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    assert is_listening(ME, [(HOST, port)])
    assert is_listening(ME, [("127.0.1.1", 1), (HOST, port)])
    assert not is_listening(ME, [("127.0.1.1", port)])
    assert not is_listening(ME, [])
    assert not is_listening(os.getppid(), [(HOST, port)])
    listener.close()
    assert not is_listening(ME, [(HOST, port)])


def test_a_reservation_does_not_listen() -> None:
    with reserve(HOST) as held:
        assert not is_listening(ME, [(HOST, held.port)])


def test_a_listener_on_every_interface_counts() -> None:
    with socket.socket() as opened:
        opened.bind(("0.0.0.0", 0))
        opened.listen()
        assert is_listening(ME, [(HOST, opened.getsockname()[1])])


def test_a_process_that_is_gone_does_not_listen(listener: socket.socket) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(30)
    address = listener.getsockname()
    assert not is_listening(child.pid, [address])
    assert strangers(child.pid, [address], [], []) == []


def test_strangers_are_told_from_neighbours(listener: socket.socket) -> None:
    address = listener.getsockname()
    with socket.create_connection(address, timeout=5) as dialled:
        accepted, peer = listener.accept()
        text = f"{HOST}:{peer[1]}"
        with accepted:
            assert strangers(ME, [address], {HOST}) == []
            assert strangers(ME, [address], {"localhost"}, {ME}) == []
            assert strangers(ME, [(HOST, 1)], set()) == []
            [by_host] = strangers(ME, [address], {"10.0.0.7"})
            [by_pid] = strangers(ME, [address], {HOST}, {os.getppid()})
            assert by_host == by_pid
            assert by_pid.startswith(text)
            assert f"pid {ME})" in by_pid
            dialled.close()
            [gone] = strangers(ME, [address], {HOST}, {os.getppid()})
            assert gone.startswith(text)
            child = subprocess.Popen([sys.executable, "-c", ""])
            child.wait(30)
            assert strangers(ME, [address], {HOST}, {child.pid}) == []


def test_many_listeners_need_more_than_one_answer_of_the_kernel() -> None:
    opened = [socket.socket() for _ in range(400)]
    try:
        for one in opened:
            one.bind((HOST, 0))
            one.listen()
        assert all(is_listening(ME, [one.getsockname()]) for one in opened[::40])
    finally:
        for one in opened:
            one.close()


def test_a_kernel_that_does_not_answer_is_asked_in_the_other_way(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> socket.socket:
        raise PermissionError

    monkeypatch.setattr("muster.group.sockdiag.socket.socket", refused)
    assert is_listening(ME, [listener.getsockname()])
