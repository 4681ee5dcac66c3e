"""What a user calls a model, and how the Hugging Face hub's cache lays models out on disk. Asks nobody.

Source: the layout is the hub library's documented one: `models--OWNER--NAME` with `refs/REVISION` (a commit),
`snapshots/COMMIT/FILE` (a link, or the file itself) and `blobs/HASH`.
"""

from __future__ import annotations

import os
import re
from itertools import islice
from pathlib import Path
from typing import Final

from muster.errors import ModelError
from muster.facts import DEFAULT_REVISION
from muster.model.reading import is_text, read_small, shown

#: What mlx-lm itself fetches of a repository, without "*.py": no code of a model ever runs here.
ALLOW_PATTERNS: Final = (
    "*.json",
    "model*.safetensors",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "*.txt",
    "*.jsonl",
    "*.jinja",
)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_REF_BYTES: Final = 1024  #: of the file that says which commit a branch is
_MOST_REFS: Final = 100  #: that are looked at
_REPOSITORY: Final = re.compile(r"models--(.+)")


def is_commit(revision: str | None) -> bool:
    """Whether `revision` names one commit for ever, and is no branch or tag."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def directory_of(model: str, revision: str | None = None) -> Path | None:
    """The directory that `model` names on this node; `None` where there is none of that name.

    Raises:
        ModelError: it is a file, or a revision is asked of a directory, or no path can be made of it.
    """
    try:
        path = Path(model).expanduser()
        is_directory, is_there = path.is_dir(), path.exists()
        if is_directory:
            path = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(
            f"model {shown(model)} is no path that this node can look at: {reason}",
            remedy="give the path of a directory from the root, or a hub id (owner/name)",
        ) from error
    if is_directory and not is_text(str(path)):
        raise ModelError(f"model {shown(model)} is a directory whose name is no UTF-8", remedy="rename the directory")
    if model and is_directory:
        if revision is not None:
            raise ModelError(
                f"model {shown(model)} is a directory, which has no revision {shown(revision)}",
                remedy="leave the revision out, or give a hub id",
            )
        return path
    if model and is_there:
        raise ModelError(
            f"model {shown(model)} is a file; a model is a directory with config.json and safetensors files",
            remedy="give the directory; convert other formats with mlx_lm.convert",
        )
    return None


def absent(model: str) -> ModelError:
    """The refusal of a name that is no directory here and no hub id."""
    return ModelError(
        f"model {shown(model)} is no directory on this node and no hub id (owner/name)",
        remedy="check the path; it must exist on this node, or on another one that gives its models to others",
    )


def cache_directory() -> Path:
    """Where the hub's library keeps its snapshots, as its own variables say: `CACHE_VARIABLES` of `muster.spec`."""
    home = os.environ.get("HF_HOME") or str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"))
    chosen = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or str(Path(home, "hub"))
    return Path(os.path.expandvars(chosen)).expanduser()


def is_offline() -> bool:
    """Whether the hub's own variables forbid to ask it."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in {"1", "ON", "YES", "TRUE"}


def repository_directory(root: Path, model: str) -> Path:
    """Where the cache in `root` keeps the hub id `model`."""
    return root / f"models--{model.replace('/', '--')}"


def blob_path(root: Path, model: str, digest: str) -> Path:
    """Where the cache in `root` keeps the content with this hash, of the hub id `model`."""
    return repository_directory(root, model) / "blobs" / digest


def snapshot(root: Path, model: str, revision: str | None) -> Path | None:
    """The directory of that revision in the cache `root`, whole or not; `None` where nothing of it is there."""
    repository = repository_directory(root, model)
    commit = revision
    if not is_commit(commit):
        try:
            commit = read_small(repository / "refs" / (revision or DEFAULT_REVISION), _REF_BYTES).decode().strip()
        except (OSError, ValueError, ModelError):
            return None
        if not is_commit(commit):
            return None
    path = repository / "snapshots" / str(commit)
    try:
        return path if path.is_dir() else None
    except OSError:  # a name that is too long
        return None


def names_of(repository: Path) -> dict[str, tuple[str, ...]]:
    """By commit the branches and tags that lead to it in one model's directory of a cache; by name, some hundred."""
    found: dict[str, list[str]] = {}
    try:
        refs = [path for path in islice((repository / "refs").rglob("*"), _MOST_REFS) if path.is_file()]
    except OSError:
        return {}
    for path in sorted(refs):
        try:
            commit = read_small(path, _REF_BYTES).decode().strip()
        except (OSError, ValueError, ModelError):
            continue
        name = path.relative_to(repository / "refs").as_posix()
        if is_commit(commit) and is_text(name):
            found.setdefault(commit, []).append(name)
    return {commit: tuple(names) for commit, names in found.items()}


def commit_of(path: Path) -> tuple[str, str] | None:
    """The hub id and the commit whose snapshot `path` is, by the cache's layout; `None` for any other directory."""
    repository = _REPOSITORY.fullmatch(path.parent.parent.name) if path.parent.name == "snapshots" else None
    if repository is None or not is_commit(path.name):
        return None
    return repository.group(1).replace("--", "/", 1), path.name
