"""A host whose address goes and comes back while its worker runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bed import Bed
from net_cluster import NetClient, NetCluster

from muster.events import NodeChanged, NodeJoined
from muster.protocol import Get
from muster.replies import Snapshot
from muster.spec import NodeId
from muster.state import State

pytestmark = [pytest.mark.netns, pytest.mark.process]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetCluster]:
    directory = tmp_path_factory.mktemp("addresses")
    with Bed(hosts=2, bridges=2) as bed, NetCluster(bed, directory) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: NetCluster) -> Iterator[NetClient]:
    with cluster.client() as client:
        yield client


def offered(state: State) -> list[str]:
    return [one.host for one in state.nodes[NodeId("h1")].info.candidates]


def test_an_address_that_goes_and_comes_back_is_an_event_each_time(cluster: NetCluster, client: NetClient) -> None:
    """In between another coordinator takes the log over, and is told nothing twice."""
    bed = cluster.bed
    first, second = bed.address("h1"), bed.address("h1", 1)
    info = client.state().nodes[NodeId("h1")].info
    assert [one.host for one in info.addresses] == [first]
    assert offered(client.state()) == [first, second]

    bed.take_down("h1", 1)
    client.wait_for(lambda state: offered(state) == [first], "the second address is gone")
    cluster.restart("coordinator")
    with cluster.client() as again:
        bed.bring_up("h1", 1)
        again.wait_for(lambda state: offered(state) == [first, second], "the second address is back")
        assert again.state().nodes[NodeId("h1")].lost is None
        (snapshot,) = again.call(Get())
        assert isinstance(snapshot, Snapshot)
        (facts,) = snapshot.facts  # told to the new coordinator as well
        assert {one.name: (one.kind, one.up) for one in facts.interfaces if one.name != "lo"} == {
            "eth0": ("ethernet", True),
            "eth1": ("ethernet", True),
        }

        events = [event for _, event in again.events()]
        changes = [event for event in events if isinstance(event, NodeChanged)]
        assert [(event.gone, event.new) for event in changes] == [((second,), ()), ((), (second,))]
        assert len([event for event in events if isinstance(event, NodeJoined)]) == 1
