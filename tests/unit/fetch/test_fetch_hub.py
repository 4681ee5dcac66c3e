"""Models from the hub: only what is needed, once, gone on with, checked; and how each refusal is told."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from bringing import MODEL, Go, parts_below, split_demo

from muster.errors import DiskFullError, FetchError, ModelError, MusterError
from muster.fetch import hub as fetch_hub
from muster.fetch import peers, sinks
from muster.fetch.progress import Meter, Moved
from muster.model.files import fingerprint, inspect
from muster.model.hub import cache_directory, repository_directory
from muster.testing import hub as stand_in_hub
from muster.testing.hub import Fault, Hub


@pytest.fixture(autouse=True)
def here(weights: list[str], hub_here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has the model on the hub, and tries again at once."""
    monkeypatch.setattr(fetch_hub, "_PAUSE_SECONDS", 0.01)


def test_a_whole_model_comes_once_and_the_second_time_nobody_is_asked(stand_in: Hub) -> None:
    go = Go()
    path = go.path()
    inspect(path)
    assert [(one.source, one.bytes > 0) for one in go.brought] == [("hub", True), ("hub", True)]
    assert go.moved[-1].done == go.moved[-1].total
    assert go.moved[-1].note == "from the hub"
    stand_in.asked.clear()
    again = Go()
    assert again.path() == path
    assert (stand_in.asked, again.brought) == ([], [])


def test_a_pipeline_rank_gets_its_files_and_the_other_goes_on_with_the_rest(stand_in: Hub, weights: list[str]) -> None:
    first = Go(range(2, 4)).path()
    assert {name for name in stand_in.downloads() if "safetensors" in name and "index" not in name} == {
        weights[0],
        weights[3],
        weights[4],
    }
    with pytest.raises(ModelError, match="lacks"):
        inspect(first)
    part = inspect(first, {weights[0], weights[3], weights[4]})
    assert part.layers == 4
    stand_in.asked.clear()
    second = Go(range(2)).path()
    assert second == first
    assert set(stand_in.downloads()) == {weights[1], weights[2]}


def test_ranks_with_other_parts_of_a_revision_have_the_same_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Go(range(2, 4)).path()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "other"))
    second = Go(range(2)).path()
    assert first != second
    assert fingerprint(first) == fingerprint(second)
    (second / "config.json").unlink()
    (second / "config.json").write_bytes((first / "config.json").read_bytes() + b" ")
    assert fingerprint(first) != fingerprint(second)


def test_the_cache_is_the_hub_librarys_own(weights: list[str]) -> None:
    from huggingface_hub import snapshot_download

    path = Go().path()
    found = snapshot_download(MODEL, cache_dir=cache_directory(), local_files_only=True)
    assert Path(found) == path
    blob = (path / weights[1]).resolve()
    assert hashlib.sha256(blob.read_bytes()).hexdigest() == blob.name


def test_a_cut_download_is_gone_on_with(stand_in: Hub, weights: list[str]) -> None:
    stand_in.faults[weights[1]] = Fault(cut_after=70_000, times=1)
    inspect(Go().path())
    offsets = stand_in.offsets(weights[1])
    assert len(offsets) == 2
    assert offsets[1] > 0


def test_what_came_before_the_end_of_a_process_is_gone_on_with(stand_in: Hub, weights: list[str]) -> None:
    stand_in.faults[weights[1]] = Fault(cut_after=70_000, times=1)
    stand_in.faults["api"] = Fault(times=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetch_hub, "_TRIES", 1)
        patch.setattr(fetch_hub, "_receive", cut_short(fetch_hub._receive))
        with pytest.raises(KeyboardInterrupt):
            Go().path()
    (part,) = parts_below(cache_directory())
    before = part.stat().st_size
    assert before > 0
    stand_in.asked.clear()
    inspect(Go().path())
    offsets = stand_in.offsets(weights[1])
    assert offsets == [before]
    assert parts_below(cache_directory()) == []


def cut_short(receive: Any) -> Any:
    """The process ends at the first broken connection."""

    def wrapped(*args: Any) -> None:
        try:
            receive(*args)
        except FetchError as error:
            raise KeyboardInterrupt from error

    return wrapped


def test_a_corrupted_file_is_thrown_away_and_asked_for_once_more(stand_in: Hub, weights: list[str]) -> None:
    stand_in.faults[weights[1]] = Fault(corrupt=True, times=1)
    inspect(Go().path())
    assert stand_in.downloads().count(weights[1]) == 2


@pytest.mark.parametrize("small", [False, True])
def test_a_file_that_is_corrupted_twice_is_named_and_nothing_of_it_stays(
    stand_in: Hub, weights: list[str], small: bool
) -> None:
    name = "config.json" if small else weights[1]
    stand_in.faults[name] = Fault(corrupt=True)
    with pytest.raises(ModelError, match=rf"{name} of owner/tiny came from the hub twice and is corrupted") as raised:
        Go().path()
    assert "HF_ENDPOINT" in raised.value.remedy
    assert parts_below(cache_directory()) == []
    assert not list(repository_directory(cache_directory(), MODEL).glob(f"snapshots/*/{name}"))


@pytest.mark.parametrize(
    ("fault", "kind", "said", "remedy"),
    [
        (Fault(status=401, code="RepoNotFound"), ModelError, "no model owner/tiny, or it is private", "hf auth login"),
        (Fault(status=401), ModelError, "owner/tiny", "hf auth login"),
        (Fault(status=403, code="GatedRepo"), ModelError, "gated", "accept its terms"),
        (Fault(status=404, code="RepoNotFound"), ModelError, "no model owner/tiny", "check the id"),
        (Fault(status=404, code="RevisionNotFound"), ModelError, "has no owner/tiny", "check the revision"),
        (Fault(status=503), FetchError, "answered 503", "try again later"),
    ],
)
def test_the_hubs_refusals(stand_in: Hub, fault: Fault, kind: type[MusterError], said: str, remedy: str) -> None:
    stand_in.faults["api"] = fault
    with pytest.raises(kind, match=said) as raised:
        Go().path()
    assert remedy.lower() in raised.value.remedy.lower()


def test_an_unknown_model_and_an_unknown_revision() -> None:
    with pytest.raises(ModelError, match="no model owner/other"):
        Go(model="owner/other").path()
    with pytest.raises(ModelError, match="no owner/tiny at revision v9"):
        Go(revision="v9").path()


def test_a_hub_that_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(FetchError, match=r"the hub at http://127\.0\.0\.1:9 cannot be reached") as raised:
        Go().path()
    assert "connection" in raised.value.remedy
    assert raised.value.retryable


@pytest.mark.parametrize("body", [b"<html>Log in to this network</html>", b"[]", b"{}"])
def test_what_answers_in_the_place_of_the_hub_is_named(
    stand_in: Hub, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def portal(handler: Any, model: str, revision: str) -> None:
        del model, revision
        handler._send_whole(body)

    monkeypatch.setattr(stand_in_hub._Handler, "_api", portal)
    with pytest.raises(FetchError, match=rf"at {stand_in.endpoint}") as raised:
        Go().path()
    assert "HF_ENDPOINT" in raised.value.remedy


def test_a_server_that_always_begins_anew_and_breaks_off_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = iter((5, 3, 7, 4, 6, 2))

    def begin_anew(listed: object, file: object, sink: Any) -> None:
        sink.restart()
        sink.write(bytes(next(ends)))

    monkeypatch.setattr(fetch_hub, "_receive", begin_anew)
    monkeypatch.setattr(fetch_hub, "_PAUSE_SECONDS", 0.0)
    file = fetch_hub.HubFile(name="w", bytes=9, hash="0" * 64, large=True)
    listed = fetch_hub.Listing(model=MODEL, commit="0" * 40, files=(file,))
    with pytest.raises(FetchError, match="ended w early"):
        fetch_hub.download(tmp_path, listed, file, Meter(list[Moved]().append, "", 9))


def test_a_hub_that_falls_silent_in_a_file(stand_in: Hub, weights: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_hub, "SILENCE_SECONDS", 0.1)
    stand_in.faults[weights[1]] = Fault(cut_after=0, stalls=True)
    with pytest.raises(FetchError, match=rf"silent.*{weights[1]} of owner/tiny stands at \d+ of \d+ bytes") as raised:
        Go().path()
    assert "what came is kept" in raised.value.remedy.lower()
    assert len(parts_below(cache_directory())) == 1


def test_offline_takes_what_is_here_and_asks_nobody(stand_in: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="must not be asked"):
        Go(offline=True).path()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="must not be asked"):
        Go().path()
    assert stand_in.asked == []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    path = Go().path()
    stand_in.asked.clear()
    assert Go(offline=True).path() == path
    assert stand_in.asked == []


def test_a_disk_without_room_is_refused_before_anything_comes(stand_in: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    free = shutil.disk_usage("/")._replace(free=70 * 2**20)
    monkeypatch.setattr(sinks, "_SPARE_BYTES", 70 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)  # pyright: ignore[reportUnknownLambdaType]
    wanted = r"owner/tiny needs 0\.0 MiB in .*hub, where 70\.0 MiB are free and 70\.0 MiB must stay free"
    with pytest.raises(DiskFullError, match=wanted) as raised:
        Go().path()
    assert "HF_HOME" in raised.value.remedy
    assert stand_in.downloads() == []


def test_a_disk_that_fills_up_midway_leaves_nothing_that_looks_whole(
    weights: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def full(descriptor: int, data: Any) -> int:
        if (
            Path(f"/proc/self/fd/{descriptor}").readlink().suffix == ".muster-part"
            and os.fstat(descriptor).st_size > 60_000
        ):
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(DiskFullError, match="became full while a model was written"):
        Go().path()
    monkeypatch.undo()
    assert not list(cache_directory().glob(f"**/snapshots/*/{weights[1]}"))


def test_two_at_once_download_once_and_the_second_says_what_it_waits_for(stand_in: Hub, weights: list[str]) -> None:
    stand_in.faults[weights[2]] = Fault(bytes_per_second=120_000, times=1)
    goes = [Go(who=f"rank {number} of i-1") for number in range(2)]
    paths: list[Path] = []
    threads = [threading.Thread(target=_note_path, args=(go, paths)) for go in goes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(set(paths)) == 1
    assert len(paths) == 2
    downloads = stand_in.downloads()
    assert len(downloads) == len(set(downloads))
    assert sorted(bool(go.brought) for go in goes) == [False, True]
    waited = next(go for go in goes if not go.brought)
    assert any("waits for rank" in moved.note and "from the hub" in moved.note for moved in waited.moved)


def _note_path(go: Go, paths: list[Path]) -> None:
    paths.append(go.path())


def test_a_directory_is_itself_and_never_written_into(tmp_path: Path, stand_in: Hub) -> None:
    directory = tmp_path / "owner" / "tiny"
    split_demo(directory)
    before = sorted(directory.iterdir())
    assert Go(model=str(directory)).path() == directory
    assert sorted(directory.iterdir()) == before
    assert stand_in.asked == []


@pytest.mark.parametrize("model", ["/no/such", "./a", "~/a", "name", "a/b/c", "a/", "", "a b/c", "a/b\n"])
def test_what_looks_like_a_path_is_never_looked_up(stand_in: Hub, model: str) -> None:
    with pytest.raises(ModelError, match="no directory on this node") as raised:
        Go(model=model).path()
    assert raised.value.remedy
    assert stand_in.asked == []


def test_a_file_and_a_revision_of_a_directory_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError, match="is a file"):
        Go(model=str(tmp_path / "model.gguf")).path()
    with pytest.raises(ModelError, match="no revision 'main'"):
        Go(model=str(tmp_path), revision="main").path()


def test_silence_is_told_before_the_phase_is_over() -> None:
    assert fetch_hub.SILENCE_SECONDS * fetch_hub._TRIES <= 60
    assert peers.SILENCE_SECONDS * peers._TRIES <= 60
