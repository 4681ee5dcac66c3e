"""What the probes of this machine find, and the checks on it. Pure; `muster.doctor.local` probes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import Final

import msgspec

from muster.doctor.checks import Check, failure, ok, warning
from muster.facts import NodeFacts

#: The coordinator's ports unless it is told otherwise: control, events, generation, HTTP.
COORDINATOR_PORTS: Final = (5710, 5711, 5712, 5713)
#: A group of ranks on a node, one link each, and some to spare.
_FEW_PORTS: Final = 8


class MlxTried(msgspec.Struct, frozen=True, kw_only=True):
    """MLX as another process found it; `error` is what that process said last, empty where MLX works.

    `wheels` are the distributions that carry its backend, by name: mlx-metal, mlx-cpu, mlx-cuda-12, …
    """

    error: str = ""
    device: str = ""
    backends: tuple[str, ...] = ()
    blas: str = ""
    wheels: dict[str, str] = {}


class Used(msgspec.Struct, frozen=True, kw_only=True):
    """A port that is taken. `ours`: by a process of muster."""

    port: int
    pid: int | None = None
    name: str = ""
    ours: bool = False


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's range of ports: of those that were tried so many are free."""

    first: int
    last: int
    tried: int
    free: int


class Hub(msgspec.Struct, frozen=True, kw_only=True):
    """What the hub at `endpoint` answered, or why it did not; nothing where it is not to be asked."""

    endpoint: str
    status: int | None = None
    error: str = ""
    offline: bool = False


class Examined(msgspec.Struct, frozen=True, kw_only=True):
    """What the probes of this machine gave; a text where one gave nothing, and why. `directory` is always that."""

    facts: NodeFacts | str
    mlx: MlxTried | str
    ports: tuple[Used, ...] | str
    range: Range | str | None = None
    hub: Hub | str | None = None
    directory: str | None = None
    local_network: str | None = None  #: why nothing can be sent there; empty where it can, `None`: not tried


def check_mlx(found: MlxTried | str, facts: NodeFacts | str) -> Iterator[Check]:
    """Whether MLX can be imported and computes, with a backend of its own version, on the GPU where there is one."""
    version = "" if isinstance(facts, str) else facts.versions.get("mlx", "")
    wheels = {} if isinstance(found, str) else found.wheels
    other = [f"{name} {its}" for name, its in sorted(wheels.items()) if version and its != version]
    if other:
        help = f"pip install --force-reinstall mlx=={version} {' '.join(f'{name}=={version}' for name in wheels)}"
        yield failure("mlx wheel", f"mlx {version} with {', '.join(other)}: they belong together", help)
    if isinstance(found, str) or found.error:
        what = found if isinstance(found, str) else found.error
        yield failure("mlx runs", f"MLX does not work here: {what}", "pip install --force-reinstall mlx")
        return
    device = found.device.removeprefix("Device(").removesuffix(")").split(",")[0]
    shown = f"on the {device.upper()}" + (f", with {', '.join(sorted(wheels))}" if wheels else "")
    if device == "cpu" and not isinstance(facts, str) and facts.gpus:
        wheel = "mlx" if facts.os == "macOS" else "'mlx[cuda]'"
        yield warning("mlx runs", f"{shown}, although there is {facts.gpus[0].name}", f"pip install --upgrade {wheel}")
    else:
        yield ok("mlx runs", shown)


def check_directory(error: str | None) -> Iterator[Check]:
    """Whether muster can write its own files; `None` where that was not looked at."""
    if error:
        yield failure("directory", error, "Set MUSTER_HOME to a directory that may be written")


def check_local_network(error: str | None) -> Iterator[Check]:
    """Whether macOS lets this program out into the local network; `None` where that was not tried."""
    if error:
        make = failure if error == os.strerror(errno.EHOSTUNREACH) else warning  # what is refused looks like that
        yield make(
            "local network",
            f"nothing can be sent there: {error}",
            "System Settings > Privacy & Security > Local Network: allow the terminal, and run this again",
        )
    elif error is not None:
        yield ok("local network", "macOS lets this program send there; a worker that launchd starts is asked for apart")


def check_ports(found: tuple[Used, ...] | str, wanted: tuple[int, ...] = COORDINATOR_PORTS) -> Iterator[Check]:
    """Whether a coordinator could have its ports, or has them."""
    span = f"{wanted[0]}-{wanted[-1]}"
    if isinstance(found, str):
        yield warning("ports", found, f"lsof -iTCP:{span} -sTCP:LISTEN")
        return
    strangers = [one for one in found if not one.ours]
    if strangers:
        who = ", ".join(f"{one.port} by {_owner(one)}" for one in strangers)
        yield warning("ports", f"taken: {who}", "muster coordinator --port PORT (on this machine only)")
    elif found:
        who = ", ".join(str(one.port) for one in found)
        yield ok("ports", f"{who} used by muster, pid {found[0].pid}; the rest of {span} is free")
    else:
        yield ok("ports", f"{span} are free for a coordinator")


def _owner(one: Used) -> str:
    if one.pid is None:
        return "another user's process"
    return f"{one.name} (pid {one.pid})" if one.name else f"pid {one.pid}"


def check_range(found: Range | str | None) -> Iterator[Check]:
    """Whether a worker's range has ports for ranks."""
    match found:
        case Range():
            what = f"{found.free} of {found.tried} tried of {found.first}-{found.last} are free"
            if found.free == 0:
                yield failure("worker ports", what, "muster worker --ports with another range")
            elif found.free < _FEW_PORTS:
                yield warning("worker ports", what, "muster worker --ports with a wider range")
            else:
                yield ok("worker ports", what)
        case str():
            yield warning("worker ports", found, "muster worker --ports with a shorter range")
        case None:
            pass


def check_hub(found: Hub | str | None) -> Iterator[Check]:
    """Whether models can be fetched; one that is a directory needs no hub."""
    mend = "Check the network and HF_ENDPOINT; for models that are here already: export HF_HUB_OFFLINE=1"
    match found:
        case Hub(offline=True):
            yield ok("hub", "offline mode (HF_HUB_OFFLINE): not asked")
        case Hub(error=str(error), endpoint=endpoint) if error:
            yield warning("hub", f"{endpoint} is not reached: {error}", mend)
        case Hub(status=status, endpoint=endpoint) if status is not None and status >= 500:
            yield warning("hub", f"{endpoint} answers with {status}", mend)
        case Hub(endpoint=endpoint):
            yield ok("hub", f"{endpoint} answers")
        case str():
            yield warning("hub", found, mend)
        case None:
            pass
