"""Which addresses a node offers to the others."""

from __future__ import annotations

from muster.facts import Interface, InterfaceKind
from muster.spec import NodeAddress
from muster.worker.facts import candidates


def address(host: str) -> NodeAddress:
    return NodeAddress(host=host, network=host.rpartition(".")[0] + ".0/24")


def interface(name: str, kind: InterfaceKind, *hosts: str, up: bool = True) -> Interface:
    return Interface(name=name, kind=kind, up=up, addresses=tuple(map(address, hosts)))


LO = interface("lo", "loopback", "127.0.0.1")
LAN = interface("en0", "ethernet", "10.0.0.9", "10.0.0.10")
CABLE = interface("en2", "thunderbolt", "169.254.3.4")
TAILNET = interface("utun4", "vpn", "100.64.0.3")
DOCKER = interface("docker0", "virtual", "172.17.0.1")
DOWN = interface("en5", "ethernet", "10.9.9.9", up=False)
ALL = (LO, CABLE, LAN, TAILNET, DOCKER, DOWN)


def offered(joined: str, *interfaces: Interface, given: bool = False) -> list[str]:
    return [one.host for one in candidates((address(joined),), interfaces, given=given)]


def test_every_address_that_is_up_is_offered_and_the_one_joined_with_is_first() -> None:
    assert offered("169.254.3.4", *ALL) == ["169.254.3.4", "10.0.0.9", "10.0.0.10", "100.64.0.3"]


def test_what_the_operator_gave_is_all_while_it_is_there() -> None:
    assert offered("10.0.0.9", *ALL, given=True) == ["10.0.0.9"]
    assert offered("172.17.0.1", *ALL, given=True) == ["172.17.0.1"]
    assert offered("10.9.9.9", *ALL, given=True) == []


def test_a_node_that_joined_over_loopback_offers_nothing_to_the_outside() -> None:
    assert offered("127.0.0.1", *ALL) == ["127.0.0.1"]


def test_a_node_with_nothing_else_offers_loopback() -> None:
    assert offered("10.0.0.9", LO, DOCKER) == ["127.0.0.1"]


def test_the_address_joined_with_may_go_and_the_others_stay() -> None:
    assert offered("10.0.0.9", LO, CABLE) == ["169.254.3.4"]


def test_an_address_of_a_virtual_bridge_is_offered_where_the_node_joined_over_it() -> None:
    assert offered("172.17.0.1", LO, LAN, DOCKER) == ["172.17.0.1", "10.0.0.9", "10.0.0.10"]
