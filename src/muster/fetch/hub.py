"""Downloads files of a model from the Hugging Face hub into a cache of its layout, going on with what is there.

The hub library answers what there is, who asks, and how; the bytes are received here: its own download starts again
from nothing when its process ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from muster.errors import FetchError, ModelError
from muster.fetch.progress import Meter
from muster.fetch.sinks import NewHash, Sink, full_disk
from muster.model.hub import DEFAULT_REVISION, blob_path, is_commit, repository_directory

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

#: How long the hub may take to answer, and to send nothing in the middle of a file.
ANSWER_SECONDS: Final = 10.0
SILENCE_SECONDS: Final = 20.0
#: Tries that get no further than one before, and the first wait between them.
_TRIES: Final = 3
_PAUSE_SECONDS: Final = 0.5

_ELSEWHERE: Final = "or copy the model to every node and give its directory"
_KEPT: Final = "what came is kept: create the instance again to go on, when this node's connection is well"


class HubFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file as the hub lists it. `hash` is the SHA-256 of a large file, the git blob id of another."""

    name: str
    bytes: int
    hash: str
    large: bool


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """The files of one commit."""

    model: str
    commit: str
    files: tuple[HubFile, ...]


def listing(model: str, revision: str | None) -> Listing:
    """What the hub has of the model.

    Raises:
        FetchError: the hub cannot be reached, or does not answer as it should.
        ModelError: there is no such model or revision, or not for this user.
    """
    from huggingface_hub import HfApi

    with told(model, revision):
        info = HfApi(endpoint=endpoint()).model_info(
            model, revision=revision, files_metadata=True, timeout=ANSWER_SECONDS
        )
    if not is_commit(info.sha):
        raise FetchError(f"the hub at {endpoint()} names no commit of {model}", remedy="check HF_ENDPOINT")
    files = (_file(sibling) for sibling in info.siblings or ())
    return Listing(model=model, commit=str(info.sha), files=tuple(file for file in files if file is not None))


def _file(sibling: RepoSibling) -> HubFile | None:
    large = sibling.lfs is not None
    digest = sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id
    size = sibling.lfs.size if sibling.lfs is not None else sibling.size
    if not digest or size is None or not digest.isalnum():
        return None
    return HubFile(name=sibling.rfilename, bytes=size, hash=digest, large=large)


def download(root: Path, listed: Listing, file: HubFile, meter: Meter) -> None:
    """Bring one file into the cache in `root`.

    Raises:
        FetchError: the hub is gone, silent, or cuts the connection, and no try brought a byte more.
        ModelError: it refuses the file, or sent it twice with another hash.
        DiskFullError: there is no room any more.
    """
    with placed(root, listed, file) as blob:
        if not blob.exists():
            _bring(blob, listed, file, meter)


@contextlib.contextmanager
def placed(root: Path, listed: Listing, file: HubFile) -> Generator[Path]:
    """Where the file's content goes in the cache in `root`; when it is there after the block, it gets its name.

    Raises:
        DiskFullError: there is no room any more.
        FetchError: the file system refuses for another reason.
    """
    repository = repository_directory(root, listed.model)
    blob = blob_path(root, listed.model, file.hash)
    link = repository / "snapshots" / listed.commit / file.name
    with full_disk(root):
        blob.parent.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
    yield blob
    with full_disk(root), contextlib.suppress(FileExistsError):
        if blob.exists():
            link.symlink_to(Path("..", "..", "blobs", file.hash))


def name_revision(root: Path, listed: Listing, revision: str | None) -> None:
    """Note in the cache which commit the branch or tag is.

    Raises:
        ModelError: the name leads out of the cache.
    """
    if is_commit(revision):
        return
    name = revision or DEFAULT_REVISION
    if not name.isprintable() or {"", ".", ".."} & set(name.split("/")):
        raise ModelError(f"revision {name!r} is no name of a branch or tag", remedy="check the revision on the hub")
    ref = repository_directory(root, listed.model) / "refs" / name
    with full_disk(root):
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(listed.commit)


def _bring(blob: Path, listed: Listing, file: HubFile, meter: Meter) -> None:
    sink = Sink(blob, hash_of(file), meter)
    wrong = ""
    try:
        if sink.offset > file.bytes:
            sink.restart()
        for _ in range(2):
            _stream(listed, file, sink)
            if (found := sink.digest()) == file.hash:
                sink.keep()
                return
            sink.restart()
            wrong = f"its hash is {found[:12]}… and not {file.hash[:12]}…"
        sink.discard()
        raise ModelError(
            f"{file.name} of {listed.model} came from the hub twice and is corrupted: {wrong}",
            remedy="check HF_ENDPOINT, proxies on the way, and this node's disk and memory",
        )
    finally:
        sink.close()


def hash_of(file: HubFile) -> NewHash:
    """How the hub hashes a file like this one."""
    if file.large:
        return hashlib.sha256
    # Source: git's object format; the hub names small files by it.
    return lambda: hashlib.sha1(f"blob {file.bytes}\0".encode(), usedforsecurity=False)


def _stream(listed: Listing, file: HubFile, sink: Sink) -> None:
    vain, furthest = 0, sink.offset
    while sink.offset < file.bytes:
        try:
            _receive(listed, file, sink)
            problem = f"the hub ended {file.name} early"
        except FetchError as error:
            problem = error.message
        # Who starts each answer from the beginning, and cuts it, must not be asked for ever.
        vain = vain + 1 if sink.offset <= furthest else 0
        furthest = max(furthest, sink.offset)
        if vain >= _TRIES:
            raise FetchError(
                f"{problem}; {file.name} of {listed.model} stands at {sink.offset} of {file.bytes} bytes", remedy=_KEPT
            )
        if vain:
            threading.Event().wait(_PAUSE_SECONDS * vain)


def _receive(listed: Listing, file: HubFile, sink: Sink) -> None:
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    # A packed answer could not be gone on with in the middle.
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    if sink.offset:
        headers["Range"] = f"bytes={sink.offset}-"
    url = hf_hub_url(listed.model, file.name, revision=listed.commit, endpoint=endpoint())
    with (
        told(listed.model, listed.commit),
        get_session().stream("GET", url, headers=headers, timeout=SILENCE_SECONDS, follow_redirects=True) as response,
    ):
        hf_raise_for_status(response)
        if sink.offset and response.status_code != 206:
            sink.restart()
        for chunk in response.iter_raw():
            sink.write(memoryview(chunk)[: file.bytes - sink.offset])
            if sink.offset >= file.bytes:
                break  # whatever more comes is not the file's


@contextlib.contextmanager
def told(model: str, revision: str | None) -> Generator[None]:
    """Turn what the hub's library raises into an error with a remedy.

    Raises:
        FetchError: what may pass: no connection, a timeout, a server error, an answer that is not the hub's.
        ModelError: the hub's refusal.
    """
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage]  # of httpx or httpx2, as the hub's version has it
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f"{model} at revision {revision}" if revision else model
    try:
        yield
    except GatedRepoError as error:
        raise ModelError(
            f"the hub does not give {at} to this user: it is gated",
            remedy="accept its terms on the hub and run `hf auth login` on every node",
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"the hub has no model {model}, or it is private",
            remedy="check the id; for a private model run `hf auth login` on every node",
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"the hub has no {at}", remedy="check the revision on the model's page") from error
    except OfflineModeIsEnabled as error:
        raise offline(model, revision) from error
    except HFValidationError as error:
        raise ModelError(
            f"model {model!r} is no valid hub id: {error}", remedy="hub ids look like owner/name"
        ) from error
    except HfHubHTTPError as error:
        raise _answered(error.response.status_code, at) from error
    except (HTTPError, TimeoutError, ConnectionError) as error:
        raise FetchError(
            f"the hub{_at()} cannot be reached, is silent or broke off: {_named(error)}",
            remedy=f"check this node's connection and HF_ENDPOINT, try again later, {_ELSEWHERE}",
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # a login page of a network, for example
        raise FetchError(
            f"what answers{_at()} in the place of the hub is none: {_named(error)}",
            remedy=f"check HF_ENDPOINT, proxies on the way, and whether this network wants a login, {_ELSEWHERE}",
        ) from error


def offline(model: str, revision: str | None) -> ModelError:
    """The refusal to ask the hub where that is forbidden."""
    at = f"{model} at revision {revision}" if revision else model
    return ModelError(
        f"{at} is not complete on this node, no other node gives it, and the hub must not be asked",
        remedy=f"start the worker without --offline and unset HF_HUB_OFFLINE, {_ELSEWHERE}",
    )


def _answered(status: int, at: str) -> FetchError | ModelError:
    message = f"the hub answered {status} to the request for {at}"
    if status in (401, 403):
        return ModelError(message, remedy="run `hf auth login` on every node, or check HF_TOKEN")
    if status < 500 and status not in (408, 429):
        return ModelError(message, remedy=f"check the id and the revision on the hub, {_ELSEWHERE}")
    return FetchError(message, remedy=f"try again later, {_ELSEWHERE}")


def _named(error: Exception) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _at() -> str:
    return f" at {found}" if (found := endpoint()) else ""


def endpoint() -> str | None:
    """Another address of the hub, where the user gives one."""
    return os.environ.get("HF_ENDPOINT") or None
