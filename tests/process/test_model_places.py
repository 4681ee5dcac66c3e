"""Models that lie differently on two nodes, of which one must not ask the hub; and tokenizers with own code."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from kit import DEMO_MODEL, Stage, assert_blames, model, spec_of, stage, until

from muster.events import InstanceFailed, RankFetched
from muster.model.hub import repository_directory
from muster.spec import InstanceSpec, ModelWorkload
from muster.testing.checkpoints import split_checkpoint
from muster.testing.hub import Hub, commit_of, hub

pytestmark = [pytest.mark.process, pytest.mark.mlx]

OLD, NEW = "1" * 40, "9" * 40
CODE = """
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture(scope="module")
def stand_in() -> Generator[Hub]:
    with hub() as made:
        yield made


@pytest.fixture(autouse=True)
def well(stand_in: Hub) -> None:
    stand_in.asked.clear()


@pytest.fixture(scope="module")
def source(stand_in: Hub, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the hub serves, once with code of its own, without which its tokenizer cannot be loaded."""
    found = tmp_path_factory.mktemp("model")
    split_checkpoint(DEMO_MODEL, found)
    stand_in.add("owner/plain", found)
    coded = tmp_path_factory.mktemp("coded")
    split_checkpoint(DEMO_MODEL, coded)
    settings = json.loads((coded / "tokenizer_config.json").read_text())
    settings |= {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer"] * 2},
    }
    (coded / "tokenizer_config.json").write_text(json.dumps(settings))
    (coded / "tokenization_own.py").write_text(CODE)
    stand_in.add("owner/coded", coded)
    return found


@pytest.fixture(scope="module")
def apart(stand_in: Hub, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Stage]:
    """Node b is offline. On both, `main` of owner/moved leads to another commit."""
    directory = tmp_path_factory.mktemp("places")
    for node, commit in (("a", NEW), ("b", OLD)):
        repository = repository_directory(directory / f"hf-{node}" / "hub", "owner/moved")
        split_checkpoint(DEMO_MODEL, repository / "snapshots" / commit)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(commit)
    environments = {
        node: {
            "HF_HOME": str(directory / f"hf-{node}"),
            "HF_MODULES_CACHE": str(directory / f"code-{node}"),
            "HF_ENDPOINT": stand_in.endpoint,
        }
        for node in ("a", "b")
    }
    with stage(directory / "cluster", ("a",), environments=environments, coordinator_options=()) as made:
        made.cluster.start_worker("b", options=("--offline",))
        yield made


def on(node: str, model_id: str, **options: Any) -> InstanceSpec:
    return spec_of(ModelWorkload(model=model_id, **options), 1, (node,))


def tells(apart: Stage, node: str, model_id: str) -> None:
    def told() -> bool:
        held = [one for facts in apart.client.snapshot().facts if facts.node == node for one in facts.models]
        return any(one.model == model_id and one.complete for one in held)

    until(told, f"{node} tells of {model_id}")


def ranks_asked_for(stand_in: Hub) -> list[str]:
    """What was downloaded; the coordinator looks at config.json before it places a model."""
    return [name for name in stand_in.downloads() if name != "config.json"]


def test_nodes_whose_branch_differs_load_the_same_commit_without_asking_the_hub(apart: Stage, stand_in: Hub) -> None:
    for node in ("a", "b"):
        tells(apart, node, "owner/moved")
    instance = apart.client.create(model("owner/moved", 2, "pipeline"))
    apart.client.ready(instance)
    assert apart.client.instance(instance).layout.commit == NEW, "as many nodes have it as the other, and it is later"
    fetched = [event for event in apart.client.events if isinstance(event, RankFetched) and event.instance == instance]
    assert {(event.rank, event.source) for event in fetched} == {(1, "node a")}
    assert stand_in.asked == []
    apart.clean(instance)


def test_a_node_that_is_offline_never_takes_a_model_from_the_hub(apart: Stage, stand_in: Hub) -> None:
    instance = apart.client.create(on("b", "owner/plain"))
    failed = apart.client.wait(InstanceFailed, instance)
    assert_blames(failed.failure, kind="model-invalid", rank=0, node="b", phase="preparing")
    assert "the hub must not be asked" in failed.failure.message
    assert "--offline" in failed.failure.remedy
    assert ranks_asked_for(stand_in) == []
    apart.clean(instance)


def test_a_tokenizers_own_code_comes_and_runs_when_it_may(apart: Stage, stand_in: Hub) -> None:
    # What another instance left in the cache before, which did not say so.
    cached = repository_directory(apart.cluster.directory.parent / "hf-a" / "hub", "owner/coded")
    snapshot = cached / "snapshots" / commit_of(stand_in.models["owner/coded"])
    snapshot.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(snapshot.name)
    for name, content in stand_in.models["owner/coded"].items():
        if not name.endswith(".py"):
            (snapshot / name).write_bytes(content)
    trusted = apart.client.create(on("a", "owner/coded", trust_remote_code=True))
    apart.client.ready(trusted)
    assert ranks_asked_for(stand_in) == ["tokenization_own.py"]
    directory = apart.cluster.directory.parent / "code-a"
    assert list(directory.rglob("tokenization_own.py")), "transformers has run it from its own directory"
    apart.clean(trusted)
