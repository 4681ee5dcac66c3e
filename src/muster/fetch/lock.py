"""One download of a model at a time on a machine, whoever of its processes wants it; and what it brings."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from muster.errors import DiskFullError, FetchError
from muster.fetch.progress import Moved, Tell

#: Between two looks at how far the other is; its end wakes us by itself.
_LOOK_SECONDS: Final = 0.5
_NOTE_BYTES: Final = 4096
#: Behind the note: the hashes of the files that are brought from the hub.
_CLAIMS_BYTES: Final = 2**20

T = TypeVar("T")


class Underway(msgspec.Struct, frozen=True, kw_only=True):
    """A download that goes on: how many bytes have come, and what it brings from the hub; `None`: not decided yet."""

    moved: int = 0
    claims: frozenset[str] | None = None


def underway(directory: Path, model: str) -> Underway | None:
    """The download of the model whose lock is in `directory`; `None` where there is none. Waits for nobody.

    Raises:
        OSError: it cannot be looked at.
    """
    try:
        descriptor = os.open(directory / _name(model), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        note, claims = _decoded(descriptor, 0, _NOTE_BYTES, Moved), None
        if (told := _decoded(descriptor, _NOTE_BYTES, _CLAIMS_BYTES, tuple[str, ...])) is not None:
            claims = frozenset(told)
        return Underway(moved=0 if note is None else note.done, claims=claims)
    finally:
        os.close(descriptor)
    return None


class DownloadLock:
    """An exclusive `flock` on a file of `directory`; who holds it writes into it how far it is, for those who wait.

    The file stays: whoever opened it just before would otherwise lock one that nobody else sees.
    """

    def __init__(self, directory: Path, model: str) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(directory / _name(model), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            kind = DiskFullError if error.errno == 28 else FetchError
            raise kind(
                f"no lock can be made in {directory}: {error.strerror}",
                remedy="check that this user may write there and that there is room, or give another --copies",
            ) from error

    @contextlib.contextmanager
    def held(self, tell: Tell, who: str) -> Generator[Tell]:
        """Wait for the lock, telling meanwhile what its holder tells; gives the `tell` to use while it is held.

        `who` is what others then wait for.
        """
        try:
            if not self._take(blocking=False):
                self._wait(tell)
            self._empty()  # who held it before may have been killed
            try:
                yield self._noting(tell, who)
            finally:
                self._empty()
        finally:
            os.close(self._descriptor)

    def claim(self, hashes: Iterable[str]) -> None:
        """Say which files are brought from the hub now, whatever others do: they may wait for those. Lock held."""
        text = msgspec.json.encode(sorted(hashes))
        with contextlib.suppress(OSError):  # a full disk: the others then take it for undecided
            os.pwrite(self._descriptor, text, _NOTE_BYTES)
            os.ftruncate(self._descriptor, _NOTE_BYTES + len(text))

    def _empty(self) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)

    def _noting(self, tell: Tell, who: str) -> Tell:
        def note(moved: Moved) -> None:
            theirs = msgspec.structs.replace(moved, note=f"waits for {who}, {moved.note}")
            text = msgspec.json.encode(theirs)
            with contextlib.suppress(OSError):  # a full disk: the others then wait without a number
                os.pwrite(self._descriptor, text.ljust(_NOTE_BYTES - 1)[: _NOTE_BYTES - 1] + b"\n", 0)
            tell(moved)

        return note

    def _take(self, *, blocking: bool) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True

    def _wait(self, tell: Tell) -> None:
        taken = threading.Event()

        def take() -> None:
            self._take(blocking=True)
            taken.set()

        threading.Thread(target=take, name="fetch-lock", daemon=True).start()
        last: Moved | None = None
        while not taken.wait(_LOOK_SECONDS):
            seen = self._theirs() or Moved(done=0, total=0, note="waits for another download of the model")
            if seen != last:
                last = seen
                tell(seen)

    def _theirs(self) -> Moved | None:
        return _decoded(self._descriptor, 0, _NOTE_BYTES, Moved)


def _name(model: str) -> str:
    return f"muster-{model.replace('/', '--').strip('-')[-200:]}.lock"


def _decoded(descriptor: int, offset: int, count: int, kind: type[T]) -> T | None:
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(os.pread(descriptor, count, offset).strip(), type=kind)
    return None
