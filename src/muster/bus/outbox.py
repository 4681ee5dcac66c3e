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
from muster.protocol import Output, Report
from muster.replies import Acked, Answer, Refused
from muster.spec import BootId, InstanceId, NodeId
from muster.state import State

#: Messages on the way at once.
WINDOW = 64
#: Without any acknowledgement for this long, everything on the way is sent again.
RESEND_SECONDS = 1.0
#: Settled reports that are kept for a coordinator whose log lacks them.
REPORTS_KEPT = 1_000
#: How far back in the numbering they may be: the outputs between them take a place each when they are queued again.
_SPAN = 100_000


class _Item(msgspec.Struct, gc=False):
    n: int
    message: Report | Output | None  #: `None` only keeps the number's place: others count from it
    call: int = 0  #: id of the last call that carried it


class OutboxStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """`queued` are not acknowledged yet; the others are counts since the start.

    `rewound` were acknowledged by a coordinator, and queued again for the next, whose log did not have them.
    """

    queued: int
    rewound: int
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
        self._settled: deque[Report] = deque(maxlen=REPORTS_KEPT)
        self._coordinator = BootId("")  #: boot of the one that was synchronised with last
        self._firsts: dict[str, int] = {}  #: the first number that concerns the log of an epoch
        self._last = 0  #: number of the newest message
        self._next = 1  #: number of the message to send next
        self._highest_sent = 0
        self._progress = 0.0  #: when an acknowledgement came, or sending began, on the monotonic clock
        self._work = Signal()
        self._room = anyio.Event()
        self._sent = self._sent_again = self._acknowledged = self._refused = self._rewound = 0

    def report(self, event: Event, cause: int) -> None:
        """Queue an event; `cause` is the sequence of the event that led to it. Never waits."""
        self._last += 1
        self._append(
            Report(
                node=self._node,
                boot=self._boot,
                n=self._last,
                cause=cause,
                event=encode_event(event),
                happened_ns=time.time_ns(),
            )
        )

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

    def synchronise(self, state: State) -> None:
        """Go on with the coordinator whose state this is: it gets what its log lacks, in order, and the rest after it.

        A standby that took over may lack what the coordinator before it had acknowledged. A log of another epoch lacks
        everything that was settled before, and has no use for it.
        """
        first = self._firsts.setdefault(state.epoch, self._oldest)
        if state.coordinator_boot != self._coordinator:
            self._coordinator = BootId(state.coordinator_boot)
            logged = state.reports.get(self._node)
            self._rewind(max(first, logged.n + 1 if logged is not None and logged.boot == self._boot else 1))
            self._forget_causes(state.sequence)
        self.resend()

    def _rewind(self, first: int) -> None:
        """Queue what was settled from this number on before all else; outputs only keep their places."""
        missing: deque[Report] = deque()
        while self._settled and self._settled[-1].n >= max(first, self._oldest - _SPAN):
            missing.appendleft(self._settled.pop())
        if not missing:
            return
        self._rewound += len(missing)
        by_number = {report.n: report for report in missing}
        places = range(self._oldest - 1, missing[0].n - 1, -1)
        self._items.extendleft(_Item(n, by_number.get(n)) for n in places)

    def _forget_causes(self, head: int) -> None:
        """A cause beyond the end of the log is an event that this log lacks, and will give its number to another."""
        for item in self._items:
            if isinstance(item.message, Report) and item.message.cause > head:
                item.message = msgspec.structs.replace(item.message, cause=0)

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

    @property
    def client(self) -> ControlClient:
        """The line that it sends on."""
        return self._client

    def statistics(self) -> OutboxStatistics:
        """What waits and what was done."""
        return OutboxStatistics(
            queued=len(self._items),
            rewound=self._rewound,
            sent=self._sent,
            sent_again=self._sent_again,
            acknowledged=self._acknowledged,
            refused=self._refused,
        )

    @property
    def _oldest(self) -> int:
        return self._items[0].n if self._items else self._last + 1

    def _append(self, message: Report | Output) -> None:
        self._items.append(_Item(message.n, message))
        self._work.set()

    async def _open(self) -> None:
        self._next = self._oldest

    def _close(self) -> None:
        for item in self._items:
            self._client.forget(item.call)

    async def _serve(self) -> None:
        while True:
            self._next = max(self._next, self._oldest)
            if self._next <= self._last and self._next < self._oldest + WINDOW and self._is_sendable(self._next):
                await self._send_next()
                continue
            if self._next == self._oldest:  # nothing is on the way
                await self._work.wait()
                continue
            with anyio.move_on_after(self._progress + self._resend_seconds - time.monotonic()):
                await self._work.wait()
                continue
            self.resend()

    def _is_sendable(self, n: int) -> bool:
        """What follows on a place that is never sent counts as missing until all before that is settled."""
        return self._items[n - self._oldest].message is not None

    async def _send_next(self) -> None:
        n = self._next
        item = self._items[n - self._oldest]
        self._next = n + 1
        assert item.message is not None
        self._client.forget(item.call)
        if n == self._oldest:
            self._progress = time.monotonic()
        message = msgspec.structs.replace(item.message, oldest=self._oldest, to=self._coordinator)
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
        while self._items and self._items[0].n <= safe:
            item = self._items.popleft()
            self._client.forget(item.call)
            self._acknowledged += item.message is not None
            if isinstance(item.message, Report):
                self._settled.append(item.message)
        if len(self._items) < before:
            self._skip()
            self._advanced()

    def _refuse(self, n: int, reason: str) -> None:
        """A coordinator that cannot read a report never will: give it up and go on with the next."""
        if not self._oldest <= n <= self._last:
            return
        item = self._items[n - self._oldest]
        if item.message is None:
            return
        logger.error("report {} ({}) is given up: {}", n, tag_of(item.message), reason)
        item.message = None
        self._refused += 1
        self._skip()
        self._advanced()

    def _skip(self) -> None:
        skipped = False
        while self._items and self._items[0].message is None:
            self._items.popleft()
            skipped = True
        if skipped:  # those after it were sent with an `oldest` that counts it as missing
            self.resend()

    def _advanced(self) -> None:
        self._progress = time.monotonic()
        room, self._room = self._room, anyio.Event()
        room.set()
        self._work.set()
