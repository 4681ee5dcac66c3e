"""The system of a Linux machine, from /proc, /etc and `nvidia-smi`. Pure."""

from __future__ import annotations

import re
import shlex

from muster.facts import Gpu, Pressure
from muster.probe.reading import Unread, number, unlike

#: Share of the last ten seconds, in percent, in which all or some tasks waited for memory.
_CRITICAL_FULL_PERCENT = 10.0
_WARNING_SOME_PERCENT = 10.0
#: What else decides: the part of the memory that is left.
_CRITICAL_LEFT, _WARNING_LEFT = 0.03, 0.08

#: Libraries that a process has mapped, and what people call them.
_BLAS = (
    ("libmkl", "MKL"),
    ("libopenblas", "OpenBLAS"),
    ("libblis", "BLIS"),
    ("libnvblas", "NVBLAS"),
    ("libcublas", "cuBLAS"),
    ("libblas", "reference BLAS"),
)


def parse_os_release(text: str) -> tuple[str, str] | Unread:
    """Name and version of the distribution, from /etc/os-release; the version is "" for a rolling one."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, equals, value = line.strip().partition("=")
        if equals and re.fullmatch(r"[A-Z_]+", name):
            try:
                found[name] = " ".join(shlex.split(value))
            except ValueError:  # a quotation mark without the other
                found[name] = value
    if "NAME" not in found:
        return unlike("/etc/os-release", text)
    return found["NAME"], found.get("VERSION_ID", "")


def parse_pressure(text: str) -> tuple[float, float] | Unread:
    """Percent of the last ten seconds in which some tasks, and in which all, waited: /proc/pressure/memory."""
    found = {
        match[1]: float(match[2])
        for match in re.finditer(r"^(some|full) avg10=([0-9]{1,3}\.[0-9]{1,4})", text, re.MULTILINE)
    }
    return (found["some"], found.get("full", 0.0)) if "some" in found else unlike("/proc/pressure/memory", text)


def pressure_of(stall: tuple[float, float] | Unread, total_bytes: int, available_bytes: int) -> Pressure | Unread:
    """The verdict: by how long tasks wait for memory, and by what is left of it."""
    left = available_bytes / total_bytes if total_bytes else 1.0
    some, full = (0.0, 0.0) if isinstance(stall, Unread) else stall
    if full >= _CRITICAL_FULL_PERCENT or left < _CRITICAL_LEFT:
        return "critical"
    if some >= _WARNING_SOME_PERCENT or left < _WARNING_LEFT:
        return "warning"
    return stall if isinstance(stall, Unread) and not total_bytes else "normal"


def parse_cpuinfo(text: str) -> str | Unread:
    """The processor, from /proc/cpuinfo: x86 names the model of each core, ARM boards the machine's."""
    for field in ("model name", "Model", "cpu model", "Hardware", "cpu"):
        match = re.search(rf"^{field}\s*: *(\S.*)$", text, re.MULTILINE)
        if match is not None:
            return " ".join(match[1].split())
    return unlike("/proc/cpuinfo", text)


def parse_nvidia_smi(text: str) -> tuple[Gpu, ...] | Unread:
    """The GPUs of `nvidia-smi --query-gpu=name,memory.total,memory.free --format=csv,noheader,nounits`.

    One that shares the machine's memory (Grace, Jetson) says "[N/A]" or "[Not Supported]".
    """
    found: list[Gpu] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        name, *said = (part.strip() for part in line.rsplit(",", 2))
        if len(said) != 2 or any(number(one) is None and not one.startswith("[") for one in said):
            return unlike("nvidia-smi", text)
        total, free = (None if (mebibytes := number(one)) is None else mebibytes * 2**20 for one in said)
        found.append(Gpu(name=name, memory_bytes=total, free_bytes=free))
    return tuple(found) or unlike("nvidia-smi", text)


def parse_ufw(text: str) -> bool | Unread:
    """Whether Ubuntu's firewall is on, from /etc/ufw/ufw.conf, which everybody may read."""
    match = re.search(r"^ENABLED=(yes|no)", text, re.MULTILINE | re.IGNORECASE)
    return match[1].lower() == "yes" if match is not None else unlike("/etc/ufw/ufw.conf", text)


def blas_of(maps: str) -> str:
    """The BLAS that a process has in memory, from its /proc/PID/maps; "" where none of those known is there."""
    names = {line.rpartition("/")[2].lower() for line in maps.splitlines() if "/" in line}
    return next((name for beginning, name in _BLAS if any(one.startswith(beginning) for one in names)), "")
