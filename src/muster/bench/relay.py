"""A link that can be cut: connections to one loopback address are carried to another, until nothing passes any more."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable

import anyio
import anyio.abc

_LOCAL = "127.0.0.1"
_CHUNK_BYTES = 65_536


class Relay:
    """Carries TCP connections from `host` to the same ports of 127.0.0.1. While cut, no byte passes either way.

    What is on its way when the link is cut arrives when it heals, as with a cable: neither end sees a reset.
    """

    def __init__(self, host: str, ports: Iterable[int]) -> None:
        self.host = host
        self._ports = tuple(ports)
        self._whole = anyio.Event()
        self._whole.set()

    def cut(self) -> None:
        """Let nothing pass."""
        self._whole = anyio.Event()

    def heal(self) -> None:
        """Let everything pass again."""
        self._whole.set()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Carry until cancelled; started when it listens.

        Raises:
            OSError: this machine has no such address, or a port of it is taken.
        """
        async with contextlib.AsyncExitStack() as stack, anyio.create_task_group() as group:
            for port in self._ports:
                listener = await anyio.create_tcp_listener(local_host=self.host, local_port=port)
                await stack.enter_async_context(listener)
                group.start_soon(self._listen, listener, port)
            task_status.started()
            await anyio.sleep_forever()

    async def _listen(self, listener: anyio.abc.Listener[anyio.abc.SocketStream], port: int) -> None:
        async def carry(near: anyio.abc.SocketStream) -> None:
            async with near:
                await self._whole.wait()
                with contextlib.suppress(OSError):
                    async with await anyio.connect_tcp(_LOCAL, port) as far, anyio.create_task_group() as group:
                        group.start_soon(self._pump, near, far, group.cancel_scope)
                        group.start_soon(self._pump, far, near, group.cancel_scope)

        await listener.serve(carry)

    async def _pump(
        self, source: anyio.abc.SocketStream, sink: anyio.abc.SocketStream, scope: anyio.CancelScope
    ) -> None:
        """Carry one direction; its end is the end of the connection, once the link lets that pass."""
        with contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            while True:
                data = await source.receive(_CHUNK_BYTES)
                await self._whole.wait()
                await sink.send(data)
        await self._whole.wait()
        scope.cancel()


def has_address(host: str) -> bool:
    """Whether this machine can listen on a loopback address; macOS has only the first."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True
