"""The facts of a Linux machine: which file or tool says what."""

from __future__ import annotations

import ctypes
from pathlib import Path

import msgspec

from muster.facts import Gpu, NodeFacts, Pressure, Rdma, System
from muster.probe import linux_buses
from muster.probe.interfaces import interfaces
from muster.probe.linux_system import (
    parse_cpuinfo,
    parse_nvidia_smi,
    parse_os_release,
    parse_pressure,
    parse_ufw,
    pressure_of,
)
from muster.probe.reading import Unknowns, Unread
from muster.probe.tools import Tools

#: `nvidia-smi` wakes the GPU where nothing keeps the driver loaded.
_NVIDIA_SECONDS = 10.0
_NVIDIA = ("nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits")
#: What ntp_adjtime(3) answers while no server disciplines the clock, and room for its struct timex (208 bytes).
_TIME_ERROR = 5
_TIMEX_BYTES = 512


def add(facts: NodeFacts, tools: Tools, unknown: Unknowns) -> NodeFacts:
    """Add what this machine's kernel and files say."""
    release = _read("/etc/os-release")
    name, version = unknown.take(
        "os", release if isinstance(release, Unread) else parse_os_release(release), ("Linux", "")
    )
    cpu = _read("/proc/cpuinfo")
    found = gpus(tools)
    if not isinstance(found, Unread) or "is not on this machine" not in found.reason:
        facts = msgspec.structs.replace(facts, gpus=unknown.take("gpus", found, ()))
    return msgspec.structs.replace(
        facts,
        os=name,
        os_version=version,
        chip=unknown.take("chip", cpu if isinstance(cpu, Unread) else parse_cpuinfo(cpu), ""),
        memory_pressure=unknown.take(
            "memory_pressure", pressure(facts.memory_total_bytes, facts.memory_available_bytes), "unknown"
        ),
        interfaces=interfaces(),
        thunderbolt=unknown.take("thunderbolt", linux_buses.read_thunderbolt(), ()),
        rdma=Rdma(devices=linux_buses.read_infiniband()),
        system=_system(facts.system, unknown),
    )


def gpus(tools: Tools) -> tuple[Gpu, ...] | Unread:
    """NVIDIA's GPUs, with what is free of their memory now."""
    printed = tools.run(_NVIDIA, _NVIDIA_SECONDS)
    return printed if isinstance(printed, Unread) else parse_nvidia_smi(printed)


def pressure(total_bytes: int, available_bytes: int) -> Pressure | Unread:
    """How short memory is now."""
    stall = _read("/proc/pressure/memory")
    return pressure_of(stall if isinstance(stall, Unread) else parse_pressure(stall), total_bytes, available_bytes)


def _system(system: System, unknown: Unknowns) -> System:
    conf = _read("/etc/ufw/ufw.conf")
    on = conf if isinstance(conf, Unread) else parse_ufw(conf)
    if isinstance(on, Unread):
        unknown.reasons["system.firewall"] = "there is no ufw; other rules of the kernel were not looked at"
    synchronised: bool | Unread | None = clock_synchronised()
    unknown.reasons["system.sleep_minutes"] = "not looked at on Linux, where servers do not sleep by themselves"
    return msgspec.structs.replace(
        system,
        firewall="unknown" if isinstance(on, Unread) else "on" if on else "off",
        firewall_detail="" if isinstance(on, Unread) else "ufw",
        clock_synchronised=unknown.take("system.clock_synchronised", synchronised, None),
    )


def clock_synchronised() -> bool | Unread:
    """Whether a time server disciplines the kernel's clock; only asks, changes nothing (adjtimex(2), modes 0)."""
    try:
        adjust = ctypes.CDLL(None, use_errno=True).ntp_adjtime
    except (OSError, AttributeError):
        return Unread("this C library has no ntp_adjtime")
    answer = int(adjust(ctypes.create_string_buffer(_TIMEX_BYTES)))
    return Unread(f"ntp_adjtime failed with errno {ctypes.get_errno()}") if answer < 0 else answer != _TIME_ERROR


def _read(path: str) -> str | Unread:
    try:
        return Path(path).read_text(errors="replace")
    except OSError as error:
        return Unread(f"{path} cannot be read: {error.strerror or error}")
