"""Models that cannot be served: found while preparing, told with the file and the reason, and not tried again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from kit import DEMO_MODEL, Stage, assert_blames, group, model, spec_of, stretched_model

from muster.events import InstanceFailed
from muster.protocol import Create
from muster.spec import Failure, ModelWorkload, RestartOnFailure

pytestmark = [pytest.mark.process, pytest.mark.mlx]


def missing(directory: Path) -> None:
    shutil.rmtree(directory)


def without_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def without_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def without_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


def truncated(directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def changed(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def fails(shared: Stage, path: Path, ranks: int, sharding: str = "auto") -> Failure:
    """Create it with a restart policy: what is wrong with the files must end it at once all the same."""
    spec = model(path, ranks, sharding, restart=RestartOnFailure(maximum=3))
    instance = shared.client.create(spec)
    failed = shared.client.wait(InstanceFailed, instance)
    assert failed.retry_at_ns is None
    shared.clean(instance)
    return failed.failure


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (missing, "is no directory on this node"),
        (without_config, "config.json"),
        (without_weights, "safetensors"),
        (without_tokenizer, "tokenizer"),
        (truncated, "model.safetensors"),
    ],
)
def test_files_that_are_missing_or_damaged_are_named(
    shared: Stage, tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, directory)
    damage(directory)
    failure = fails(shared, directory, 1)
    assert_blames(failure, kind="model-invalid", rank=0, node="a", phase="preparing")
    assert words in failure.message


def test_heads_that_do_not_divide_are_refused(shared: Stage, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, directory)
    spec = spec_of(ModelWorkload(model=str(directory), sharding="tensor"), 3, ("a", "b"))
    failure = shared.client.refusal(Create(spec=spec))
    assert failure.kind == "sharding-unsupported"
    assert failure.phase.value == "placing"
    assert "num_attention_heads is 8, which does not divide by 3 ranks" in failure.message
    assert "--ranks 2" in failure.remedy


def test_fewer_layers_than_ranks_are_refused(shared: Stage, tmp_path: Path) -> None:
    spec = model(stretched_model(tmp_path / "model", 1), 2, "pipeline")
    failure = shared.client.refusal(Create(spec=spec))
    assert failure.kind == "sharding-unsupported"
    assert failure.phase.value == "placing"
    assert "layer" in failure.message
    assert failure.remedy


def test_a_model_that_differs_between_nodes_is_refused(
    shared: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node in ("x", "y"):
        shutil.copytree(DEMO_MODEL, tmp_path / node / "model")
        monkeypatch.setenv("HOME", str(tmp_path / node))
        shared.cluster.start_worker(node)
    changed(tmp_path / "y" / "model" / "generation_config.json", temperature=0.5)
    instance = shared.client.create(spec_of(ModelWorkload(model="~/model", sharding="pipeline"), 2, ("x", "y")))
    failure = shared.client.failure_of(instance)
    assert failure.kind == "members-differ"
    assert failure.phase.value == "forming"
    assert failure.node in ("x", "y")
    assert "workload" in failure.message
    assert "equal on all nodes" in failure.remedy
    shared.clean(instance)


def test_more_ranks_than_the_nodes_hold_are_refused_with_what_is_missing(shared: Stage) -> None:
    failure = shared.client.refusal(Create(spec=group(ranks=65)))
    assert failure.kind == "placement-refused"
    assert failure.phase.value == "placing"
    for node in ("a", "b"):
        assert f"node {node} takes 32 of them, then has all its 32 ranks in use" in failure.message
    assert failure.remedy


def test_more_memory_than_the_nodes_have_is_refused_with_what_is_left(shared: Stage) -> None:
    failure = shared.client.refusal(Create(spec=group(memory_bytes=2**60)))
    assert failure.kind == "placement-refused"
    assert "node a has" in failure.message
    assert "MiB left" in failure.message
    assert failure.remedy


def test_a_node_that_nobody_knows_is_refused_with_those_that_there_are(shared: Stage) -> None:
    failure = shared.client.refusal(Create(spec=group(nodes=("a", "zebra"))))
    assert failure.kind == "placement-refused"
    assert "zebra" in failure.message
    assert "a, b" in failure.message
    assert failure.remedy
