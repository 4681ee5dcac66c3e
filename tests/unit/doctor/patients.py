"""Machines and clusters that the doctor is shown, as their facts describe them."""

from __future__ import annotations

from typing import Any

from muster.doctor.checks import Check, Verdict
from muster.facts import Disk, Gpu, Interface, InterfaceKind, NodeFacts, Rdma, RdmaDevice, System, ThunderboltPort
from muster.links import Measured, NodeLinks
from muster.spec import BootId, NodeAddress, NodeId, NodeInfo
from muster.state import Node

BOOT = BootId("boot")
GIB = 2**30
VERSIONS = {"muster": "0.1.0", "mlx": "0.32.4", "mlx-lm": "0.32.2"}


def interface(name: str, host: str = "", kind: InterfaceKind = "ethernet", **fields: Any) -> Interface:
    network = host.rpartition(".")[0] + ".0/24"
    addresses = (NodeAddress(host=host, network=network),) if host else ()
    return Interface(name=name, kind=kind, up=True, addresses=addresses, **fields)


def linux(node: str = "box", host: str = "10.0.0.9", **fields: Any) -> NodeFacts:
    """A Linux machine with an NVIDIA card and nothing wrong."""
    defaults: dict[str, Any] = {
        "os": "Debian GNU/Linux",
        "os_version": "12",
        "architecture": "x86_64",
        "chip": "AMD Ryzen 9",
        "memory_total_bytes": 64 * GIB,
        "memory_available_bytes": 50 * GIB,
        "memory_pressure": "normal",
        "gpus": (Gpu(name="RTX 4090", memory_bytes=24 * GIB),),
        "disks": (Disk(path="/srv/muster", total_bytes=900 * GIB, free_bytes=500 * GIB),),
        "versions": VERSIONS,
        "backends": ("ring",),
        "interfaces": (interface("eth0", host, mbps=1000, mtu=1500),),
        "system": System(python="3.12.4", open_files=65_536, firewall="off", sleep_minutes=0, clock_synchronised=True),
    }
    return NodeFacts(node=NodeId(node), boot=BOOT, **{**defaults, **fields})


def mac(node: str = "mac", number: int = 1, *, generation: int = 5, **fields: Any) -> NodeFacts:
    """A Mac with a cable in its first Thunderbolt port, RDMA on, and nothing wrong."""
    port = ThunderboltPort(
        port="1",
        domain=f"domain-{number}",
        peer_domain=f"domain-{3 - number}",
        peer_name="the other Mac",
        generation=generation,
        gbps=80 if generation == 5 else 40,
        interface="en2",
    )
    device = RdmaDevice(name="rdma_en2", interface="en2", active=True, ipv4_gid=True)
    defaults: dict[str, Any] = {
        "os": "macOS",
        "os_version": "26.2",
        "architecture": "arm64",
        "chip": "Apple M4 Max",
        "memory_total_bytes": 128 * GIB,
        "memory_available_bytes": 100 * GIB,
        "memory_pressure": "normal",
        "wired_limit_bytes": 96 * GIB,
        "gpus": (Gpu(name="Apple M4 Max"),),
        "disks": (Disk(path="/Library/muster", total_bytes=900 * GIB, free_bytes=500 * GIB),),
        "versions": VERSIONS,
        "backends": ("ring", "jaccl"),
        "interfaces": (
            interface("en0", f"10.0.0.{number}", mbps=10_000, mtu=1500),
            interface("en2", f"10.99.2.{number}", "thunderbolt", mtu=9000),
        ),
        "thunderbolt": (port,),
        "rdma": Rdma(enabled=True, devices=(device,)) if generation == 5 else Rdma(),
        "system": System(python="3.12.4", open_files=65_536, firewall="off", sleep_minutes=0, blas="Accelerate"),
    }
    return NodeFacts(node=NodeId(node), boot=BOOT, **{**defaults, **fields})


def joined(facts: NodeFacts, *, lost: str | None = None, **fields: Any) -> Node:
    """The node of a machine with these facts."""
    addresses = tuple(address for one in facts.interfaces for address in one.addresses)
    defaults: dict[str, Any] = {
        "hostname": f"{facts.node}.local",
        "machine": f"machine-{facts.node}",
        "addresses": addresses[:1],
        "candidates": addresses,
        "versions": facts.versions,
        "network_id": f"stack-{facts.node}",
    }
    info = NodeInfo(
        node=facts.node,
        boot=facts.boot,
        pid=1,
        backends=facts.backends,
        memory_bytes=facts.memory_total_bytes,
        max_ranks=32,
        **{**defaults, **fields},
    )
    return Node(info=info, since_ns=1, lost=lost)


def measured(there: str, own: str, host: str, **fields: Any) -> Measured:
    """A pair of addresses on which everything was well, unless a field says otherwise."""
    defaults: dict[str, Any] = {"other_boot": BOOT, "reached": True, "dialled_back": True, "rtt_us": 200.0}
    if fields.get("reached") is not False:
        defaults |= {"mbps_out": 900.0, "mbps_in": 900.0}
    return Measured(other=NodeId(there), own=own, host=host, **{**defaults, **fields})


def links(node: str, *found: Measured) -> NodeLinks:
    return NodeLinks(node=NodeId(node), boot=BOOT, measured=found)


def wrong(checks: tuple[Check, ...]) -> dict[str, Verdict]:
    """The checks that are not OK, by name; the worst verdict of each."""
    found: dict[str, Verdict] = {}
    for check in checks:
        if check.verdict is not Verdict.OK and found.get(check.name) is not Verdict.FAILURE:
            found[check.name] = check.verdict
    return found


def the(checks: tuple[Check, ...], name: str) -> Check:
    """The one check of this name."""
    (found,) = [check for check in checks if check.name == name]
    return found
