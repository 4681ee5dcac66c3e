"""A coordinator and workers on this machine, as child processes: for `muster up`, the demo, the bench and tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import msgspec

from muster.errors import UnreachableError
from muster.spec import NodeInfo

#: How long a process may take to come up: importing MLX on a busy machine takes seconds.
_START_SECONDS = 60.0
#: How long a process may take to stop politely before it is killed.
_STOP_SECONDS = 15.0
#: Between two looks for a file that a child writes; nothing portable wakes us.
_POLL_SECONDS = 0.02
_COORDINATORS = ("coordinator", "standby", "witness")


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """Where a coordinator is reached, as its ready file says: control endpoint, HTTP base URL, generation port."""

    control: str
    http: str = ""
    generation_port: int = 0


class Member(msgspec.Struct):
    """One process of a local cluster. Its log is in `log`; `ready` appears when it is up."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    ready: Path


class LocalCluster:
    """Use as a context manager: everything is gone when it ends. All methods block.

    A second coordinator, the member "standby", may be started too; workers that are started after it know both.
    `standby` is its address.

    `directory` holds logs, state and sockets' addresses; `node_options` are further options of `muster worker`.
    `address` is where the coordinator is, `http` the base URL of its HTTP API ("http://127.0.0.1:5713"), empty
    without one. `http_port` is 0 for any free port, `None` for no HTTP; `environments` are added to those of
    the processes, by name: "coordinator", or the node's.
    """

    def __init__(
        self,
        directory: Path,
        nodes: Sequence[str] = ("a", "b"),
        *,
        port: int = 0,
        http_port: int | None = 0,
        coordinator_options: Sequence[str] = (),
        environments: Mapping[str, Mapping[str, str]] | None = None,
        node_options: Sequence[str] = (),
        log_level: str = "info",
    ) -> None:
        self.directory = directory
        self.nodes = tuple(nodes)
        self.address = ""
        self.standby = ""
        self.http = ""
        self._generation_port = 0
        self.members: dict[str, Member] = {}
        self._port = port
        self._http_port = http_port
        self._environments = dict(environments or {})
        self._coordinator_options = tuple(coordinator_options)
        self._node_options = tuple(node_options)
        self._log_level = log_level

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start all, and wait until every worker has joined.

        Raises:
            UnreachableError: a process did not come up; the message quotes the end of its log.
        """
        self.start_coordinator()
        for node in self.nodes:
            self.start_worker(node, wait=False)
        for node in self.nodes:
            self.wait_ready(node)

    def start_coordinator(self, options: Sequence[str] = ()) -> Member:
        """Start the coordinator, on the same ports as before if it ran before; `options` are further ones."""
        port = int(self.address.rpartition(":")[2]) if self.address else self._port
        http_port = int(self.http.rpartition(":")[2]) if self.http else self._http_port
        http = ["--no-http"] if http_port is None else ["--http-port", str(http_port)]
        command = ["coordinator", "--port", str(port), "--directory", str(self.directory / "coordinator"), *http]
        if self._generation_port:  # runners of ready instances dial it again
            command += ["--generation-port", str(self._generation_port)]
        member = self._start("coordinator", [*command, *self._coordinator_options, *options])
        reached = msgspec.json.decode(self.wait_ready("coordinator"), type=Reached)
        self.address, self.http, self._generation_port = reached.control, reached.http, reached.generation_port
        return member

    def start_standby(self, port: int = 0, options: Sequence[str] = ()) -> Member:
        """Start the standby, on the control port that it had if it ran before; `options` are further ones."""
        port = int(self.standby.rpartition(":")[2]) if self.standby else port
        command = ["coordinator", "--port", str(port), "--directory", str(self.directory / "standby"), "--no-http"]
        command += ["--standby-of", self.address, *self._coordinator_options, *options]
        member = self._start("standby", command)
        self.standby = msgspec.json.decode(self.wait_ready("standby"), type=Reached).control
        return member

    def start_worker(self, node: str, *, wait: bool = True, options: Sequence[str] = ()) -> Member:
        """Start one worker."""
        join = ",".join(filter(None, (self.address, self.standby)))
        command = ["worker", "--join", join, "--node-id", node]
        command += ["--directory", str(self.directory / node), *self._node_options, *options]
        member = self._start(node, command)
        if wait:
            self.wait_ready(node)
        return member

    def wait_ready(self, name: str) -> str:
        """Wait until a process is up; answers what it says of itself."""
        member = self.members[name]
        deadline = time.monotonic() + _START_SECONDS
        while not member.ready.exists():
            if member.process.poll() is not None or time.monotonic() > deadline:
                tail = "\n".join(self.log_of(name).splitlines()[-8:])
                raise UnreachableError(
                    f"{name} did not come up (exit code {member.process.poll()}):\n{tail}",
                    remedy=f"The whole log is {member.log}",
                )
            time.sleep(_POLL_SECONDS)
        return member.ready.read_text()

    def info(self, node: str) -> NodeInfo:
        """What a worker said of itself when it joined."""
        return msgspec.json.decode(self.wait_ready(node), type=NodeInfo)

    def log_of(self, name: str) -> str:
        """The log of a process so far."""
        log = self.members[name].log
        return log.read_text(errors="replace") if log.exists() else ""

    def kill(self, name: str) -> None:
        """SIGKILL a process and wait for its end."""
        member = self.members[name]
        member.process.kill()
        _bury(member)

    def stop(self) -> None:
        """Stop the workers, then the coordinators: so the last events are logged."""
        self._end([member for name, member in self.members.items() if name not in _COORDINATORS])
        self._end([member for name, member in self.members.items() if name in _COORDINATORS])

    def _start(self, name: str, arguments: list[str]) -> Member:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        ready = self.directory / f"{name}.ready"
        ready.unlink(missing_ok=True)
        before = self.members.get(name)
        if before is not None and before.process.poll() is not None:
            _bury(before)
        log = self.directory / f"{name}.log"
        with log.open("ab") as output:
            command = [*arguments, "--ready-file", str(ready), "--log-level", self._log_level]
            process = _spawn(command, output, self._environments.get(name, {}))
        self.members[name] = Member(name, process, log, ready)
        return self.members[name]

    def _end(self, members: Sequence[Member]) -> None:
        for member in members:
            if member.process.poll() is None:
                member.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_SECONDS
        for member in members:
            try:
                member.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                member.process.kill()
            _bury(member)


def _bury(member: Member) -> None:
    """Wait for the end of a process, and close our end of its standard input."""
    member.process.wait()
    if member.process.stdin is not None:
        member.process.stdin.close()


def _spawn(arguments: list[str], output: IO[bytes], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A `muster` process of its own session: Ctrl-C in the terminal reaches only its parent, which stops it.

    It holds the other end of a pipe that closes however its parent ends.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "muster", *arguments, "--stop-with-stdin"],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environment},
        start_new_session=True,
    )
