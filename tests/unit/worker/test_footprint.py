"""The footprint of a process, as macOS tells it; elsewhere it is not to be had."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from typing import Any

import pytest

from muster.worker import footprint
from muster.worker.footprint import footprint_bytes, parse_usage

#: A UUID, then user and system time, two kinds of wake-ups, page-ins, wired and resident size, footprint, two times.
USAGE = bytes(range(16)) + struct.pack("=10Q", 1, 2, 3, 4, 5, 6, 700, 2**40, 9, 10)


def test_the_footprint_is_found_in_what_the_system_fills_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_usage(USAGE) == 2**40
    asked: list[tuple[int, int]] = []

    def ask(pid: int, flavour: int, usage: Any) -> int:
        asked.append((pid, flavour))
        ctypes.memmove(usage, USAGE, len(USAGE))
        return 0 if pid == 7 else -1

    monkeypatch.setattr(footprint, "_proc_pid_rusage", lambda: ask)
    assert (footprint_bytes(7), footprint_bytes(8)) == (2**40, 0)
    assert asked == [(7, 0), (8, 0)]


def test_this_process_has_one_on_macos_only() -> None:
    assert (footprint_bytes(os.getpid()) > 2**20) == (sys.platform == "darwin")
