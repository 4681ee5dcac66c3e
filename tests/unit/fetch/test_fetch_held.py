"""Which models a node says that it holds."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from bringing import DEMO, split_demo

from muster.fetch.held import file_of, held_models
from muster.model.hub import repository_directory

COMMIT = "0123456789" * 4


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def test_a_directory_of_models_and_a_model_itself(tmp_path: Path) -> None:
    split_demo(tmp_path / "models" / "owner" / "one")
    split_demo(tmp_path / "models" / "two")
    split_demo(tmp_path / "three")
    (tmp_path / "models" / "empty").mkdir()
    held = held_models((tmp_path / "models", tmp_path / "three", tmp_path / "no-such"))
    assert [one.model for one in held] == sorted(
        str(tmp_path / name) for name in ("models/owner/one", "models/two", "three")
    )
    assert all(one.complete and one.bytes > 700_000 and one.path == one.model for one in held)


def test_a_part_of_a_snapshot_is_not_complete(tmp_path: Path) -> None:
    snapshot = repository_directory(tmp_path / "hf" / "hub", "owner/tiny") / "snapshots" / COMMIT
    names = split_demo(snapshot)
    assert [(one.model, one.revision, one.complete) for one in held_models()] == [("owner/tiny", COMMIT, True)]
    (snapshot / names[2]).unlink()
    assert [one.complete for one in held_models()] == [False]
    for name in names:
        (snapshot / name).unlink(missing_ok=True)
    assert held_models() == ()


def test_a_file_is_given_only_from_where_models_lie(tmp_path: Path) -> None:
    split_demo(tmp_path / "one")
    (tmp_path / "one" / "linked.json").symlink_to(DEMO / "config.json")
    (held,) = held_models((tmp_path,))
    assert file_of(held, "config.json") == Path(held.path) / "config.json"
    assert file_of(held, "linked.json") is None
    assert file_of(held, "missing.json") is None
    assert file_of(held, "../one/config.json") is None


def test_names_that_cannot_be_sent_are_passed_over(tmp_path: Path) -> None:
    split_demo(tmp_path / "good")
    split_demo(tmp_path / os.fsdecode(b"bad\xff"))
    (tmp_path / "good" / os.fsdecode(b"notes\xff.json")).write_text("{}")
    held = held_models((tmp_path,))
    assert [one.model for one in held] == [str(tmp_path / "good")]
    assert msgspec.msgpack.encode(held)
    assert file_of(held[0], os.fsdecode(b"notes\xff.json")) is None
    assert file_of(held[0], "x" * 5000 + ".json") is None


def test_a_config_that_is_a_pipe_or_an_index_without_end_is_no_model(tmp_path: Path) -> None:
    split_demo(tmp_path / "pipe")
    (tmp_path / "pipe" / "config.json").unlink()
    os.mkfifo(tmp_path / "pipe" / "config.json")
    split_demo(tmp_path / "endless")
    os.truncate(tmp_path / "endless" / "model.safetensors.index.json", 2**40)
    split_demo(tmp_path / "noted")
    os.mkfifo(tmp_path / "noted" / ".muster-copy")
    assert [one.model for one in held_models((tmp_path,))] == [str(tmp_path / "noted")]
