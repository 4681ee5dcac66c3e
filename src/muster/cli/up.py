"""`muster up`: a coordinator and workers of this machine in the foreground."""

from __future__ import annotations

import signal
import socket
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import msgspec
import psutil

from muster.api.settings import ApiSettings
from muster.cli.render import exit_text
from muster.errors import MusterError, PortError, UnreachableError
from muster.local import LocalCluster, Member

_POLL_SECONDS = 0.1
#: What instances may use of the machine, as for a single worker.
_MEMORY_SHARE = 0.9
_PURPOSES = ("control", "events", "generation")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class UpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `muster up` starts."""

    nodes: int
    port: int
    http: ApiSettings | None
    directory: Path
    pool: int
    heartbeat_seconds: float
    lease_seconds: float
    log_level: str


class MemberEndedError(MusterError):
    """The coordinator or a worker ended by itself."""

    kind = "member-ended"


class _Stopped(BaseException):
    """A signal asked for the end while the processes were being started."""


class _Stop:
    """The first signal. While `raises`, it interrupts what is under way."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.raises = True

    @contextmanager
    def installed(self) -> Generator[None]:
        """Handle the signals while the body runs."""
        before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def held_back(self) -> Generator[None]:
        """Let no signal interrupt the body; one that came ends what follows it."""
        raises, self.raises = self.raises, False
        try:
            yield
        finally:
            self.raises = raises
        if raises and self.event.is_set():
            raise _Stopped

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.event.is_set():
            return
        self.event.set()
        sys.stderr.write(f"muster: {signal.Signals(number).name} received, stopping\n")
        if self.raises:
            raise _Stopped


class _Cluster(LocalCluster):
    """Knows each process that it has started, also when a signal comes at that moment."""

    def __init__(
        self,
        stop: _Stop,
        directory: Path,
        nodes: Sequence[str],
        *,
        port: int,
        http: ApiSettings | None,
        coordinator_options: Sequence[str],
        node_options: Sequence[str],
        log_level: str,
    ) -> None:
        super().__init__(
            directory,
            nodes,
            port=port,
            http_port=None if http is None else http.port,
            coordinator_options=[*coordinator_options, *_http_options(http)],
            # Not on the command line, which everybody on this machine can read.
            environments={}
            if http is None or http.api_key is None
            else {"coordinator": {"MUSTER_API_KEY": http.api_key}},
            node_options=node_options,
            log_level=log_level,
        )
        self._stop = stop

    def _start(self, name: str, arguments: list[str]) -> Member:
        with self._stop.held_back():
            return super()._start(name, arguments)


class _Tails:
    """Copies what is new in the logs to standard error, each line with the name of its process."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        # The files of an earlier run are appended to.
        self._positions = {path: path.stat().st_size for path in cluster.directory.glob("*.log")}

    def copy(self) -> None:
        """Copy whole lines."""
        width = max(map(len, self._cluster.members), default=0)
        for name, member in self._cluster.members.items():
            try:
                with member.log.open("rb") as log:
                    log.seek(self._positions.get(member.log, 0))
                    new = log.read()
            except FileNotFoundError:
                continue
            whole = new[: new.rfind(b"\n") + 1]
            self._positions[member.log] = self._positions.get(member.log, 0) + len(whole)
            text = whole.decode(errors="replace")
            sys.stderr.writelines(f"{name:<{width}} | {line}\n" for line in text.splitlines())
        sys.stderr.flush()


def run_up(settings: UpSettings) -> int:
    """Run until a signal; the exit code.

    Raises:
        PortError: a port is taken.
        MusterError: a process did not come up.
        MemberEndedError: one ended by itself.
    """
    _check_ports(settings.port, settings.http)
    names = [f"n{number}" for number in range(1, settings.nodes + 1)]
    memory_gib = psutil.virtual_memory().total * _MEMORY_SHARE / settings.nodes / 2**30
    stop = _Stop()
    cluster = _Cluster(
        stop,
        settings.directory,
        names,
        port=settings.port,
        http=settings.http,
        coordinator_options=["--heartbeat", str(settings.heartbeat_seconds), "--lease", str(settings.lease_seconds)],
        node_options=[
            *("--memory", f"{memory_gib:.3f}", "--pool", str(settings.pool)),
            *("--copies", str(settings.directory / "models")),
        ],
        log_level=settings.log_level,
    )
    tails = _Tails(cluster)
    with stop.installed():
        try:
            cluster.start()
            stop.raises = False
            _greet(cluster, names)
            _attend(cluster, tails, stop.event)
        except _Stopped:
            pass
        except UnreachableError as error:
            raise MusterError(error.message, remedy=error.remedy) from error
        finally:
            stop.raises = False
            cluster.stop()
            tails.copy()
    sys.stderr.write("muster: everything is stopped\n")
    return 0


def _http_options(http: ApiSettings | None) -> list[str]:
    if http is None:
        return []
    return ["--http-host", http.host, *(option for name in http.names for option in ("--http-name", name))]


def _greet(cluster: LocalCluster, names: list[str]) -> None:
    address = cluster.address.removeprefix("tcp://")
    default = address == "127.0.0.1:5710"
    option = "" if default else f" --coordinator {address}"
    sys.stdout.write(f"coordinator on {address}, nodes {', '.join(names)}, files in {cluster.directory}\n")
    if cluster.http:
        sys.stdout.write(f"HTTP API on {cluster.http}, for OpenAI's clients {cluster.http}/v1\n")
    sys.stdout.write(f"next, in another terminal:  muster create MODEL --ranks {len(names)} --wait{option}\n")
    sys.stdout.write("Ctrl-C stops everything.\n")
    sys.stdout.flush()


def _attend(cluster: LocalCluster, tails: _Tails, stop: threading.Event) -> None:
    while not stop.wait(_POLL_SECONDS):
        tails.copy()
        for name, member in cluster.members.items():
            code = member.process.poll()
            if code is not None and not stop.is_set():
                what = name if name == "coordinator" else f"worker {name}"
                raise MemberEndedError(
                    f"{what} (pid {member.process.pid}) ended by itself ({exit_text(code)}); everything is stopped",
                    remedy=f"Its log is {member.log}",
                )


def _check_ports(port: int, http: ApiSettings | None) -> None:
    """Raises `PortError` before anything is started if one of the ports is taken."""
    wanted = [("127.0.0.1", port + number, purpose) for number, purpose in enumerate(_PURPOSES)] if port else []
    if http is not None and http.port:
        wanted.append((http.host, http.port, "HTTP"))
    for host, number, purpose in wanted:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            other = "--http-port" if purpose == "HTTP" else "--port, which takes the next two as well"
            raise PortError(
                f"port {number} (for {purpose}) on {host} cannot be had: {reason}",
                remedy=f"A `muster up` or `muster coordinator` may be running already; else choose another {other}.",
            ) from error
