"""A worker tells of its machine: the facts arrive, and follow what a test changes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import psutil
import pytest
from kit import Client, group
from kit.waiting import until

from muster.facts import NodeFacts
from muster.local import LocalCluster
from muster.protocol import Measure
from muster.spec import NodeId
from muster.worker.telling import TESTING_FACTS

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    directory = tmp_path_factory.mktemp("facts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TESTING_FACTS, str(directory / "{node}.json"))
        with LocalCluster(directory, ["a"], node_options=("--pool", "0")) as made:
            yield made


@pytest.fixture(scope="module")
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster.address) as made:
        yield made


def told(client: Client) -> NodeFacts | None:
    return next(iter(client.snapshot().facts), None)


def test_the_facts_of_a_node_arrive(cluster: LocalCluster, client: Client) -> None:
    facts = until(lambda: told(client), "the facts of a")
    worker = psutil.Process(cluster.members["a"].process.pid)
    info = client.latest.nodes[NodeId("a")].info
    assert (facts.node, facts.boot) == (info.node, info.boot)
    assert info.pid == worker.pid
    assert facts.memory_total_bytes == psutil.virtual_memory().total
    assert facts.versions == info.versions
    assert facts.backends == info.backends
    assert facts.memory_gbps is not None
    assert facts.memory_gbps > 0
    assert facts.device in ("cpu", "gpu")
    assert any(one.kind == "loopback" and one.up for one in facts.interfaces)
    assert [disk.path for disk in facts.disks] == [str(cluster.directory / "a")]
    assert [one.host for one in info.candidates] == ["127.0.0.1"]
    assert not info.addresses_given
    assert info.network_id


def test_what_changes_is_told_again_and_people_see_it(cluster: LocalCluster, client: Client) -> None:
    before = until(lambda: told(client), "the facts of a")
    (cluster.directory / "a.json").write_bytes(msgspec.json.encode({"chip": "Apple M9 Ultra"}))

    def changed() -> NodeFacts | None:
        found = told(client)
        return found if found is not None and found.chip == "Apple M9 Ultra" else None

    assert until(changed, "the other chip").n > before.n
    command = [sys.executable, "-m", "muster", "nodes", "a", "--coordinator", cluster.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert "Apple M9 Ultra" in done.stdout
    assert "loopback" in done.stdout


def test_the_memory_of_ranks_is_told_with_the_heartbeat(client: Client) -> None:
    instance = client.create(group(2, ("a",)))
    client.ready(instance)

    def used() -> int:
        return max((beat.ranks_memory_bytes for beat in client.snapshot().beats), default=0)

    assert until(used, "the memory of the ranks") > 10 * 2**20
    client.delete(instance)


def test_the_memory_is_measured_again_with_the_links(cluster: LocalCluster, client: Client) -> None:
    worker = psutil.Process(cluster.members["a"].process.pid)
    until(lambda: told(client), "the facts of a")
    client.call(Measure())

    def measures() -> bool:
        with contextlib.suppress(psutil.Error):
            return any("probe" in child.cmdline() for child in worker.children())
        return False

    until(measures, "a runner that measures")
