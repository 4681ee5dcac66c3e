"""What the tests call a port that is left: one that a rank still has, and not one that the system gave to others."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from muster.bench.leftovers import port_left
from muster.group.ports import reserve
from muster.spec import Address

pytestmark = pytest.mark.process

LISTEN = """
import socket, sys
heard = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("listening", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def address() -> Address:
    with reserve("127.0.0.1") as held:
        return Address("127.0.0.1", held.port, "")


def test_a_port_that_nobody_has_is_not_left(address: Address) -> None:
    assert port_left(address, {1}) is None


def test_a_listener_that_is_no_rank_has_what_the_system_gave_it(address: Address) -> None:
    with socket.create_server((address.host, address.port)):
        assert port_left(address, {os.getsid(0) + 1}) is None


@pytest.mark.parametrize("own", [True, False])
def test_a_listener_in_the_session_of_a_rank_is_left(address: Address, own: bool) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LISTEN, str(address.port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=own,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline()
        left = port_left(address, {process.pid})
        process.communicate(b"")
    assert (left is not None) == own
    if own:
        assert f"pid {process.pid}" in str(left)


def test_a_reservation_is_left(address: Address) -> None:
    with socket.socket() as held:
        held.bind((address.host, address.port))
        assert port_left(address, {1}) is not None
