"""What a rank is at, in memory that its worker shares: it can be read of a rank that answers no more."""

from __future__ import annotations

import mmap
import os
import struct
import sys
import tempfile
from typing import Final

_NUMBER: Final = struct.Struct("=q")
#: Where each number is.
_STEP, _ALLOCATED = 0, _NUMBER.size


class StepCounter:
    """Numbers in shared memory. A whole page is mapped; 8 bytes of it are used for each, and written at once."""

    def __init__(self, descriptor: int) -> None:
        """Map the file `descriptor`, made by `counter_file`; it may be closed afterwards."""
        self._memory = mmap.mmap(descriptor, mmap.PAGESIZE)

    @property
    def step(self) -> int:
        """The last step that was begun, 0 before the first."""
        return int(_NUMBER.unpack_from(self._memory, _STEP)[0])

    @step.setter
    def step(self, step: int) -> None:
        _NUMBER.pack_into(self._memory, _STEP, step)

    @property
    def allocated_bytes(self) -> int:
        """What MLX has allocated in the process, as it was last noted; 0 before."""
        return int(_NUMBER.unpack_from(self._memory, _ALLOCATED)[0])

    @allocated_bytes.setter
    def allocated_bytes(self, amount: int) -> None:
        _NUMBER.pack_into(self._memory, _ALLOCATED, amount)

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
