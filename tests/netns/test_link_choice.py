"""Hosts with two links each, of which one is slow, and nobody says which to use."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from bed import Bed
from net_cluster import NetClient, NetCluster, group, wait_until

from muster.links import LinkMap
from muster.protocol import Get
from muster.replies import Snapshot
from muster.spec import NodeId
from muster.state import Instance

pytestmark = [pytest.mark.netns, pytest.mark.process, pytest.mark.mlx]

H1, H2 = NodeId("h1"), NodeId("h2")
SLOW, FAST = 0, 1
SLOW_BITS = 20_000_000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetCluster]:
    """The workers join over the slow link: nothing but its rate speaks against it."""
    directory = tmp_path_factory.mktemp("links")
    with Bed(hosts=3, bridges=2) as bed:
        if reason := bed.refusal("limit") or bed.refusal("drop"):
            pytest.skip(reason)
        bed.limit("h1", SLOW_BITS, SLOW)
        with NetCluster(bed, directory) as cluster:
            yield cluster


@pytest.fixture(scope="module")
def client(cluster: NetCluster) -> Iterator[NetClient]:
    with cluster.client() as client:
        yield client


def links_now(client: NetClient) -> LinkMap:
    (reply,) = client.call(Get())
    assert isinstance(reply, Snapshot)
    infos = {name: node.info for name, node in client.state().nodes.items()}
    return LinkMap(infos, {one.node: one for one in reply.links}, {one.node: one for one in reply.facts})


def wait_links(client: NetClient, holds: Callable[[LinkMap], object], what: str) -> None:
    wait_until(lambda: bool(holds(links_now(client))), lambda: f"{what}: {links_now(client).trials(H1, H2)}")


def hosts(bed: Bed, bridge: int) -> tuple[str, str]:
    return bed.address(H1, bridge), bed.address(H2, bridge)


def faulty(links: LinkMap) -> dict[tuple[str, str], str]:
    return {(one.link.a_host, one.link.b_host): one.fault for one in links.trials(H1, H2) if one.fault}


def connected(cluster: NetCluster, client: NetClient) -> tuple[Instance, set[tuple[str, str]]]:
    """A new group of both, deleted again, and the pairs of addresses between which its ranks had connections."""
    instance = client.wait_ready(client.create(group(H1, H2)))
    addresses = {host for bridge in (SLOW, FAST) for host in hosts(cluster.bed, bridge)}
    ends = [
        (one.local.partition(":")[0], one.remote.partition(":")[0])
        for one in cluster.bed.sockets(H1)
        if one.state == "ESTAB" and instance.ranks[0].pid in one.pids
    ]
    client.delete(instance.id)
    return instance, {pair for pair in ends if set(pair) <= addresses}


def muster(cluster: NetCluster, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "muster", *arguments, "--coordinator", cluster.address]
    process = cluster.bed.run("h0", *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def test_the_faster_link_is_chosen_and_the_other_when_it_is_cut(cluster: NetCluster, client: NetClient) -> None:
    bed = cluster.bed
    wait_links(client, lambda links: links.trials(H1, H2)[-1].mbps_out and not faulty(links), "both are measured")
    fast, slow = links_now(client).trials(H1, H2)
    assert (fast.link.a_host, fast.link.b_host) == hosts(bed, FAST)
    assert (slow.link.a_host, slow.link.b_host) == hosts(bed, SLOW)
    assert slow.mbps_out is not None
    assert slow.mbps_out * 1e6 < 2 * SLOW_BITS  # bursts are short, and the bucket is full

    instance, pairs = connected(cluster, client)
    assert pairs == {hosts(bed, FAST)}
    chosen = [rank.next for rank in instance.layout.ranks]
    assert [(one.own, one.host) for one in chosen if one is not None] == [hosts(bed, FAST), hosts(bed, FAST)[::-1]]
    assert [[one.host for one in rank.addresses] for rank in instance.ranks] == [[host] for host in hosts(bed, FAST)]

    bed.cut("h1", FAST)
    wait_links(client, lambda links: links.pairs(H1, H2)[0].a_host == bed.address(H1, SLOW), "the cut is seen")
    assert connected(cluster, client)[1] == {hosts(bed, SLOW)}

    bed.heal("h1", FAST)
    wait_links(client, lambda links: links.pairs(H1, H2)[0].a_host == bed.address(H1, FAST), "it is back")


def test_a_link_that_is_open_one_way_only_is_named_and_not_used(cluster: NetCluster, client: NetClient) -> None:
    """A firewall lets `h1` open nothing: what is open already goes on, so that only measuring again shows it."""
    bed = cluster.bed
    bed.bar("h1", FAST)
    done = muster(cluster, "links", "--measure", "--json")
    assert done.returncode == 0, done.stderr
    (pair,) = (one for one in json.loads(done.stdout)["links"] if (one["a"], one["b"]) == (H1, H2))
    assert (pair["link"]["a_host"], pair["link"]["b_host"]) == hosts(bed, SLOW)
    faults = [one["fault"] for one in pair["pairs"] if one["fault"]]
    assert len(faults) == 1
    own, host = hosts(bed, FAST)
    assert faults[0].startswith(f"h2 reaches h1 by {host} → {own}, but h1 does not reach h2 back")
    bed.heal("h1", FAST)
    wait_links(client, lambda links: not faulty(links), "it is open again")


def test_an_address_that_two_nodes_have_is_named(cluster: NetCluster, client: NetClient) -> None:
    bed = cluster.bed
    bed.add_address("h2", bed.address("h1", FAST), FAST)
    twice = (bed.address(H1, FAST), bed.address(H1, FAST))

    def named(links: LinkMap) -> bool:
        return f"both have the address {twice[0]}" in faulty(links).get(twice, "")

    wait_links(client, named, "the address of both is named")
    shown = muster(cluster, "links", "h1", "h2")
    assert shown.returncode == 0, shown.stderr
    assert f"nodes h1 and h2 both have the address {twice[0]}" in shown.stdout.decode()


def test_the_network_that_is_asked_for_is_used_whatever_its_rate(cluster: NetCluster, client: NetClient) -> None:
    del client
    done = muster(cluster, "links", "--network", cluster.bed.network(SLOW), "--json")
    (pair,) = json.loads(done.stdout)["links"]
    assert pair["link"]["a_host"] == cluster.bed.address(H1, SLOW)
