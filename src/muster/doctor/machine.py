"""The checks of one machine, from its facts alone. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from muster.doctor.checks import Check, failure, gib, numbers, ok, warning
from muster.doctor.network import check_interfaces
from muster.doctor.rdma_checks import check_rdma
from muster.facts import NodeFacts

#: The least versions, and why: pyproject.toml says the same.
_LEAST_VERSIONS: Final = (
    ("mlx", (0, 32, 1), "before, a ring never noticed that a peer was lost"),
    ("mlx-lm", (0, 32), "before, an uneven pipeline lost layers"),
)
_LEAST_PYTHON: Final = (3, 11)
#: MLX's wheels are made for this macOS and later, and for Apple silicon only.
_LEAST_MACOS: Final = (14,)
#: The first macOS that asks before a program may talk to others in the local network.
_ASKING_MACOS: Final = (15,)
_LEAST_FREE_BYTES: Final = 2**30
_FEW_FREE_BYTES: Final = 20 * 2**30
#: A worker needs a few per rank, connection and warm runner; launchd gives 256.
_LEAST_FILES: Final = 128
_FEW_FILES: Final = 1024
#: macOS lets the GPU wire two thirds to three quarters of the memory by itself.
_LOW_WIRED_SHARE: Final = 0.6
_APPLE_FIREWALL: Final = "/usr/libexec/ApplicationFirewall/socketfilterfw"


def check_machine(facts: NodeFacts) -> tuple[Check, ...]:
    """Every check that a machine's facts allow, in the order in which to mend; what is not known is said last."""
    return tuple(
        check
        for rule in (
            _system,
            _python,
            _mlx,
            _device,
            _blas,
            _memory,
            _wired,
            _disks,
            _files,
            _firewall,
            _local_network,
            _sleep,
            _clock,
            check_interfaces,
            check_rdma,
            _unknown,
        )
        for check in rule(facts)
    )


def is_mac(facts: NodeFacts) -> bool:
    """Whether the machine runs macOS."""
    return facts.os == "macOS"


def _system(facts: NodeFacts) -> Iterator[Check]:
    what = ", ".join(filter(None, (f"{facts.os} {facts.os_version}".strip(), facts.chip, facts.architecture)))
    if is_mac(facts) and facts.architecture == "x86_64" and not facts.chip.startswith("Intel"):
        yield failure("system", f"{what}: this Python runs under Rosetta", "Install a native (arm64) Python.")
    elif is_mac(facts) and facts.architecture == "x86_64":
        yield failure("system", f"{what}: MLX needs Apple silicon", "Use another machine, or Linux.")
    elif is_mac(facts) and numbers(facts.os_version) and numbers(facts.os_version) < _LEAST_MACOS:
        yield failure("system", f"{what}: MLX needs macOS 14 or later", "sudo softwareupdate --install --all")
    else:
        yield ok("system", what or "unknown")


def _python(facts: NodeFacts) -> Iterator[Check]:
    python = facts.system.python
    if python and numbers(python) < _LEAST_PYTHON:
        yield failure("python", f"Python {python}; muster needs 3.11 or later", "uv python install 3.12")
    elif python:
        yield ok("python", f"Python {python}")


def _mlx(facts: NodeFacts) -> Iterator[Check]:
    wheel = "mlx" if is_mac(facts) else ("mlx[cuda]" if facts.gpus else "mlx[cpu]")
    for name, least, why in _LEAST_VERSIONS:
        version = facts.versions.get(name, "")
        install = f"pip install --upgrade {wheel if name == 'mlx' else name}"
        if not version:
            yield failure(name, f"{name} is not installed", install)
        elif numbers(version) < least:
            wanted = ".".join(map(str, least))
            yield failure(name, f"{name} {version}; {wanted} or later is needed: {why}", install)
        else:
            yield ok(name, f"{name} {version}")
    if facts.versions.get("mlx") and "ring" not in facts.backends:
        found = ", ".join(facts.backends) or "none"
        yield failure(
            "backends",
            f"MLX offers no ring; what it offers: {found}",
            f"pip install --force-reinstall '{wheel}'",
        )
    elif facts.backends:
        yield ok("backends", ", ".join(facts.backends))


def _device(facts: NodeFacts) -> Iterator[Check]:
    """Where MLX runs, as the node's own worker has tried; `muster.doctor.findings` has it of this machine."""
    if facts.device == "cpu" and facts.gpus:
        wheel = "mlx" if is_mac(facts) else "'mlx[cuda]'"
        what = f"on the CPU, although there is {facts.gpus[0].name}"
        yield warning("mlx runs", what, f"pip install --upgrade {wheel}")
    elif facts.device:
        yield ok("mlx runs", f"on the {facts.device.upper()}")


def _blas(facts: NodeFacts) -> Iterator[Check]:
    if facts.gpus or is_mac(facts) or not facts.system.blas:
        return
    if facts.system.blas == "reference BLAS":
        yield warning(
            "blas",
            "MLX multiplies with reference BLAS on this CPU, which is 20 to 50 times slower than OpenBLAS in fp32",
            "sudo apt install libopenblas0-pthread, and start the worker with LD_PRELOAD=libopenblas.so.0",
        )
    else:
        yield ok("blas", facts.system.blas)


def _memory(facts: NodeFacts) -> Iterator[Check]:
    if not facts.memory_total_bytes:
        return
    what = f"{gib(facts.memory_available_bytes)} of {gib(facts.memory_total_bytes)} available"
    end = "End what uses it (top), or give instances less: muster worker --memory GIB"
    match facts.memory_pressure:
        case "critical":
            yield failure("memory", f"{what}, pressure is critical: processes may be killed", end)
        case "warning":
            yield warning("memory", f"{what}, under pressure", end)
        case _:
            yield ok("memory", what)


def _wired(facts: NodeFacts) -> Iterator[Check]:
    limit, total = facts.wired_limit_bytes, facts.memory_total_bytes
    if limit is None or not total:
        return
    what = f"the GPU may wire {gib(limit)} of {gib(total)}"
    if limit < _LOW_WIRED_SHARE * total:
        wanted = int(total * 0.75) >> 20
        yield warning(
            "wired limit", f"{what}: less than macOS's own share", f"sudo sysctl iogpu.wired_limit_mb={wanted}"
        )
    elif limit > total - 2 * 2**30:
        yield warning("wired limit", f"{what}: nothing is left for macOS itself", "sudo sysctl iogpu.wired_limit_mb=0")
    else:
        yield ok("wired limit", what)


def _disks(facts: NodeFacts) -> Iterator[Check]:
    for disk in facts.disks:
        what = f"{gib(disk.free_bytes)} of {gib(disk.total_bytes)} free at {disk.path}"
        if disk.free_bytes < _LEAST_FREE_BYTES:
            yield failure("disk", f"{what}: coordination files and logs may not be written", f"df -h {disk.path}")
        elif disk.free_bytes < _FEW_FREE_BYTES:
            yield warning("disk", f"{what}: few models fit", "Delete models: hf cache rm, or name another directory.")
        else:
            yield ok("disk", what)


def _files(facts: NodeFacts) -> Iterator[Check]:
    limit = facts.system.open_files
    if limit is None:
        return
    what = f"{limit} open files for a process" if 0 <= limit < 2**31 else "open files are not limited"
    if 0 <= limit < _LEAST_FILES:
        yield failure("file limit", f"{what}: too few for ranks and connections", "ulimit -n 4096")
    elif 0 <= limit < _FEW_FILES:
        yield warning("file limit", f"{what}: many instances or clients may not fit", "ulimit -n 4096")
    else:
        yield ok("file limit", what)


def _firewall(facts: NodeFacts) -> Iterator[Check]:
    detail = f" ({facts.system.firewall_detail})" if facts.system.firewall_detail else ""
    match facts.system.firewall:
        case "on" if is_mac(facts):
            yield warning(
                "firewall",
                f"the firewall is on{detail}: other nodes reach this one only where it lets Python in",
                f"sudo {_APPLE_FIREWALL} --add PYTHON && sudo {_APPLE_FIREWALL} --unblockapp PYTHON, "
                "with the worker's Python",
            )
        case "on":
            yield warning(
                "firewall",
                f"a firewall is on{detail}: other nodes reach only the ports that it lets through",
                "Let through 5710-5713 on the coordinator, and on nodes the range of: muster worker --ports FIRST-LAST",
            )
        case "off":
            yield ok("firewall", f"off{detail}")
        case "unknown":
            pass


def _local_network(facts: NodeFacts) -> Iterator[Check]:
    if is_mac(facts) and numbers(facts.os_version) >= _ASKING_MACOS:
        yield ok(
            "local network",
            f"macOS {facts.os_version} asks before a program may reach the local network, and does not tell the answer",
            "If no other node is reached: System Settings > Privacy & Security > Local Network, allow the terminal",
        )


def _sleep(facts: NodeFacts) -> Iterator[Check]:
    minutes = facts.system.sleep_minutes
    if minutes is None:
        return
    if minutes > 0:
        command = "sudo pmset -a sleep 0" if is_mac(facts) else "sudo systemctl mask sleep.target suspend.target"
        yield warning("sleep", f"the machine sleeps after {minutes} min: its ranks are lost then", command)
    else:
        yield ok("sleep", "never")


def _clock(facts: NodeFacts) -> Iterator[Check]:
    if facts.system.clock_synchronised is False:
        command = "sudo systemsetup -setusingnetworktime on" if is_mac(facts) else "sudo timedatectl set-ntp true"
        yield warning("clock", "not set by NTP: times of several nodes cannot be compared", command)
    elif facts.system.clock_synchronised:
        yield ok("clock", "set by NTP")


def _unknown(facts: NodeFacts) -> Iterator[Check]:
    if facts.unknown:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in sorted(facts.unknown.items()))
        yield ok("not found out", reasons)
