"""From what a user calls a model to a local directory: a path, or a download from the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from muster.errors import ModelError

#: Called with (bytes done, bytes in all), from any thread. The total grows while files are discovered.
DownloadProgress = Callable[[int, int], None]

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

#: One slash, and no first character that a path would have.
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")


def resolve(model: str, revision: str | None, *, on_progress: DownloadProgress) -> Path:
    """The local directory of `model`: itself if it is one, else the hub's snapshot of that id.

    Only `name/name` that is no directory is looked up on the hub; a path that does not exist never is.

    Raises:
        ModelError: no such directory, no such repository or revision, no access, or no connection.
    """
    path = Path(model).expanduser()
    if model and path.is_dir():
        if revision is not None:
            raise ModelError(
                f"model {model!r} is a directory, which has no revision {revision!r}",
                remedy="leave the revision out, or give a hub id",
            )
        return path.resolve()
    if model and path.exists():
        raise ModelError(
            f"model {model!r} is a file; a model is a directory with config.json and safetensors files",
            remedy="give the directory; convert other formats with mlx_lm.convert",
        )
    if not _HUB_ID.fullmatch(model):
        raise ModelError(
            f"model {model!r} is no directory on this node and no hub id (owner/name)",
            remedy="check the path; it must exist on every node of the instance",
        )
    return _download(model, revision, on_progress)


def _download(model: str, revision: str | None, on_progress: DownloadProgress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage]  # of httpx or httpx2, as the hub's version has it
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f"{model} at revision {revision}" if revision else model
    elsewhere = "or copy the model to every node and give its directory"
    try:
        directory = snapshot_download(
            model,
            revision=revision,
            allow_patterns=list(ALLOW_PATTERNS),
            tqdm_class=_progress_class(on_progress),
        )
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
    except (OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
        raise ModelError(
            f"the hub cannot be reached and {at} is not complete in this node's cache",
            remedy=f"connect this node and unset HF_HUB_OFFLINE, {elsewhere}",
        ) from error
    except HFValidationError as error:
        raise ModelError(
            f"model {model!r} is no valid hub id: {error}", remedy="hub ids look like owner/name"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        raise ModelError(
            f"the hub answered {status} to the request for {at}",
            remedy=f"run `hf auth login`, try again later, {elsewhere}"
            if status in (401, 403)
            else f"try again later, {elsewhere}",
        ) from error
    except (HTTPError, OSError) as error:
        raise ModelError(
            f"the download of {at} failed: {type(error).__name__}: {error}",
            remedy=f"check this node's connection and free disk space, {elsewhere}",
        ) from error
    return Path(directory)


def _progress_class(on_progress: DownloadProgress) -> type[Any]:
    """A progress bar that shows nothing and tells `on_progress` the bytes, as huggingface_hub drives it."""
    from tqdm import tqdm

    most_done = 0

    class ReportingBar(tqdm):  # pyright: ignore[reportMissingTypeArgument]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # A second bar counts bytes on the wire, of which there may be fewer than bytes in the files.
            self._reports = kwargs.get("unit") == "B" and kwargs.get("desc") != "Downloading bytes"
            kwargs["disable"] = True  # draws nothing; a disabled bar keeps its total but not its count
            super().__init__(*args, **kwargs)
            self._done = int(kwargs.get("initial") or 0)

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal most_done
            self._done += int(n or 0)
            if self._reports and self._done > most_done:
                most_done = self._done
                on_progress(self._done, max(self._done, int(self.total or 0)))
            return None

    return ReportingBar
