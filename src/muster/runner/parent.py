"""Dying with the worker, also while MLX holds the GIL."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends, and end at once if that happened already.

    Linux only; elsewhere the worker's reaper does it alone. A thread could not: MLX holds the GIL while it forms a
    group. Source: prctl(2), PR_SET_PDEATHSIG.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)
