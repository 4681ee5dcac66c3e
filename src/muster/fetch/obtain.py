"""Obtains a model's files on this node: from its own disk, else from another node, else from the hub."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

import msgspec

from muster.errors import FetchError, MusterError
from muster.fetch import hub, peers
from muster.fetch.choice import is_plain, is_weights, small_files
from muster.fetch.held import COPIES
from muster.fetch.lock import DownloadLock
from muster.fetch.progress import Brought, Meter, Tell
from muster.fetch.sinks import full_disk, refused, require_space
from muster.layout import ModelSource
from muster.model.files import COPY_NOTE, TOKENIZER_GLOBS, CopyNote, copy_note, weight_files
from muster.model.hub import (
    DEFAULT_REVISION,
    absent,
    cache_directory,
    directory_of,
    is_commit,
    is_hub_id,
    is_offline,
    repository_directory,
    snapshot,
)
from muster.peer_protocol import Files, PeerFile

#: Of the names of all weight files of the model in a directory, those that are needed here.
Choose = Callable[[Path, Collection[str]], Collection[str]]

_LOCKS: Final = ".locks"


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What to obtain. `copies` is muster's own directory; `code` takes the tokenizer's Python files in.

    `who` is what others on this machine are told to wait for.
    """

    model: str
    revision: str | None = None
    sources: tuple[ModelSource, ...] = ()
    copies: Path | None = None
    offline: bool = False
    code: bool = False
    who: str = "another download of the model"


def obtain(wish: Wish, choose: Choose, tell: Tell, brought: Callable[[Brought], None]) -> Path:
    """The directory of the model on this node, with what `choose` needs of it in there.

    A directory of that name wins, then a snapshot that has all that is needed, then the nodes in `sources`, then the
    hub. Only one process of the machine brings a model at a time; the others wait for it, and take what it brought.
    Nothing is ever written into a directory that `model` names.

    Args:
        wish: which model.
        choose: asked when the small files are there, perhaps more than once.
        tell: called with the progress, also that of a process that is waited for.
        brought: called with what each source gave.

    Raises:
        ModelError: there is no such model, or it is refused, or corrupted.
        FetchError: it could not be brought now; the next try goes on with what came.
        DiskFullError: there is no room.
    """
    if (path := directory_of(wish.model, wish.revision)) is not None:
        return path
    if not is_hub_id(wish.model) and not wish.sources and _copy_here(wish, choose) is None:
        raise absent(wish.model)
    if (path := _here(wish, choose)) is not None:
        return path
    with _lock(wish).held(tell, wish.who) as noting:
        if is_hub_id(wish.model) and (path := _here(wish, choose)) is not None:
            return path  # whoever was waited for has brought it
        return _Bringing(wish, choose, noting, brought).bring()


def _here(wish: Wish, choose: Choose) -> Path | None:
    """A place on this node that has all that is needed. A copy of a directory counts only while nobody can be asked."""
    if not is_hub_id(wish.model):
        return None if wish.sources else _copy_here(wish, choose)
    for root in _roots(wish):
        path = snapshot(root, wish.model, wish.revision)
        if path is not None and not _missing(path, choose):
            return path
    return None


def _copy_here(wish: Wish, choose: Choose) -> Path | None:
    """The latest copy of the directory that has all that is needed."""
    if wish.copies is None or not (wish.copies / COPIES).is_dir():
        return None
    notes = sorted((wish.copies / COPIES).glob(f"*/{COPY_NOTE}"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in (note.parent for note in notes):
        note = copy_note(path)
        if note is not None and note.model == wish.model and not _missing(path, choose):
            return path
    return None


def _roots(wish: Wish) -> tuple[Path, ...]:
    return (cache_directory(), *((wish.copies,) if wish.copies is not None else ()))


def _missing(path: Path, choose: Choose) -> Collection[str]:
    """The needed files that are not in `path`; its config.json where even that is not."""
    if not (path / "config.json").is_file():
        return ("config.json",)
    if not any(file.is_file() for pattern in TOKENIZER_GLOBS for file in path.glob(pattern)):
        return ("tokenizer.json",)
    weights = weight_files(path)
    if not weights:
        return ("model.safetensors",)
    return [name for name in choose(path, weights) if not (path / name).is_file()]


def _lock(wish: Wish) -> DownloadLock:
    """The lock that others on this machine see: in the hub's cache, or where that is only read, in our own."""
    cache = cache_directory()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if wish.copies is None:
            raise refused(cache, error) from error
    shared = os.access(cache, os.W_OK) or wish.copies is None
    return DownloadLock((cache if shared else wish.copies or cache) / _LOCKS, wish.model)


class _Bringing:
    """One go at bringing a model, under its lock."""

    def __init__(self, wish: Wish, choose: Choose, tell: Tell, brought: Callable[[Brought], None]) -> None:
        self._wish = wish
        self._choose = choose
        self._tell = tell
        self._brought = brought

    def bring(self) -> Path:
        failed: MusterError | None = None
        for source in self._wish.sources if self._wish.copies is not None else ():
            try:
                if (path := self._from_node(source, self._wish.copies)) is not None:
                    return path
            except MusterError as error:
                failed = failed or error
        if not is_hub_id(self._wish.model):
            if (path := _copy_here(self._wish, self._choose)) is not None:
                return path
            raise failed or FetchError(
                f"no node has all that is needed of {self._wish.model}",
                remedy="copy the whole directory to one node, and start that worker with --models and its place",
            )
        if self._wish.offline or is_offline():
            raise failed or hub.offline(self._wish.model, self._wish.revision)
        try:
            return self._from_hub()
        except FetchError as error:
            if failed is None:
                raise
            raise FetchError(f"{error.message}; before that, {failed.message}", remedy=error.remedy) from error

    # --- from another node --------------------------------------------------------------------------------

    def _from_node(self, source: ModelSource, copies: Path | None) -> Path | None:
        """Where the files are when all that is needed came; `None` where the node has only some of it."""
        assert copies is not None
        listed = peers.listing(source)
        files = {file.name: file for file in listed.files}
        target = self._target(listed, copies)
        if target is None or "config.json" not in files:
            return None
        with full_disk(copies):
            target.mkdir(parents=True, exist_ok=True)
        small = [files[name] for name in small_files(files, code=self._wish.code)]
        self._copy(source, small, target)
        if is_hub_id(self._wish.model):
            self._note_revision(copies, listed.revision)
        else:
            note = CopyNote(model=self._wish.model, identity=listed.identity, weights=listed.weights)
            with full_disk(copies):
                (target / COPY_NOTE).write_bytes(msgspec.json.encode(note))
        needed = self._choose(target, listed.weights)
        self._copy(source, [files[name] for name in sorted(needed) if name in files], target)
        return target if all((target / name).is_file() for name in needed) else None

    def _target(self, listed: Files, copies: Path) -> Path | None:
        if is_hub_id(self._wish.model):
            other = is_commit(self._wish.revision) and self._wish.revision != listed.revision
            if other or not is_commit(listed.revision):
                return None
            return repository_directory(copies, self._wish.model) / "snapshots" / listed.revision
        if not listed.identity:
            return None
        name = self._wish.model.rstrip("/").rpartition("/")[2] or "model"
        return copies / COPIES / f"{name}--{listed.identity[:16]}"

    def _note_revision(self, copies: Path, commit: str) -> None:
        if not is_commit(self._wish.revision):
            listed = hub.Listing(model=self._wish.model, commit=commit, files=())
            hub.name_revision(copies, listed, self._wish.revision or DEFAULT_REVISION)

    def _copy(self, source: ModelSource, files: Collection[PeerFile], target: Path) -> None:
        begin = time.monotonic()
        wanted = [file for file in files if not (target / file.name).exists()]
        total = sum(file.bytes for file in wanted)
        require_space(target, total, self._wish.model)
        meter = Meter(self._tell, f"from node {source.node}", total)
        for file in wanted:
            peers.copy(source, file, target, meter)
        self._tell_brought(f"node {source.node}", wanted, meter, begin)

    # --- from the hub -------------------------------------------------------------------------------------

    def _from_hub(self) -> Path:
        wish = self._wish
        root, revision = self._hub_root()
        listed = hub.listing(wish.model, revision)
        files = {file.name: file for file in listed.files}
        path = repository_directory(root, wish.model) / "snapshots" / listed.commit
        self._download(root, listed, [files[name] for name in small_files(files, code=wish.code)])
        weights = frozenset(name for name in files if is_weights(name) and is_plain(name))
        needed = self._choose(path, weights)
        self._download(root, listed, [files[name] for name in sorted(needed) if name in files])
        # Only now: a name leads to what can be used.
        hub.name_revision(root, listed, wish.revision)
        return path

    def _hub_root(self) -> tuple[Path, str | None]:
        """Where to download to, and which revision: that of which a part is here already goes on."""
        for root in _roots(self._wish):
            path = snapshot(root, self._wish.model, self._wish.revision)
            if path is not None and os.access(root, os.W_OK):
                return root, path.name
        cache = cache_directory()
        if self._wish.copies is None or os.access(cache, os.W_OK) or not cache.exists():
            return cache, self._wish.revision
        return self._wish.copies, self._wish.revision

    def _download(self, root: Path, listed: hub.Listing, files: Collection[hub.HubFile]) -> None:
        begin = time.monotonic()
        here = repository_directory(root, listed.model) / "snapshots" / listed.commit
        wanted = [file for file in files if not (here / file.name).exists()]
        total = sum(file.bytes for file in wanted)
        with full_disk(root):
            root.mkdir(parents=True, exist_ok=True)
        require_space(root, total, self._wish.model)
        meter = Meter(self._tell, "from the hub", total)
        for file in wanted:
            hub.download(root, listed, file, meter)
        self._tell_brought("hub", wanted, meter, begin)

    def _tell_brought(
        self, source: str, files: Collection[PeerFile] | Collection[hub.HubFile], meter: Meter, begin: float
    ) -> None:
        if meter.moved:
            seconds = time.monotonic() - begin
            self._brought(Brought(source=source, files=len(files), bytes=meter.moved, seconds=seconds))
