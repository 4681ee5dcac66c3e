"""Holding the ranks of an instance in a phase: the test's end of `shim/sitecustomize.py`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path

from kit import until

_SHIM = Path(__file__).parent / "shim"


class Gates:
    """Gates that runners stand at while they are closed. `directory` is made."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def built_in(self) -> Generator[None]:
        """Runners of workers that are started within the block have these gates."""
        before = {name: os.environ.get(name) for name in ("PYTHONPATH", "MUSTER_GATES")}
        path = before["PYTHONPATH"]
        os.environ["PYTHONPATH"] = str(_SHIM) if path is None else f"{_SHIM}{os.pathsep}{path}"
        os.environ["MUSTER_GATES"] = str(self._directory)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def close(self, gate: str) -> None:
        """From now on, who comes to this gate stands there. Who stood there before is forgotten."""
        for path in self._directory.glob("reached-*"):
            path.unlink()
        (self._directory / f"hold-{gate}").touch()

    def open(self) -> None:
        """Let everybody go on."""
        for path in self._directory.glob("hold-*"):
            path.unlink()

    def reached(self, gate: str) -> set[int]:
        """The ranks that have come to this gate since it was closed."""
        return {int(path.name.split("-")[2]) for path in self._directory.glob(f"reached-{gate}-*")}

    def wait_reached(self, gate: str, ranks: set[int]) -> None:
        """Wait until these ranks stand at the gate.

        Raises:
            AssertionError: they do not come.
        """
        until(lambda: self.reached(gate) >= ranks, f"ranks {sorted(ranks)} {gate}")
