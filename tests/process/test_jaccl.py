"""JACCL from facts to tokens with real processes: all of it is real but RDMA itself (`muster.testing.jaccl`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kit import Stage, assert_blames, group, spec_of, stage, stopped
from kit.specs import DEMO_MODEL
from kit.waiting import until
from kit.wishes import QUESTION

from muster.events import InstanceReady, RankListening, RankPrepared
from muster.group.hostfile import parse, write
from muster.group.hosts import hostfile_of, resolve
from muster.layout import Devices
from muster.replies import Chunk
from muster.spec import Deadlines, GroupWorkload, InstanceId, InstanceSpec, ModelWorkload, SideChannel
from muster.testing.jaccl import Fault, StandIn

pytestmark = [pytest.mark.process, pytest.mark.mlx]

NODES = ("a", "b", "c")
MODEL = ModelWorkload(model=str(DEMO_MODEL), sharding="pipeline")
#: To the question of `kit.wishes`, byte for byte.
ANSWER = "One workload over all its ranks, such as a served model or a script."
#: Two cables between a and b, one from each of them to c.
CABLES = (("a", "en2", "b", "en2"), ("a", "en3", "b", "en3"), ("a", "en4", "c", "en2"), ("b", "en4", "c", "en3"))
MESH: Devices = ((None, "rdma_en2", "rdma_en4"), ("rdma_en2", None, "rdma_en4"), ("rdma_en2", "rdma_en3", None))
RING: Devices = ((None, ("rdma_en2", "rdma_en3")), (("rdma_en2", "rdma_en3"), None))
NAMES = ("rdma_en2", "rdma_en3", "rdma_en4")


class Lab:
    """A cluster whose nodes have RDMA devices that do what a test wants."""

    def __init__(self, made: Stage, file: Path) -> None:
        self.stage = made
        self.client = made.client
        self._file = file

    def fail(self, *faults: Fault) -> None:
        self._file.write_bytes(msgspec.json.encode(StandIn(devices=NAMES, faults=faults)))


def facts(node: str) -> dict[str, Any]:
    """What `MUSTER_TESTING_FACTS` puts in the place of what the worker found out."""
    ends = [(one, far) for a, x, b, y in CABLES for one, far in (((a, x), (b, y)), ((b, y), (a, x)))]
    peers = {interface: f"{far[0]}-{far[1]}" for (name, interface), far in ends if name == node}
    ports = [
        {
            "port": interface,
            "domain": f"{node}-{interface}",
            "peer_domain": peer,
            "generation": 5,
            "interface": interface,
        }
        for interface, peer in sorted(peers.items())
    ]
    devices = [
        {"name": f"rdma_{interface}", "interface": interface, "active": True, "ipv4_gid": True} for interface in peers
    ]
    return {"thunderbolt": ports, "rdma": {"enabled": True, "devices": devices}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    directory = tmp_path_factory.mktemp("jaccl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUSTER_TESTING_JACCL", str(directory / "stand-in.json"))
        (directory / "stand-in.json").write_bytes(msgspec.json.encode(StandIn(devices=NAMES)))
        patch.setenv("MUSTER_TESTING_FACTS", str(directory / "facts-{node}.json"))
        for node in NODES:
            (directory / f"facts-{node}.json").write_bytes(msgspec.json.encode(facts(node)))
        with stage(directory, NODES) as own:
            until(lambda: sum(bool(one.rdma.devices) for one in own.client.snapshot().facts) == len(NODES), "all facts")
            yield Lab(own, directory / "stand-in.json")


@pytest.fixture
def lab(made: Lab) -> Lab:
    made.fail()
    return made


def wish(spec: InstanceSpec, devices: Devices, side: SideChannel = "tcp") -> InstanceSpec:
    backend = "jaccl-ring" if devices is RING else "jaccl"
    return msgspec.structs.replace(spec, backend=backend, devices=devices, side_channel=side)


def answer(lab: Lab, instance: InstanceId) -> str:
    replies = lab.client.stream(msgspec.structs.replace(QUESTION, instance=instance))
    return "".join(reply.text for reply in replies if isinstance(reply, Chunk))


def test_cables_become_a_mesh_without_a_word_from_anybody(lab: Lab) -> None:
    instance = lab.client.create(group(3, NODES))
    found = lab.client.ready(instance)
    assert found.backend == "jaccl"
    assert found.layout.devices == MESH
    lab.stage.clean(instance)


def test_a_jaccl_ring_takes_all_cables_and_gives_tokens(lab: Lab) -> None:
    spec = msgspec.structs.replace(spec_of(MODEL, 2, NODES[:2]), backend="jaccl-ring")
    instance = lab.client.create(spec)
    found = lab.client.ready(instance)
    assert (found.backend, found.layout.jaccl_ring, found.layout.devices) == ("jaccl", True, RING)
    assert answer(lab, instance) == ANSWER
    lab.stage.clean(instance)


def test_a_second_group_takes_the_second_cable_and_a_third_one_none(lab: Lab) -> None:
    instances = [lab.client.create(group(2, NODES[:2])) for _ in range(3)]
    found = [lab.client.ready(instance) for instance in instances]
    assert [one.layout.devices[0][1] if one.layout.devices else "" for one in found] == ["rdma_en2", "rdma_en3", ""]
    assert found[2].backend == "ring"
    assert "taken by other instances" in found[2].layout.steps_down[0]
    for instance in instances:
        lab.stage.clean(instance)


@pytest.mark.parametrize("side", ["tcp", "bus"])
def test_a_mesh_of_three_forms_over_either_side_channel(lab: Lab, side: SideChannel) -> None:
    spec = wish(group(3, NODES), MESH, side)
    instance = lab.client.create(spec)
    ready = lab.client.wait(InstanceReady, instance)
    assert lab.client.latest.instances[ready.instance].backend == "jaccl"
    prepared = {rank: lab.client.wait(RankPrepared, instance, rank=rank) for rank in range(3)}
    reserved = {rank: len(event.addresses) for rank, event in prepared.items()}
    assert reserved == ({0: 1, 1: 0, 2: 0} if side == "tcp" else {0: 0, 1: 0, 2: 0})
    listening = [
        event for event in lab.client.events if isinstance(event, RankListening) and event.instance == instance
    ]
    assert [event.rank for event in listening] == ([0] if side == "tcp" else [])
    lab.stage.clean(instance)


@pytest.mark.parametrize(
    ("ranks", "devices", "side"),
    [(3, MESH, "bus"), (2, RING, "tcp")],
    ids=["mesh over bus", "ring of two wires over tcp"],
)
def test_tokens(lab: Lab, ranks: int, devices: Devices, side: SideChannel) -> None:
    instance = lab.client.create(wish(spec_of(MODEL, ranks, NODES[:ranks]), devices, side))
    lab.client.ready(instance)
    assert answer(lab, instance) == ANSWER
    lab.stage.clean(instance)


def test_a_hostfile_written_of_it_brings_the_same_group_up(lab: Lab) -> None:
    instance = lab.client.create(wish(group(2), RING))
    first = lab.client.ready(instance)
    nodes = [node.info for node in lab.client.latest.nodes.values()]
    text = write(hostfile_of(first, nodes))
    lab.stage.clean(instance)
    facts = {one.node: one for one in lab.client.snapshot().facts}
    spec = resolve(parse(text), nodes, facts).upon(InstanceSpec(workload=GroupWorkload(), ranks=2))
    again = lab.client.create(spec)
    second = lab.client.ready(again)
    assert (second.backend, second.layout.devices) == ("jaccl", RING)
    assert second.layout.jaccl_ring
    lab.stage.clean(again)


def test_a_rank_that_never_comes_is_named_by_the_bus(lab: Lab) -> None:
    lab.fail(Fault(step="absent", ranks=(1,)))
    spec = msgspec.structs.replace(wish(group(3, NODES), MESH, "bus"), deadlines=Deadlines(form_seconds=1.5))
    instance = lab.client.create(spec)
    failure = lab.client.failure_of(instance)
    # The others name it when the exchange is over, and its own worker a moment later, for which they wait.
    assert failure.rank == 1 or "rank 1 on node b" in failure.message, failure.sentence()
    assert re.search("did not send connection data in time|never sent its connection data", failure.message)
    lab.stage.clean(instance)


def test_an_errno_becomes_a_cause_and_a_remedy(lab: Lab) -> None:
    lab.fail(Fault(step="RTR", errno=22, ranks=(1,)))
    instance = lab.client.create(wish(group(2), RING))
    failure = lab.client.failure_of(instance)
    assert_blames(failure, kind="formation-failed", rank=1, node="b", phase="forming")
    assert "the Thunderbolt bridge is active or the port has no IPv4 address" in failure.message
    assert "Remove the interface from the Thunderbolt bridge" in failure.remedy
    lab.stage.clean(instance)


def test_what_only_a_reboot_mends_is_not_tried_again(lab: Lab) -> None:
    lab.fail(Fault(step="queue-pair"))
    instance = lab.client.create(wish(group(2), RING))
    failure = lab.client.failure_of(instance)
    assert failure.kind == "rdma-unusable"
    assert not failure.retryable
    assert "no queue pair left" in failure.message
    lab.stage.clean(instance)


def test_ranks_that_hang_inside_rdma_are_given_up_at_the_deadline(lab: Lab) -> None:
    """JACCL itself would wait for ever, without a word."""
    lab.fail(Fault(step="RTR", hang=True, ranks=(1,)))
    spec = msgspec.structs.replace(wish(group(2), RING), deadlines=Deadlines(form_seconds=1.0, stop_seconds=0.3))
    instance = lab.client.create(spec)
    failure = lab.client.failure_of(instance)
    assert failure.kind == "formation-timeout"
    assert "or for RDMA to connect them" in failure.message
    lab.stage.clean(instance)


def test_a_crash_inside_the_driver_says_so(lab: Lab) -> None:
    lab.fail(Fault(step="crash", ranks=(1,)))
    instance = lab.client.create(wish(group(2), RING))
    failure = lab.client.failure_of(instance)
    assert_blames(failure, kind="rank-killed", rank=1, node="b", phase="forming")
    assert "SIGSEGV: a crash inside JACCL" in failure.message
    lab.stage.clean(instance)


def test_an_exchange_survives_the_coordinator(lab: Lab) -> None:
    """Rank 0 waits in the exchange, rank 1 stands still; what rank 0 had sent is lost with the coordinator."""
    instance = lab.client.create(wish(group(2), RING, "bus"))
    with stopped(lab.stage.runner(instance, 1)):
        lab.stage.cluster.kill("coordinator")
        lab.stage.cluster.start_coordinator()
    lab.client.ready(instance)
    lab.stage.clean(instance)
