"""What a model needs is read from files here, or from the hub by headers alone, and remembered while it holds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator
from pathlib import Path

import pytest
from bringing import DEMO, MODEL, split_demo

from muster.errors import FetchError, ModelError
from muster.facts import HeldModel
from muster.fetch import remote
from muster.fetch.survey import Survey
from muster.model.files import inspect
from muster.model.needs import needs_of
from muster.testing.hub import Fault, Hub, commit_of, hub


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Generator[Hub]:
    source = tmp_path_factory.mktemp("published")
    split_demo(source)
    with hub() as made:
        made.add(MODEL, source)
        yield made


@pytest.fixture(autouse=True)
def here(stand_in: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own, and nothing wrong with the hub."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", stand_in.endpoint)
    stand_in.faults.clear()
    stand_in.asked.clear()


def copied(target: Path) -> Path:
    return shutil.copytree(DEMO, target)


def test_the_hub_says_what_the_files_say_and_gives_no_weights(stand_in: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_FIRST_BYTES", 64)  # shorter than any header: each takes a second request
    needs = Survey().hub(MODEL, None)
    expected = needs_of(inspect(DEMO))
    assert (needs.layers, needs.outside_bytes) == (expected.layers, expected.outside_bytes)
    assert (needs.model, needs.tensor_sizes, needs.parameters) == (MODEL, expected.tensor_sizes, expected.parameters)
    assert "model.safetensors" not in " ".join(stand_in.downloads())
    assert needs.weights_bytes > 0


def test_the_hub_is_asked_again_only_when_a_branch_may_have_moved(stand_in: Hub) -> None:
    clock = [0.0]
    survey = Survey(lambda: clock[0])
    first = survey.hub(MODEL, None)
    asked = len(stand_in.asked)
    assert survey.hub(MODEL, None) is first
    assert len(stand_in.asked) == asked
    clock[0] = 61.0
    assert survey.hub(MODEL, None) == first
    assert len(stand_in.asked) == 2 * asked


def test_refusals_of_the_hub_are_told_apart(stand_in: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    survey = Survey()
    with pytest.raises(ModelError, match="no hub id"):
        survey.hub("no-owner", None)
    with pytest.raises(ModelError, match="has no model owner/other"):
        survey.hub("owner/other", None)
    stand_in.faults["api"] = Fault(status=401)
    with pytest.raises(ModelError, match="hf auth login"):
        survey.hub(MODEL, None)
    stand_in.faults["api"] = Fault(status=503)
    with pytest.raises(FetchError, match="503"):
        survey.hub(MODEL, None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="must not be asked"):
        survey.hub(MODEL, None)


def test_a_repository_without_weights_is_no_model(stand_in: Hub, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "config.json").write_text("{}")
    stand_in.add("owner/notes", tmp_path / "notes")
    with pytest.raises(ModelError, match="has no safetensors files"):
        Survey().hub("owner/notes", None)


def test_a_config_without_end_is_not_read_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_JSON_BYTES", 20)
    with pytest.raises(ModelError, match=r"config\.json is longer than 20 bytes"):
        Survey().hub(MODEL, None)


def test_files_are_read_again_when_they_change(tmp_path: Path) -> None:
    path = copied(tmp_path / "m")
    survey = Survey()
    first = survey.here(str(path), None)
    assert survey.here(str(path), None) is first
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 77}))
    changed = survey.here(str(path), None)
    assert changed is not None
    assert first is not None
    assert (changed.context_tokens, changed.fingerprint != first.fingerprint) == (77, True)


def test_a_broken_directory_is_told_and_a_missing_one_is_somebody_elses(tmp_path: Path) -> None:
    path = copied(tmp_path / "m")
    weights = next(path.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ModelError, match="truncated"):
        Survey().here(str(path), None)
    assert Survey().here(str(tmp_path / "other"), None) is None
    assert Survey().here(MODEL, None) is None


def test_it_says_which_commit_is_meant_where_a_name_leads_to_it(stand_in: Hub, tmp_path: Path) -> None:
    assert Survey().hub(MODEL, None).commit == commit_of(stand_in.models[MODEL])
    path = str(copied(tmp_path / "copy"))
    known = HeldModel(model=MODEL, path=path, revision="c" * 40, names=("main", "v1"))
    nameless = HeldModel(model=MODEL, path=path, revision="d" * 40)

    def commit(revision: str | None, *held: HeldModel) -> str | None:
        found = Survey().here(MODEL, revision, held)
        return None if found is None else found.commit

    assert [commit(revision, nameless, known) for revision in (None, "v1", "d" * 40)] == ["c" * 40, "c" * 40, "d" * 40]
    assert (commit(None, nameless), commit("v2", nameless, known)) == ("", None)


def test_a_copy_on_the_node_stands_for_the_hub_id(tmp_path: Path) -> None:
    held = HeldModel(model=MODEL, path=str(copied(tmp_path / "copy")), revision="c" * 40)
    found = Survey().here(MODEL, None, [held])
    assert found is not None
    assert found.model == MODEL
    assert Survey().here(MODEL, "d" * 40, [held]) is None
    (Path(held.path) / "config.json").unlink()
    assert Survey().here(MODEL, None, [held]) is None, "an incomplete copy says nothing"
