"""Where a model is taken from when several places have some of it, other revisions of it, or less than is wanted."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio.from_thread
import pytest
from bringing import MODEL, Go, split_demo
from givers import Giver

from muster.errors import DiskFullError, FetchError, ModelError
from muster.fetch import peers, sinks
from muster.fetch.held import held_models
from muster.layout import ModelSource
from muster.model.config import tokenizer_code
from muster.model.files import code_fingerprint, fingerprint
from muster.model.hub import cache_directory, repository_directory
from muster.spec import NodeId
from muster.testing.hub import Fault, Hub, commit_of
from muster.worker import giving

GONE = ModelSource(node=NodeId("a"), host="127.0.0.1", port=9, path="/nowhere")
OWN_CODE = "own/coded"


@pytest.fixture(scope="module")
def weights(stand_in: Hub, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    source = tmp_path_factory.mktemp("model")
    names = split_demo(source)
    stand_in.add(MODEL, source)
    wants_code(source)
    stand_in.add(OWN_CODE, source)
    return names


@pytest.fixture(autouse=True)
def here(weights: list[str], hub_here: None) -> None:
    """Every test has the models on the hub."""


@pytest.fixture
def giver(tmp_path: Path) -> Generator[Giver]:
    made = Giver(tmp_path)
    with anyio.from_thread.start_blocking_portal() as portal:
        future, _ = portal.start_task(made.serve)
        yield made
        future.cancel()


def wants_code(model: Path) -> None:
    """Make its tokenizer want to run code of its own."""
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (model / "tokenization_own.py").write_text("from transformers import PreTrainedTokenizerFast\n")


def given(giver: Giver, stand_in: Hub, *, without: str = "", commit: str = "") -> Path:
    """The model among what the node copied before, in a cache of the hub's layout."""
    files = stand_in.models[MODEL]
    snapshot = repository_directory(giver.cache, MODEL) / "snapshots" / (commit or commit_of(files))
    snapshot.mkdir(parents=True)
    for name, content in files.items():
        if name != without:
            (snapshot / name).write_bytes(content)
    return snapshot


# --- revisions ------------------------------------------------------------------------------------------------


def test_a_node_tells_which_branches_lead_to_a_snapshot() -> None:
    repository = repository_directory(cache_directory(), MODEL)
    old, new = "1" * 40, "9" * 40
    for commit in (old, new):
        split_demo(repository / "snapshots" / commit)
    for name, commit in (("main", new), ("refs/pr/1", new), ("v1", old), ("odd", "no commit")):
        (repository / "refs" / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / "refs" / name).write_text(commit)
    held = {one.revision: one for one in held_models()}
    assert (held[old].names, held[new].names) == (("v1",), ("main", "refs/pr/1"))
    assert [held[commit].is_at(None) for commit in (old, new)] == [False, True]
    assert [held[old].is_at(revision) for revision in ("v1", "main", old, "1")] == [True, False, True, False]
    # A branch that moves changes no file of a snapshot.
    (repository / "refs" / "main").write_text(old)
    assert {one.revision: one.names for one in held_models()}[old] == ("main", "v1")


def test_the_commit_of_the_attempt_comes_before_what_a_branch_is_here(stand_in: Hub) -> None:
    repository = repository_directory(cache_directory(), MODEL)
    old, new = "1" * 40, commit_of(stand_in.models[MODEL])
    split_demo(repository / "snapshots" / old)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(old)
    assert Go().path().name == old
    assert Go(commit=new).path().name == new
    assert (repository / "refs" / "main").read_text() == old, "what was not asked for stays what it was"
    asked = len(stand_in.asked)
    assert Go(commit=new).path().name == new
    assert len(stand_in.asked) == asked


def test_a_source_with_another_commit_is_passed_over(giver: Giver, stand_in: Hub, tmp_path: Path) -> None:
    other = given(giver, stand_in, commit="1" * 40)
    go = Go(sources=(giver.source(other),), copies=tmp_path / "copies", commit=commit_of(stand_in.models[MODEL]))
    assert go.path().name == commit_of(stand_in.models[MODEL])
    assert {one.source for one in go.brought} == {"hub"}


# --- from several places --------------------------------------------------------------------------------------


def test_what_a_node_has_only_in_part_is_completed_from_the_hub(
    giver: Giver, stand_in: Hub, weights: list[str], tmp_path: Path
) -> None:
    Go(range(3, 4)).path()  # the hub's cache has some of it as well
    part = given(giver, stand_in, without=weights[1])
    stand_in.asked.clear()
    go = Go(sources=(giver.source(part),), copies=tmp_path / "copies")
    path = go.path()
    assert path.is_relative_to(tmp_path / "copies")
    assert [name for name in stand_in.downloads() if name in weights] == [weights[1]]
    assert all((path / name).exists() for name in weights)


def test_a_private_model_of_a_node_that_is_gone_may_come_the_next_time(stand_in: Hub, tmp_path: Path) -> None:
    stand_in.faults["api"] = Fault(status=401, code="RepoNotFound")
    with pytest.raises(
        FetchError, match=r"from node a at 127\.0\.0\.1:9: .*; and then, the hub has no model"
    ) as raised:
        Go(sources=(GONE,), copies=tmp_path / "copies").path()
    assert "muster links" in raised.value.remedy
    with pytest.raises(ModelError, match=r"^the hub has no model"):
        Go(copies=tmp_path / "copies").path()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a file system that nobody can write to is wanted")
def test_without_a_cache_of_the_hub_models_go_to_the_copies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", "/proc/nope")
    path = Go(copies=tmp_path / "copies").path()
    assert path.is_relative_to(tmp_path / "copies")
    with pytest.raises(FetchError, match="cannot be written to /proc/nope"):
        Go().path()


# --- code -----------------------------------------------------------------------------------------------------


def test_the_tokenizers_code_comes_when_it_may_run(giver: Giver, stand_in: Hub, tmp_path: Path) -> None:
    path = Go(model=OWN_CODE).path()
    assert not (path / "tokenization_own.py").exists()
    assert Go(model=OWN_CODE, code=True).path() == path
    assert (path / "tokenization_own.py").exists()
    stand_in.asked.clear()
    assert Go(model=OWN_CODE, code=True).path() == path
    assert stand_in.asked == []


def test_a_node_without_the_code_is_no_whole_source(giver: Giver, stand_in: Hub, tmp_path: Path) -> None:
    files = stand_in.models[OWN_CODE]
    snapshot = repository_directory(giver.cache, OWN_CODE) / "snapshots" / commit_of(files)
    snapshot.mkdir(parents=True)
    for name, content in files.items():
        if not name.endswith(".py"):
            (snapshot / name).write_bytes(content)
    go = Go(model=OWN_CODE, code=True, sources=(giver.source(snapshot),), copies=tmp_path / "copies")
    assert (go.path() / "tokenization_own.py").exists()
    assert [name for name in stand_in.downloads() if "model" in name] == []


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ("own.Tokenizer", ("own.py",)),
        (["slow.A", "fast.B"], ("slow.py", "fast.py")),
        (["other/repository--own.A", None, 3, "../own.A", "own"], ()),
        ({"a": 1}, ()),
    ],
)
def test_what_code_a_tokenizer_names(tmp_path: Path, entries: object, expected: tuple[str, ...]) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": entries}}))
    assert tokenizer_code(tmp_path) == expected


@pytest.mark.parametrize("text", ["{", "[]", '{"auto_map": 3}', '{"auto_map": {}}'])
def test_settings_without_code(tmp_path: Path, text: str) -> None:
    assert tokenizer_code(tmp_path) == ()
    (tmp_path / "tokenizer_config.json").write_text(text)
    assert tokenizer_code(tmp_path) == ()


# --- what makes two directories the same ----------------------------------------------------------------------


def test_only_files_that_are_copied_make_a_difference(giver: Giver, tmp_path: Path) -> None:
    model = giver.directory / "tiny"
    split_demo(model)
    for name in ("tokenizer.model.v3", "vocab.bpe", "vocab.model", "tokenizer_own.py"):
        (model / name).write_bytes(b"something")
    asked = Go(model=f"/elsewhere{model}", sources=(giver.source(model),), copies=tmp_path / "copies")
    assert fingerprint(asked.path()) == fingerprint(model)
    before = fingerprint(model)
    (model / "vocab.txt").write_text("x")
    assert fingerprint(model) != before


def test_what_macos_leaves_beside_files_makes_no_difference(tmp_path: Path) -> None:
    split_demo(tmp_path / "model")
    model = tmp_path / "model"
    (model / "own.py").write_text("one = 1\n")
    before = fingerprint(model), code_fingerprint(model)
    for name in ("._tokenizer.json", "._own.py"):
        (model / name).write_text("Mac OS X")
    (model / "directory.py").mkdir()
    assert (fingerprint(model), code_fingerprint(model)) == before


def test_code_that_was_changed_at_the_source_comes_again(giver: Giver, tmp_path: Path) -> None:
    model = giver.directory / "model"
    split_demo(model)
    (model / "own.py").write_text("one = 1\n")
    (model / "more.py").write_text("more = 1\n")
    go = Go(model=str(tmp_path / "elsewhere"), sources=(giver.source(model),), copies=tmp_path / "copies", code=True)
    path = go.path()
    (model / "own.py").write_text("one = 2\n")
    (model / "more.py").unlink()
    assert go.path() == path
    assert code_fingerprint(path) == code_fingerprint(model)


def test_code_makes_a_difference_where_it_may_run(giver: Giver, tmp_path: Path) -> None:
    model = giver.directory / "tiny"
    split_demo(model)
    assert code_fingerprint(model) == ""
    wants_code(model)
    go = Go(model=f"/elsewhere{model}", sources=(giver.source(model),), copies=tmp_path / "copies", code=True)
    path = go.path()
    assert code_fingerprint(path) == code_fingerprint(model) != ""
    (model / "tokenization_own.py").write_text("other = 1\n")
    assert code_fingerprint(path) != code_fingerprint(model)


# --- disks ----------------------------------------------------------------------------------------------------


def usage(free: int) -> Callable[[Path], SimpleNamespace]:
    """A disk with so much room left."""
    return lambda path: SimpleNamespace(total=10**9, used=10**9 - free, free=free)


def test_room_is_wanted_only_for_what_is_not_here(
    stand_in: Hub, weights: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = max(weights, key=lambda name: len(stand_in.models[MODEL][name]))
    size = len(stand_in.models[MODEL][largest])
    path = Go().path()
    blob = (path / largest).resolve()
    (path / largest).unlink()
    spare = 1000
    monkeypatch.setattr(sinks, "_SPARE_BYTES", 0)
    monkeypatch.setattr(shutil, "disk_usage", usage(spare))
    assert Go().path() == path, "a blob without its link"
    (path / largest).unlink()
    content = blob.read_bytes()
    blob.unlink()
    blob.with_name(blob.name + sinks.PART_SUFFIX).write_bytes(content[: size - spare])
    assert Go().path() == path, "a part"
    (path / largest).unlink()
    blob.unlink()
    with pytest.raises(DiskFullError):
        Go().path()


def test_a_part_of_a_copy_counts_as_room(giver: Giver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = giver.directory / "tiny"
    names = split_demo(model)
    asked: dict[str, Any] = {
        "model": f"/elsewhere{model}",
        "sources": (giver.source(model),),
        "copies": tmp_path / "copies",
    }
    path = Go(**asked).path()
    content = (path / names[1]).read_bytes()
    (path / names[1]).unlink()
    (path / (names[1] + sinks.PART_SUFFIX)).write_bytes(content[:-1000])
    monkeypatch.setattr(sinks, "_SPARE_BYTES", 0)
    monkeypatch.setattr(shutil, "disk_usage", usage(1000))
    assert Go(**asked).path() == path
    assert (path / names[1]).read_bytes() == content


def test_a_file_gets_its_name_only_when_its_content_is_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        done.append("synced")
        sync(descriptor)

    def replaced(path: Path, target: Path) -> Path:
        done.append("named")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    Go().path()
    assert len(done) > 5
    assert done == ["synced", "named"] * (len(done) // 2)


def test_a_node_that_reads_long_for_a_hash_is_told_of(
    giver: Giver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = giver.directory / "tiny"
    names = split_demo(model)
    read, go = giving._read, Go(model=f"/elsewhere{model}", sources=(giver.source(model),), copies=tmp_path / "copies")
    what = f"waits for node b, which reads {names[1]} for its hash"

    def told() -> int:
        return sum(moved.note == what for moved in list(go.moved))

    def slow(file: Path) -> str:
        """Until the asker has told twice that it waits; else the assertion at the end says that it did not."""
        until = time.monotonic() + 5
        while file.name == names[1] and time.monotonic() < until and told() < 2:
            threading.Event().wait(0.005)
        return read(file)

    monkeypatch.setattr(giving, "_read", slow)
    monkeypatch.setattr(peers, "_WAIT_SECONDS", 0.01)
    go.path()
    assert told() >= 2
