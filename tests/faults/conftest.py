"""Where the fault matrix finds the test kit and the bed of real hosts."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / directory) for directory in ("netns", "process")]
