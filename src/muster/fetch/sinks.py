"""A file on its way to disk: hashed while it is written, kept in part, and never taken for whole before it is."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from muster.errors import DiskFullError, FetchError, MusterError
from muster.fetch.progress import Meter

#: Behind the name of a file that is not whole yet.
PART_SUFFIX: Final = ".muster-part"
#: Bytes per block, and how many blocks wait for the hash at most.
BUFFER_BYTES: Final = 2**20
_BUFFERS: Final = 8
#: What is left free on a disk.
_SPARE_BYTES: Final = 64 * 2**20

_ELSEWHERE: Final = (
    "make room there, or put models elsewhere: HF_HOME for the hub's cache, --copies for copies from nodes"
)

NewHash = Callable[[], "hashlib._Hash"]


class Sink:
    """The part of one file, opened at its end: `offset` bytes are there. The hash runs in a thread of its own.

    Use `buffer()`, fill it, and hand it back with `write(count)`.
    """

    def __init__(self, file: Path, new_hash: NewHash, meter: Meter) -> None:
        self.path = file.with_name(file.name + PART_SUFFIX)
        self._file = file
        self._new_hash = new_hash
        self._meter = meter
        with full_disk(file.parent):
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.offset = os.fstat(self._descriptor).st_size
        self._free: SimpleQueue[bytearray] = SimpleQueue()
        self._full: SimpleQueue[tuple[bytearray, int] | None] = SimpleQueue()
        self._buffers = 0  #: made so far: small files need few
        self._hash = new_hash()
        self._current: bytearray | None = None
        self._thread = threading.Thread(target=self._digest, name="fetch-hash", daemon=True)
        self._thread.start()
        meter.have(self.offset)
        self._hash_part()

    def buffer(self) -> memoryview:
        """Where to put what comes next."""
        self._current = self._current or self._next_buffer()
        return memoryview(self._current)

    def write(self, count: int) -> None:
        """The first `count` bytes of the buffer are the file's next."""
        assert self._current is not None
        view = memoryview(self._current)[:count]
        self._full.put((self._current, count))
        self._current = None
        with full_disk(self._file.parent):
            written = 0
            while written < count:
                written += os.write(self._descriptor, view[written:])
        self.offset += count
        self._meter.add(count)

    def digest(self) -> str:
        """The hash over everything written, in hex. Nothing may be written any more."""
        self._full.put(None)
        while self._thread.is_alive():
            self._thread.join(1.0)
            self._meter.alive()
        return self._hash.hexdigest()

    def restart(self) -> None:
        """Throw away what is there: it cannot be gone on with, or is wrong."""
        self._full.put(None)
        self._thread.join()
        self._full = SimpleQueue()
        self._meter.have(-self.offset)
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        self.offset = 0
        self._hash = self._new_hash()
        self._thread = threading.Thread(target=self._digest, name="fetch-hash", daemon=True)
        self._thread.start()

    def keep(self) -> None:
        """The file is whole: it gets its name."""
        self.path.replace(self._file)

    def discard(self) -> None:
        """Nothing of it is of any use."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go; a part that was not kept stays for the next time."""
        self._full.put(None)
        os.close(self._descriptor)

    def _next_buffer(self) -> bytearray:
        if self._free.empty() and self._buffers < _BUFFERS:
            self._buffers += 1
            return bytearray(BUFFER_BYTES)
        return self._free.get()

    def _hash_part(self) -> None:
        left = self.offset
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        while left:
            buffer = self._next_buffer()
            count = os.readv(self._descriptor, [memoryview(buffer)[: min(left, BUFFER_BYTES)]])
            left -= count
            self._full.put((buffer, count))
            self._meter.have(0)
            if not count:
                break

    def _digest(self) -> None:
        while (item := self._full.get()) is not None:
            buffer, count = item
            self._hash.update(memoryview(buffer)[:count])
            self._free.put(buffer)


def require_space(directory: Path, count: int, what: str) -> None:
    """Refuse to begin where `count` more bytes do not fit.

    Raises:
        DiskFullError: names the directory, what is needed and what there is.
    """
    if count <= 0:
        return
    free = shutil.disk_usage(directory).free
    if free < count + _SPARE_BYTES:
        raise DiskFullError(
            f"{what} needs {count / 2**30:.2f} GiB in {directory}, where {free / 2**30:.2f} GiB are free",
            remedy=_ELSEWHERE,
        )


@contextlib.contextmanager
def full_disk(directory: Path) -> Generator[None]:
    """Name the directory where a write fails; what a full disk cut short stays a part, which the next try goes on with.

    Raises:
        DiskFullError: there is no room, or a quota is used up.
        FetchError: the file system refuses for another reason.
    """
    try:
        yield
    except OSError as error:
        raise refused(directory, error) from error


def refused(directory: Path, error: OSError) -> MusterError:
    """What a file system's refusal means."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(
            f"the disk of {directory} became full while a model was written to it",
            remedy=_ELSEWHERE,
        )
    return FetchError(
        f"a model cannot be written to {directory}: {error.strerror or error}",
        remedy="check that this user may write there, or give another directory with --copies or HF_HOME",
    )
