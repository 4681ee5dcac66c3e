"""What macOS counts against a process, its GPU's buffers included, which are no part of what is resident."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from typing import Any, Final

import psutil

#: `struct rusage_info_v0`: a UUID, and ten numbers, the eighth `ri_phys_footprint`. Source: sys/resource.h of macOS.
_USAGE: Final = struct.Struct("=16x10Q")
_FOOTPRINT: Final = 7
_FLAVOUR: Final = 0


def footprint_bytes(pid: int) -> int:
    """The physical footprint of one of the user's processes, of a Metal script as well; 0 where it is not to be had."""
    ask = _proc_pid_rusage()
    if ask is None:
        return 0
    usage = ctypes.create_string_buffer(_USAGE.size)
    return parse_usage(usage.raw) if ask(pid, _FLAVOUR, usage) == 0 else 0


def parse_usage(usage: bytes) -> int:
    """The footprint out of what `proc_pid_rusage` fills in, in bytes."""
    return int(_USAGE.unpack(usage)[_FOOTPRINT])


@functools.cache
def _proc_pid_rusage() -> Callable[[int, int, Any], int] | None:
    """libproc's function, on macOS alone."""
    if not psutil.MACOS:
        return None
    try:
        found = ctypes.CDLL(None).proc_pid_rusage
    except (OSError, AttributeError):
        return None
    found.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    return found
