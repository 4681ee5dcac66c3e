"""What every socket of the bus has in common: its options, non-blocking sends, and a task that owns its receive."""

from __future__ import annotations

import asyncio
import errno
import socket as std_socket
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, cast

import anyio
import psutil
import zmq
import zmq.asyncio
from anyio.abc import TaskGroup, TaskStatus

from muster.errors import PortError

#: How long a closed socket may try to hand over what is queued. Never infinite: a dead peer would block the exit.
LINGER_MILLISECONDS = 500
#: The largest call. A prompt of a million characters fits; a flood of large ones stays bounded.
MAXIMUM_CALL_BYTES = 1024 * 1024
#: The largest message that a client accepts: a snapshot of a large cluster.
MAXIMUM_ANSWER_BYTES = 256 * 1024 * 1024

# A cut cable leaves both ends connected until the kernel gives the connection up: after so long without an answer,
# to a probe or to data. Not by ZeroMQ's own heartbeat: libzmq 4.3.5 aborts the process when it answers a ping of a
# connection that was reset while its queue was full ("Assertion failed: !_io_error", stream_engine_base.cpp).
_KEEPALIVE_IDLE_SECONDS = 2
_KEEPALIVE_INTERVAL_SECONDS = 1
_KEEPALIVE_PROBES = 4
_UNANSWERED_MILLISECONDS = 6_000
_HANDSHAKE_MILLISECONDS = 5_000  #: a stranger that connects and says nothing is dropped after this
_RECONNECT_MILLISECONDS = 50
_RECONNECT_MAXIMUM_MILLISECONDS = 1_000


def open_socket(
    kind: int, *, receive_messages: int, send_messages: int, maximum_bytes: int, immediate: bool = False
) -> zmq.asyncio.Socket:
    """Open a socket with bounded queues (in messages per peer), bounded messages, and a finite linger.

    With `immediate`, messages go to established connections only, and a lost connection takes its queue with it.
    """
    socket = zmq.asyncio.Context.instance().socket(kind)
    _set_options(socket, receive_messages, send_messages, maximum_bytes, immediate)
    return socket


def open_plain_socket(kind: int, *, receive_messages: int, send_messages: int, maximum_bytes: int) -> zmq.Socket[bytes]:
    """`open_socket` for one who watches the socket's descriptor and never waits: a message costs half as much."""
    socket = zmq.Context[zmq.Socket[bytes]](zmq.asyncio.Context.instance()).socket(kind)
    _set_options(socket, receive_messages, send_messages, maximum_bytes, False)
    return socket


def _set_options(
    socket: zmq.Socket[Any], receive_messages: int, send_messages: int, maximum_bytes: int, immediate: bool
) -> None:
    options = {
        zmq.LINGER: LINGER_MILLISECONDS,
        zmq.RCVHWM: receive_messages,
        zmq.SNDHWM: send_messages,
        zmq.MAXMSGSIZE: maximum_bytes,
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: _KEEPALIVE_IDLE_SECONDS,
        zmq.TCP_KEEPALIVE_INTVL: _KEEPALIVE_INTERVAL_SECONDS,
        zmq.TCP_KEEPALIVE_CNT: _KEEPALIVE_PROBES,
        zmq.TCP_MAXRT: _UNANSWERED_MILLISECONDS,
        zmq.HANDSHAKE_IVL: _HANDSHAKE_MILLISECONDS,
        zmq.RECONNECT_IVL: _RECONNECT_MILLISECONDS,
        zmq.RECONNECT_IVL_MAX: _RECONNECT_MAXIMUM_MILLISECONDS,
        zmq.IMMEDIATE: int(immediate),
    }
    for option, value in options.items():
        socket.setsockopt(option, value)


async def bind_socket(socket: zmq.Socket[Any], host: str, port: int, purpose: str) -> int:
    """Bind to an address of this machine; port 0 takes a free one. Returns the port.

    Raises:
        PortError: the port is taken, or the host is no address of this machine. The socket is closed.
    """
    try:
        address = "0.0.0.0" if host in ("", "*") else await _resolve(host, purpose)
        socket.bind(f"tcp://{address}:{port or '*'}")
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise _bind_error(error, host, port, purpose) from error
    except BaseException:  # cancelled while the name was looked up, or the name is unknown
        socket.close(linger=0)
        raise
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2].rstrip("\0"))


async def _resolve(host: str, purpose: str) -> str:
    try:
        found = await anyio.getaddrinfo(host, None, family=std_socket.AF_INET)
    except OSError as error:
        raise PortError(
            f"the {purpose} socket cannot bind to {host!r}: {error}",
            remedy="Give an IPv4 address of this machine, or 0.0.0.0 for all of them.",
        ) from error
    return str(found[0][4][0])


def _bind_error(error: zmq.ZMQError, host: str, port: int, purpose: str) -> PortError:
    if error.errno == errno.EADDRINUSE:
        owner = _listener(port)
        return PortError(
            f"the {purpose} socket cannot bind to {host}:{port}: the port is in use{owner}",
            remedy="Stop what uses the port, or choose another one.",
        )
    return PortError(
        f"the {purpose} socket cannot bind to {host}:{port}: {error.strerror}",
        remedy="Give an IPv4 address of this machine, or 0.0.0.0 for all of them, and a port that you may use.",
    )


def _listener(port: int) -> str:
    """Who listens on the port, as far as this user may see."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return ""
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            return f" by process {connection.pid}" if connection.pid else ""
    return ""


async def receive(socket: zmq.asyncio.Socket) -> list[bytes]:
    """Wait for the next message. Only the one task that owns the socket's receive may call this."""
    frames = await socket.recv_multipart()
    # A socket with more in its queue answers without yielding; a flood must not starve the other tasks.
    await anyio.lowlevel.checkpoint()
    return frames


def receive_now(socket: zmq.asyncio.Socket) -> list[bytes] | None:
    """The next message if it is there already. For the task that owns the socket's receive."""
    future = cast("asyncio.Future[list[bytes]]", socket.recv_multipart(flags=zmq.NOBLOCK))
    return None if isinstance(future.exception(), zmq.Again) else future.result()


async def send(socket: zmq.asyncio.Socket, frames: Sequence[bytes]) -> None:
    """Send, and wait while there is no connection or the queue is full."""
    await socket.send_multipart(frames)


def send_now(socket: zmq.asyncio.Socket, frames: Sequence[bytes]) -> bool:
    """Send without waiting; `False` where there is no connection or the queue is full."""
    future = cast("asyncio.Future[object]", socket.send_multipart(frames, flags=zmq.NOBLOCK))
    if not future.done():  # others wait for their turn
        future.cancel()
        return False
    error = future.exception()
    if error is not None and not isinstance(error, zmq.Again):
        raise error
    return error is None


class Resident(ABC):
    """A part of the bus that needs a task of its own while it is used: `async with X(...) as x`, or `x.run`.

    An error of its task cancels the body of the `async with` and comes out of it; an error of the body is
    never wrapped into a group.
    """

    def __init__(self) -> None:
        self._group: TaskGroup | None = None
        self._closed = False

    @abstractmethod
    async def _open(self) -> None:
        """Acquire sockets; on an error nothing stays open."""

    @abstractmethod
    async def _serve(self) -> None:
        """What the task does until it is cancelled."""

    @abstractmethod
    def _close(self) -> None:
        """Release what `_open` acquired. May be called twice."""

    async def __aenter__(self) -> Self:
        await self._open()
        group = anyio.create_task_group()
        await group.__aenter__()
        group.start_soon(self._serve_until_closed, name=f"{type(self).__module__}.{type(self).__qualname__}")
        self._group = group
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        group, self._group = self._group, None
        if group is None:
            return None
        group.cancel_scope.cancel()
        try:
            if isinstance(error, anyio.get_cancelled_exc_class()):
                return await group.__aexit__(kind, error, trace)
            await group.__aexit__(None, None, None)
            return None
        finally:
            self.close()

    def close(self) -> None:
        """Close everything now, as if the process had ended; leaving the `async with` does it too."""
        self._closed = True
        self._close()

    async def _serve_until_closed(self) -> None:
        try:
            await self._serve()
        except (zmq.ZMQError, anyio.ClosedResourceError):
            if not self._closed:
                raise
        except asyncio.CancelledError:
            # Closing a socket cancels the future that waits on it, which is no cancellation of this task.
            task = asyncio.current_task()
            if not self._closed or (task is not None and task.cancelling()):
                raise

    async def run(self, *, task_status: TaskStatus[object] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. Returns at once inside an `async with` of the same object."""
        if self._group is not None:
            task_status.started(self)
            return
        async with self:
            task_status.started(self)
            await anyio.sleep_forever()


class Throttle:
    """Lets one log line through per interval and counts the rest. Reads the monotonic clock."""

    def __init__(self, interval_seconds: float = 10.0) -> None:
        self._interval_seconds = interval_seconds
        self._next = 0.0
        self._count = 0

    def count(self) -> int:
        """Count one more; returns how many there were since the last line if a line is due, else 0."""
        self._count += 1
        now = time.monotonic()
        if now < self._next:
            return 0
        self._next = now + self._interval_seconds
        count, self._count = self._count, 0
        return count


class Signal:
    """Wakes the one task that waits; set before the wait, it wakes at once."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def set(self) -> None:
        """Wake the task that waits, now or next."""
        self._event.set()

    async def wait(self) -> None:
        """Wait for `set` and take it."""
        await self._event.wait()
        self._event = anyio.Event()
