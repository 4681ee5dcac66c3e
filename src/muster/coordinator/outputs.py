"""What the ranks printed, for whoever asks: in memory, bounded, gone with the instance."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from muster.protocol import Output
from muster.replies import OutputLine, Outputs
from muster.spec import InstanceId

#: Lines and bytes that one instance may keep; the oldest go first.
MAX_LINES = 20_000
MAX_BYTES = 8 * 2**20
#: Lines and bytes in one answer.
_ANSWER_LINES = 1_000
_ANSWER_BYTES = 512 * 1024


class Reader(msgspec.Struct):
    """Somebody who waits for the next line. Times are seconds of the monotonic clock."""

    after: int
    rank: int | None
    until: float
    answer: Callable[[Outputs], None]


class _Store(msgspec.Struct):
    lines: deque[OutputLine]
    first: int = 0  #: position of the oldest line
    size_bytes: int = 0
    readers: list[Reader] = []


class OutputStore:
    """Lines by instance. A position counts all lines of the instance ever, from 0."""

    def __init__(self, max_lines: int = MAX_LINES, max_bytes: int = MAX_BYTES) -> None:
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        self._stores: dict[InstanceId, _Store] = {}

    def add(self, output: Output) -> None:
        """Take lines and answer those who wait for them."""
        store = self._store(output.instance)
        for text in output.lines:
            store.lines.append(OutputLine(attempt=output.attempt, rank=output.rank, text=text))
            store.size_bytes += len(text.encode())
        while len(store.lines) > self._max_lines or store.size_bytes > self._max_bytes:
            store.size_bytes -= len(store.lines.popleft().text.encode())
            store.first += 1
        self._wake(output.instance, lambda reader: reader.rank is None or reader.rank == output.rank)

    def read(self, instance: InstanceId, after: int, rank: int | None) -> Outputs:
        """Lines from position `after` on, as many as one answer carries."""
        store = self._stores.get(instance)
        if store is None:
            return Outputs(lines=(), position=after)
        # A position beyond the end is from before a restart of the coordinator: begin with what there is.
        position = max(after, store.first) if after <= store.first + len(store.lines) else store.first
        dropped = max(0, position - after)
        found: list[OutputLine] = []
        size = 0
        end = store.first + len(store.lines)
        while position < end and len(found) < _ANSWER_LINES and size < _ANSWER_BYTES:
            line = store.lines[position - store.first]
            position += 1
            if rank is None or line.rank == rank:
                found.append(line)
                size += len(line.text)
        return Outputs(lines=tuple(found), position=position, dropped=dropped)

    def wait(self, instance: InstanceId, reader: Reader) -> None:
        """Answer `reader` when there is a line for it, or at its time."""
        self._store(instance).readers.append(reader)

    def expire(self, now: float) -> None:
        """Answer those who have waited long enough."""
        for instance in list(self._stores):
            self._wake(instance, lambda reader: reader.until <= now)

    def wake(self, instance: InstanceId) -> None:
        """Answer all who wait: the instance has changed."""
        self._wake(instance, lambda reader: True)

    def drop(self, instance: InstanceId) -> None:
        """The instance is gone."""
        self.wake(instance)
        self._stores.pop(instance, None)

    def _store(self, instance: InstanceId) -> _Store:
        return self._stores.setdefault(instance, _Store(lines=deque()))

    def _wake(self, instance: InstanceId, due: Callable[[Reader], bool]) -> None:
        store = self._stores.get(instance)
        if store is None or not store.readers:
            return
        ready = [reader for reader in store.readers if due(reader)]
        store.readers = [reader for reader in store.readers if not due(reader)]
        for reader in ready:
            reader.answer(self.read(instance, reader.after, reader.rank))
