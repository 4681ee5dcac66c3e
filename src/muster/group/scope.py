"""The file and the variables by which MLX learns of its group, there only while they are needed.

MLX reads them during `mx.distributed.init` alone. Each scope has a file of its own in a private directory, and
puts the environment back as it was, whatever order nested or concurrent scopes end in. A signal handler that
raises (KeyboardInterrupt, SystemExit) leaves by the same way out; what `kill -9` leaves behind is for `sweep`.

Source of the variables: `mlx/distributed/ring/ring.cpp` (`init`), `mlx/distributed/jaccl/lib/jaccl/jaccl.cpp`
(`Config::from_env`: `JACCL_*` wins over `MLX_*`), `mlx/distributed/nccl/nccl.cpp`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import stat
import threading
from collections.abc import Callable, Generator, Mapping, MutableMapping
from functools import cache
from pathlib import Path
from typing import Final

import msgspec
import psutil

from muster.errors import ScopeError, ScopeWriteError
from muster.group.rules import resolved
from muster.group.shapes import JacclPayload, Payload, RingPayload

#: Variables that would make MLX read something other than what a scope sets.
CONFLICTING_NAMES: Final = frozenset(
    {
        "MLX_HOSTFILE",
        "MLX_RANK",
        "MLX_WORLD_SIZE",
        "MLX_RING_VERBOSE",
        "MLX_IBV_DEVICES",
        "MLX_IBV_COORDINATOR",  # the name before jaccl
        "NCCL_HOST_IP",
        "NCCL_PORT",
    }
)
CONFLICTING_PREFIXES: Final = ("MLX_JACCL_", "JACCL_")

_FILE_NAME: Final = re.compile(
    r"muster-[A-Za-z0-9_.]*-[0-9a-f]{12}-a\d+-r\d+-p(?P<pid>\d+)-t(?P<start>\d+)-[0-9a-f]{8}\.json"
)
_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


class CoordinationFiles(msgspec.Struct, frozen=True):
    """What a scope put in place.

    Attributes:
        path: The hostfile (ring) or the device file (jaccl).
        variables: Exactly the variables that MLX now finds, and no other of its distributed ones.
    """

    backend: str
    path: Path
    variables: Mapping[str, str]


@contextlib.contextmanager
def coordination_scope(
    payload: Payload, *, directory: Path, environ: MutableMapping[str, str] = os.environ
) -> Generator[CoordinationFiles]:
    """Writes the coordination file and sets MLX's variables until the block ends.

    Args:
        payload: Checked first; nothing is written for a payload that MLX would not take.
        directory: Private to this user; created (0700) when missing.
        environ: What MLX reads; another mapping in tests, or the environment of a child to be started.

    Yields:
        The file and the variables.

    Raises:
        PayloadError: The payload breaks a rule of `muster.group.rules`.
        ScopeError: The directory is not private, or the file cannot be written.
    """
    numeric = resolved(payload)
    private_directory(directory)
    path = directory / _file_name(payload)
    variables = _variables(numeric, path)
    overlay = _Overlay(environ, variables)
    creator = os.getpid()
    try:
        _write(path, _content(numeric))
        overlay.enter()
        yield CoordinationFiles(_backend(payload), path, variables)
    finally:
        if os.getpid() == creator:  # a fork of the process that unwinds does not end the scope
            overlay.leave()
            path.unlink(missing_ok=True)


def sweep(directory: Path, *, alive: Callable[[int, float], bool]) -> list[Path]:
    """Removes the coordination files whose owner is gone.

    Args:
        directory: Where scopes write; nothing happens when it does not exist.
        alive: Whether the process `pid` that started at `start_seconds` (since the epoch, to a hundredth)
            still runs; `owner_alive` asks the system.

    Returns:
        The files removed. Files with other names are left alone.
    """
    removed: list[Path] = []
    try:
        candidates = sorted(directory.iterdir())
    except FileNotFoundError:
        return removed
    for path in candidates:
        match = _FILE_NAME.fullmatch(path.name)
        if match is None or alive(int(match["pid"]), int(match["start"]) / 100):
            continue
        with contextlib.suppress(FileNotFoundError):  # another worker may sweep at the same time
            path.unlink()
            removed.append(path)
    return removed


def owner_alive(pid: int, start_seconds: float) -> bool:
    """Whether the process `pid` still is the one that started at `start_seconds` (since the epoch), and runs."""
    try:
        process = psutil.Process(pid)
        # The boot time that the start is counted from may move by parts of a second.
        same = abs(process.create_time() - start_seconds) < 1.0
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def private_directory(directory: Path) -> None:
    """Creates `directory` with mode 0700 when it is missing, and refuses one that is not private.

    Raises:
        ScopeError: Not a directory, another user's, or others may write in it.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        info = directory.stat()
    except OSError as error:
        raise ScopeError(
            f"cannot create the directory {directory}: {error.strerror}", remedy="choose another directory"
        ) from error
    if info.st_uid != os.geteuid():
        raise ScopeError(
            f"the directory {directory} belongs to user {info.st_uid}, not to this one ({os.geteuid()})",
            remedy="choose a directory of your own",
        )
    if info.st_mode & _OTHERS_MAY_WRITE:
        raise ScopeError(
            f"others may write in the directory {directory} (mode {stat.S_IMODE(info.st_mode):04o})",
            remedy=f"run: chmod 700 {directory}",
        )


class _Overlay:
    """One scope's variables on top of an environment that other scopes may use at the same time.

    The newest scope still open is in force, and the last one out puts back what the first one found.
    """

    _lock: Final = threading.RLock()
    #: Per environment (by identity; it is alive while a scope holds it): what was found, and the open scopes.
    _found: Final[dict[int, dict[str, str | None]]] = {}
    _open: Final[dict[int, list[_Overlay]]] = {}

    def __init__(self, environ: MutableMapping[str, str], variables: Mapping[str, str]) -> None:
        self._environ = environ
        self._variables = variables

    def enter(self) -> None:
        with self._lock:
            key = id(self._environ)
            found = self._found.setdefault(key, {})
            for name in {*filter(_conflicts, self._environ), *self._variables}:
                found.setdefault(name, self._environ.get(name))
            self._open.setdefault(key, []).append(self)
            self._apply(self._variables)

    def leave(self) -> None:
        """Also right when a signal interrupted `enter`, or nothing was entered."""
        with self._lock:
            key = id(self._environ)
            scopes = self._open.get(key, [])
            if self in scopes:
                scopes.remove(self)
            if scopes:
                self._apply(scopes[-1]._variables)
                return
            self._open.pop(key, None)
            if key in self._found:
                self._apply(self._found.pop(key))

    def _apply(self, wanted: Mapping[str, str | None]) -> None:
        for name in list(filter(_conflicts, self._environ)):
            if wanted.get(name) is None:
                del self._environ[name]
        self._environ.update({name: value for name, value in wanted.items() if value is not None})


def owned(name: str) -> bool:
    """Whether the variable is one that a scope sets, or that would mislead the group: nobody else may set it."""
    return _conflicts(name)


def _conflicts(name: str) -> bool:
    return name in CONFLICTING_NAMES or name.startswith(CONFLICTING_PREFIXES)


def _backend(payload: Payload) -> str:
    return "ring" if isinstance(payload, RingPayload) else "jaccl"


def _variables(payload: Payload, path: Path) -> dict[str, str]:
    # MLX opens the file by this text, so it must not depend on the working directory.
    absolute = str(path.absolute())
    match payload:
        case RingPayload():
            return {"MLX_HOSTFILE": absolute, "MLX_RANK": str(payload.rank)}
        case JacclPayload():
            variables = {"MLX_IBV_DEVICES": absolute, "MLX_RANK": str(payload.rank)}
            if payload.side_channel == "tcp":
                variables["MLX_JACCL_COORDINATOR"] = payload.coordinator
            return variables | {"MLX_JACCL_RING": "1"} if payload.prefer_ring else variables


def _content(payload: Payload) -> bytes:
    return msgspec.json.encode(payload.hosts if isinstance(payload, RingPayload) else payload.devices)


def _file_name(payload: Payload) -> str:
    instance = payload.instance
    readable = re.sub(r"[^A-Za-z0-9_.]+", "_", instance)[:40]
    digest = hashlib.sha256(instance.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    pid, start = os.getpid(), _start_hundredths(os.getpid())
    unique = secrets.token_hex(4)
    return f"muster-{readable}-{digest}-a{payload.attempt}-r{payload.rank}-p{pid}-t{start}-{unique}.json"


@cache
def _start_hundredths(pid: int) -> int:
    return round(psutil.Process(pid).create_time() * 100)


def _write(path: Path, content: bytes) -> None:
    """Creates `path` (0600); nobody knows its name before it is complete, so no rename is needed."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    except OSError as error:
        raise ScopeWriteError(
            f"cannot write the coordination file {path}: {error.strerror}",
            remedy="free space in its directory, or choose another one",
        ) from error
