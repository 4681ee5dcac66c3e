"""A thread that turns requests into token ids, so that a long template or grammar holds no running answer up."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

from muster.errors import MusterError
from muster.model.load import LoadedModel
from muster.model.request import PreparedRequest, prepare
from muster.protocol import Generate
from muster.spec import Failure, Phase

#: What became of a request: its number, and what was prepared or why it cannot be.
Prepared = tuple[int, PreparedRequest | Failure]

#: How long a template may hold up the thread that generates, each time it wants to go on; Python's own is 5 ms.
_SWITCH_SECONDS: Final = 0.0005

PrepareCall = Callable[[LoadedModel, Generate], PreparedRequest]


class Preparer:
    """Prepares requests in the order of their arrival; `fileno` becomes readable when `take` has something."""

    def __init__(self, loaded: LoadedModel, prepare_request: PrepareCall = prepare) -> None:
        self._loaded = loaded
        self._prepare = prepare_request
        self._asked: SimpleQueue[tuple[int, Generate] | None] = SimpleQueue()
        self._ready: SimpleQueue[Prepared] = SimpleQueue()
        self._dropped: set[int] = set()  #: asked for and not wanted any more
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        sys.setswitchinterval(_SWITCH_SECONDS)
        self._thread = threading.Thread(target=self._work, name="prepare", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """The descriptor to poll."""
        return self._ours.fileno()

    def submit(self, request: int, generate: Generate) -> None:
        """Prepare this one after those before it."""
        self._asked.put((request, generate))

    def drop(self, request: int) -> None:
        """Nobody wants this one any more; `take` may still give it, where the thread is at it."""
        self._dropped.add(request)

    def take(self) -> list[Prepared]:
        """What has been prepared since the last call."""
        try:
            self._ours.recv(4096)
        except BlockingIOError:
            return []
        taken = [self._ready.get() for _ in range(self._ready.qsize())]
        self._dropped.difference_update(number for number, _ in taken)
        return taken

    def close(self) -> None:
        """Let the thread end once it has prepared what it is at; `take` is no longer possible."""
        self._asked.put(None)
        self._ours.close()

    def _work(self) -> None:
        with self._theirs, contextlib.suppress(OSError):  # whoever took the results has gone
            while (asked := self._asked.get()) is not None:
                request, generate = asked
                if request in self._dropped:
                    self._dropped.discard(request)
                    continue
                self._ready.put((request, self._outcome(generate)))
                self._theirs.send(b"\0")

    def _outcome(self, generate: Generate) -> PreparedRequest | Failure:
        try:
            return self._prepare(self._loaded, generate)
        except Exception as error:  # the thread's outermost edge: templates and schemas are the client's
            return failure_of(error)


def failure_of(error: Exception) -> Failure:
    """What the client of a request hears of an error that is its request's alone."""
    if isinstance(error, MusterError):
        return Failure(
            kind=error.kind,
            message=error.message,
            remedy=error.remedy,
            phase=Phase.RUNNING,
            retryable=error.retryable,
            field=error.field,
        )
    traceback.print_exception(error)
    return Failure(
        kind="internal",
        message=f"the request failed: {type(error).__name__}: {error}",
        remedy="See the runner's output: muster logs",
        phase=Phase.RUNNING,
    )
