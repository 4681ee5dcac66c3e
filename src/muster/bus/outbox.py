"""A worker's reports, kept until the coordinator has them for certain."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import anyio
import msgspec
from loguru import logger

from muster.bus.client import ControlClient, tag_of
from muster.bus.sockets import Resident, Signal
from muster.errors import RequestError
from muster.events import Event, encode_event
from muster.protocol import Acked, Answer, Output, Refused, Report
from muster.spec import BootId, InstanceId, NodeId

#: Messages on the way at once.
WINDOW = 64
#: Without any acknowledgement for this long, everything on the way is sent again.
RESEND_SECONDS = 1.0


class _Item(msgspec.Struct, gc=False):
    message: Report | Output
    call: int = 0  #: id of the last call that carried it
    refused: bool = False  #: never to be sent again; it leaves the queue in its turn, since others count from it


class OutboxStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """`queued` are not acknowledged yet; the others are counts since the start."""

    queued: int
    sent: int
    sent_again: int
    acknowledged: int
    refused: int


class Outbox(Resident):
    """Sends reports and outputs in order, numbered from 1 upward within a boot, each until it is acknowledged.

    `limit` bounds the lines of output that wait: `output` waits beyond it. Reports are few, and never wait.
    """

    def __init__(
        self,
        client: ControlClient,
        node: NodeId,
        boot: BootId,
        limit: int = 1_000,
        *,
        resend_seconds: float = RESEND_SECONDS,
    ) -> None:
        super().__init__()
        self._client = client
        self._node = node
        self._boot = boot
        self._limit = limit
        self._resend_seconds = resend_seconds
        self._items: deque[_Item] = deque()
        self._last = 0  #: number of the newest message
        self._next = 1  #: number of the message to send next
        self._highest_sent = 0
        self._progress = 0.0  #: when an acknowledgement came, or sending began, on the monotonic clock
        self._work = Signal()
        self._room = anyio.Event()
        self._sent = self._sent_again = self._acknowledged = self._refused = 0

    def report(self, event: Event, cause: int) -> None:
        """Queue an event; `cause` is the sequence of the event that led to it. Never waits."""
        self._last += 1
        self._append(Report(node=self._node, boot=self._boot, n=self._last, cause=cause, event=encode_event(event)))

    async def output(self, instance: InstanceId, attempt: int, rank: int, lines: tuple[str, ...]) -> None:
        """Queue lines that a rank printed; waits while `limit` messages are not acknowledged."""
        while len(self._items) >= self._limit:
            await self._room.wait()
        self._last += 1
        self._append(
            Output(
                node=self._node,
                boot=self._boot,
                n=self._last,
                instance=instance,
                attempt=attempt,
                rank=rank,
                lines=lines,
            )
        )

    def resend(self) -> None:
        """Send again all that is not acknowledged: the coordinator was started again, or asked for it."""
        self._next = self._oldest
        self._work.set()

    async def drained(self, timeout_seconds: float) -> bool:
        """Wait until everything is acknowledged; `False` if it was not in time."""
        with anyio.move_on_after(timeout_seconds):
            while self._items:
                await self._room.wait()
        return not self._items

    def statistics(self) -> OutboxStatistics:
        """What waits and what was done."""
        return OutboxStatistics(
            queued=len(self._items),
            sent=self._sent,
            sent_again=self._sent_again,
            acknowledged=self._acknowledged,
            refused=self._refused,
        )

    @property
    def _oldest(self) -> int:
        return self._items[0].message.n if self._items else self._last + 1

    def _append(self, message: Report | Output) -> None:
        self._items.append(_Item(message))
        self._work.set()

    async def _open(self) -> None:
        self._next = self._oldest

    def _close(self) -> None:
        for item in self._items:
            self._client.forget(item.call)

    async def _serve(self) -> None:
        while True:
            self._next = max(self._next, self._oldest)
            if self._next <= self._last and self._next < self._oldest + WINDOW:
                await self._send_next()
                continue
            if self._next == self._oldest:  # nothing is on the way
                await self._work.wait()
                continue
            with anyio.move_on_after(self._progress + self._resend_seconds - time.monotonic()):
                await self._work.wait()
                continue
            self.resend()

    async def _send_next(self) -> None:
        n = self._next
        item = self._items[n - self._oldest]
        self._next = n + 1
        if item.refused:
            return
        self._client.forget(item.call)
        if n == self._oldest:
            self._progress = time.monotonic()
        message = msgspec.structs.replace(item.message, oldest=self._oldest)
        try:
            item.call = await self._client.submit(message, self._answered(n))
        except RequestError as error:
            self._refuse(n, error.message)
            return
        if n < self._oldest:  # acknowledged while this waited for a connection
            self._client.forget(item.call)
        self._sent += 1
        self._sent_again += n <= self._highest_sent
        self._highest_sent = max(self._highest_sent, n)

    def _answered(self, n: int) -> Callable[[Answer], None]:
        def answered(answer: Answer) -> None:
            match answer.reply:
                case Acked(n=safe):
                    self._settle(safe)
                case Refused(failure=failure) if not failure.retryable:
                    self._refuse(n, failure.message)
                case Refused():
                    pass  # the coordinator does not know this boot yet; the next hello and `resend` mend it
                case other:
                    logger.error("the coordinator answered report {} with {}", n, tag_of(other))

        return answered

    def _settle(self, safe: int) -> None:
        before = len(self._items)
        while self._items and self._items[0].message.n <= safe:
            self._client.forget(self._items.popleft().call)
            self._acknowledged += 1
        if len(self._items) < before:
            self._skip_refused()
            self._advanced()

    def _refuse(self, n: int, reason: str) -> None:
        """A coordinator that cannot read a report never will: give it up and go on with the next."""
        if not self._oldest <= n <= self._last:
            return
        item = self._items[n - self._oldest]
        item.refused = True
        self._refused += 1
        logger.error("report {} ({}) is given up: {}", n, tag_of(item.message), reason)
        self._skip_refused()
        self._advanced()

    def _skip_refused(self) -> None:
        skipped = False
        while self._items and self._items[0].refused:
            self._items.popleft()
            skipped = True
        if skipped:  # those after it were sent with an `oldest` that counts it as missing
            self.resend()

    def _advanced(self) -> None:
        self._progress = time.monotonic()
        room, self._room = self._room, anyio.Event()
        room.set()
        self._work.set()
