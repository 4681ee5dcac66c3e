"""Looks at files in threads that nobody has to wait for: a file system may hang, and its process goes on, and ends."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Final, TypeVar

import anyio

from muster.bus.peer import PeerConnection
from muster.errors import FetchError, PeerError

#: How long a look at directories, indexes and headers may take.
LOOK_SECONDS: Final = 10.0

_REMEDY: Final = "see that node's disks and network shares: one of them hangs, or is very slow"

T = TypeVar("T")


class Looks:
    """Runs what may hang, `at_once` at a time. A thread that was given up keeps its turn until it ends.

    The threads are daemons, unlike those of anyio: the interpreter does not wait for them when the process ends.
    """

    def __init__(self, at_once: int) -> None:
        self._turns = anyio.Semaphore(at_once)

    async def find(
        self, look: Callable[[], T], what: str, *, seconds: float = LOOK_SECONDS, asker: PeerConnection | None = None
    ) -> T:
        """What `look` finds in its thread; its errors are raised here.

        Raises:
            FetchError: it took longer than `seconds`; the message names `what`.
            PeerError: the asker is gone.
        """
        with anyio.move_on_after(seconds) as wait:
            await self._turns.acquire()
        if wait.cancelled_caught:
            raise FetchError(f"{what} waits for others that do not end within {seconds:g} s", remedy=_REMEDY)
        loop = asyncio.get_running_loop()
        found: asyncio.Future[T] = loop.create_future()

        def settle(outcome: Callable[[], None]) -> None:
            self._turns.release()
            if not found.done():
                outcome()

        def work() -> None:
            try:
                outcome = functools.partial(found.set_result, look())
            except Exception as error:  # not this thread's: it is raised where the answer is waited for
                outcome = functools.partial(found.set_exception, error)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, outcome)

        try:
            threading.Thread(target=work, name="look", daemon=True).start()
        except RuntimeError as error:
            self._turns.release()
            raise FetchError(f"{what} cannot be looked at now: {error}", remedy="see `ulimit -u` there") from error
        gone = False
        try:
            async with anyio.create_task_group() as group:

                async def watch(asker: PeerConnection) -> None:
                    nonlocal gone
                    await asker.until_gone()
                    gone = True
                    group.cancel_scope.cancel()

                if asker is not None:
                    group.start_soon(watch, asker)
                with anyio.move_on_after(seconds):
                    await asyncio.wait([found])
                group.cancel_scope.cancel()
            if found.done():
                return found.result()
        finally:
            found.cancel()
        if gone and asker is not None:
            raise PeerError(f"{asker.other} waits no more for {what}")
        raise FetchError(f"{what} could not be read within {seconds:g} s", remedy=_REMEDY)
