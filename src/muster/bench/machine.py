"""The machine that a benchmark ran on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import psutil

from muster import __version__

_CPU_LIST = Path("/proc/cpuinfo")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What figures depend on. `load_average` is over the minute before the run: other work makes figures worse."""

    cores: int
    cpu: str
    memory_bytes: int
    system: str
    python: str
    mlx: str
    mlx_lm: str
    muster: str
    load_average: float

    def sentence(self) -> str:
        """One line for a person."""
        return (
            f"{self.cores} cores of {self.cpu}, {self.memory_bytes / 2**30:.1f} GiB, {self.system}, "
            f"Python {self.python}, mlx {self.mlx}, mlx-lm {self.mlx_lm}, muster {self.muster}, "
            f"load {self.load_average:.2f}"
        )


def this_machine() -> Machine:
    """The machine that runs this."""
    return Machine(
        cores=psutil.cpu_count() or 1,
        cpu=_cpu(),
        memory_bytes=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        mlx=_version("mlx"),
        mlx_lm=_version("mlx-lm"),
        muster=__version__,
        load_average=os.getloadavg()[0],
    )


def cpu_model(text: str) -> str | None:
    """The first "model name" of a Linux CPU list; `None` where it has none, as on most Arm machines."""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return None


def _cpu() -> str:
    listed = cpu_model(_CPU_LIST.read_text()) if _CPU_LIST.exists() else None
    return listed or platform.processor() or platform.machine()


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "none"
