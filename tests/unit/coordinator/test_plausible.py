"""What a node tells that cannot be."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.coordinator.plausible import fault_of_facts, fault_of_links
from muster.facts import HeldModel, Interface, NodeFacts
from muster.links import Measured, NodeLinks
from muster.spec import BootId, NodeAddress, NodeId

A = NodeId("a")
PAIR = Measured(other=NodeId("b"), other_boot=BootId("2"), own="10.0.0.1", host="10.0.0.2", reached=True)
FACTS = NodeFacts(node=A, boot=BootId("1"))


def links(**fields: object) -> NodeLinks:
    return NodeLinks(node=A, boot=BootId("1"), measured=(msgspec.structs.replace(PAIR, **fields),))


@given(st.floats(0, 1e12))
def test_what_can_be_measured_is_taken(rate: float) -> None:
    assert fault_of_links(links(mbps_in=rate, mbps_out=rate, rtt_us=rate)) == ""


@pytest.mark.parametrize("name", ["mbps_in", "mbps_out", "rtt_us"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -5.0, 1e308])
def test_a_rate_that_cannot_be_is_named(name: str, value: float) -> None:
    assert fault_of_links(links(**{name: value})).startswith(f"{name} is ")


@pytest.mark.parametrize("fields", [{"own": ""}, {"host": "10.0.0.1/24"}, {"host": "b"}])
def test_a_pair_is_of_addresses(fields: dict[str, str]) -> None:
    assert "pair of addresses" in fault_of_links(links(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"memory_gbps": float("nan")},
        {"memory_total_bytes": -1},
        {"models": (HeldModel(model="m", path="m", bytes=2**63),)},
        {"interfaces": (Interface(name="e", kind="other", up=True, mtu=-2),)},
        {"interfaces": (Interface(name="e", kind="other", up=True, addresses=(NodeAddress(host="x/", network=""),)),)},
    ],
)
def test_facts_that_cannot_be(fields: dict[str, object]) -> None:
    assert fault_of_facts(FACTS) == ""
    assert fault_of_facts(msgspec.structs.replace(FACTS, **fields))
