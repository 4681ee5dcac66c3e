"""`muster serve`: a model instance from its creation to nothing left, on a cluster of its own or on one that runs."""

from __future__ import annotations

import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import anyio.to_thread
import msgspec

from muster.bus import ControlClient
from muster.cli.client import CALL_SECONDS
from muster.cli.errors import EXIT_FAILED, InterruptedBySignalError, bare_errors, show_failure, show_note
from muster.cli.instance_commands import remove
from muster.cli.options import DEFAULT_ADDRESS
from muster.cli.processes import http_url
from muster.cli.reaching import reach
from muster.cli.serve_card import card
from muster.cli.watch import Quiet, display, is_settled, watching
from muster.cli.wishes import PLACING_SECONDS
from muster.errors import MusterError, PortError, UnreachableError
from muster.local import LocalCluster
from muster.model.files import inspect
from muster.model.hub import absent, directory_of
from muster.protocol import Create, Delete, Hello
from muster.replies import Accepted, Created, Welcome
from muster.spec import InstanceSpec, ModelWorkload
from muster.state import Broken, Deleting, Instance, Running

_HOST = "127.0.0.1"
#: Where other commands look for a coordinator; events, generation and HTTP follow it.
_CONTROL_PORT = int(DEFAULT_ADDRESS.rpartition(":")[2])
_HTTP_AFTER_CONTROL = 3
#: Between two looks at the processes of our own cluster; nothing portable wakes us.
_POLL_SECONDS = 0.5
#: Beyond its drain: asking the ranks politely, SIGTERM, SIGKILL.
_REMOVE_SECONDS = 20.0


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to serve and where. Without `join`, the coordinator's address, everything is started here."""

    spec: InstanceSpec
    http_port: int | None = None
    join: str | None = None
    quiet: bool = False


def check_directory(path: Path) -> None:
    """Look at the model's files before anything is started.

    Raises:
        ModelError: there is no such directory, or what is in it is no model.
    """
    if (directory := directory_of(str(path))) is None:
        raise absent(str(path))
    inspect(directory)


def run_serve(settings: ServeSettings) -> int:
    """Serve until a signal; the exit code.

    Raises:
        MusterError: the cluster did not come up, or one of its processes ended by itself.
        InterruptedBySignalError: a signal came before the model was ready.
    """
    return anyio.run(_run, settings)


class _Signals:
    """The first signal ends the serving, the second cuts answers off, the third is Python's own."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self.first: int | None = None
        self.again = anyio.Event()

    async def watch(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
            task_status.started()
            async for number in signals:
                if self.first is not None:
                    self.again.set()
                    return
                self.first = number
                self.scope.cancel()


class _Site(msgspec.Struct, frozen=True):
    """Where to serve: the coordinator, its HTTP API ("" where that is not known), and the cluster, if it is ours."""

    address: str
    http: str
    cluster: LocalCluster | None = None


async def _run(settings: ServeSettings) -> int:
    signals = _Signals()
    outcome = _Outcome()
    with bare_errors():
        async with anyio.create_task_group() as group:
            await group.start(signals.watch)
            async with _site(settings) as site, ControlClient(site.address) as client:
                service = _Service(client, site, settings, signals, outcome)
                # Site and client stay outside of what a signal cancels: the deletion still needs them.
                with signals.scope:
                    await reach(client)
                    await service.run()
            group.cancel_scope.cancel()
    if signals.first is not None and not outcome.ready:
        raise InterruptedBySignalError(signals.first)
    return outcome.code


@asynccontextmanager
async def _site(settings: ServeSettings) -> AsyncGenerator[_Site]:
    if settings.join is not None:
        async with ControlClient(settings.join) as client:
            await reach(client)
            welcome = await client.ask(Hello(), CALL_SECONDS, Welcome)
        port = settings.http_port or welcome.http_port
        yield _Site(settings.join, http_url(client.endpoint.host, port) if port is not None else "")
        return
    control, http = _ports(settings.http_port)
    # The addresses of sockets are short, so the directory has to be, too.
    with tempfile.TemporaryDirectory(prefix="muster-serve-") as directory:
        cluster = LocalCluster(
            Path(directory), ("n1",), port=control, http_port=http, node_options=("--pool", "0"), log_level="warning"
        )
        try:
            try:
                await anyio.to_thread.run_sync(cluster.start)
            except UnreachableError as error:  # which for a user means a coordinator elsewhere
                raise MusterError(error.message, remedy=error.remedy) from error
            yield _Site(cluster.address, cluster.http, cluster)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(cluster.stop)


def _ports(http: int | None) -> tuple[int, int]:
    """Control and HTTP port: where other commands look first, else any free one (0).

    Raises:
        PortError: the HTTP port that was asked for is taken.
    """
    if http is not None and not _is_free(http):
        raise PortError(
            f"port {http} on {_HOST} cannot be had: somebody listens there", remedy="Choose another --port."
        )
    control = _CONTROL_PORT
    if not all(_is_free(control + number) for number in range(3)):
        show_note(f"port {control} is taken, by another coordinator perhaps; this one is found by --coordinator only")
        control = 0
    usual = _CONTROL_PORT + _HTTP_AFTER_CONTROL
    return control, http if http is not None else usual if _is_free(usual) else 0


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError:
            return False
        return True


class _Outcome(msgspec.Struct):
    """Whether the model was ready, and the exit code."""

    ready: bool = False
    code: int = 0


class _Service:
    """The instance from its creation to its end."""

    def __init__(
        self, client: ControlClient, site: _Site, settings: ServeSettings, signals: _Signals, outcome: _Outcome
    ) -> None:
        self._outcome = outcome
        self._client = client
        self._site = site
        self._settings = settings
        self._signals = signals

    async def run(self) -> None:
        """Create, wait, say how to ask it, stay; it is gone in the end, whatever happens."""
        created: list[Created] = []
        # A signal between the request and its answer must not leave an instance that nobody knows of.
        with anyio.CancelScope(shield=True):
            request = Create(spec=self._settings.spec, key=secrets.token_hex(8))
            created.append(await self._client.ask(request, PLACING_SECONDS, Created))
        try:
            instance = await self._until_ready(created[0])
            if instance is None:
                self._outcome.code = EXIT_FAILED
                return
            self._outcome.ready = True
            self._greet(instance)
            await self._stay(created[0])
        finally:
            with anyio.CancelScope(shield=True):
                await self._remove(created[0])

    async def _until_ready(self, created: Created) -> Instance | None:
        """The ready instance; `None` if it will not be, which is told."""
        shown = Quiet() if self._settings.quiet else display()
        async with watching(self._client, shown) as watcher:
            watcher.shown.add(created.instance)
            with shown:
                await watcher.until(
                    lambda state: (
                        watcher.reached(created.sequence, created.instance) and is_settled(state, created.instance)
                    )
                )
            instance = watcher.state.instances.get(created.instance)
        if instance is not None and isinstance(instance.status, Running):
            return instance
        self._tell(instance)
        return None

    def _tell(self, instance: Instance | None) -> None:
        if instance is not None and isinstance(instance.status, Broken):
            show_failure(instance.status.failure)
        else:
            show_note("the instance was deleted by somebody else")

    def _greet(self, instance: Instance) -> None:
        workload = self._settings.spec.workload
        assert isinstance(workload, ModelWorkload)
        own = self._site.cluster is not None
        address = self._client.endpoint
        usual = f"{address.host}:{address.port}" == DEFAULT_ADDRESS
        sys.stdout.write(
            card(
                workload.public_name,
                len(instance.ranks),
                self._site.http,
                coordinator="" if usual else f"{address.host}:{address.port}",
                own=own,
            )
        )
        sys.stdout.flush()

    async def _stay(self, created: Created) -> None:
        """Until a signal, or until the instance or our own cluster has ended.

        Raises:
            MusterError: a process of our cluster ended by itself.
        """
        async with watching(self._client) as watcher, anyio.create_task_group() as group:
            watcher.shown.add(created.instance)
            group.start_soon(self._attend)

            def ended() -> bool:
                found = watcher.state.instances.get(created.instance)
                status = None if found is None else found.status
                return (
                    status is None
                    or isinstance(status, Deleting)
                    or (isinstance(status, Broken) and status.retry_at_ns is None)
                )

            await watcher.until(lambda state: ended())
            self._outcome.code = EXIT_FAILED
            self._tell(watcher.state.instances.get(created.instance))
            group.cancel_scope.cancel()

    async def _attend(self) -> None:
        """Watch the processes of our own cluster."""
        while self._site.cluster is not None:
            for name, member in self._site.cluster.members.items():
                code = member.process.poll()
                if code is not None:
                    self._outcome.code = EXIT_FAILED
                    tail = "\n".join(self._site.cluster.log_of(name).splitlines()[-6:])
                    raise MusterError(f"{name} (pid {member.process.pid}) ended by itself with {code}:\n{tail}")
            await anyio.sleep(_POLL_SECONDS)
        await anyio.sleep_forever()

    async def _remove(self, created: Created) -> None:
        """Delete it; answers that are under way may end first, unless there is a second signal."""
        drain = self._settings.spec.deadlines.drain_seconds if self._outcome.ready else 0.0
        if self._outcome.ready and self._signals.first is not None:
            show_note(f"stopping; answers under way have {drain:g} s to end, Ctrl-C again cuts them off")
        async with anyio.create_task_group() as group:

            async def cut() -> None:
                await self._signals.again.wait()
                await self._client.ask(Delete(instance=created.instance, now=True), CALL_SECONDS, Accepted)

            group.start_soon(cut)
            try:
                await remove(
                    self._client, [created.instance], drain + _REMOVE_SECONDS, now=not self._outcome.ready, quiet=True
                )
            except UnreachableError as error:  # our coordinator is gone, and with it all that it ran
                if self._site.cluster is None:
                    show_note(f"{created.instance} could not be deleted: {error.message}")
            group.cancel_scope.cancel()
