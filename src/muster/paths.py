"""Where files go, on macOS and Linux, and how that is changed."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

#: Overrides the directory of all of muster's files.
HOME_VARIABLE = "MUSTER_HOME"
#: Overrides the coordinator's address that commands use.
COORDINATOR_VARIABLE = "MUSTER_COORDINATOR"


def home() -> Path:
    """Directory of everything that must survive a restart: `$MUSTER_HOME`, or the user's state directory."""
    chosen = os.environ.get(HOME_VARIABLE)
    return Path(chosen).expanduser() if chosen else platformdirs.user_state_path("muster")


def coordinator_directory() -> Path:
    """Directory of the coordinator's event log."""
    return home() / "coordinator"


def models_directory() -> Path:
    """Directory of models that this machine's workers copied from other nodes, each once for all of them."""
    return home() / "models"


def worker_directory(node: str) -> Path:
    """Directory of one node's worker."""
    return home() / "workers" / node
