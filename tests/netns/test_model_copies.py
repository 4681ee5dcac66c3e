"""A model that one host holds comes to another over the faster of two links, also where that is cut meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from bed import Bed
from net_cluster import NetClient, NetCluster, wait_until

from muster.events import RankFetched, RankPrepared
from muster.links import LinkMap
from muster.model.hub import repository_directory
from muster.protocol import Get
from muster.replies import Snapshot
from muster.spec import InstanceSpec, ModelWorkload, NodeId

pytestmark = [pytest.mark.netns, pytest.mark.process, pytest.mark.mlx]

DEMO = Path(__file__).parents[2] / "src" / "muster" / "demo" / "model"
H1, H2 = NodeId("h1"), NodeId("h2")
SLOW, FAST = 0, 1
#: While the model is copied, the faster link takes some seconds for it.
SLOW_BITS, COPY_BITS = 20_000_000, 2_000_000
MODEL = "owner/tiny"
#: Where a worker keeps it, below its own directory.
COPY = repository_directory(Path("models"), MODEL) / "snapshots" / ("1" * 40)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetCluster]:
    """`h1` has copied the model before, and nobody has a hub."""
    directory = tmp_path_factory.mktemp("copies")
    shutil.copytree(DEMO, directory / "h1" / COPY)
    branch = directory / "h1" / COPY.parents[1] / "refs" / "main"
    branch.parent.mkdir()
    branch.write_text(COPY.name)
    with Bed(hosts=3, bridges=2) as bed, pytest.MonkeyPatch.context() as patch:
        if reason := bed.refusal("limit"):
            pytest.skip(reason)
        patch.setenv("HF_HOME", str(directory / "hf"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        bed.limit("h1", SLOW_BITS, SLOW)
        with NetCluster(bed, directory) as cluster:
            yield cluster


@pytest.fixture(scope="module")
def client(cluster: NetCluster) -> Iterator[NetClient]:
    with cluster.client() as client:
        yield client


def is_told(client: NetClient) -> bool:
    """Whether the coordinator knows of the model and has rates of both links."""
    (reply,) = client.call(Get())
    assert isinstance(reply, Snapshot)
    infos = {name: node.info for name, node in client.state().nodes.items()}
    links = LinkMap(infos, {one.node: one for one in reply.links}, {one.node: one for one in reply.facts})
    trials = links.trials(H1, H2)
    held = [one.model for facts in reply.facts if facts.node == H1 for one in facts.models]
    return MODEL in held and len(trials) > 1 and all(one.mbps_out for one in trials)


def test_a_copy_comes_over_the_faster_link_and_goes_on_when_the_cable_is_back(
    cluster: NetCluster, client: NetClient
) -> None:
    bed = cluster.bed
    wait_until(lambda: is_told(client), lambda: "the model and the rates are told")
    bed.limit("h1", COPY_BITS, FAST)
    copied = cluster.directory / H2 / COPY / "model.safetensors"
    part = copied.with_name(copied.name + ".muster-part")
    instance = client.create(InstanceSpec(workload=ModelWorkload(model=MODEL), ranks=1, nodes=(H2,)))
    wait_until(lambda: part.exists() and part.stat().st_size > 50_000, lambda: "the copy has begun")
    bed.cut("h1", FAST)
    assert not copied.exists()
    bed.heal("h1", FAST)

    def events(kind: type[RankFetched | RankPrepared]) -> list[RankFetched | RankPrepared]:
        return [event for _, event in client.events(instance) if isinstance(event, kind)]

    wait_until(lambda: bool(events(RankPrepared)), lambda: "the rank has its files")
    assert [event.attempt for event in events(RankPrepared)] == [1]
    (source,) = client.state().instances[instance].layout.ranks[0].sources
    assert (source.node, source.host) == (H1, bed.address(H1, FAST))
    given = [event for event in events(RankFetched) if isinstance(event, RankFetched)]
    assert {event.source for event in given} == {"node h1"}
    assert sum(event.bytes for event in given) == sum(file.stat().st_size for file in copied.parent.iterdir())
    assert copied.read_bytes() == (DEMO / "model.safetensors").read_bytes()
    client.delete(instance)
