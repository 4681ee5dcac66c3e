"""What a node says of itself: its memory, its machine, and addresses that others can dial."""

from __future__ import annotations

import ipaddress
from unittest.mock import Mock

import psutil
import pytest

from muster.bus import Endpoint
from muster.errors import RequestError, UnreachableError
from muster.facts import Interface
from muster.spec import NodeAddress
from muster.worker import facts
from muster.worker.facts import addresses, carriers, default_memory_bytes, machine_id

HERE = Endpoint("127.0.0.1", 5710)


def test_some_memory_is_left_to_the_system() -> None:
    total = psutil.virtual_memory().total
    assert total // 2 < default_memory_bytes() < total


def test_a_machine_is_the_same_each_time() -> None:
    assert machine_id() == machine_id() != ""


def test_the_address_is_the_one_that_the_coordinator_is_reached_from() -> None:
    (found,) = addresses((), HERE)
    assert found.host == "127.0.0.1"
    assert ipaddress.IPv4Address(found.host) in ipaddress.IPv4Network(found.network)


def test_addresses_that_the_operator_gives_are_offered_in_that_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_own", lambda: {"10.0.0.2": "10.0.0.0/24", "10.1.0.2": "10.1.0.0/16"})
    found = addresses(("10.1.0.2", "10.0.0.2"), HERE)
    assert [(item.host, item.network) for item in found] == [("10.1.0.2", "10.1.0.0/16"), ("10.0.0.2", "10.0.0.0/24")]


@pytest.mark.parametrize("host", ["192.0.2.1", "::1", "localhost", "", "127.0.0.1 "])
def test_an_address_of_another_machine_or_kind_is_refused(host: str) -> None:
    with pytest.raises(RequestError, match="is no IPv4 address of this machine") as caught:
        addresses((host,), HERE)
    assert "127.0.0.1" in caught.value.message


def test_a_coordinator_that_no_way_leads_to_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoRoute:
        def __enter__(self) -> NoRoute:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def connect(self, address: object) -> None:
            raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(facts.socket, "socket", Mock(return_value=NoRoute()))
    with pytest.raises(UnreachableError, match=r"10\.9\.8\.7:5710: Network is unreachable") as caught:
        addresses((), Endpoint("10.9.8.7", 5710))
    assert "--join" in caught.value.remedy


def test_what_carries_an_address_is_told_with_its_bridge_and_what_the_slow_tools_know() -> None:
    at = NodeAddress(host="10.0.0.9", network="10.0.0.0/24")
    quick = Interface(name="en5", kind="other", up=True, addresses=(at,), mbps=10_000)
    slow = Interface(name="en5", kind="ethernet", up=True, addresses=(at,))
    bridge = Interface(name="bridge0", kind="bridge", up=True)
    joined = Interface(name="bridge0", kind="bridge", up=True, members=("en5", "en2"), addresses=(at,))
    assert carriers([at], [quick], []) == {"10.0.0.9": "en5 (other)"}
    assert carriers([at], [quick], [slow]) == {"10.0.0.9": "en5 (ethernet, 10000 Mbit/s)"}
    assert carriers([at], [bridge, quick], [joined]) == {"10.0.0.9": "en5 (other, in bridge0)"}
    assert carriers([at], [joined], []) == {"10.0.0.9": "bridge0 (bridge, of en2 and en5)"}
    assert carriers([], [quick], [slow]) == {}
