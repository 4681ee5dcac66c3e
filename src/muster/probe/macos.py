"""The facts of a Mac: which of its tools says what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from muster.facts import Gpu, NodeFacts, Pressure, Rdma, RdmaDevice, System
from muster.probe.interfaces import interfaces
from muster.probe.macos_network import parse_hardware_ports, parse_ifconfig
from muster.probe.macos_rdma import parse_ibv_devices, parse_ibv_devinfo, parse_rdma_ctl
from muster.probe.macos_system import (
    Hardware,
    parse_firewall,
    parse_hardware,
    parse_pmset,
    parse_sw_vers,
    parse_sysctl,
    pressure_of,
    wired_limit_of,
)
from muster.probe.macos_thunderbolt import parse_thunderbolt
from muster.probe.reading import Unknowns, Unread, number
from muster.probe.tools import Tools

#: `system_profiler` asks drivers, and takes a second or more where one of them is slow.
PROFILER_SECONDS = 10.0
FIREWALL = "/usr/libexec/ApplicationFirewall/socketfilterfw"
PRESSURE = "kern.memorystatus_vm_pressure_level"

T = TypeVar("T")


def add(facts: NodeFacts, tools: Tools, unknown: Unknowns) -> NodeFacts:
    """Add what this Mac's tools say."""
    name, version = unknown.take("os", _ask(tools, ("sw_vers",), parse_sw_vers, once=True), ("macOS", ""))
    names = ("machdep.cpu.brand_string", "hw.memsize", "iogpu.wired_limit_mb", PRESSURE)
    nothing: dict[str, str] = {}
    values = unknown.take("sysctl", _ask(tools, ("sysctl", *names), parse_sysctl), nothing)
    hardware = Hardware(chip=values.get("machdep.cpu.brand_string", ""))
    if not hardware.chip:
        command = ("system_profiler", "SPHardwareDataType", "-json")
        hardware = unknown.take(
            "chip", _ask(tools, command, parse_hardware, seconds=PROFILER_SECONDS, once=True), hardware
        )
    memory = number(values.get("hw.memsize", "")) or hardware.memory_bytes or facts.memory_total_bytes
    facts = msgspec.structs.replace(
        facts,
        os=name,
        os_version=version,
        chip=hardware.chip,
        memory_total_bytes=memory,
        memory_pressure=unknown.take("memory_pressure", pressure_of(values), "unknown"),
        gpus=(Gpu(name=hardware.chip),) if hardware.chip.startswith("Apple") else (),
        system=_system(facts.system, tools, unknown),
    )
    if facts.gpus:
        limit: int | Unread | None = wired_limit_of(values, memory)
        facts = msgspec.structs.replace(facts, wired_limit_bytes=unknown.take("wired_limit_bytes", limit, None))
    return _with_network(facts, tools, unknown)


def wired_limit(tools: Tools, memory_bytes: int) -> int | Unread:
    """What the GPU may wire now: an administrator may change it while everything runs."""
    values = _ask(tools, ("sysctl", "iogpu.wired_limit_mb"), parse_sysctl)
    return values if isinstance(values, Unread) else wired_limit_of(values, memory_bytes)


def pressure(tools: Tools) -> Pressure | Unread:
    """How short memory is now."""
    values = _ask(tools, ("sysctl", PRESSURE), parse_sysctl)
    return values if isinstance(values, Unread) else pressure_of(values)


def _system(system: System, tools: Tools, unknown: Unknowns) -> System:
    firewall, detail = unknown.take(
        "system.firewall", _ask(tools, (FIREWALL, "--getglobalstate"), parse_firewall), ("unknown", "")
    )
    minutes: int | Unread | None = _ask(tools, ("pmset", "-g"), parse_pmset)
    unknown.reasons["system.clock_synchronised"] = "macOS tells it to administrators only"
    return msgspec.structs.replace(
        system,
        firewall=firewall,
        firewall_detail=detail,
        sleep_minutes=unknown.take("system.sleep_minutes", minutes, None),
        blas=system.blas or "Accelerate",
    )


def _with_network(facts: NodeFacts, tools: Tools, unknown: Unknowns) -> NodeFacts:
    nothing: dict[str, str] = {}
    ports = unknown.take(
        "hardware_ports", _ask(tools, ("networksetup", "-listallhardwareports"), parse_hardware_ports), nothing
    )
    shown = _ask(tools, ("ifconfig", "-a"), lambda text: parse_ifconfig(text, ports))
    command = ("system_profiler", "SPThunderboltDataType", "-json")
    thunderbolt = unknown.take(
        "thunderbolt",
        _ask(tools, command, lambda text: parse_thunderbolt(text, ports, facts.chip), seconds=PROFILER_SECONDS),
        (),
    )
    return msgspec.structs.replace(
        facts,
        interfaces=unknown.take("interfaces", shown, ()) or interfaces(),
        thunderbolt=thunderbolt,
        rdma=_rdma(tools, unknown),
    )


def _rdma(tools: Tools, unknown: Unknowns) -> Rdma:
    """Where `rdma_ctl` is missing, macOS is older than 26.2, and there is nothing more to ask."""
    enabled: bool | Unread | None = _ask(tools, ("rdma_ctl", "status"), parse_rdma_ctl)
    if isinstance(enabled, Unread) or not enabled:
        return Rdma(enabled=unknown.take("rdma", enabled, None))
    names = _ask(tools, ("ibv_devices",), parse_ibv_devices)
    if isinstance(names, Unread) or not names:
        unknown.take("rdma.devices", names, ())
        return Rdma(enabled=True)
    shown = _ask(tools, ("ibv_devinfo", "-v"), parse_ibv_devinfo)
    known: Mapping[str, RdmaDevice] = {one.name: one for one in unknown.take("rdma.devices", shown, ())}
    devices = [
        known.get(name, RdmaDevice(name=name, interface=name.removeprefix("rdma_"), active=False)) for name in names
    ]
    return Rdma(enabled=True, devices=tuple(devices))


def _ask(
    tools: Tools,
    command: Sequence[str],
    parse: Callable[[str], T | Unread],
    *,
    seconds: float = 5.0,
    once: bool = False,
) -> T | Unread:
    printed = tools.run(command, seconds, once=once)
    return printed if isinstance(printed, Unread) else parse(printed)
