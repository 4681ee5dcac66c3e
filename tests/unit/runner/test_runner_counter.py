"""What a rank is at is read by another process, and of one that stands still too."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from muster.runner.counter import StepCounter, counter_file

pytestmark = pytest.mark.process

CHILD = """
import os, signal, sys
from muster.runner.counter import StepCounter
counter = StepCounter(int(sys.argv[1]))
counter.step = 2**40
counter.allocated_bytes = 2**41
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_step_is_seen_of_a_process_that_is_stopped() -> None:
    descriptor = counter_file()
    counter = StepCounter(descriptor)
    assert counter.step == 0
    process = subprocess.Popen([sys.executable, "-c", CHILD, str(descriptor)], pass_fds=[descriptor])
    os.close(descriptor)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    assert (counter.step, counter.allocated_bytes) == (2**40, 2**41)
    process.kill()
    process.wait()
    assert (counter.step, counter.allocated_bytes) == (2**40, 2**41)
    counter.close()
