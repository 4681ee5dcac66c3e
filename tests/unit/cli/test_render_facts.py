"""What `muster nodes NODE` shows of a machine."""

from __future__ import annotations

import msgspec
from cluster_states import BOOT, node, state, text_of

from muster.cli import documents
from muster.cli.render_facts import node_details
from muster.facts import (
    Disk,
    Gpu,
    HeldModel,
    Interface,
    NodeFacts,
    Rdma,
    RdmaDevice,
    System,
    ThunderboltPort,
)
from muster.protocol import Beat
from muster.spec import NodeAddress, NodeId

GIB = 2**30
MAC = NodeFacts(
    node=NodeId("a"),
    boot=BOOT,
    chip="Apple M4 Max",
    architecture="arm64",
    cores=16,
    os="macOS",
    os_version="26.2",
    memory_total_bytes=128 * GIB,
    memory_available_bytes=98 * GIB,
    memory_pressure="normal",
    wired_limit_bytes=96 * GIB,
    memory_gbps=412.3,
    gpus=(Gpu(name="Apple M4 Max"),),
    disks=(Disk(path="/var/muster", total_bytes=500 * GIB, free_bytes=200 * GIB),),
    backends=("ring", "jaccl"),
    versions={"mlx": "0.32.4"},
    interfaces=(
        Interface(
            name="en0",
            kind="ethernet",
            up=True,
            mbps=10_000,
            mtu=1500,
            addresses=(NodeAddress(host="10.0.1.21", network="10.0.1.0/24"),),
        ),
        Interface(name="bridge0", kind="bridge", up=False, members=("en2", "en4")),
        Interface(name="anpi0", kind="other", up=False),
    ),
    thunderbolt=(
        ThunderboltPort(port="2", domain="A2", peer_domain="B1", peer_name="x", generation=5, gbps=80, interface="en3"),
        ThunderboltPort(port="3", domain="A3", peer_name="TS4", generation=5, gbps=40, interface="en4"),
    ),
    rdma=Rdma(enabled=True, devices=(RdmaDevice(name="rdma_en3", interface="en3", active=True, ipv4_gid=False),)),
    models=(HeldModel(model="mlx-community/x", path="/models/x", revision="0123456789abcdef", bytes=3 * GIB),),
    system=System(firewall="off", sleep_minutes=1, open_files=256, blas="Accelerate"),
    unknown={"system.clock_synchronised": "macOS tells it to administrators only"},
)
OTHER = NodeFacts(node=NodeId("b"), boot=BOOT, thunderbolt=(ThunderboltPort(port="1", domain="B1", peer_domain="A2"),))


def test_everything_about_a_machine_is_shown() -> None:
    seen = state(nodes=(node("a"), node("b")))
    facts = {NodeId("a"): MAC, NodeId("b"): OTHER}
    beat = Beat(node=NodeId("a"), boot=BOOT, memory_available_bytes=90 * GIB)
    lines = text_of(node_details(seen, seen.nodes[NodeId("a")], facts, beat), width=140).splitlines()
    shown = [" ".join(line.split()) for line in lines]
    for line in (
        "chip Apple M4 Max, 16 cores, arm64",
        "system macOS 26.2",
        "memory 90.0 GiB free of 128.0 GiB, pressure normal, the GPU may wire 96.0 GiB, copied at 412 GB/s",
        "disk 200.0 GiB free of 500.0 GiB under /var/muster",
        "settings firewall off, sleeps after 1 min, 256 open files, Accelerate",
        "en0 ethernet up 10.0 Gbit/s 1500 10.0.1.21/24",
        "bridge0 bridge down of en2, en4",
        "port 2 5 80 Gbit/s en3 port 1 of node b",
        "port 3 5 40 Gbit/s en4 TS4",
        "rdma_en3 en3 active no",
        "mlx-community/x 3.0 GiB 0123456789ab whole",
        "not known: system.clock synchronised: macOS tells it to administrators only",
    ):
        assert line in shown
    assert not any("anpi0" in line for line in shown)


def test_a_node_that_is_lost_or_has_told_nothing_is_shown_without() -> None:
    gone = node("a", lost="no heartbeat")
    seen = state(nodes=(gone,))
    for facts in ({NodeId("a"): MAC}, {}):
        shown = text_of(node_details(seen, gone, facts))
        assert "nothing is told of its machine" in shown
        assert "Apple" not in shown


def test_programs_get_the_facts_too() -> None:
    seen = state(nodes=(node("a"), node("b", lost="no heartbeat")))
    first, second = (
        documents.node_document(seen, one, {}, facts={NodeId("a"): MAC, NodeId("b"): OTHER})
        for one in seen.nodes.values()
    )
    assert msgspec.convert(first["facts"], NodeFacts) == MAC
    assert second["facts"] is None
    assert documents.node_document(seen, seen.nodes[NodeId("a")], {})["facts"] is None
