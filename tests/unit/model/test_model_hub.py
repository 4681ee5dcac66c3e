"""What becomes a hub lookup and what never does, and how the hub's refusals are told. No network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from muster.errors import ModelError
from muster.model.hub import resolve


class Hub:
    """Stands in for `snapshot_download`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str | None]] = []
        self.error: BaseException | None = None

    def __call__(self, repo_id: str, *, revision: str | None, tqdm_class: Any, allow_patterns: list[str]) -> str:
        self.calls.append((repo_id, revision))
        if self.error is not None:
            raise self.error
        with tqdm_class(desc="Reconstructing", total=0, initial=0, unit="B", unit_scale=True) as written:
            wire = tqdm_class(desc="Downloading bytes", total=0, initial=0, unit="B")
            counted = tqdm_class(desc="Fetching 2 files", total=2)
            written.total += 100
            wire.update(70)
            written.update(40)
            counted.update(1)
            written.set_postfix_str("1 MB/s", refresh=False)
            written.update(60)
        return "/snapshots/abc"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    stand_in = Hub()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", stand_in)
    return stand_in


def find(model: str, revision: str | None = None) -> Path:
    return resolve(model, revision, on_progress=lambda done, total: None)


def test_a_directory_is_itself(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for model in (str(tmp_path / "owner/name"), "owner/name", "./owner/name", "~/owner/name"):
        assert find(model) == (tmp_path / "owner/name").resolve()
    assert hub.calls == []


@pytest.mark.parametrize(
    "model", ["/no/such", "/nothing", "./a", "../a/b", "~/a", ".a/b", "name", "a/b/c", "a/", "", " ", "a b/c", "a/b\n"]
)
def test_what_looks_like_a_path_is_never_looked_up(hub: Hub, model: str) -> None:
    with pytest.raises(ModelError) as raised:
        find(model)
    assert raised.value.remedy
    assert hub.calls == []


def test_a_file_and_a_revision_of_a_directory_are_refused(tmp_path: Path, hub: Hub) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError, match="is a file"):
        find(str(tmp_path / "model.gguf"))
    with pytest.raises(ModelError, match="no revision 'main'"):
        find(str(tmp_path), "main")
    assert hub.calls == []


def test_a_hub_id_is_downloaded_with_progress_in_bytes(hub: Hub) -> None:
    seen: list[tuple[int, int]] = []
    path = resolve("owner/Name-4bit", "v1", on_progress=lambda done, total: seen.append((done, total)))
    assert path == Path("/snapshots/abc")
    assert hub.calls == [("owner/Name-4bit", "v1")]
    assert seen == [(40, 100), (100, 100)]


def answer(kind: Any, status: int) -> Any:
    """One of the hub's errors, without the request that it belongs to."""
    error: Any = kind.__new__(kind)
    error.response = type("Response", (), {"status_code": status})()
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (answer(GatedRepoError, 403), "gated"),
        (answer(RepositoryNotFoundError, 401), "no model owner/name, or it is private"),
        (answer(RevisionNotFoundError, 404), "no owner/name at revision v1"),
        (answer(huggingface_hub.errors.HfHubHTTPError, 503), "answered 503"),
        (LocalEntryNotFoundError("x"), "cannot be reached"),
        (OfflineModeIsEnabled("x"), "cannot be reached"),
        (HFValidationError("x"), "no valid hub id"),
        (TimeoutError("timed out"), "timed out"),
        (OSError(28, "No space left on device"), "No space left"),
    ],
)
def test_refusals_become_model_errors_with_a_remedy(hub: Hub, error: BaseException, message: str) -> None:
    hub.error = error
    with pytest.raises(ModelError, match=message) as raised:
        find("owner/name", "v1")
    assert raised.value.remedy
