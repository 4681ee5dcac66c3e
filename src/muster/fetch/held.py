"""Which models' files are on this node: in the hub's cache, in directories of the operator's, among muster's copies."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from muster.errors import ModelError
from muster.facts import HeldModel
from muster.fetch.choice import is_offered, is_weights
from muster.model.files import copy_note, weight_files
from muster.model.hub import cache_directory, commit_of, names_of
from muster.model.reading import MOST, is_text

#: Below muster's own directory: copies of other nodes' directories. Beside it lies a cache of the hub's layout.
COPIES: Final = "copies"
#: In a cache of the hub's layout: what keeps two processes from bringing the same model.
LOCKS: Final = ".locks"
#: How deep models lie below a directory of them: NAME, or OWNER/NAME.
_DEPTH: Final = 2
_NAME_CHARACTERS: Final = 4096


def caches(own: Path | None) -> tuple[Path, ...]:
    """The caches of the hub's layout on this node; `own` is where muster keeps copies from other nodes."""
    return (cache_directory(), *((own,) if own is not None else ()))


def held_models(
    roots: Sequence[Path] = (), own: Path | None = None, *, shareable: bool = True
) -> tuple[HeldModel, ...]:
    """The models with weights on this node, by name. Reads directories and indexes, no weights; safe in any thread.

    Args:
        roots: directories of the operator's, each a model itself or full of them.
        own: where muster keeps copies from other nodes.
        shareable: whether this node gives them to others.
    """
    found: dict[str, HeldModel] = {}
    for cache in caches(own):
        for repository in _children(cache, "models--*"):
            names = names_of(repository)
            for path in _children(repository, "snapshots/*"):
                _add(found, path, names.get(path.name, ()))
    if own is not None:
        for path in _children(own, f"{COPIES}/*"):
            _add(found, path)
    for root in roots:
        for path in _models_below(root.expanduser(), _DEPTH):
            _add(found, path)
    held = sorted(found.values(), key=lambda held: (held.model, held.path))
    return tuple(held if shareable else (msgspec.structs.replace(one, shareable=False) for one in held))


def file_of(held: HeldModel, name: str) -> Path | None:
    """The file `name` of the model, where it may be given to others; links do not lead out of where models lie."""
    directory = Path(held.path)
    file = directory / name
    try:
        if not is_offered(name, code=True) or not file.is_file():
            return None
    except OSError:  # a name that is too long
        return None
    # A snapshot's files are links to blobs of the same cache, which may be shared between models.
    home = directory.parents[2] if commit_of(directory) is not None else directory
    return file if file.resolve().is_relative_to(home.resolve()) else None


def _add(found: dict[str, HeldModel], path: Path, names: tuple[str, ...] = ()) -> None:
    with contextlib.suppress(OSError, RuntimeError):  # gone, closed to us, or links in a circle
        path = path.resolve()
        if not is_text(str(path)):
            return  # what is said of it could not be sent
        held = _look(path, path.stat().st_mtime_ns)
        if held is not None:
            found[held.path] = msgspec.structs.replace(held, names=names)


@functools.lru_cache(maxsize=1024)
def _look(path: Path, changed_ns: int) -> HeldModel | None:
    """What is in the directory; it is looked at again when a file came or went."""
    del changed_ns
    if not (path / "config.json").is_file():
        return None
    try:
        named = weight_files(path)
    except ModelError:
        return None
    here = [file for file in path.iterdir() if is_weights(file.name) and file.is_file()]
    if not here:
        return None
    known, note = commit_of(path), copy_note(path)
    if note is not None and len(note.model) > _NAME_CHARACTERS:
        return None
    model = known[0] if known is not None else note.model if note is not None else str(path)
    return HeldModel(
        model=model,
        path=str(path),
        revision=known[1] if known is not None else "",
        bytes=min(sum(file.stat().st_size for file in here), MOST),  # files with holes say what they like
        complete=named <= {file.name for file in here},
    )


def _children(directory: Path, pattern: str) -> list[Path]:
    try:
        return sorted(path for path in directory.glob(pattern) if path.is_dir())
    except OSError:
        return []


def _models_below(directory: Path, depth: int) -> Iterator[Path]:
    try:
        is_model = (directory / "config.json").is_file()
    except OSError:  # closed to us
        return
    if is_model:
        yield directory
    elif depth:
        for child in _children(directory, "[!.]*"):
            yield from _models_below(child, depth - 1)
