"""The step that a rank is at, in memory that its worker shares: it can be read of a rank that answers no more."""

from __future__ import annotations

import mmap
import os
import struct
import sys
import tempfile
from typing import Final

_STEP: Final = struct.Struct("=q")


class StepCounter:
    """A number in shared memory. A whole page is mapped; 8 bytes of it are used, and written at once."""

    def __init__(self, descriptor: int) -> None:
        """Map the file `descriptor`, made by `counter_file`; it may be closed afterwards."""
        self._memory = mmap.mmap(descriptor, mmap.PAGESIZE)

    @property
    def step(self) -> int:
        """The last step that was begun, 0 before the first."""
        return int(_STEP.unpack_from(self._memory)[0])

    @step.setter
    def step(self, step: int) -> None:
        _STEP.pack_into(self._memory, 0, step)

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()


def counter_file() -> int:
    """The descriptor of new memory for a counter, which nobody else can open. The caller closes it.

    Raises:
        OSError: no descriptor, or no space, is left.
    """
    if sys.platform == "linux":  # no file: a full disk must not keep a rank from coming up
        descriptor = os.memfd_create("muster-steps")
        os.truncate(descriptor, mmap.PAGESIZE)
        return descriptor
    with tempfile.TemporaryFile() as file:
        file.write(bytes(mmap.PAGESIZE))
        file.flush()
        return os.dup(file.fileno())
