"""The whole probe, with a Mac's tools played back, and on the machine that runs the tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import macos_samples as samples
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from macos_samples import ibv_devinfo

from muster.facts import Gpu, NodeFacts, Rdma, RdmaDevice
from muster.probe import (
    linux_system,
    macos,
    macos_network,
    macos_rdma,
    macos_system,
    macos_thunderbolt,
)
from muster.probe.collect import Subject, collect, disks, look_at_gpu, refresh
from muster.probe.interfaces import glance, interfaces
from muster.probe.reading import Unknowns, Unread
from muster.probe.tools import Tools
from muster.spec import BootId, NodeId

SUBJECT = Subject(node=NodeId("a"), boot=BootId("b"), backends=("ring",), memory_gbps=400.0)

TOOLS = {
    "sw_vers": samples.SW_VERS["26"],
    "sysctl": samples.SYSCTL,
    "networksetup": samples.HARDWARE_PORTS,
    "ifconfig": samples.IFCONFIG,
    "system_profiler": samples.CABLED_A,
    "rdma_ctl": "enabled\n",
    "ibv_devices": samples.IBV_DEVICES,
    "ibv_devinfo": ibv_devinfo("rdma_en2", "PORT_DOWN (1)") + ibv_devinfo("rdma_en3", "PORT_ACTIVE (4)", "fe80::1"),
    "pmset": samples.PMSET,
    macos.FIREWALL: "Firewall is disabled. (State = 0)\n",
}


class Recorded(Tools):
    """Plays back what tools printed; what is not recorded is missing."""

    def __init__(self, printed: Mapping[str, str | Unread]) -> None:
        super().__init__()
        self.printed = printed
        self.asked: list[str] = []

    def run(self, command: Sequence[str], seconds: float = 5.0, *, once: bool = False) -> str | Unread:
        self.asked.append(command[0])
        return self.printed.get(command[0], Unread(f"{command[0]} is not on this machine"))


def mac(**changes: str | Unread) -> tuple[NodeFacts, dict[str, str]]:
    """The facts of the recorded Mac, with some of its tools saying otherwise."""
    unknown = Unknowns()
    before = NodeFacts(node=NodeId("a"), boot=BootId("b"))
    return macos.add(before, Recorded({**TOOLS, **changes}), unknown), unknown.reasons


def test_a_mac_is_found_out_whole() -> None:
    facts, unknown = mac()
    assert (facts.chip, facts.os, facts.os_version) == ("Apple M4 Max", "macOS", "26.2")
    assert (facts.memory_total_bytes, facts.wired_limit_bytes) == (128 * 2**30, 96 * 2**30)
    assert (facts.memory_pressure, facts.gpus[0].name, facts.gpus[0].memory_bytes) == ("normal", "Apple M4 Max", None)
    assert [port.interface for port in facts.thunderbolt] == ["en2", "en3", "en4"]
    assert facts.rdma == Rdma(
        enabled=True,
        devices=(
            RdmaDevice(name="rdma_en2", interface="en2", active=False, ipv4_gid=False),
            RdmaDevice(name="rdma_en3", interface="en3", active=True, ipv4_gid=False),
        ),
    )
    assert (facts.system.firewall, facts.system.sleep_minutes, facts.system.blas) == ("off", 1, "Accelerate")
    assert {one.name: one.kind for one in facts.interfaces}["en3"] == "thunderbolt"
    assert set(unknown) == {"system.clock_synchronised"}


def test_rdma_that_is_off_or_has_no_devices_or_no_tool() -> None:
    facts, unknown = mac(rdma_ctl="disabled\n")
    assert facts.rdma == Rdma(enabled=False)
    assert "rdma" not in unknown
    facts, _ = mac(ibv_devices=samples.IBV_DEVICES_OFF)
    assert facts.rdma == Rdma(enabled=True)
    facts, unknown = mac(rdma_ctl=Unread("rdma_ctl is not on this machine"), sw_vers=samples.SW_VERS["15"])
    assert facts.rdma == Rdma()
    assert unknown["rdma"] == "rdma_ctl is not on this machine"
    facts, unknown = mac(ibv_devinfo=Unread("ibv_devinfo did not end within 5 s"))
    assert [device.name for device in facts.rdma.devices] == ["rdma_en2", "rdma_en3"]
    assert not any(device.active for device in facts.rdma.devices)
    assert unknown["rdma.devices"] == "ibv_devinfo did not end within 5 s"


def test_a_mac_whose_tools_say_nothing_still_has_facts_with_reasons() -> None:
    unknown = Unknowns()
    facts = macos.add(NodeFacts(node=NodeId("a"), boot=BootId("b")), Recorded({}), unknown)
    assert (facts.os, facts.chip, facts.thunderbolt, facts.rdma) == ("macOS", "", (), Rdma())
    assert facts.interfaces, "those that can be seen without tools"
    assert {"os", "sysctl", "chip", "thunderbolt", "hardware_ports", "interfaces", "rdma"} <= set(unknown.reasons)


def test_this_machine_is_found_out(tmp_path: Path) -> None:
    facts = collect(SUBJECT)
    assert facts.cores > 0
    assert 0 < facts.memory_available_bytes <= facts.memory_total_bytes
    assert (facts.backends, facts.memory_gbps) == (("ring",), 400.0)
    assert facts.os
    assert any(one.kind == "loopback" and one.up for one in facts.interfaces)
    for name in ("chip", "os"):
        assert getattr(facts, name) or name in facts.unknown
    again = refresh(facts, SUBJECT, Tools())
    assert again.interfaces == facts.interfaces
    assert again.memory_pressure in ("normal", "warning", "critical")
    (disk,) = disks((tmp_path / "not" / "made",))
    assert disk.path == str(tmp_path / "not" / "made")
    assert 0 < disk.free_bytes <= disk.total_bytes


def test_the_free_memory_of_a_gpu_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.probe.collect.psutil.MACOS", False)
    gpu = Gpu(name="NVIDIA RTX 4090", memory_bytes=24564 * 2**20, free_bytes=20000 * 2**20)
    facts = NodeFacts(node=NodeId("a"), boot=BootId("b"), gpus=(gpu,))

    def seen(printed: str | Unread) -> NodeFacts:
        return look_at_gpu(facts, Recorded({"nvidia-smi": printed}))

    assert seen("NVIDIA RTX 4090, 24564, 1203\n").gpus[0].free_bytes == 1203 * 2**20
    assert seen("NVIDIA RTX 4090, 24564, 19900\n") is facts, "so little is not worth telling"
    assert seen(Unread("nvidia-smi did not end within 10 s")) is facts
    assert [one.name for one in seen("NVIDIA A100, 24564, 20000\n").gpus] == ["NVIDIA A100"]
    shared = msgspec.structs.replace(facts, gpus=(Gpu(name="NVIDIA GB10"),))
    tools = Recorded({})
    assert look_at_gpu(shared, tools) is shared
    assert tools.asked == [], "it has no memory of its own"


def test_the_wired_limit_of_a_mac_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.probe.collect.psutil.MACOS", True)
    facts, _ = mac()
    seen = look_at_gpu(facts, Recorded({"sysctl": "iogpu.wired_limit_mb: 110000\n"}))
    assert seen == msgspec.structs.replace(facts, wired_limit_bytes=110000 * 2**20)
    assert look_at_gpu(facts, Recorded({"sysctl": "iogpu.wired_limit_mb: 0\n"})) == facts
    assert look_at_gpu(facts, Recorded({})) is facts


def test_a_glance_sees_what_interfaces_have() -> None:
    assert {name for name, *_ in glance()} == {one.name for one in interfaces()}
    assert glance() == glance()


def test_a_tool_is_run_with_a_deadline_and_what_stays_is_asked_once(tmp_path: Path) -> None:
    tools = Tools()
    late = tools.run((sys.executable, "-c", "import time; time.sleep(60)"), 0.2)
    assert isinstance(late, Unread)
    assert late.reason.endswith("did not end within 0.2 s")
    assert tools.run(("no-such-tool-of-muster",)) == Unread("no-such-tool-of-muster is not on this machine")
    failed = tools.run((sys.executable, "-c", "import sys; sys.exit('broken pipe of a pump')"), 20)
    assert isinstance(failed, Unread)
    assert "exit code 1: broken pipe of a pump" in failed.reason
    half = tools.run((sys.executable, "-c", "print('value: 1'); raise SystemExit(1)"), 20)
    assert half == "value: 1\n", "sysctl fails for one name and prints the others"
    count = f"open({str(tmp_path / 'n')!r}, 'a').write('x'); print('said')"
    for _ in range(2):
        assert tools.run((sys.executable, "-c", count), 20, once=True) == "said\n"
    assert (tmp_path / "n").read_text() == "x"


PARSERS: list[Callable[[str], object]] = [
    lambda text: macos_thunderbolt.parse_thunderbolt(text, {}),
    macos_network.parse_hardware_ports,
    macos_network.parse_ifconfig,
    macos_rdma.parse_rdma_ctl,
    macos_rdma.parse_ibv_devices,
    macos_rdma.parse_ibv_devinfo,
    macos_system.parse_hardware,
    macos_system.parse_sysctl,
    macos_system.parse_sw_vers,
    macos_system.parse_pmset,
    macos_system.parse_firewall,
    linux_system.parse_os_release,
    linux_system.parse_pressure,
    linux_system.parse_cpuinfo,
    linux_system.parse_nvidia_smi,
    linux_system.parse_ufw,
    linux_system.blas_of,
]
TEXTS = [text for text in TOOLS.values() if text] + [samples.INTEL, samples.HARDWARE]


@given(
    text=st.text(max_size=80),
    sample=st.sampled_from(TEXTS),
    cut=st.tuples(st.integers(0, 3000), st.integers(0, 200)),
)
def test_no_text_makes_a_parser_raise(text: str, sample: str, cut: tuple[int, int]) -> None:
    begin, length = cut
    torn = sample[:begin] + text + sample[begin + length :]
    for parse in PARSERS:
        for read in (text, torn):
            parse(read)


@pytest.mark.parametrize("parse", PARSERS[:-1])
def test_an_empty_text_has_a_reason(parse: Callable[[str], object]) -> None:
    found = parse("")
    assert isinstance(found, Unread)
    assert found.reason
