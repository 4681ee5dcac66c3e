"""A file on its way to disk: hashed while it is written, kept in part, and never taken for whole before it is."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Final, Protocol

from muster.errors import DiskFullError, FetchError, MusterError
from muster.fetch.progress import Meter

#: Behind the name of a file that is not whole yet.
PART_SUFFIX: Final = ".muster-part"
#: Bytes that are read at once at most: what the processor's cache holds until they are hashed.
BLOCK_BYTES: Final = 2**20
#: What is left free on a disk.
_SPARE_BYTES: Final = 64 * 2**20

_ELSEWHERE: Final = (
    "make room there, or put models elsewhere: HF_HOME for the hub's cache, --copies for copies from nodes"
)


class Hash(Protocol):
    """What `hashlib` and `xxhash` make."""

    def update(self, data: memoryview, /) -> object:
        """Go on with these bytes."""
        ...

    def hexdigest(self) -> str:
        """The hash over all of them."""
        ...


NewHash = Callable[[], Hash]


class Sink:
    """The part of one file, opened at its end: `offset` bytes are there, hashed as what comes will be.

    The thread that writes also hashes, while the bytes are in the processor's cache: a hand-over costs more than XXH3.
    """

    def __init__(self, file: Path, new_hash: NewHash, meter: Meter) -> None:
        self.path = file.with_name(file.name + PART_SUFFIX)
        self.offset = 0
        self._file = file
        self._new_hash = new_hash
        self._hash = new_hash()
        self._meter = meter
        with full_disk(file.parent):
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._hash_part()

    def write(self, data: bytes | memoryview) -> None:
        """These are the file's next bytes.

        Raises:
            DiskFullError: there is no room any more.
            FetchError: the file system refuses for another reason.
        """
        view = memoryview(data)
        with full_disk(self._file.parent):
            while view:
                count = os.write(self._descriptor, view)
                self._hash.update(view[:count])
                self.offset += count
                self._meter.add(count)
                view = view[count:]

    def digest(self) -> str:
        """The hash over everything written, in hex."""
        return self._hash.hexdigest()

    def restart(self) -> None:
        """Throw away what is there: it cannot be gone on with, or is wrong."""
        self._meter.have(-self.offset)
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        self.offset = 0
        self._hash = self._new_hash()

    def keep(self) -> None:
        """The file is whole: it gets its name, which it must not carry after a power cut without its content.

        Raises:
            DiskFullError: there is no room any more.
            FetchError: the file system refuses for another reason.
        """
        with full_disk(self._file.parent):
            os.fsync(self._descriptor)
            self.path.replace(self._file)

    def discard(self) -> None:
        """Nothing of it is of any use."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go; a part that was not kept stays for the next time."""
        os.close(self._descriptor)

    def _hash_part(self) -> None:
        buffer = memoryview(bytearray(BLOCK_BYTES))
        while count := os.readv(self._descriptor, [buffer]):
            self._hash.update(buffer[:count])
            self.offset += count
            self._meter.have(count)


def to_come(file: Path, count: int) -> int:
    """Of a file of `count` bytes those that are not here yet, under its name or as a part."""
    if file.exists():
        return 0
    part = file.with_name(file.name + PART_SUFFIX)
    try:
        return max(0, count - part.stat().st_size)
    except OSError:
        return count


def require_space(directory: Path, count: int, what: str) -> None:
    """Refuse to begin where `count` more bytes do not fit.

    Raises:
        DiskFullError: names the directory, what is needed and what there is.
    """
    if count <= 0:
        return
    free = shutil.disk_usage(directory).free
    if free < count + _SPARE_BYTES:
        spare = f"{_size(_SPARE_BYTES)} must stay free"
        raise DiskFullError(
            f"{what} needs {_size(count)} in {directory}, where {_size(free)} are free and {spare}",
            remedy=_ELSEWHERE,
        )


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


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
