"""A real cluster on this machine with a client, and what must not be left of an instance."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil

from kit.client import Client
from kit.processes import alive, free_ports, is_runner
from kit.waiting import until
from muster.bench.leftovers import port_left
from muster.events import InstanceCreated, InstanceDeleted, RankPrepared
from muster.local import LocalCluster
from muster.spec import InstanceId

#: Short clocks, for tests that wait for a node to be lost.
FAST_CLOCKS = ("--heartbeat", "0.2", "--lease", "1.0")
#: For all others: a machine that stands still for a second has lost nobody.
PATIENT_CLOCKS = ("--heartbeat", "0.2", "--lease", "5.0")
#: No warm runners: a light cold one starts in 0.3 s, and nothing else runs beside the test.
COLD = ("--pool", "0")
#: How long a stranger may have a rank's port: the system gives it to anybody who asks for none in particular.
LEFT_SECONDS = 5.0


class Stage:
    """A local cluster and a client of it."""

    def __init__(self, cluster: LocalCluster, client: Client) -> None:
        self.cluster = cluster
        self.client = client

    def worker(self, node: str) -> psutil.Process:
        """The worker's process."""
        return psutil.Process(self.cluster.members[node].process.pid)

    def runners(self, node: str) -> list[psutil.Process]:
        """The runner processes of a node's worker, the oldest first."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return sorted(filter(is_runner, self.worker(node).children()), key=lambda process: process.create_time())
        return []

    def new_runner(self, node: str, known: list[psutil.Process] | None = None) -> psutil.Process:
        """The next runner that a node's worker starts, as soon as it is there."""
        before = known or []
        return until(
            lambda: next((one for one in self.runners(node) if one not in before), None), f"a new runner on {node}"
        )

    def runner(self, instance: InstanceId, rank: int) -> psutil.Process:
        """The process of a rank that has been prepared."""
        prepared = self.client.wait(RankPrepared, instance, rank=rank)
        return psutil.Process(prepared.pid)

    def clean(self, instance: InstanceId) -> None:
        """Delete an instance, and see that nothing of it is left."""
        self.client.delete(instance)
        self.assert_nothing_left(instance)

    def assert_nothing_left(self, *instances: InstanceId) -> None:
        """No process, port, coordination file or record of these instances; call it when they are deleted."""
        events = list(self.client.events)
        ranks = [event for event in events if isinstance(event, RankPrepared) and event.instance in instances]
        pids = {rank.pid for rank in ranks}
        for rank in ranks:
            assert not alive(rank.pid, rank.process_started), f"runner {rank.pid} of {rank.instance} is left"
            for address in rank.addresses:
                what = f"{address} of {rank.instance} to be free"
                until(lambda address=address: port_left(address, pids) is None, what, LEFT_SECONDS)
        for instance in instances:
            assert instance not in self.client.latest.instances
        created = {event.instance for event in self.client.events if isinstance(event, InstanceCreated)}
        gone = {event.instance for event in self.client.events if isinstance(event, InstanceDeleted)}
        if created <= gone:
            for node in self.cluster.nodes:
                self.assert_node_empty(node)

    def assert_node_empty(self, node: str) -> None:
        """No runner, coordination file or record on a node that keeps no warm runners."""
        directory = self.cluster.directory / node
        assert self.runners(node) == []
        assert list((directory / "groups").glob("*")) == []
        assert list((directory / "runners").glob("*")) == []


@contextlib.contextmanager
def stage(directory: Path, nodes: tuple[str, ...] = ("a", "b"), **options: Any) -> Generator[Stage]:
    """A cluster without warm runners, unless the options say otherwise.

    Its coordinator has the same ports each time it is started.
    """
    first = options.pop("port", None) or free_ports(4)
    settings: dict[str, Any] = {"coordinator_options": PATIENT_CLOCKS, "node_options": COLD, **options}
    settings.setdefault("http_port", first + 3)
    with LocalCluster(directory, nodes, port=first, **settings) as cluster, Client(cluster.address) as client:
        yield Stage(cluster, client)
