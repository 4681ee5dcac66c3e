"""Hosts with two links each, and a coordinator that listens on both."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bed import Bed
from net_cluster import NetClient, NetCluster, group

pytestmark = [pytest.mark.netns, pytest.mark.process, pytest.mark.mlx]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetCluster]:
    directory = tmp_path_factory.mktemp("two-links")
    with (
        Bed(hosts=3, bridges=2) as bed,
        NetCluster(bed, directory, links=(0, 1), listen="0.0.0.0") as cluster,
    ):
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: NetCluster) -> Iterator[NetClient]:
    with cluster.client() as client:
        yield client


def test_a_coordinator_on_all_addresses_is_reached_from_every_host(cluster: NetCluster) -> None:
    port = cluster.address.rpartition(":")[2]
    for host in cluster.bed.hosts:
        with cluster.client(host, f"{cluster.bed.address('h0', 1)}:{port}") as client:
            assert set(client.state().nodes) >= {"h1", "h2"}


def test_two_ranks_with_two_links_have_connections_over_both(cluster: NetCluster, client: NetClient) -> None:
    bed = cluster.bed
    instance = client.create(group("h1", "h2"))
    ranks = client.wait_ready(instance).ranks

    for rank in ranks:
        assert [(one.host, one.network) for one in rank.addresses] == [
            (bed.address(rank.node, bridge), bed.network(bridge)) for bridge in bed.bridges
        ]
        other = ranks[1 - rank.rank].node
        used = {
            (one.local.partition(":")[0], one.remote.partition(":")[0])
            for one in bed.sockets(rank.node)
            if one.state == "ESTAB" and rank.pid in one.pids
        }
        assert {(bed.address(rank.node, bridge), bed.address(other, bridge)) for bridge in bed.bridges} <= used
    client.delete(instance)
    cluster.wait_nothing_left(ranks)
