"""Obtains a model's files on this node: from its own disk, else from another node, else from the hub.

Of what several nodes of an attempt need from the hub, one downloads each file, and the others take it from there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import msgspec

from muster.errors import FetchError, ModelError, MusterError
from muster.fetch import hub, peers
from muster.fetch.choice import is_plain, is_weights, small_files
from muster.fetch.held import COPIES, LOCKS, caches
from muster.fetch.lock import DownloadLock
from muster.fetch.progress import Brought, Meter, Tell
from muster.fetch.sharing import Owner
from muster.fetch.sinks import full_disk, refused, require_space, to_come
from muster.layout import ModelSource, Sharer
from muster.model.config import tokenizer_code
from muster.model.files import COPY_NOTE, TOKENIZER_GLOBS, CopyNote, copy_note, weight_files
from muster.model.hub import (
    DEFAULT_REVISION,
    absent,
    blob_path,
    cache_directory,
    directory_of,
    is_commit,
    is_offline,
    repository_directory,
    snapshot,
)
from muster.peer_protocol import Files, PeerFile
from muster.spec import is_hub_id

#: Of the names of all weight files of the model in a directory, those that are needed here.
Choose = Callable[[Path, Collection[str]], Collection[str]]
#: And by name the rank of the attempt that downloads it from the hub; asked after `Choose`, the same on every rank.
Share = Callable[[Path, Collection[str]], Mapping[str, int]]


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What to obtain. `copies` is muster's own directory; `code` takes the tokenizer's Python files in.

    `commit` is the one that is meant by `revision`, where that is known: other nodes of the attempt take it too.
    `sharers` give what their ranks download. `who` is what others on this machine are told to wait for.
    """

    model: str
    revision: str | None = None
    commit: str = ""
    sources: tuple[ModelSource, ...] = ()
    sharers: tuple[Sharer, ...] = ()
    copies: Path | None = None
    offline: bool = False
    code: bool = False
    who: str = "another download of the model"

    @property
    def at(self) -> str | None:
        """Which files to take: the commit, or else the revision."""
        return self.commit or self.revision


def _alone(path: Path, weights: Collection[str]) -> Mapping[str, int]:
    """No other rank downloads anything for this one."""
    del path, weights
    return {}


def obtain(wish: Wish, choose: Choose, tell: Tell, brought: Callable[[Brought], None], share: Share = _alone) -> Path:
    """The directory of the model on this node, with what `choose` needs of it in there.

    A directory of that name wins, then a snapshot that has all that is needed, then the nodes in `sources`, then the
    hub. Only one process of the machine brings a model at a time; the others wait for it, and take what it brought.
    What a rank on a node in `sharers` downloads is taken from there; where that does not go well, from the hub.
    Nothing is ever written into a directory that `model` names.

    Args:
        wish: which model.
        choose: asked when the small files are there, perhaps more than once.
        tell: called with the progress, also that of a process that is waited for.
        brought: called with what each source gave.
        share: which rank downloads which file.

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
    lock = _lock(wish)
    with lock.held(tell, wish.who) as noting:
        if is_hub_id(wish.model) and (path := _here(wish, choose)) is not None:
            return path  # whoever was waited for has brought it
        return _Bringing(wish, choose, noting, brought, share, lock).bring()


def _here(wish: Wish, choose: Choose) -> Path | None:
    """A place on this node that has all that is needed. A copy of a directory counts only while nobody can be asked."""
    if not is_hub_id(wish.model):
        return None if wish.sources else _copy_here(wish, choose)
    for root in caches(wish.copies):
        path = snapshot(root, wish.model, wish.at)
        if path is not None and not _missing(path, choose, code=wish.code):
            return path
    return None


def _copy_here(wish: Wish, choose: Choose) -> Path | None:
    """The latest copy of the directory that has all that is needed."""
    if wish.copies is None or not (wish.copies / COPIES).is_dir():
        return None
    notes = sorted((wish.copies / COPIES).glob(f"*/{COPY_NOTE}"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in (note.parent for note in notes):
        note = copy_note(path)
        if note is not None and note.model == wish.model and not _missing(path, choose, code=wish.code):
            return path
    return None


def _missing(path: Path, choose: Choose, *, code: bool) -> Collection[str]:
    """The needed files that are not in `path`; its config.json where even that is not.

    With `code`, the tokenizer's own is needed too: what is here may have come when it was not to run.
    """
    if not (path / "config.json").is_file():
        return ("config.json",)
    if not any(file.is_file() for pattern in TOKENIZER_GLOBS for file in path.glob(pattern)):
        return ("tokenizer.json",)
    weights = weight_files(path)
    if not weights:
        return ("model.safetensors",)
    names = (*choose(path, weights), *(tokenizer_code(path) if code else ()))
    return [name for name in names if not (path / name).is_file()]


def _lock(wish: Wish) -> DownloadLock:
    """The lock that others on this machine see: in the hub's cache, or where that is only read, in our own."""
    cache = cache_directory()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if wish.copies is None:
            raise refused(cache, error) from error
    shared = os.access(cache, os.W_OK) or wish.copies is None
    return DownloadLock((cache if shared else wish.copies or cache) / LOCKS, wish.model)


class _Bringing:
    """One go at bringing a model, under its lock."""

    def __init__(
        self,
        wish: Wish,
        choose: Choose,
        tell: Tell,
        brought: Callable[[Brought], None],
        share: Share,
        lock: DownloadLock,
    ) -> None:
        self._wish = wish
        self._choose = choose
        self._tell = tell
        self._brought = brought
        self._share = share
        self._lock = lock

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
            raise failed or hub.offline(self._wish.model, self._wish.at)
        try:
            return self._from_hub()
        except ModelError as error:
            if failed is None or not failed.retryable:
                raise
            # It is a node's own, perhaps: what the hub knows nothing of may come from there the next time.
            raise FetchError(f"{failed.message}; and then, {error.message}", remedy=failed.remedy) from error
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
        self._copy(source, small, target, again=self._is_code)
        if self._wish.code and not is_hub_id(self._wish.model):
            for gone in [file for file in target.glob("*.py") if file.name not in files]:
                gone.unlink(missing_ok=True)
        if is_hub_id(self._wish.model):
            self._note_revision(copies, listed.revision)
        else:
            note = CopyNote(model=self._wish.model, identity=listed.identity, weights=listed.weights)
            with full_disk(copies):
                (target / COPY_NOTE).write_bytes(msgspec.json.encode(note))
        needed = self._choose(target, listed.weights)
        self._copy(source, [files[name] for name in sorted(needed) if name in files], target)
        wanted = (*needed, *(tokenizer_code(target) if self._wish.code and is_hub_id(self._wish.model) else ()))
        return target if all((target / name).is_file() for name in wanted) else None

    def _target(self, listed: Files, copies: Path) -> Path | None:
        if is_hub_id(self._wish.model):
            other = is_commit(self._wish.at) and self._wish.at != listed.revision
            if other or not is_commit(listed.revision):
                return None
            return repository_directory(copies, self._wish.model) / "snapshots" / listed.revision
        if not listed.identity:
            return None
        name = self._wish.model.rstrip("/").rpartition("/")[2] or "model"
        return copies / COPIES / f"{name}--{listed.identity[:16]}"

    def _note_revision(self, root: Path, commit: str) -> None:
        """Note what the branch or tag is; one that leads elsewhere here stays, where another commit was asked for."""
        wish = self._wish
        if is_commit(wish.revision) or (wish.commit and snapshot(root, wish.model, wish.revision) is not None):
            return
        listed = hub.Listing(model=wish.model, commit=commit, files=())
        hub.name_revision(root, listed, wish.revision or DEFAULT_REVISION)

    def _is_code(self, name: str) -> bool:
        """Whether a directory's file may differ from the copy that is here, which its identity does not tell."""
        return name.endswith(".py") and not is_hub_id(self._wish.model)

    def _copy(
        self,
        source: ModelSource,
        files: Collection[PeerFile],
        target: Path,
        *,
        again: Callable[[str], bool] = lambda name: False,
    ) -> None:
        begin = time.monotonic()
        wanted = [file for file in files if again(file.name) or not (target / file.name).exists()]
        total = sum(file.bytes for file in wanted)
        require_space(target, sum(to_come(target / file.name, file.bytes) for file in wanted), self._wish.model)
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
        chosen = self._choose(path, weights)
        needed = [files[name] for name in sorted(chosen) if name in files and not (path / name).exists()]
        self._require_space(root, needed)
        ranks = self._share(path, weights)
        owners = {rank: owner for one in wish.sharers for owner in (Owner(one, wish.model),) for rank in one.ranks}
        theirs = {file.name: owners[ranks[file.name]] for file in needed if ranks.get(file.name) in owners}
        self._download_and_take(root, listed, needed, theirs)
        # Only now: a name leads to what can be used.
        self._note_revision(root, listed.commit)
        return path

    def _download_and_take(
        self, root: Path, listed: hub.Listing, files: Collection[hub.HubFile], theirs: Mapping[str, Owner]
    ) -> None:
        """Own files come first, whatever others do: who waits for them waits for nobody else."""
        own = [file for file in files if file.name not in theirs]
        self._lock.claim(file.hash for file in own)
        self._download(root, listed, own)
        left: list[hub.HubFile] = []
        for owner in dict.fromkeys(theirs.values()):
            left += self._take(root, listed, [file for file in files if theirs.get(file.name) is owner], owner)
        if not left:
            return
        self._lock.claim(file.hash for file in (*own, *left))
        failure = next((owner.failure for owner in theirs.values() if owner.failure is not None), None)
        try:
            self._download(root, listed, left, instead=theirs[left[0].name].node)
        except FetchError as error:
            before = f"; before that, {failure.message}" if failure is not None else ""
            raise FetchError(f"{error.message}{before}", remedy=error.remedy) from error

    def _take(self, root: Path, listed: hub.Listing, files: Collection[hub.HubFile], owner: Owner) -> list[hub.HubFile]:
        """Take the files from the node that downloads them; those that it did not bring."""
        begin = time.monotonic()
        meter = Meter(self._tell, f"from node {owner.node}", sum(file.bytes for file in files))
        meter.wait(f"waits for node {owner.node}, which downloads it")  # the time for the phase begins anew
        came = [file for file in files if owner.bring(root, listed, file, meter)]
        self._tell_brought(f"node {owner.node}", came, meter, begin)
        return [file for file in files if file not in came]

    def _hub_root(self) -> tuple[Path, str | None]:
        """Where to download to, and which revision: that of which a part is here already goes on."""
        wish, most, found = self._wish, -1, None
        for root in caches(wish.copies):
            path = snapshot(root, wish.model, wish.at)
            if path is not None and os.access(root, os.W_OK) and (here := self._here_bytes(path)) > most:
                most, found = here, (root, path.name)
        if found is not None:
            return found
        cache = cache_directory()
        shared = wish.copies is None or os.access(cache, os.W_OK)
        return (cache if shared else wish.copies or cache), wish.at

    def _here_bytes(self, path: Path) -> int:
        """Of what is needed, so much is in this directory."""
        if not (path / "config.json").is_file():
            return 0
        try:
            needed = [path / name for name in self._choose(path, weight_files(path))]
        except ModelError:  # of what came, too little is here to tell
            return 0
        return sum(file.stat().st_size for file in needed if file.is_file())

    def _require_space(self, root: Path, files: Collection[hub.HubFile]) -> None:
        blobs = ((blob_path(root, self._wish.model, file.hash), file.bytes) for file in files)
        require_space(root, sum(to_come(blob, count) for blob, count in blobs), self._wish.model)

    def _download(self, root: Path, listed: hub.Listing, files: Collection[hub.HubFile], *, instead: str = "") -> None:
        """Download what is not here; `instead` of taking it from that node."""
        begin = time.monotonic()
        here = repository_directory(root, listed.model) / "snapshots" / listed.commit
        wanted = [file for file in files if not (here / file.name).exists()]
        total = sum(file.bytes for file in wanted)
        with full_disk(root):
            root.mkdir(parents=True, exist_ok=True)
        self._require_space(root, wanted)
        meter = Meter(self._tell, f"from the hub instead of node {instead}" if instead else "from the hub", total)
        if instead:
            meter.have(0)  # tells of the change, and the time for the phase begins anew
        for file in wanted:
            hub.download(root, listed, file, meter)
        self._tell_brought("hub", wanted, meter, begin)

    def _tell_brought(
        self, source: str, files: Collection[PeerFile] | Collection[hub.HubFile], meter: Meter, begin: float
    ) -> None:
        if meter.moved:
            seconds = time.monotonic() - begin
            self._brought(Brought(source=source, files=len(files), bytes=meter.moved, seconds=seconds))
