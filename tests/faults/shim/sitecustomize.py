"""Python runs this file at its start where its directory is on PYTHONPATH: it holds runners where a test wants them.

A runner that comes to a gate says so in a file "reached-GATE-RANK-PID", and stands there as long as the file
"hold-GATE" exists beside it. The directory is in MUSTER_GATES. Only runners are touched, and only from outside.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_POLL_SECONDS = 0.002
#: Nobody is held for longer, whatever became of the test.
_LONGEST_SECONDS = 60.0
#: Tokens of an answer before it counts as under way.
_TOKENS = 5


class Gates:
    """Which rank this process is, and where it stands."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._rank = -1
        self._passes = 0  #: since the last prompt was through

    def name(self, rank: int) -> None:
        """The process has been given a rank."""
        self._rank = rank

    def come_to(self, gate: str) -> None:
        """Stand here while the gate is closed."""
        hold = self._directory / f"hold-{gate}"
        if not hold.exists():
            return
        (self._directory / f"reached-{gate}-{self._rank}-{os.getpid()}").touch()
        deadline = time.monotonic() + _LONGEST_SECONDS
        while hold.exists() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def come_to_pass(self, batch: Any) -> None:
        """A forward pass is about to begin: the first of a prompt, a further one of a prompt, or one for a token."""
        if not len(batch):
            self._passes = 0
        elif not batch.steady:
            self._passes = 0
            self.come_to("prefilling")
        else:
            self._passes += 1
            if self._passes > _TOKENS:
                self.come_to("decoding")


def _before(owner: Any, name: str, action: Callable[..., None]) -> None:
    """Have `action` called with the arguments of each call of `owner.name`, before it."""
    inner: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(inner)
    def outer(*arguments: Any, **options: Any) -> Any:
        action(*arguments, **options)
        return inner(*arguments, **options)

    setattr(owner, name, outer)


def _workload_gates(gates: Gates, kind: Any) -> None:
    def preparing(workload: Any) -> None:
        gates.name(workload._context.prepare.rank)
        gates.come_to("preparing")

    _before(kind, "prepare", preparing)
    _before(kind, "run", lambda *_: gates.come_to("connected"))


def _group_rank(gates: Gates, module: Any) -> None:
    _workload_gates(gates, module.GroupRank)


def _model_rank(gates: Gates, module: Any) -> None:
    _workload_gates(gates, module.ModelRank)
    loaded: Callable[..., None] = module.ModelRank._layer_loaded

    @functools.wraps(loaded)
    def layer_loaded(rank: Any, done: int, total: int) -> None:
        loaded(rank, done, total)
        if done == 1:
            gates.come_to("loading")

    module.ModelRank._layer_loaded = layer_loaded


def _formation(gates: Gates, module: Any) -> None:
    def dialling(payload: Any, **_: Any) -> None:
        if payload.rank == payload.world_size - 1:  # it dials first, and the others listen
            gates.come_to("listening")

    _before(module, "form_group", dialling)


def _batch(gates: Gates, module: Any) -> None:
    def warming(batch: Any) -> None:
        del batch
        gates.come_to("warming")

    def passing(batch: Any, step: Any) -> None:
        del step
        gates.come_to_pass(batch)

    _before(module.Batch, "warm_up", warming)
    _before(module.Batch, "run", passing)


_FITTINGS: dict[str, Callable[[Gates, Any], None]] = {
    "muster.runner.group_rank": _group_rank,
    "muster.runner.model_rank": _model_rank,
    "muster.group.formation": _formation,
    "muster.model.batch": _batch,
}


class _Fitter(importlib.abc.MetaPathFinder):
    """Puts the gates into the runner's modules as they are imported."""

    def __init__(self, gates: Gates) -> None:
        self._gates = gates

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        fit = _FITTINGS.get(fullname)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target) if fit is not None else None
        if fit is None or spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            fit(self._gates, module)

        spec.loader.exec_module = exec_module  # of this spec's own loader
        return spec


if "muster.runner" in sys.orig_argv and (_directory := os.environ.get("MUSTER_GATES")):
    sys.meta_path.insert(0, _Fitter(Gates(Path(_directory))))
