"""Finds out what a model needs, from files on this machine or from the hub, and remembers it while they stay."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec

from muster.errors import ModelError
from muster.facts import HeldModel
from muster.fetch.remote import remote_files
from muster.model.files import INDEX_NAME, WEIGHTS_GLOB, inspect
from muster.model.hub import absent, cache_directory, directory_of, is_commit, snapshot
from muster.model.needs import needs_of
from muster.needs import ModelNeeds
from muster.spec import is_hub_id

#: A branch of the hub may move; a commit never does.
_BRANCH_SECONDS: Final = 60.0
#: Models that are remembered.
_REMEMBERED: Final = 128

_Stamp = tuple[tuple[str, int, int], ...]


class Survey:
    """Answers by model; safe in any thread. All methods block, so call them in one."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._here: dict[str, tuple[_Stamp, ModelNeeds]] = {}
        self._hub: dict[tuple[str, str], tuple[float, ModelNeeds]] = {}

    def here(self, model: str, revision: str | None, held: Iterable[HeldModel] = ()) -> ModelNeeds | None:
        """What files on this machine say; `None` where there are none of that name, or not all.

        `held` are models of this node that lie elsewhere than in the hub's own cache.

        Raises:
            ModelError: the files of a directory are incomplete or inconsistent.
        """
        path = directory_of(model, revision)
        if path is not None:
            return self._read(path, model)
        if not is_hub_id(model):
            return None
        snap = snapshot(cache_directory(), model, revision)
        places = [(snap, snap.name)] if snap is not None else []
        places += [(Path(one.path), one.revision) for one in held if one.model == model and one.is_at(revision)]
        # A snapshot that no branch leads to says what the model needs, but not which commit is meant.
        places += [(Path(one.path), "") for one in held if one.model == model and revision is None]
        for place, commit in places:
            if (found := self._read_whole(place, model)) is not None:
                return msgspec.structs.replace(found, commit=commit)
        return None

    def hub(self, model: str, revision: str | None) -> ModelNeeds:
        """What the hub says.

        Raises:
            FetchError: it cannot be reached, or does not answer as it should.
            ModelError: the model is no hub id, or the hub refuses it.
        """
        if not is_hub_id(model):
            raise absent(model)
        key = (model, revision or "")
        with self._lock:
            known = self._hub.get(key)
        if known is not None and (is_commit(revision) or self._now() - known[0] < _BRANCH_SECONDS):
            return known[1]
        files, commit = remote_files(model, revision)
        needs = msgspec.structs.replace(needs_of(files, model=model), commit=commit)
        with self._lock:
            _bound(self._hub)
            self._hub[key] = (self._now(), needs)
        return needs

    def _read_whole(self, path: Path, model: str) -> ModelNeeds | None:
        """As `_read`, but a snapshot that is not complete, or not readable, is none."""
        try:
            return self._read(path, model)
        except ModelError:
            return None

    def _read(self, path: Path, model: str) -> ModelNeeds:
        stamp = _stamp(path)
        key = f"{model}\0{path}"
        with self._lock:
            known = self._here.get(key)
        if known is not None and known[0] == stamp:
            return known[1]
        needs = needs_of(inspect(path), model=model)
        with self._lock:
            _bound(self._here)
            self._here[key] = (stamp, needs)
        return needs


def _bound(remembered: dict[str, tuple[_Stamp, ModelNeeds]] | dict[tuple[str, str], tuple[float, ModelNeeds]]) -> None:
    while len(remembered) >= _REMEMBERED:
        remembered.pop(next(iter(remembered)))  # pyright: ignore[reportArgumentType, reportCallIssue]


def _stamp(path: Path) -> _Stamp:
    """Name, time of change and size of every file that is read: the same as long as they stay what they were."""
    files = [path / "config.json", path / INDEX_NAME, *sorted(path.glob(WEIGHTS_GLOB))]
    stamps: list[tuple[str, int, int]] = []
    for file in files:
        try:
            status = file.stat()
        except OSError:
            continue
        stamps.append((file.name, status.st_mtime_ns, status.st_size))
    return tuple(stamps)
