"""Serving the API: uvicorn's protocol within the coordinator's event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import closing

import anyio
import anyio.abc
import uvicorn
from loguru import logger
from starlette.applications import Starlette

from muster.api.app import build_app, frame_of
from muster.api.backend import Backend
from muster.api.settings import ApiSettings
from muster.errors import PortError

#: How long requests under way may take to tell their clients that the server ends.
_CLOSE_SECONDS = 1.0
_BACKLOG = 2048
#: A connection without a request is kept so long: a person thinks between two turns.
_KEEP_ALIVE_SECONDS = 75


class HttpServer:
    """The API on a port. `run` serves until it is cancelled."""

    def __init__(self, backend: Backend, settings: ApiSettings) -> None:
        self._backend = backend
        self._settings = settings

    async def run(self, *, task_status: anyio.abc.TaskStatus[int] = anyio.TASK_STATUS_IGNORED) -> None:
        """Bind and serve; started with the port.

        Raises:
            PortError: the port is taken, or the host is no address of this machine.
        """
        with closing(_bound(self._settings.host, self._settings.port)) as listener:
            port: int = listener.getsockname()[1]
            app = build_app(self._backend, self._settings)
            server = _uvicorn(app)
            await server.startup(sockets=[listener])
            # Nothing of uvicorn's own loop is needed, and it would wake ten times a second.
            await server.on_tick(0)
            try:
                task_status.started(port)
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await _close(server, app)


def _uvicorn(app: Starlette) -> uvicorn.Server:
    _log_through_loguru()
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    return server


async def _close(server: uvicorn.Server, app: Starlette) -> None:
    """End what is under way, each request with a word to its client, and do not wait for those that do not listen."""
    for listener in server.servers:
        listener.close()
    state = server.server_state
    for connection in tuple(state.connections):
        connection.shutdown()
    frame_of(app).closing.begin()
    if state.tasks:
        await asyncio.wait(tuple(state.tasks), timeout=_CLOSE_SECONDS)
    for connection in tuple(state.connections):
        connection.transport.abort()
    if state.tasks:
        await asyncio.wait(tuple(state.tasks), timeout=_CLOSE_SECONDS)


def _bound(host: str, port: int) -> socket.socket:
    try:
        host = "0.0.0.0" if host in ("", "*") else host
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _port_error(host, port, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Now and not later: two sockets with SO_REUSEADDR may be bound to one port as long as none listens.
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _port_error(host, port, error) from error
    return listener


def _port_error(host: str, port: int, error: OSError) -> PortError:
    reason = (error.strerror or str(error)).lower()
    return PortError(
        f"port {port} (for HTTP) on {host} cannot be had: {reason}",
        remedy="Another coordinator may be running already; else choose another --http-port, or --no-http",
    )


class _ToLoguru(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        logger.opt(exception=record.exc_info).log(record.levelname, "http: {}", record.getMessage())


def _log_through_loguru() -> None:
    uvicorns = logging.getLogger("uvicorn.error")
    if not any(isinstance(handler, _ToLoguru) for handler in uvicorns.handlers):
        uvicorns.addHandler(_ToLoguru())
    uvicorns.setLevel(logging.WARNING)
    uvicorns.propagate = False
