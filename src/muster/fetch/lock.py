"""One download of a model at a time on a machine, whoever of its processes wants it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Final

import msgspec

from muster.errors import DiskFullError, FetchError
from muster.fetch.progress import Moved, Tell

#: Between two looks at how far the other is; its end wakes us by itself.
_LOOK_SECONDS: Final = 0.5
_NOTE_BYTES: Final = 4096


class DownloadLock:
    """An exclusive `flock` on a file of `directory`; who holds it writes into it how far it is, for those who wait.

    The file stays: whoever opened it just before would otherwise lock one that nobody else sees.
    """

    def __init__(self, directory: Path, model: str) -> None:
        name = model.replace("/", "--").strip("-")[-200:]
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(directory / f"muster-{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
            try:
                yield self._noting(tell, who)
            finally:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, 0)
        finally:
            os.close(self._descriptor)

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
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(os.pread(self._descriptor, _NOTE_BYTES, 0).strip(), type=Moved)
        return None
