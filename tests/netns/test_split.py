"""Groups on a network of their own, apart from the coordinator's, so that either can fail without the other."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pytest
from bed import Bed
from net_cluster import LEASE_SECONDS, NetClient, NetCluster, group

from muster.spec import InstanceId, Phase
from muster.state import Connected, Listening, Rank

pytestmark = [pytest.mark.netns, pytest.mark.process, pytest.mark.mlx, pytest.mark.usefixtures("mended")]

_CONTROL, _GROUP = 0, 1
#: What a busy machine may add to any deadline.
_SLACK_SECONDS = 10.0
#: Connects to a port, and then does what its third argument says.
_STRANGER = """if True:
    import socket, struct, sys, time
    connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5)
    if sys.argv[3] == "stays":
        time.sleep(600)
    if sys.argv[3] == "resets":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetCluster]:
    directory = tmp_path_factory.mktemp("split")
    with Bed(hosts=4, bridges=2) as bed, NetCluster(bed, directory, links=(_GROUP,)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: NetCluster) -> Iterator[NetClient]:
    with cluster.client() as client:
        yield client


def listening(client: NetClient, instance: InstanceId, *numbers: int) -> tuple[Rank, ...]:
    """Wait until these ranks of an instance listen; all its ranks then."""

    def holds(ranks: tuple[Rank, ...]) -> bool:
        return all(isinstance(ranks[number].state, Listening | Connected) for number in numbers)

    state = client.wait_for(lambda state: holds(state.instances[instance].ranks), f"ranks {numbers} listen")
    return state.instances[instance].ranks


def test_a_host_cut_from_the_others_while_forming_is_named_when_the_deadline_passes(
    cluster: NetCluster, client: NetClient
) -> None:
    client.wait_linked("h1", "h2", "h3")
    cluster.bed.cut("h2", _GROUP)
    form_seconds = 1.5
    instance = client.create(group("h1", "h2", "h3", form_seconds=form_seconds))
    ranks = listening(client, instance, 0, 1)
    began = time.monotonic()
    failed, broken = client.wait_failed(instance)
    took_seconds = time.monotonic() - began
    cluster.bed.heal("h2", _GROUP)

    assert broken.failure.kind == "formation-timeout"
    assert broken.failure.phase is Phase.FORMING
    assert "node h2" in broken.failure.sentence()
    assert took_seconds < form_seconds + _SLACK_SECONDS
    cluster.wait_nothing_left(ranks)
    client.delete(failed.id)


def test_a_host_that_falls_silent_while_forming_is_lost_and_the_cause(cluster: NetCluster, client: NetClient) -> None:
    client.wait_linked("h1", "h2", "h3")
    cluster.bed.cut("h2", _GROUP)
    instance = client.create(group("h1", "h2", "h3", form_seconds=30))
    ranks = listening(client, instance, 0, 1)
    cluster.bed.cut("h2", _CONTROL)
    failed, broken = client.wait_failed(instance, LEASE_SECONDS + _SLACK_SECONDS)

    assert (broken.failure.kind, broken.failure.node, broken.failure.rank) == ("node-lost", "h2", 1)
    assert broken.failure.phase is Phase.FORMING
    cluster.wait_nothing_left((ranks[0], ranks[2]))

    for bridge in (_GROUP, _CONTROL):
        cluster.bed.heal("h2", bridge)
    client.wait_node("h2", lost=False)
    cluster.wait_nothing_left(ranks)
    client.delete(failed.id)
    client.wait_linked("h1", "h2", "h3")
    again = client.create(group("h1", "h2", "h3"))
    client.wait_ready(again)
    client.delete(again)


@pytest.mark.parametrize("manner", ["stays", "closes", "resets"])
def test_a_stranger_on_the_port_of_a_rank_that_waits_for_its_neighbour_is_named(
    cluster: NetCluster, client: NetClient, manner: str
) -> None:
    client.wait_linked("h1", "h2", "h3")
    cluster.bed.cut("h2", _GROUP)
    instance = client.create(group("h1", "h2", form_seconds=2))
    ranks = listening(client, instance, 0)
    (address,) = ranks[0].addresses
    stranger = cluster.bed.run("h3", sys.executable, "-c", _STRANGER, address.host, str(address.port), manner)
    failed, broken = client.wait_failed(instance)
    stranger.kill()
    cluster.wait_nothing_left(ranks)
    client.delete(failed.id)

    assert broken.failure.kind == "stranger-connected"
    assert (broken.failure.rank, broken.failure.node) == (0, "h1")
    # The kernel forgets the far end of a connection that was reset.
    stranger_named = "somebody who is gone" if manner == "resets" else f"{cluster.bed.address('h3', _GROUP)}:"
    assert stranger_named in broken.failure.message
