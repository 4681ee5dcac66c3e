"""Models that are on no node, or on one: brought by the ranks themselves, once, in part, and gone on with."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kit import DEMO_MODEL, Stage, assert_blames, model, spec_of, stage, until

from muster.events import InstanceFailed, RankFailed, RankFetched, RankPrepared
from muster.fetch.sharing import PATIENCE_SECONDS
from muster.spec import InstanceId, InstanceSpec, ModelWorkload, RestartOnFailure
from muster.testing.checkpoints import split_checkpoint
from muster.testing.hub import Fault, Hub, hub

pytestmark = [pytest.mark.process, pytest.mark.mlx]

RETRY = RestartOnFailure(maximum=2, backoff_seconds=0.05)


@pytest.fixture(scope="module")
def stand_in() -> Generator[Hub]:
    with hub() as made:
        yield made


@pytest.fixture(scope="module")
def weights(stand_in: Hub, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The files of the model that the hub serves under several ids."""
    source = tmp_path_factory.mktemp("model")
    names = split_checkpoint(DEMO_MODEL, source)
    for name in ("parts", "copied", "both", "killed", "wrong", "shared", "gone", "crossed"):
        stand_in.add(f"owner/{name}", source)
    return names


@pytest.fixture(scope="module")
def shared(stand_in: Hub, tmp_path_factory: pytest.TempPathFactory) -> Generator[Stage]:
    """Two nodes that share no cache."""
    directory = tmp_path_factory.mktemp("fetching")
    environment = {
        node: {"HF_HOME": str(directory / f"hf-{node}"), "HF_ENDPOINT": stand_in.endpoint} for node in ("a", "b")
    }
    with stage(directory / "cluster", environments=environment, coordinator_options=()) as made:
        yield made


@pytest.fixture(autouse=True)
def well(stand_in: Hub) -> None:
    stand_in.faults.clear()
    stand_in.asked.clear()


def on(node: str, model_id: str, **options: Any) -> InstanceSpec:
    return spec_of(ModelWorkload(model=model_id), 1, (node,), **options)


def fetched(shared: Stage, instance: InstanceId) -> list[RankFetched]:
    events = list(shared.client.events)
    return [event for event in events if isinstance(event, RankFetched) and event.instance == instance]


def weights_of(stand_in: Hub, weights: list[str]) -> list[str]:
    """The weight files that were downloaded, each as often as it was."""
    return sorted(name for name in stand_in.downloads() if name in weights)


def weights_below(directory: Path) -> set[str]:
    return {path.name for path in directory.rglob("model-*.safetensors")}


def test_pipeline_ranks_fetch_their_own_files_once(shared: Stage, stand_in: Hub, weights: list[str]) -> None:
    instance = shared.client.create(model("owner/parts", 2, "pipeline"))
    shared.client.ready(instance)
    directory = shared.cluster.directory.parent
    held = {node: weights_below(directory / f"hf-{node}") for node in ("a", "b")}
    assert held["a"] & held["b"] == {weights[0]}
    assert held["a"] | held["b"] == set(weights)
    sources = {(event.rank, event.source) for event in fetched(shared, instance)}
    assert sources == {(0, "hub"), (1, "hub"), (1, "node a")}
    assert weights_of(stand_in, weights) == weights, "what both need was downloaded once"
    shared.clean(instance)
    stand_in.asked.clear()
    again = shared.client.create(model("owner/parts", 2, "pipeline"))
    for rank in range(2):
        shared.client.wait(RankPrepared, again, rank=rank)
    assert fetched(shared, again) == []
    assert stand_in.downloads() == []
    shared.clean(again)


@contextmanager
def held_up(stand_in: Hub, name: str) -> Generator[threading.Event]:
    """The hub sends a part of the file, and the rest when the event is set."""
    gate = threading.Event()
    stand_in.faults[name] = Fault(cut_after=50_000, times=1, gate=gate)
    try:
        yield gate
    finally:
        gate.set()


def follows(shared: Stage, model_id: str, stand_in: Hub, name: str) -> None:
    """Wait until the second node has what the first one has got of the file."""
    cache = shared.cluster.directory.parent / "hf-b" / "hub" / f"models--{model_id.replace('/', '--')}"

    def followed() -> bool:
        # Only parts of the file that is held up do not become whole.
        return bool(stand_in.offsets(name)) and any(
            part.stat().st_size == 50_000 for part in cache.glob("blobs/*.muster-part")
        )

    until(followed, f"the second node follows the first one in {name}")


def test_tensor_ranks_download_once_over_both_nodes_at_the_same_time(
    shared: Stage, stand_in: Hub, weights: list[str]
) -> None:
    with held_up(stand_in, weights[1]):
        instance = shared.client.create(model("owner/shared", 2, "tensor"))
        follows(shared, "owner/shared", stand_in, weights[1])
    shared.client.ready(instance)
    assert weights_of(stand_in, weights) == weights
    assert {event.source for event in fetched(shared, instance) if event.rank == 0} == {"hub"}
    given = [event for event in fetched(shared, instance) if event.source == "node a"]
    total = sum(len(stand_in.models["owner/shared"][name]) for name in weights)
    assert [(event.rank, event.files, event.bytes) for event in given] == [(1, len(weights), total)]
    shared.clean(instance)


def test_an_owner_that_is_killed_midway_goes_on_and_the_other_follows_again(
    shared: Stage, stand_in: Hub, weights: list[str]
) -> None:
    with held_up(stand_in, weights[1]):
        instance = shared.client.create(model("owner/gone", 2, "tensor", restart=RETRY))
        follows(shared, "owner/gone", stand_in, weights[1])
        shared.runners("a")[-1].kill()
        shared.client.wait(RankFailed, instance)
        shared.client.ready(instance, attempt=2)
    assert stand_in.offsets(weights[1]) == [0, 50_000]
    assert set(weights_of(stand_in, weights)) == set(weights)
    shared.clean(instance)


def test_two_instances_in_opposite_orders_do_not_wait_for_each_other(
    shared: Stage, stand_in: Hub, weights: list[str]
) -> None:
    workload = ModelWorkload(model="owner/crossed", sharding="tensor")
    both = [shared.client.create(spec_of(workload, 2, nodes)) for nodes in (("a", "b"), ("b", "a"))]
    for instance in both:
        shared.client.ready(instance)
        assert not [event for event in fetched(shared, instance) if event.seconds >= PATIENCE_SECONDS]
    assert {stand_in.downloads().count(name) for name in weights} <= {1, 2}
    for instance in both:
        shared.clean(instance)


def test_a_node_copies_from_another_instead_of_downloading(shared: Stage, stand_in: Hub) -> None:
    first = shared.client.create(on("a", "owner/copied"))
    shared.client.wait(RankPrepared, first)

    def told() -> bool:
        held = [one for facts in shared.client.snapshot().facts if facts.node == "a" for one in facts.models]
        return any(one.model == "owner/copied" and one.complete for one in held)

    until(told, "a tells of the model that it holds")
    stand_in.asked.clear()
    second = shared.client.create(on("b", "owner/copied"))
    shared.client.ready(second)
    assert {event.source for event in fetched(shared, second)} == {"node a"}
    assert stand_in.downloads() == []
    shared.clean(first)
    shared.clean(second)


def test_two_instances_at_once_download_once(shared: Stage, stand_in: Hub, weights: list[str]) -> None:
    both = [shared.client.create(on("a", "owner/both")) for _ in range(2)]
    for instance in both:
        shared.client.wait(RankPrepared, instance)
    assert sorted(name for name in stand_in.downloads() if name in weights) == weights
    for instance in both:
        shared.clean(instance)


def test_a_runner_that_is_killed_midway_is_gone_on_after(shared: Stage, stand_in: Hub, weights: list[str]) -> None:
    stand_in.faults[weights[1]] = Fault(bytes_per_second=100_000, times=1)
    instance = shared.client.create(on("a", "owner/killed", restart=RETRY))

    cache = shared.cluster.directory.parent / "hf-a"

    def begun() -> bool:
        asked = bool(stand_in.offsets(weights[1]))  # else the part is that of a file before it
        return asked and any(part.stat().st_size > 20_000 for part in cache.rglob("*.muster-part"))

    until(begun, "the file has begun to come")
    shared.runners("a")[-1].kill()
    shared.client.wait(RankFailed, instance)
    shared.client.wait(RankPrepared, instance, attempt=2)
    offsets = stand_in.offsets(weights[1])
    assert len(offsets) == 2
    assert offsets[1] > 0
    shared.clean(instance)


def test_a_corrupted_file_fails_the_attempt_by_its_name(shared: Stage, stand_in: Hub, weights: list[str]) -> None:
    stand_in.faults[weights[2]] = Fault(corrupt=True)
    instance = shared.client.create(on("b", "owner/wrong", restart=RETRY))
    failed = shared.client.wait(InstanceFailed, instance)
    assert_blames(failed.failure, kind="model-invalid", rank=0, node="b", phase="preparing")
    assert f"{weights[2]} of owner/wrong came from the hub twice and is corrupted" in failed.failure.message
    assert failed.retry_at_ns is None
    shared.clean(instance)
