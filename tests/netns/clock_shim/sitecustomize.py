"""Shifts the wall clock of a Python process of the bed: `time.time` and `time.time_ns`, and nothing else.

Python imports this module by itself where its directory is on PYTHONPATH. `MUSTER_BED_CLOCK` names a file of eight
bytes, the offset in seconds as a double, which counts from the moment it is written.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path


def _shift(path: str) -> None:
    with Path(path).open("rb") as file:
        offset = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    seconds, nanoseconds, read = time.time, time.time_ns, struct.Struct("<d").unpack_from

    def shifted_time() -> float:
        return seconds() + read(offset)[0]

    def shifted_time_ns() -> int:
        return nanoseconds() + round(read(offset)[0] * 1e9)

    time.time, time.time_ns = shifted_time, shifted_time_ns


if _path := os.environ.get("MUSTER_BED_CLOCK"):
    _shift(_path)
