"""A lock file that tells a second owner who the first is."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from muster.errors import LockError


class FileLock:
    """An exclusive `flock` on `path`, held until `release` or the end of the process; the file stays, with its pid.

    The file is never deleted: whoever opened it just before would then lock a file that nobody else can see.
    `what` is what it protects, and `remedy` what to do when somebody else has it.

    Raises:
        LockError: another process holds it, or the file system refuses.
    """

    def __init__(self, path: Path, *, what: str, remedy: str) -> None:
        self._descriptor: int | None = None
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _refused(path, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise LockError(
                    f"{what} is in use by process {holder or 'of unknown number'}", remedy=remedy
                ) from error
            raise _refused(path, error) from error
        self._descriptor = descriptor

    def release(self) -> None:
        """Let the next one in. Harmless when called again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _refused(path: Path, error: OSError) -> LockError:
    return LockError(
        f"the lock file {path} cannot be written: {error.strerror}",
        remedy=f"Check that there is room in {path.parent} and that this user may write to it.",
    )
