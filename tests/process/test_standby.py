"""A second coordinator: equal to the first, promoted by hand or by the witness, and the first one fenced."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from kit import COLD, FAST_CLOCKS, PATIENT_CLOCKS, Client, free_ports, group, stopped, until

from muster.events import InstanceCreated
from muster.local import LocalCluster
from muster.protocol import Create, Delete, Get, Hello, Promote, Query, Who
from muster.replies import Found, Refused, Role, Snapshot
from muster.spec import BootId, GroupWorkload, InstanceId, InstanceSpec, NodeAddress, NodeId, NodeInfo
from muster.state import State

pytestmark = [pytest.mark.process]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[LocalCluster]:
    """A coordinator and its standby, without workers; started by the test."""
    first = free_ports(6)
    with LocalCluster(
        tmp_path, (), port=first, http_port=None, coordinator_options=PATIENT_CLOCKS, node_options=COLD
    ) as cluster:
        cluster.start_standby(first + 3)
        yield cluster


def info(node: str, boot: str = "boot-1", replaces: BootId | None = None) -> NodeInfo:
    return NodeInfo(
        node=NodeId(node),
        boot=BootId(boot),
        hostname=node,
        machine=node,
        pid=1,
        addresses=(NodeAddress(host="127.0.0.1", network="127.0.0.0/8"),),
        backends=("ring",),
        memory_bytes=2**34,
        max_ranks=8,
        replaces=replaces,
    )


def spec(name: str) -> InstanceSpec:
    return InstanceSpec(workload=GroupWorkload(), ranks=2, name=name)


def create(client: Client, name: str) -> InstanceId:
    """An instance on a node that is nothing but its hello, which is as new as the instance."""
    before = msgspec.msgpack.decode(client.snapshot().state, type=State).nodes.get(NodeId("x"))
    hello = Hello(info=info("x", f"boot of {name}", None if before is None else before.info.boot))
    assert not isinstance(client.call(hello), Refused)
    return client.create(spec(name))


def role_of(client: Client) -> Role:
    reply = client.call(Who())
    assert isinstance(reply, Role), reply
    return reply


def events_of(client: Client) -> tuple[bytes, ...]:
    reply = client.call(Query())
    assert isinstance(reply, Found), reply
    return reply.envelopes


def equal(first: Client, second: Client) -> bool:
    return events_of(first) == events_of(second)


def promoted(client: Client, force: bool = False) -> Role:
    reply = client.call(Promote(force=force))
    assert isinstance(reply, Role), reply
    assert reply.role == "active"
    return reply


def refused(client: Client, request: Create | Hello | Promote | Delete) -> str:
    failure = client.refusal(request)
    assert failure.retryable
    assert failure.remedy
    return failure.kind


def test_a_standby_is_equal_and_serves_reads_and_hands_over(pair: LocalCluster) -> None:
    with Client(pair.address) as active, Client(pair.standby) as standby:
        created = create(active, "one")
        standby.wait(InstanceCreated, created)
        assert equal(active, standby)
        # Reads from the standby; the rest is refused with the address of the active one.
        snapshots = [client.call(Get()) for client in (active, standby)]
        states = [snapshot.state for snapshot in snapshots if isinstance(snapshot, Snapshot)]
        assert states[0] == states[1]
        role = role_of(standby)
        assert (role.role, role.term, role.follows) == ("standby", 1, pair.address)
        assert refused(standby, Create(spec=spec("two"))) == "standby"
        assert refused(standby, Hello(info=info("y"))) == "standby"
        assert pair.address.removeprefix("tcp://") in standby.refusal(Delete(instance=created)).remedy
        assert refused(standby, Promote()) == "standby", "the active one lives"
        # What happens while the standby is away, and a restart of the active one.
        pair.kill("standby")
        create(active, "three")
        pair.kill("coordinator")
        pair.start_coordinator()
        pair.start_standby()
        until(lambda: role_of(standby).head >= role_of(active).head > 0 or None, "a standby that has caught up")
        assert equal(active, standby)
        # Handing over while the active one lives: it is fenced first, so that nothing is lost.
        last = create(active, "four")
        assert promoted(standby, force=True).term == 2
        standby.wait_for(lambda: standby.latest.term == 2, "its own promotion")
        before = events_of(active)
        assert events_of(standby)[: len(before)] == before
        assert last in standby.latest.instances
        old = role_of(active)
        assert (old.role, old.term) == ("fenced", 1)
        assert "term 2" in old.reason
        for request in (Create(spec=spec("five")), Hello(), Hello(info=info("x"))):
            assert refused(active, request) == "fenced"
        assert events_of(active) == before
        create(standby, "five")
    assert "FENCED" in pair.log_of("coordinator")


@pytest.mark.mlx
def test_a_group_is_untouched_when_the_standby_is_promoted(pair: LocalCluster, tmp_path: Path) -> None:
    for node in ("a", "b"):
        pair.start_worker(node, wait=False)
    for node in ("a", "b"):
        pair.wait_ready(node)
    with Client(pair.address) as active, Client(f"{pair.address},{pair.standby}") as client:
        instance = active.create(group())
        before = active.ready(instance)
        pair.kill("coordinator")
        with Client(pair.standby) as standby:
            done = _muster("promote", "--coordinator", f"{pair.address},{pair.standby}")
            assert (done.returncode, done.stdout) == (0, ""), done.stderr
            assert f"{pair.standby} leads, with term 2" in done.stderr
            # The client and the workers find it by themselves.
            client.wait_for(lambda: client.latest.term == 2, "the new coordinator")
            again = standby.create(group())
            standby.ready(again)
            assert standby.instance(instance) == before
            assert all(psutil.pid_exists(rank.pid) for rank in before.ranks)
            # The old one, started again as it was, is fenced by the workers; as a standby it gives up what it logged.
            started = pair.start_coordinator()
            until(lambda: role_of(active).role == "fenced" or None, "the old coordinator fenced")
            pair.kill("coordinator")
            assert "must not lead: it was fenced" in _refused_to_start(pair)
            pair.start_coordinator(["--standby-of", pair.standby])
            until(lambda: (role_of(active).role == "standby" and equal(active, standby)) or None, "equal logs")
            standby.delete(again)
            standby.delete(instance)
            assert not any(psutil.pid_exists(rank.pid) for rank in before.ranks)
    assert started.log.read_text().count("is replaced by the active one's") == 1
    (kept,) = (tmp_path / "coordinator").glob("events.db.fenced-*")
    with contextlib.closing(sqlite3.connect(kept)) as log:
        kinds = [kind for (kind,) in log.execute("SELECT kind FROM events ORDER BY sequence")]
    assert kinds.count("coordinator.started") == 2


def _refused_to_start(pair: LocalCluster) -> str:
    """What a coordinator says that may not lead."""
    done = _muster("coordinator", "--port", "0", "--no-http", "--directory", str(pair.directory / "coordinator"))
    assert done.returncode == 1
    assert "--standby-of" in done.stderr
    return done.stderr


def _muster(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "muster", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_with_a_witness_the_standby_takes_over_by_itself(tmp_path: Path) -> None:
    first = free_ports(7)
    address, standby_address, witness = (f"127.0.0.1:{first + number}" for number in (0, 3, 6))
    options = [*FAST_CLOCKS, "--witness", witness]
    as_partner = ["--peer", standby_address, "--standby-of", standby_address]
    pair = LocalCluster(tmp_path, (), port=first, http_port=None, coordinator_options=options)
    with contextlib.ExitStack() as stack:
        stack.callback(pair.stop)
        command = ["witness", "--port", str(first + 6), "--lease", "1", "--directory", str(tmp_path / "witness")]
        voter = pair._start("witness", command)
        pair.start_coordinator(as_partner)
        pair.start_standby(first + 3)
        addresses = (address, standby_address, f"{address},{standby_address}")
        active, standby, both = (stack.enter_context(Client(one)) for one in addresses)
        created = create(active, "one")
        standby.wait(InstanceCreated, created)
        # Without its two partners it changes nothing, and with one of them it goes on.
        follower = psutil.Process(pair.members["standby"].process.pid)
        with stopped(psutil.Process(voter.process.pid)):
            with stopped(follower):
                until(lambda: role_of(active).role == "fenced" or None, "a coordinator without votes")
                assert refused(active, Create(spec=spec("two"))) == "no-quorum"
            until(lambda: role_of(active).role == "active" or None, "a coordinator with a vote")
            create(active, "three")
        pair.kill("coordinator")
        both.wait_for(lambda: both.latest.term == 2, "the standby's takeover")
        assert role_of(standby).role == "active"
        pair.start_coordinator(as_partner)
        until(lambda: (role_of(active).role == "standby" and equal(active, standby)) or None, "a standby again")
        # And back.
        pair.kill("standby")
        both.wait_for(lambda: both.latest.term == 3, "the takeover back")
        assert created in both.latest.instances
