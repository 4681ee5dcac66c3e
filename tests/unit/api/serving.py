"""The API on a real port of loopback, with a fake coordinator behind it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import anyio.from_thread
import msgspec

from muster.api.backend import Backend
from muster.api.server import HttpServer
from muster.api.settings import ApiSettings


class Served(msgspec.Struct, frozen=True):
    """A server in a thread of its own; `portal.call` runs something in its event loop."""

    url: str
    portal: anyio.from_thread.BlockingPortal


@contextmanager
def served(backend: Backend, settings: ApiSettings | None = None) -> Generator[Served]:
    """Serve on a free port while the body runs."""
    with anyio.from_thread.start_blocking_portal() as portal:
        future, port = portal.start_task(HttpServer(backend, settings or ApiSettings()).run)
        try:
            yield Served(f"http://127.0.0.1:{port}", portal)
        finally:
            future.cancel()


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    """Wait for something that another thread does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds} seconds"
        time.sleep(0.002)
