"""Finds out everything that a node knows of its machine. Blocks; run it in a thread."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from muster.facts import Device, Disk, Gpu, NodeFacts, System, filled_gpu
from muster.probe import linux, macos
from muster.probe.reading import Unknowns, Unread
from muster.probe.tools import Tools
from muster.spec import BootId, NodeId

#: What a GPU's free memory has to move by to be told.
_MOVED_BYTES = 256 * 2**20


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """What the caller knows of its node already. `directories` are those that muster writes to."""

    node: NodeId
    boot: BootId
    versions: dict[str, str] = {}
    backends: tuple[str, ...] = ()
    memory_gbps: float | None = None
    device: Device = ""
    blas: str = ""
    directories: tuple[Path, ...] = ()


def collect(subject: Subject, tools: Tools | None = None) -> NodeFacts:
    """Everything but the models, the system's slow tools included. Never raises for what cannot be found out.

    Pass the same `tools` again, and what does not change is not asked again.
    """
    tools = tools or Tools()
    unknown = Unknowns()
    memory = psutil.virtual_memory()
    facts = NodeFacts(
        node=subject.node,
        boot=subject.boot,
        architecture=platform.machine(),
        cores=psutil.cpu_count(logical=False) or os.cpu_count() or 0,
        memory_total_bytes=memory.total,
        memory_available_bytes=memory.available,
        memory_gbps=subject.memory_gbps,
        device=subject.device,
        disks=disks(subject.directories),
        versions=subject.versions,
        backends=subject.backends,
        system=System(
            python=platform.python_version(),
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            blas=subject.blas,
        ),
    )
    facts = macos.add(facts, tools, unknown) if psutil.MACOS else linux.add(facts, tools, unknown)
    return msgspec.structs.replace(facts, unknown=unknown.reasons)


def refresh(facts: NodeFacts, subject: Subject, tools: Tools) -> NodeFacts:
    """The same facts with memory, pressure and disks as they are now."""
    unknown = Unknowns()
    memory = psutil.virtual_memory()
    facts = msgspec.structs.replace(
        facts, memory_available_bytes=memory.available, disks=disks(subject.directories) or facts.disks
    )
    pressure = macos.pressure(tools) if psutil.MACOS else linux.pressure(memory.total, memory.available)
    return msgspec.structs.replace(facts, memory_pressure=unknown.take("memory_pressure", pressure, "unknown"))


def look_at_gpu(facts: NodeFacts, tools: Tools) -> NodeFacts:
    """The same facts with what the GPU may have as it is now: of its own memory, or of a Mac's."""
    if psutil.MACOS:
        limit = macos.wired_limit(tools, facts.memory_total_bytes) if facts.gpus else facts.wired_limit_bytes
        return facts if isinstance(limit, Unread) else msgspec.structs.replace(facts, wired_limit_bytes=limit)
    before = filled_gpu(facts)
    found = linux.gpus(tools) if before is not None else facts.gpus
    if before is None or isinstance(found, Unread):
        return facts
    others = msgspec.structs.replace(facts, gpus=found)
    return facts if _is_near(before, filled_gpu(others)) else others


def _is_near(before: Gpu, now: Gpu | None) -> bool:
    """Whether it is the same GPU, and no more of its memory has come or gone than is worth telling."""
    if now is None or before.free_bytes is None or now.free_bytes is None:
        return before == now
    same = msgspec.structs.replace(before, free_bytes=now.free_bytes) == now
    return same and abs(before.free_bytes - now.free_bytes) < _MOVED_BYTES


def disks(directories: tuple[Path, ...]) -> tuple[Disk, ...]:
    """The file systems under these directories, each once, under the first directory that is on it.

    Of a directory that is not made yet, that of the nearest one above it.
    """
    return tuple(_disks(directories))


def _disks(directories: tuple[Path, ...]) -> Iterator[Disk]:
    devices: set[int] = set()
    for directory in directories:
        try:
            there = next(path for path in (directory, *directory.parents) if path.exists())
            device, usage = there.stat().st_dev, shutil.disk_usage(there)
        except (OSError, StopIteration):
            continue
        if device in devices:
            continue
        devices.add(device)
        yield Disk(path=str(directory), total_bytes=usage.total, free_bytes=usage.free)
