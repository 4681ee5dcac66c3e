"""What the doctor asks of the machine that it runs on. Each probe has a deadline, and none raises.

MLX is tried in a process of its own: an import that crashes or hangs is a finding, and not the doctor's end.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import psutil

from muster import __version__, paths
from muster.doctor.findings import COORDINATOR_PORTS, Examined, Hub, MlxTried, Range, Used
from muster.errors import PortError
from muster.facts import NodeFacts
from muster.group.ports import reserve_at
from muster.model.hub import cache_directory
from muster.probe.collect import Subject, collect
from muster.probe.linux_system import blas_of
from muster.spec import BootId, NodeId

T = TypeVar("T")

#: Importing MLX takes 20 ms with warm caches, seconds with cold ones.
MLX_SECONDS: Final = 20.0
#: `system_profiler` may take ten on a Mac; see `muster.probe`.
FACTS_SECONDS: Final = 30.0
HUB_SECONDS: Final = 4.0
PORTS_SECONDS: Final = 5.0
#: As many ports of a worker's range are tried.
_RANGE_TRIED: Final = 256
#: What the distributions that carry MLX's backends are called.
_WHEELS: Final = ("mlx-metal", "mlx-cpu", "mlx-cuda")
_MULTICAST_DNS: Final = ("224.0.0.251", 5353)
_DNS_HEADER_BYTES: Final = 12
#: What huggingface_hub takes for yes.
_YES: Final = ("1", "on", "yes", "true")

_TRY_MLX: Final = """
import json, sys
import mlx.core as mx
mx.eval(mx.ones((8, 8)) @ mx.ones((8, 8)))
try:
    maps = open("/proc/self/maps").read()
except OSError:
    maps = ""
backends = [name for name in ("ring", "jaccl") if mx.distributed.is_available(name)]
sys.stdout.write(json.dumps({"device": str(mx.default_device()), "backends": backends, "maps": maps}))
"""


class Probe(Generic[T]):
    """A function that runs in a thread of its own from now on; the thread is left behind where it is late."""

    def __init__(self, what: str, seconds: float, function: Callable[[], T]) -> None:
        self._what, self._seconds = what, seconds
        self._found: list[T] = []
        self._reason = ""
        self._thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[[], T]) -> None:
        try:
            self._found.append(function())
        except Exception as error:  # a broken machine is what the doctor is for: whatever it is, it is said
            self._reason = f"{self._what}: {type(error).__name__}: {error}"

    def result(self) -> T | str:
        """What the function gave, or why nothing: it raised, or did not end in time."""
        self._thread.join(self._seconds)
        if self._found:
            return self._found[0]
        return self._reason or f"{self._what}: no answer within {self._seconds:g} s"


def try_mlx() -> MlxTried:
    """Import MLX in another process, and let it multiply something."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRY_MLX],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=MLX_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return MlxTried(error=f"did not end within {MLX_SECONDS:g} s")
    except OSError as error:
        return MlxTried(error=f"{sys.executable} cannot be started: {error.strerror}")
    if done.returncode != 0 or not done.stdout:
        last = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
        return MlxTried(error=last)
    found = json.loads(done.stdout)
    return MlxTried(
        device=found["device"], backends=tuple(found["backends"]), blas=blas_of(found["maps"]), wheels=_wheels()
    )


def _wheels() -> dict[str, str]:
    known = ((str(one.metadata["Name"] or ""), one.version) for one in metadata.distributions())
    return {name: version for name, version in known if name.startswith(_WHEELS)}


def installed_versions() -> dict[str, str]:
    """Versions of what ranks need, as they are installed beside this Python."""
    found = {"muster": __version__}
    for name in ("mlx", "mlx-lm"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def local_facts(tried: MlxTried, copies: Path | None = None) -> NodeFacts:
    """The facts of this machine, as a worker on it would tell them; `copies` is its --copies."""
    subject = Subject(
        node=NodeId(socket.gethostname().partition(".")[0]),
        boot=BootId(""),
        versions=installed_versions(),
        backends=tried.backends,
        blas=tried.blas,
        directories=_directories(copies),
    )
    return collect(subject)


def _directories(copies: Path | None) -> tuple[Path, ...]:
    """What is written to: muster's own files, copies of models, and the hub's cache."""
    try:
        home = paths.home()
        return (home, copies or home / "models", cache_directory())
    except (OSError, RuntimeError):  # no home at all, or one that may not be looked into: see `try_directory`
        return ()


def _there(path: Path) -> Path:
    """The nearest directory that is there already."""
    return next((one for one in (path, *path.parents) if one.exists()), Path("/"))


def try_directory() -> str:
    """Why muster's own directory cannot be written; empty where it can."""
    try:
        home = paths.home()
        there = _there(home)
    except (OSError, RuntimeError) as error:
        return f"muster's directory cannot be found: {error}"
    if not there.is_dir():
        return f"{there} is no directory, and muster's files go to {home}"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} may not be written, and muster's files go to {home}"


def used_ports(wanted: Iterable[int] = COORDINATOR_PORTS) -> tuple[Used, ...]:
    """Which of the ports somebody listens on, and who."""
    ports = set(wanted)
    owners = {port: pid for port, pid in _listeners() if port in ports}
    for port in ports - set(owners):
        try:
            reserve_at("0.0.0.0", port).close()
        except PortError:
            owners[port] = None
    return tuple(_used(port, pid) for port, pid in sorted(owners.items()))


def _listeners() -> Iterator[tuple[int, int | None]]:
    """Every port that a process listens on, and which, as far as the system tells."""
    try:
        everyone = [(one, one.pid) for one in psutil.net_connections(kind="tcp")]
    except psutil.AccessDenied:  # macOS shows other users' sockets to root only: at least our own processes'
        everyone = [(one, process.pid) for process in psutil.process_iter() for one in _connections(process)]
    for one, pid in everyone:
        if one.status == psutil.CONN_LISTEN and one.laddr:
            yield one.laddr.port, pid


def _connections(process: psutil.Process) -> list[Any]:
    try:
        return process.net_connections(kind="tcp")
    except psutil.Error:
        return []


def _used(port: int, pid: int | None) -> Used:
    if pid is None:
        return Used(port=port)
    try:
        command = " ".join(psutil.Process(pid).cmdline())
        name = psutil.Process(pid).name()
    except psutil.Error:
        return Used(port=port, pid=pid)
    return Used(port=port, pid=pid, name=name, ours="muster" in command)


def try_range(first: int, last: int) -> Range:
    """How many ports of a worker's range can be had on this machine; of a long one the first of it."""
    end = min(last, first + _RANGE_TRIED - 1)
    free = 0
    for port in range(first, end + 1):
        try:
            reserve_at("0.0.0.0", port).close()
        except PortError:
            continue
        free += 1
    return Range(first=first, last=last, tried=end - first + 1, free=free)


def try_hub(seconds: float = HUB_SECONDS) -> Hub:
    """Whether the hub that models come from answers; in offline mode it is not asked."""
    from huggingface_hub import constants

    endpoint = constants.ENDPOINT
    if any(os.environ.get(name, "").lower() in _YES for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")):
        return Hub(endpoint=endpoint, offline=True)
    if not endpoint.startswith(("http://", "https://")):
        return Hub(endpoint=endpoint, error="HF_ENDPOINT is no http:// or https:// address")
    request = urllib.request.Request(endpoint, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return Hub(endpoint=endpoint, status=answer.status)
    except urllib.error.HTTPError as error:
        return Hub(endpoint=endpoint, status=error.code)
    except OSError as error:
        reason = getattr(error, "reason", None) or error
        return Hub(endpoint=endpoint, error=str(reason))


def try_local_network() -> str | None:
    """Why macOS lets no packet out to the local network; empty where it does, `None` on other systems.

    That is a question of multicast DNS without a question, which nobody answers.
    """
    if not psutil.MACOS:
        return None
    return send_to(_MULTICAST_DNS)


def send_to(address: tuple[str, int]) -> str:
    """Why a packet to an IPv4 address cannot be sent; empty where it can."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        try:
            sender.sendto(bytes(_DNS_HEADER_BYTES), address)
        except OSError as error:
            return error.strerror or str(error)
    return ""


def examine(port_range: tuple[int, int] | None = None, *, hub: bool = True, copies: Path | None = None) -> Examined:
    """Ask this machine everything, at the same time. Takes as long as the slowest probe may; never raises."""
    tried = Probe("MLX", MLX_SECONDS + 1, try_mlx)
    ports = Probe("ports", PORTS_SECONDS, used_ports)
    ranged = Probe("ports", PORTS_SECONDS, lambda: try_range(*port_range)) if port_range is not None else None
    asked = Probe("hub", HUB_SECONDS + 1, try_hub) if hub else None
    network = Probe("local network", PORTS_SECONDS, try_local_network)
    mlx = tried.result()
    directory = Probe("directory", PORTS_SECONDS, try_directory)
    known = mlx if isinstance(mlx, MlxTried) else MlxTried(error=mlx)
    facts = Probe("facts", FACTS_SECONDS, lambda: local_facts(known, copies))
    return Examined(
        facts=facts.result(),
        mlx=mlx,
        ports=ports.result(),
        range=ranged.result() if ranged is not None else None,
        hub=asked.result() if asked is not None else None,
        directory=directory.result(),
        local_network=network.result(),
    )
