"""The doctor on single machines: healthy ones are left alone, and each fault is named with what helps."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from patients import BOOT, GIB, VERSIONS, interface, linux, mac, the, wrong

from muster.doctor.checks import Verdict
from muster.doctor.machine import check_machine
from muster.facts import Disk, NodeFacts, Rdma, RdmaDevice, System
from muster.spec import NodeAddress, NodeId

FAILURE, WARNING = Verdict.FAILURE, Verdict.WARNING


@pytest.mark.parametrize("facts", [linux(), mac(), mac(generation=4), mac(thunderbolt=(), rdma=Rdma())])
def test_a_healthy_machine_needs_nothing(facts: NodeFacts) -> None:
    checks = check_machine(facts)
    assert wrong(checks) == {}
    assert {"system", "python", "mlx", "memory", "disk", "network", "rdma"} <= {check.name for check in checks}


def system(**fields: Any) -> System:
    healthy = System(python="3.12.4", open_files=65_536, firewall="off", sleep_minutes=0, clock_synchronised=True)
    return msgspec.structs.replace(healthy, **fields)


@pytest.mark.parametrize(
    ("facts", "name", "verdict", "evidence", "helps"),
    [
        (linux(system=system(python="3.10.12")), "python", FAILURE, "3.10.12", "uv python install"),
        (linux(versions={"mlx": "0.31.0", "mlx-lm": "0.32.2"}), "mlx", FAILURE, "0.32.1", "mlx[cuda]"),
        (linux(versions={"mlx": "0.32.4"}), "mlx-lm", FAILURE, "not installed", "pip install --upgrade mlx-lm"),
        (linux(backends=()), "backends", FAILURE, "none", "mlx[cuda]"),
        (linux(gpus=(), system=system(blas="reference BLAS")), "blas", WARNING, "reference", "libopenblas0-pthread"),
        (linux(memory_pressure="critical"), "memory", FAILURE, "50.0 GiB of 64.0 GiB", "--memory"),
        (linux(memory_pressure="warning"), "memory", WARNING, "under pressure", "--memory"),
        (linux(disks=(Disk(path="/x", total_bytes=GIB, free_bytes=9),)), "disk", FAILURE, "at /x", "df -h /x"),
        (linux(disks=(Disk(path="/x", total_bytes=GIB, free_bytes=5 * GIB),)), "disk", WARNING, "5.0 GiB", "hf cache"),
        (linux(system=system(open_files=64)), "file limit", FAILURE, "64", "ulimit -n"),
        (linux(system=system(open_files=256)), "file limit", WARNING, "256", "ulimit -n"),
        (linux(system=system(firewall="on", firewall_detail="ufw")), "firewall", WARNING, "(ufw)", "--ports"),
        (mac(system=system(firewall="on")), "firewall", WARNING, "lets Python in", "socketfilterfw --add"),
        (mac(system=system(sleep_minutes=10)), "sleep", WARNING, "10 min", "sudo pmset -a sleep 0"),
        (linux(system=system(sleep_minutes=20)), "sleep", WARNING, "20 min", "systemctl mask"),
        (linux(system=system(clock_synchronised=False)), "clock", WARNING, "NTP", "timedatectl"),
        (
            mac(wired_limit_bytes=20 * GIB),
            "wired limit",
            WARNING,
            "20.0 GiB of 128.0 GiB",
            "iogpu.wired_limit_mb=98304",
        ),
        (mac(wired_limit_bytes=127 * GIB), "wired limit", WARNING, "nothing is left", "iogpu.wired_limit_mb=0"),
        (mac(architecture="x86_64"), "system", FAILURE, "Rosetta", "arm64"),
        (
            mac(architecture="x86_64", chip="Intel(R) Core(TM) i7"),
            "system",
            FAILURE,
            "Apple silicon",
            "another machine",
        ),
        (mac(os_version="13.6"), "system", FAILURE, "macOS 14", "softwareupdate"),
        (linux(interfaces=()), "network", None, "", ""),
        (linux(interfaces=(interface("docker0", "172.17.0.1", "virtual"),)), "network", WARNING, "docker0", "cable"),
        (linux(interfaces=(interface("eth0", "169.254.3.4"),)), "network", WARNING, "link-local", "fixed IPv4"),
        (linux(interfaces=(interface("wlan0", "10.0.0.3", "wifi"),)), "wi-fi", WARNING, "wlan0", "Ethernet"),
        (
            mac(interfaces=(interface("en0", "10.0.0.1"), interface("en1", "10.0.0.7", "wifi"))),
            "same network",
            WARNING,
            "en0 (ethernet), en1 (wifi) are all in 10.0.0.0/24",
            "Turn en1 (Wi-Fi) off",
        ),
        (
            linux(interfaces=(interface("eth0", "10.0.0.1"), interface("eth1", "10.0.0.1"))),
            "duplicate address",
            FAILURE,
            "10.0.0.1 is on eth0 and on eth1",
            "from eth1",
        ),
    ],
)
def test_each_fault_is_named_with_what_helps(
    facts: NodeFacts, name: str, verdict: Verdict | None, evidence: str, helps: str
) -> None:
    checks = check_machine(facts)
    found = [check for check in checks if check.name == name and check.verdict is verdict]
    assert len(found) == (verdict is not None), checks
    assert all(evidence in check.evidence and helps in check.help for check in found), found


# --- RDMA -------------------------------------------------------------------------------------------------------


def with_device(**fields: Any) -> Rdma:
    device = RdmaDevice(name="rdma_en2", interface="en2", active=True, ipv4_gid=True)
    return Rdma(enabled=True, devices=(msgspec.structs.replace(device, **fields),))


def with_bridge(facts: NodeFacts) -> NodeFacts:
    bridge = interface("bridge0", "169.254.1.1", "bridge", members=("en2", "en3"))
    return msgspec.structs.replace(facts, interfaces=(*facts.interfaces, bridge))


def test_thunderbolt_4_is_told_that_it_never_can_and_sent_nowhere() -> None:
    check = the(check_machine(mac(generation=4, rdma=Rdma(enabled=True))), "rdma")
    assert check.verdict is Verdict.OK
    assert "Thunderbolt 4 can never do RDMA, although rdma_ctl says enabled" in check.evidence
    assert "Nothing to set" in check.help
    off = the(check_machine(mac(generation=4, rdma=Rdma(enabled=False))), "rdma")
    assert "rdma_ctl enable" not in off.help


@pytest.mark.parametrize(
    ("facts", "name", "verdict", "evidence", "helps"),
    [
        (mac(rdma=Rdma(enabled=False)), "rdma", WARNING, "disabled", "Recovery mode"),
        (mac(os_version="26.1"), "rdma", WARNING, "26.2", "softwareupdate"),
        (mac(rdma=Rdma()), "rdma", WARNING, "not known", "rdma_ctl status"),
        (mac(rdma=Rdma(enabled=True)), "rdma", FAILURE, "ibv_devices shows no device", "reboot"),
        (mac(rdma=with_device(active=False)), "rdma", WARNING, "none of rdma_en2", "cable"),
        (mac(rdma=with_device(ipv4_gid=False)), "rdma gid", FAILURE, "errno 22", "sudo ifconfig en2 inet 10.99.2.1"),
        (with_bridge(mac()), "thunderbolt bridge", FAILURE, "bridge0 is up with en2", '"Thunderbolt Bridge" off'),
    ],
)
def test_rdma_that_could_be_is_brought_on_step_by_step(
    facts: NodeFacts, name: str, verdict: Verdict, evidence: str, helps: str
) -> None:
    checks = check_machine(facts)
    assert wrong(checks) == {name: verdict}
    check = next(check for check in checks if check.name == name and check.verdict is verdict)
    assert evidence in check.evidence
    assert helps in check.help


def test_a_bridge_explains_a_missing_gid_and_is_no_fault_without_rdma() -> None:
    assert wrong(check_machine(with_bridge(mac(rdma=with_device(ipv4_gid=False))))) == {"thunderbolt bridge": FAILURE}
    assert wrong(check_machine(with_bridge(mac(generation=4)))) == {}


def test_a_slow_cable_between_thunderbolt_5_ports_is_noticed() -> None:
    port = msgspec.structs.replace(mac().thunderbolt[0], gbps=40)
    check = the(check_machine(mac(thunderbolt=(port,))), "thunderbolt speed")
    assert (check.verdict, "40 Gb/s" in check.evidence) == (WARNING, True)


# --- what is not known -------------------------------------------------------------------------------------------


def test_a_container_without_tools_says_what_it_does_not_know_and_fails_nothing() -> None:
    facts = NodeFacts(
        node=NodeId("box"),
        boot=BOOT,
        versions=VERSIONS,
        backends=("ring",),
        unknown={"system.firewall": "ufw is not on this machine", "interfaces": "/sys is not there"},
    )
    checks = check_machine(facts)
    assert wrong(checks) == {}
    assert "interfaces: /sys is not there; system.firewall: ufw" in the(checks, "not found out").evidence


def test_every_field_may_be_missing() -> None:
    """A machine of which nothing is known but that it exists."""
    assert wrong(check_machine(NodeFacts(node=NodeId("x"), boot=BOOT))) == {"mlx": FAILURE, "mlx-lm": FAILURE}


def test_what_is_wrong_says_what_helps_in_one_line() -> None:
    address = NodeAddress(host="10.0.0.1", network="10.0.0.0/24")
    bad = msgspec.structs.replace(
        mac(rdma=with_device(ipv4_gid=False), wired_limit_bytes=1, memory_pressure="critical", versions={}),
        system=System(python="3.9", open_files=10, firewall="on", sleep_minutes=3, clock_synchronised=False),
        interfaces=(msgspec.structs.replace(interface("en0"), addresses=(address, address)),),
    )
    for check in check_machine(bad):
        assert check.verdict is Verdict.OK or check.help
        assert "\n" not in check.evidence + check.help
        assert not check.evidence.endswith(".")
