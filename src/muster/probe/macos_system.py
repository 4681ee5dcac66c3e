"""The system of a Mac, from `sysctl`, `sw_vers`, `pmset`, `socketfilterfw` and `system_profiler`. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from muster.facts import Pressure, Switch
from muster.probe.reading import Unread, number, unlike

_UNITS = {"MB": 2**20, "GB": 2**30, "TB": 2**40}
_PRESSURES: Mapping[str, Pressure] = {"1": "normal", "2": "warning", "4": "critical"}
#: Parts of the memory that the GPU may wire while nobody says otherwise: more where there is more than this.
_MUCH_MEMORY_BYTES = 36 * 2**30


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """What `SPHardwareDataType` says; "" and 0 where it does not."""

    chip: str = ""
    model: str = ""
    memory_bytes: int = 0


def parse_hardware(text: str) -> Hardware | Unread:
    """Chip, model and memory, from `system_profiler SPHardwareDataType -json`."""
    try:
        found = msgspec.json.decode(text, type=dict[str, list[dict[str, object]]])
    except (msgspec.DecodeError, RecursionError):
        return unlike("system_profiler SPHardwareDataType", text)
    for entry in found.get("SPHardwareDataType", []):
        memory = re.fullmatch(r"([0-9]{1,6}) (MB|GB|TB)", str(entry.get("physical_memory", "")))
        return Hardware(
            chip=str(entry.get("chip_type") or entry.get("cpu_type") or ""),
            model=str(entry.get("machine_model", "")),
            memory_bytes=0 if memory is None else int(memory[1]) * _UNITS[memory[2]],
        )
    return unlike("system_profiler SPHardwareDataType", text)


def parse_sysctl(text: str) -> dict[str, str] | Unread:
    """Names and values of `sysctl NAME …`; a name that the system does not have is not among them."""
    pairs = [line.partition(": ") for line in text.splitlines()]
    named = re.compile(r"\w+(\.\w+)+")
    found = {name: value.strip() for name, colon, value in pairs if colon and named.fullmatch(name)}
    return found or unlike("sysctl", text)


def pressure_of(values: Mapping[str, str]) -> Pressure | Unread:
    """The kernel's own verdict, kern.memorystatus_vm_pressure_level: 1, 2 or 4 (osfmk/kern/vm_pressure.h)."""
    value = values.get("kern.memorystatus_vm_pressure_level", "")
    return _PRESSURES.get(value) or unlike("sysctl kern.memorystatus_vm_pressure_level", value)


def wired_limit_of(values: Mapping[str, str], memory_bytes: int) -> int | Unread:
    """What the GPU may wire, in bytes: iogpu.wired_limit_mb, where 0 stands for the system's own share.

    That share is two thirds of the memory, and three quarters of more than 36 GiB, as Metal's recommended working set
    was seen to be on machines of each size.
    """
    value = values.get("iogpu.wired_limit_mb", "")
    limit = number(value)
    if limit is None:
        return unlike("sysctl iogpu.wired_limit_mb", value)
    if limit:
        return min(limit * 2**20, memory_bytes or limit * 2**20)
    return memory_bytes * 3 // 4 if memory_bytes > _MUCH_MEMORY_BYTES else memory_bytes * 2 // 3


def parse_sw_vers(text: str) -> tuple[str, str] | Unread:
    """Name and version of the system, from `sw_vers`: ("macOS", "26.2")."""
    pairs = [line.partition(":") for line in text.splitlines()]
    found = {name.strip(): value.strip() for name, _, value in pairs}
    if "ProductVersion" not in found:
        return unlike("sw_vers", text)
    return found.get("ProductName", "macOS"), found["ProductVersion"]


def parse_pmset(text: str) -> int | Unread:
    """After how many minutes the machine sleeps, from `pmset -g`; 0 is never."""
    match = re.search(r"^\s*sleep\s+([0-9]{1,9})", text, re.MULTILINE)
    return int(match[1]) if match is not None else unlike("pmset -g", text)


def parse_firewall(text: str) -> tuple[Switch, str] | Unread:
    """Whether the application firewall is on, and what it says, from `socketfilterfw --getglobalstate`.

    State 1 asks for every program, 2 blocks all that is not essential.
    """
    match = re.search(r"State\s*=\s*(\d)", text)
    words = text.lower()
    said = " ".join(text.split())
    if match is not None:
        return ("off" if match[1] == "0" else "on"), said
    if "enabled" in words or "blocking all" in words:
        return "on", said
    return ("off", said) if "disabled" in words else unlike("socketfilterfw --getglobalstate", text)
