"""Running the two long-lived processes in the foreground: logs, signals, exit codes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVarTuple

import anyio
import anyio.abc
import msgspec
from loguru import logger

from muster.api.settings import ApiSettings
from muster.bus import Endpoint
from muster.cli.errors import EXIT_FAILED, EXIT_INTERRUPTED, bare_errors, exit_code_of, show_error
from muster.coordinator.role import Member, Partners
from muster.coordinator.service import Coordinator, CoordinatorSettings
from muster.coordinator.witness import Witness, WitnessSettings
from muster.errors import MusterError, PortError
from muster.local import Reached
from muster.spec import NodeInfo
from muster.worker.service import Worker
from muster.worker.settings import WorkerSettings

#: How long threads may go on after everything else has ended.
_THREADS_SECONDS: Final = 1.0

A = TypeVarTuple("A")


def run_process(function: Callable[[*A], Awaitable[None]], *arguments: *A) -> None:
    """Run one of the long-lived processes to its end, as `anyio.run` does.

    A thread that hangs in a file system, a share that is gone for example, would keep the interpreter from ending for
    ever. Where one is left after the orderly end, this does not return but ends the process, with the same output and
    exit code.
    """
    before = set(threading.enumerate())
    try:
        anyio.run(function, *arguments)
    except (Exception, KeyboardInterrupt) as error:
        if not _threads_left(before):
            raise
        code = _shown(error)
    else:
        if not _threads_left(before):
            return
        code = 0
    logger.warning("a thread hangs, in a file system that does not answer: ending without it")
    logger.complete()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # whoever read it is gone
            stream.flush()
    os._exit(code)


def _threads_left(before: set[threading.Thread]) -> bool:
    """Whether threads are left that the interpreter would wait for; those that only have to end are let do so."""
    deadline = time.monotonic() + _THREADS_SECONDS
    left = [thread for thread in set(threading.enumerate()) - before if not thread.daemon]
    for thread in left:
        thread.join(max(deadline - time.monotonic(), 0.0))
    return any(thread.is_alive() for thread in left)


def _shown(error: BaseException) -> int:
    """Write the error to standard error as `main` would; its exit code."""
    if isinstance(error, MusterError):
        show_error(error)
        return exit_code_of(error)
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    traceback.print_exception(error)
    return EXIT_FAILED


def configure_logs(level: str) -> None:
    """Log to standard error. Variable values are never shown: they may be prompts."""
    logger.remove()
    logger.add(
        sys.stderr,
        level=level.upper(),
        format="<green>{time:HH:mm:ss.SSS}</green> <level>{level: <7}</level> {message}",
        diagnose=False,
        backtrace=False,
    )


class Attendance(msgspec.Struct, frozen=True, kw_only=True):
    """How whoever started a process hears of it, and how the process hears of their end.

    `ready_file` is written once the process is up. With `stop_with_stdin` the end of standard input, which comes
    however the starter ends, counts as SIGTERM.
    """

    ready_file: Path | None = None
    stop_with_stdin: bool = False


async def until_told(attendance: Attendance, stop: Callable[[], None]) -> None:
    """Call `stop` at the first SIGINT or SIGTERM, or with whoever started us, and return."""
    async with anyio.create_task_group() as group:

        async def until_starter_ends() -> None:
            await anyio.wait_readable(sys.stdin)
            logger.info("stopping: whoever started this process has ended")
            stop()
            group.cancel_scope.cancel()

        if attendance.stop_with_stdin:
            group.start_soon(until_starter_ends)
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for number in signals:
                logger.info("stopping: {} received", signal.Signals(number).name)
                stop()
                group.cancel_scope.cancel()
                return


async def run_coordinator(
    settings: CoordinatorSettings, partners: Partners, attendance: Attendance, api: ApiSettings | None
) -> None:
    """Serve as the coordinator, or as a standby, until told to stop, over HTTP too where there are settings for it.

    A standby serves HTTP once it has taken over.

    Raises:
        OtherLeadsError: another coordinator leads, and this one was not told to follow it.
        PortError: a port is taken, or a host is no address of this machine.
    """
    member = Member(settings, partners)
    stop = anyio.Event()
    with bare_errors():
        async with anyio.create_task_group() as group:
            begun = False

            def end() -> None:
                stop.set()
                if not begun:  # a first vote may be long in coming
                    group.cancel_scope.cancel()

            group.start_soon(until_told, attendance, end)
            leads: bool = await group.start(member.run)
            begun = True
            control = member.coordinator.control_port
            logger.info("coordinator on {}:{}, log in {}", settings.host, control, settings.directory)
            # Ends before the coordinator does: requests under way still have somebody to cancel them.
            async with anyio.create_task_group() as front:
                front.start_soon(_serve_front, member, settings, attendance, api, leads)
                await stop.wait()
                front.cancel_scope.cancel()
            group.cancel_scope.cancel()


async def _serve_front(
    member: Member, settings: CoordinatorSettings, attendance: Attendance, api: ApiSettings | None, leads: bool
) -> None:
    """Say where the coordinator is, and serve HTTP once it leads."""
    coordinator = member.coordinator
    async with anyio.create_task_group() as group:
        if not leads:
            _publish(attendance, coordinator, _announce(settings.host, coordinator.control_port, None, None))
            await member.activated.wait()
        http = None
        if api is not None:
            try:
                http = await _serve_http(coordinator, api, group)
            except PortError as error:
                if leads:
                    raise
                logger.error("this coordinator leads without HTTP: {}", error)
        coordinator.http_port = http
        _publish(attendance, coordinator, _announce(settings.host, coordinator.control_port, api, http))


def _publish(attendance: Attendance, coordinator: Coordinator, reached: Reached) -> None:
    if attendance.ready_file is not None:
        reached = msgspec.structs.replace(reached, generation_port=coordinator.generation_port)
        publish_ready(attendance.ready_file, msgspec.json.encode(reached).decode())


async def run_witness(settings: WitnessSettings, attendance: Attendance) -> None:
    """Vote between coordinators until told to stop.

    Raises:
        PortError: the port is taken, or the host is no address of this machine.
    """
    with bare_errors():
        async with anyio.create_task_group() as group:
            group.start_soon(until_told, attendance, group.cancel_scope.cancel)
            port: int = await group.start(Witness(settings).run)
            logger.info("witness on {}:{}, votes in {}", settings.host, port, settings.directory)
            if attendance.ready_file is not None:
                reached = Reached(control=Endpoint(reachable(settings.host), port).url)
                publish_ready(attendance.ready_file, msgspec.json.encode(reached).decode())


async def _serve_http(coordinator: Coordinator, api: ApiSettings, group: anyio.abc.TaskGroup) -> int:
    """Start the HTTP API in `group`; answers its port."""
    from muster.api.server import HttpServer

    return await group.start(HttpServer(coordinator.door, api).run)


def _announce(host: str, control: int, api: ApiSettings | None, http: int | None) -> Reached:
    """Say in the log where the coordinator is; answers what the ready file says of it."""
    url = ""
    if host == "0.0.0.0":
        logger.warning("whoever reaches port {} may use this cluster: keep it inside a trusted network", control)
    if api is not None and http is not None:
        url = http_url(api.host, http)
        logger.info("HTTP API on {}", url)
        if not is_loopback(api.host) and api.api_key is None:
            logger.warning(
                "whoever reaches port {} may use this cluster: keep it inside a trusted network, or set --api-key", http
            )
    return Reached(control=Endpoint(reachable(host), control).url, http=url)


def reachable(host: str) -> str:
    """An address at which this machine reaches what listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "*": "127.0.0.1", "::": "::1"}.get(host, host)


def http_url(host: str, port: int) -> str:
    """The base URL of an HTTP API that listens on `host`."""
    name = reachable(host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`."""
    return host in {"localhost", "::1"} or host.startswith("127.")


async def run_worker(settings: WorkerSettings, attendance: Attendance) -> None:
    """Run a worker until told to stop; then its ranks are torn down and it leaves the cluster."""
    worker = Worker(settings)
    with bare_errors():
        async with anyio.create_task_group() as group:
            group.start_soon(until_told, attendance, worker.stop)
            await worker.run(task_status=_Ready(attendance.ready_file))
            group.cancel_scope.cancel()


class _Ready:
    """A task status that leaves a file behind."""

    def __init__(self, ready_file: Path | None) -> None:
        self._ready_file = ready_file

    def started(self, value: NodeInfo | None = None) -> None:
        """Say that the worker has joined."""
        if self._ready_file is not None and value is not None:
            publish_ready(self._ready_file, msgspec.json.encode(value).decode())


def publish_ready(path: Path, text: str) -> None:
    """Write `text` to `path` at once: whoever waits for the file never sees half of it."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text)
    temporary.replace(path)
