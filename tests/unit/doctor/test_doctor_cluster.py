"""The doctor on clusters: what no machine can see of itself."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from patients import VERSIONS, interface, joined, links, linux, mac, measured, the, wrong

from muster.doctor.checks import Check, Verdict, failed
from muster.doctor.cluster import Evidence, check_cluster
from muster.facts import NodeFacts
from muster.links import NodeLinks
from muster.replies import NodeClock
from muster.spec import BootId, NodeId
from muster.state import Aside, Draining, Node

FAILURE, WARNING = Verdict.FAILURE, Verdict.WARNING
A, B = NodeId("a"), NodeId("b")


def evidence(*nodes: Node, facts: tuple[NodeFacts, ...], found: tuple[NodeLinks, ...] = (), **more: Any) -> Evidence:
    return Evidence(
        nodes={node.info.node: node for node in nodes},
        facts={one.node: one for one in facts},
        links={one.node: one for one in found},
        **more,
    )


def pair(a: NodeFacts, b: NodeFacts, *found: NodeLinks, **more: Any) -> Evidence:
    """Two nodes with these facts; where nothing is said of links, their first addresses reach each other well."""
    if not found:
        hosts = [one.interfaces[0].addresses[0].host for one in (a, b)]
        found = (links("a", measured("b", *hosts)), links("b", measured("a", *reversed(hosts))))
    return evidence(joined(a), joined(b), facts=(a, b), found=found, **more)


def boxes(**of_b: Any) -> tuple[NodeFacts, NodeFacts]:
    return linux("a", "10.0.0.1"), linux("b", **{"host": "10.0.0.2", **of_b})


def test_a_fine_pair_needs_nothing_and_what_both_share_is_said_once() -> None:
    clocks = (NodeClock(node=A, offset_ns=200_000, error_ns=100_000), NodeClock(node=B, offset_ns=0, error_ns=900_000))
    checks = check_cluster(pair(*boxes(), clocks=clocks))
    assert wrong(checks) == {}
    assert not failed(checks)
    assert the(checks, "node").node == "a, b"
    assert the(checks, "links").evidence == "a - b: ethernet, 900 Mbit/s"
    assert "mlx 0.32.4, mlx-lm 0.32.2, Python 3.12" in the(checks, "versions").evidence
    assert the(checks, "clocks").evidence == "within 0.9 ms of the coordinator's"


def test_a_cluster_without_nodes_says_how_to_get_one() -> None:
    (check,) = check_cluster(Evidence())
    assert (check.verdict, check.help) == (FAILURE, "muster worker --join HOST[:PORT]")


@pytest.mark.parametrize(
    ("fields", "verdict", "evidence_text"),
    [
        ({"lost": "no heartbeat for 5.0 s"}, FAILURE, "lost: no heartbeat"),
        ({"lost": "its worker was stopped"}, WARNING, "stopped"),
        ({"suspect": "no heartbeat for 2.0 s"}, WARNING, "suspect"),
        ({"duty": Aside(reason="three failures")}, FAILURE, "set aside: three failures"),
        ({"duty": Draining(reason="new disk")}, WARNING, "draining: new disk"),
    ],
)
def test_a_node_that_takes_nothing_is_named(fields: dict[str, Any], verdict: Verdict, evidence_text: str) -> None:
    a, b = boxes()
    seen = evidence(joined(a), msgspec.structs.replace(joined(b), **fields), facts=(a, b))
    check = next(check for check in check_cluster(seen) if check.name == "node" and check.node == "b")
    assert (check.verdict, evidence_text in check.evidence, bool(check.help)) == (verdict, True, True)


@pytest.mark.parametrize(
    ("fields", "text", "helps"),
    [
        ({"versions": {**VERSIONS, "mlx": "0.33.0"}}, "mlx differs: 0.32.4 on a; 0.33.0 on b", "mlx==0.33.0"),
        (
            {"versions": {**VERSIONS, "muster": "0.0.9"}},
            "muster differs",
            "on b, in the directory of muster 0.1.0: pip install .",
        ),
        (
            {"versions": {"mlx": "0.32.4", "muster": "0.1.0"}},
            "mlx-lm differs: 0.32.2 on a; missing on b",
            "==0.32.2, on b",
        ),
        ({"system": msgspec.structs.replace(linux().system, python="3.11.9")}, "Python differs: 3.11 on b", "3.12"),
    ],
)
def test_versions_that_ranks_would_refuse_are_found_before(fields: dict[str, Any], text: str, helps: str) -> None:
    checks = check_cluster(pair(*boxes(**fields)))
    check = next(check for check in checks if check.name == "versions" and check.verdict is FAILURE)
    assert text in check.evidence
    assert helps in check.help


@pytest.mark.parametrize(
    ("fields", "verdict", "evidence_text"),
    [
        ({"device": "cpu"}, WARNING, "although there is RTX 4090"),
        ({"device": "gpu"}, Verdict.OK, "on the GPU"),
        ({"device": "cpu", "gpus": ()}, Verdict.OK, "on the CPU"),
    ],
)
def test_where_mlx_runs_is_said_of_each_node(fields: dict[str, Any], verdict: Verdict, evidence_text: str) -> None:
    check = the(check_cluster(pair(*boxes(**fields))), "mlx runs")
    assert (check.node, check.verdict, evidence_text in check.evidence) == ("b", verdict, True)


def test_a_clock_that_is_off_is_said_of_its_node() -> None:
    checks = check_cluster(pair(*boxes(), clocks=(NodeClock(node=B, offset_ns=-3_200_000_000, error_ns=400_000),)))
    check = the(checks, "clocks")
    assert (check.node, check.verdict, check.evidence) == ("b", WARNING, "3.2 s behind the coordinator's")


def test_cloned_machines_are_told_from_workers_of_one() -> None:
    a, b = boxes()
    cloned = evidence(joined(a, machine="same"), joined(b, machine="same"), facts=(a, b))
    assert the(check_cluster(cloned), "machine id").verdict is WARNING
    one = {"machine": "same", "hostname": "host", "network_id": "stack"}
    together = evidence(joined(a, **one), joined(linux("b", "10.0.0.1"), **one), facts=(a, linux("b", "10.0.0.1")))
    checks = check_cluster(together)
    assert the(checks, "machine id").verdict is Verdict.OK
    assert "duplicate address" not in wrong(checks)


def test_two_machines_with_one_address_are_found() -> None:
    a, b = linux("a", "10.0.0.1"), linux("b", "10.0.0.1")
    check = the(check_cluster(pair(a, b)), "duplicate address")
    assert (check.verdict, "10.0.0.1 is an address of a and of b" in check.evidence) == (FAILURE, True)
    namesakes = [joined(one, hostname="mac", network_id="") for one in (a, b)]
    assert the(check_cluster(evidence(*namesakes, facts=(a, b))), "duplicate address").verdict is FAILURE
    bridges = (interface("eth0", "10.0.0.2"), interface("docker0", "172.17.0.1", "virtual"))
    a, b = linux("a", interfaces=(interface("eth0", "10.0.0.1"), bridges[1])), linux("b", interfaces=bridges)
    assert "duplicate address" not in wrong(check_cluster(pair(a, b)))


def test_nodes_without_a_backend_in_common_are_found() -> None:
    check = next(c for c in check_cluster(pair(*boxes(backends=("jaccl",)))) if "no backend" in c.evidence)
    assert "jaccl on b; ring on a" in check.evidence


def test_a_node_that_tells_nothing_and_facts_of_another_boot_are_the_same() -> None:
    a, b = boxes()
    old = msgspec.structs.replace(b, boot=BootId("old"))
    for facts in ((a,), (a, old)):
        assert the(check_cluster(evidence(joined(a), joined(b), facts=facts)), "facts").node == "b"
    assert "a standby does not" in the(check_cluster(evidence(joined(a), joined(b), facts=())), "facts").evidence


# --- links -------------------------------------------------------------------------------------------------------


def link_check(name: str, seen: Evidence) -> Check:
    return the(check_cluster(seen), name)


def test_a_directed_link_says_which_way_it_goes() -> None:
    one_way = measured("b", "10.0.0.1", "10.0.0.2", dialled_back=False, error="timed out")
    nothing = measured("a", "10.0.0.2", "10.0.0.1", reached=False, error="timed out")
    check = link_check("directed link", pair(*boxes(), links("a", one_way), links("b", nothing)))
    assert check.verdict is FAILURE
    assert check.evidence.startswith("a reaches b at 10.0.0.2 (from 10.0.0.1), b does not reach a back: timed out")
    assert "firewall of a" in check.help


def test_what_was_measured_towards_an_earlier_boot_is_past() -> None:
    old = measured("b", "10.0.0.1", "10.0.0.2", dialled_back=False, other_boot=BootId("old"))
    assert "directed link" not in wrong(check_cluster(pair(*boxes(), links("a", old), links("b"))))


def test_a_directed_pair_beside_one_that_works_is_only_a_warning() -> None:
    a = linux("a", interfaces=(interface("eth0", "10.0.0.1"), interface("eth1", "10.0.1.1")))
    b = linux("b", interfaces=(interface("eth0", "10.0.0.2"), interface("eth1", "10.0.1.2")))
    found = (
        links("a", measured("b", "10.0.0.1", "10.0.0.2"), measured("b", "10.0.1.1", "10.0.1.2", dialled_back=False)),
        links("b", measured("a", "10.0.0.2", "10.0.0.1")),
    )
    assert link_check("directed link", pair(a, b, *found)).verdict is WARNING


def silent(error: str) -> tuple[NodeLinks, NodeLinks]:
    return (
        links("a", measured("b", "10.0.0.1", "10.0.0.2", reached=False, error=error)),
        links("b", measured("a", "10.0.0.2", "10.0.0.1", reached=False, error=error)),
    )


def test_nodes_that_do_not_reach_each_other_are_named_and_a_firewall_is_suspected() -> None:
    closed = msgspec.structs.replace(linux().system, firewall="on")
    check = link_check("no link", pair(*boxes(system=closed), *silent("timed out")))
    assert (check.verdict, check.evidence.startswith("a and b: ")) == (FAILURE, True)
    assert check.help == "Let muster's ports through the firewall of b"


def test_a_mac_that_may_not_use_the_local_network_is_told_where_to_allow_it() -> None:
    a, b = mac("a", 1), linux("b", "10.0.0.2")
    check = link_check("no link", pair(a, b, *silent("[Errno 65] No route to host")))
    assert check.help == "On a: System Settings > Privacy & Security > Local Network, allow the terminal"


def test_nodes_without_a_common_network_are_told_to_connect() -> None:
    a, b = boxes(host="192.168.7.2")
    check = link_check("no common network", pair(a, b, links("a"), links("b")))
    assert check.evidence.startswith("a is in 10.0.0.0/24, b in 192.168.7.0/24")
    assert "Connect both to one network" in check.help


def test_a_worker_that_offers_loopback_only_is_told_to_give_an_address() -> None:
    a, b = boxes(interfaces=(interface("lo", "127.0.0.1", "loopback"),))
    check = link_check("no link", pair(a, b, links("a"), links("b")))
    assert "no network in common" in check.evidence
    assert check.help == "Start the worker of b with --address, an address that the others reach it at"


def test_wifi_or_a_vpn_between_nodes_is_a_warning() -> None:
    a, b = boxes(interfaces=(interface("wlan0", "10.0.0.2", "wifi"),))
    check = link_check("slow link", pair(a, b))
    assert check.evidence == "a and b reach each other over Wi-Fi only (10.0.0.1 - 10.0.0.2, 900 Mbit/s)"


def test_a_link_far_below_its_claim_is_a_warning_and_a_good_one_is_not() -> None:
    fast = (interface("eth0", "10.0.0.2", mbps=10_000, mtu=1500),)
    assert "link speed" not in wrong(check_cluster(pair(*boxes(interfaces=fast))))  # the other end claims 1000
    slow = measured("b", "10.0.0.1", "10.0.0.2", mbps_out=94.0, mbps_in=900.0)
    check = link_check("link speed", pair(*boxes(), links("a", slow), links("b")))
    assert check.evidence == "a and b (eth0 - eth0): 94 Mbit/s measured, 1,000 claimed"


def test_an_mtu_that_differs_says_which_to_change_to_what() -> None:
    jumbo = (interface("eth7", "10.0.0.2", mbps=1000, mtu=9000),)
    check = link_check("mtu", pair(*boxes(interfaces=jumbo)))
    assert "a eth0 has an MTU of 1500, b eth7 of 9000" in check.evidence
    assert check.help == "On b: sudo ip link set eth7 mtu 1500"


def test_nothing_measured_yet_says_how_to() -> None:
    a, b = boxes()
    checks = check_cluster(evidence(joined(a), joined(b), facts=(a, b)))
    assert any(check.evidence == "a, b measured nothing yet" and "--measure" in check.help for check in checks)


def test_a_pair_of_macs_with_everything_on_is_fine() -> None:
    a, b = mac("a", 1), mac("b", 2)
    found = (
        links("a", measured("b", "10.99.2.1", "10.99.2.2", mbps_out=30_000.0, mbps_in=30_000.0)),
        links("b", measured("a", "10.99.2.2", "10.99.2.1", mbps_out=30_000.0, mbps_in=30_000.0)),
    )
    checks = check_cluster(pair(a, b, *found))
    assert wrong(checks) == {}
    assert the(checks, "rdma").node == "a, b"
    assert the(checks, "rdma cables").evidence == "a, b: each is cabled to each other"


def test_macs_that_are_not_cabled_to_each_other_are_named() -> None:
    facts = [mac(name, number) for name, number in (("a", 1), ("b", 2), ("c", 7))]
    checks = check_cluster(evidence(*map(joined, facts), facts=tuple(facts)))
    check = the(checks, "rdma cables")
    assert (check.verdict, "c" in check.evidence, "cable" in check.help) == (WARNING, True, True)


def test_many_nodes_that_are_fine_take_one_line_each_kind_and_what_is_wrong_comes_first() -> None:
    facts = [linux(f"n{n}", f"10.0.0.{n}", memory_available_bytes=n * 2**30) for n in range(1, 8)]
    facts[3] = linux("n4", "10.0.0.4", memory_pressure="critical")
    checks = check_cluster(evidence(*map(joined, facts), facts=tuple(facts)))
    fine = [check for check in checks if check.verdict is Verdict.OK]
    assert len({check.name for check in fine}) == len(fine)
    (memory,) = [check for check in fine if check.name == "memory"]
    assert memory.evidence.startswith("n1: 1.0 GiB of 64.0 GiB available; n2: 2.0 GiB")
    assert memory.evidence.endswith("; and 2 more")
    assert [check.verdict for check in checks] == sorted(
        (check.verdict for check in checks), key=["FAILURE", "WARNING", "OK"].index
    )
