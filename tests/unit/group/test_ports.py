"""A reserved port is ours, refuses connections, and can still be listened on by MLX."""

from __future__ import annotations

import os
import socket

import pytest

from muster.errors import PortError
from muster.group.ports import reserve, reserve_at

HOST = "127.0.0.1"


def listen(port: int, *, shared: bool = True) -> socket.socket:
    """As MLX does: both options, then bind and listen."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((HOST, port))
        listener.listen(0)
    except OSError:
        listener.close()
        raise
    return listener


def test_ports_are_different_and_held_until_closed() -> None:
    with reserve(HOST, 20) as held:
        assert len(set(held.ports)) == 20
        assert held.port == held.ports[0]
        with pytest.raises(OSError, match="in use"):
            listen(held.port, shared=False)
        with pytest.raises(PortError, match=f"port {held.port} of {HOST} is held by another process"):
            reserve_at(HOST, held.port)
    listen(held.port, shared=False).close()


def test_a_connection_to_a_reserved_port_is_refused() -> None:
    with reserve(HOST) as held, pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, held.port), timeout=5)


def test_mlx_can_listen_beside_the_reservation_and_gets_every_connection() -> None:
    with reserve(HOST) as held, listen(held.port) as listener:
        for _ in range(20):
            with socket.create_connection((HOST, held.port), timeout=5) as dialled:
                accepted, peer = listener.accept()
                assert peer == dialled.getsockname()
                accepted.close()


def test_automatic_choice_never_gives_a_reserved_port() -> None:
    with reserve(HOST, 200) as held:
        chosen = set[int]()
        for _ in range(300):
            with socket.socket() as other:
                other.bind((HOST, 0))
                chosen.add(other.getsockname()[1])
        assert not chosen & set(held.ports)
        with reserve(HOST, 100) as more:
            assert not set(more.ports) & set(held.ports)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("at", [HOST, "0.0.0.0"])
def test_a_fixed_port_that_someone_listens_on_names_the_process(shared: bool, at: str) -> None:
    with socket.socket() as listener:
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((at, 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(PortError, match=rf"port {port} .*pid {os.getpid()}\)") as caught:
            reserve_at(HOST, port)
        assert caught.value.remedy


def test_a_fixed_port_can_be_reserved_again_right_after_a_group_ended() -> None:
    with reserve(HOST) as held, listen(held.port) as listener:
        dialled = socket.create_connection((HOST, held.port), timeout=5)
        accepted, _ = listener.accept()
        accepted.close()  # closing first leaves this side in TIME_WAIT
        assert dialled.recv(1) == b""
        dialled.close()
        port = held.port
    with reserve_at(HOST, port) as again:
        assert again.ports == (port,)


def test_what_cannot_be_reserved_is_refused() -> None:
    with pytest.raises(PortError, match="not an address of this node"):
        reserve("192.0.2.1")
    with pytest.raises(PortError, match="has no IPv4 address"):
        reserve("::1")
    with pytest.raises(PortError, match="cannot reserve 0 ports"):
        reserve(HOST, 0)
    for port in (0, 65_536, -1):
        with pytest.raises(PortError, match="out of range"):
            reserve_at(HOST, port)
