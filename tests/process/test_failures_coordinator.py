"""A coordinator that is killed, stopped, or cannot write its log."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from kit import (
    COLD,
    DEMO_MODEL,
    FAST_CLOCKS,
    STATES,
    Client,
    Stage,
    alive,
    assert_blames,
    brought_to,
    group,
    model,
    script,
    stage,
    stopped,
    until,
)

from muster.events import CoordinatorStarted, InstanceCleared, InstanceFailed, NodeLost, RankPrepared, decode_envelope
from muster.local import LocalCluster
from muster.protocol import Create, Delete, Generate, Query
from muster.replies import Chunk, Created, Done, Found, Refused
from muster.sampling import Message
from muster.spec import Failure, InstanceId
from muster.state import Running

pytestmark = [pytest.mark.process, pytest.mark.mlx]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Stage]:
    """A cluster that soon takes a node for lost."""
    with stage(tmp_path / "cluster", coordinator_options=FAST_CLOCKS) as made:
        yield made


def answer(client: Client, instance: InstanceId) -> str:
    question = Generate(instance=instance, messages=(Message(role="user", content="What is an instance?"),))
    replies = client.stream(question)
    assert isinstance(replies[-1], Done), replies[-1]
    return "".join(reply.text for reply in replies if isinstance(reply, Chunk))


def start_again(own: Stage) -> None:
    """Start the coordinator, and wait until the client and both workers have heard of it."""
    boots = [event.boot for event in own.client.events if isinstance(event, CoordinatorStarted)]
    before = own.client.latest.coordinator_boot or boots[-1]
    own.cluster.start_coordinator()
    own.client.wait_for(lambda: own.client.latest.coordinator_boot != before, "the new coordinator")


def logged(own: Stage, kind: str) -> list[InstanceId]:
    """The instances with an event of this kind, whether or not the client was there when it was logged."""
    found = own.client.call(Query(kinds=(kind,)))
    assert isinstance(found, Found)
    events = [decode_envelope(envelope).event() for envelope in found.envelopes]
    return [event.instance for event in events if isinstance(event, InstanceCleared)]


@contextmanager
def asking(own: Stage, instance: InstanceId, errors: Path) -> Generator[tuple[subprocess.Popen[bytes], Path]]:
    """A `muster generate` that goes on after the body, unless that fails."""
    command = ["generate", instance, "What is an instance?", "--coordinator", own.cluster.address]
    with errors.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-m", "muster", *command], stdout=subprocess.PIPE, stderr=file)
    try:
        yield process, errors
    except BaseException:
        process.kill()
        process.communicate()
        raise


def running_requests(own: Stage) -> int:
    """How many requests the model has."""
    models = httpx.get(f"{own.cluster.http}/api/models").raise_for_status().json()["models"]
    return sum(one["running_requests"] for one in models)


# --- kill -9 ------------------------------------------------------------------------------------------------


def test_a_ready_model_and_a_request_without_a_token_survive_their_coordinator(own: Stage, tmp_path: Path) -> None:
    kept = own.client.create(model(DEMO_MODEL, sharding="pipeline"))
    dropped = own.client.create(group())
    own.client.ready(dropped)
    own.client.delete(dropped)
    before = own.client.ready(kept).ranks
    said = answer(own.client, kept)
    with stopped(own.runner(kept, 0)), asking(own, kept, tmp_path / "errors") as (asker, errors):
        until(lambda: running_requests(own), "the request")
        own.cluster.kill("coordinator")
        until(lambda: "waiting for it" in errors.read_text(), "a word about the coordinator")
    start_again(own)
    text, _ = asker.communicate(timeout=30)
    assert (asker.returncode, bool(text.strip())) == (0, True), errors.read_text()
    assert "was started again; asking again" in errors.read_text()
    assert set(own.client.latest.instances) == {kept}
    assert isinstance(own.client.instance(kept).status, Running)
    assert own.client.instance(kept).ranks == before
    assert answer(own.client, kept) == said
    again = own.client.create(group())
    own.client.ready(again)
    own.client.delete(again)
    own.clean(kept)


def test_a_half_made_instance_gets_ready_under_the_next_coordinator(own: Stage) -> None:
    instance = own.client.create(group())
    with stopped(own.new_runner("a")):
        own.client.wait(RankPrepared, instance, rank=1)
        own.cluster.kill("coordinator")
        start_again(own)
    own.client.wait_for(lambda: isinstance(own.client.instance(instance).status, Running), "a ready group")
    own.clean(instance)


def test_a_rank_that_dies_while_there_is_no_coordinator_is_told_to_the_next(own: Stage) -> None:
    instance = own.client.create(group())
    own.client.ready(instance)
    own.cluster.kill("coordinator")
    own.runner(instance, 1).kill()
    start_again(own)
    failure = own.client.failure_of(instance)
    assert_blames(failure, kind="rank-killed", rank=1, node="b", phase="running")
    own.clean(instance)


def test_a_deletion_that_was_under_way_is_finished_by_the_next_coordinator(own: Stage, tmp_path: Path) -> None:
    text = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)\n"
    instance = own.client.create(script(tmp_path, text, 1))
    own.client.ready(instance)
    assert not isinstance(own.client.call(Delete(instance=instance)), Refused)
    own.cluster.kill("coordinator")
    start_again(own)
    own.client.wait_for(lambda: instance not in own.client.latest.instances, "the end of the instance")
    own.assert_node_empty("a")


def test_a_coordinator_with_an_empty_log_adopts_what_is_ready_and_clears_the_rest(own: Stage) -> None:
    kept = own.client.create(group())
    ranks = own.client.ready(kept).ranks
    known = own.runners("a")
    half = own.client.create(group())
    with stopped(own.new_runner("a", known)):
        pid = own.client.wait(RankPrepared, half, rank=1).pid
        own.cluster.kill("coordinator")
        shutil.rmtree(own.cluster.directory / "coordinator")
        start_again(own)
        assert until(lambda: logged(own, "instance.cleared"), "the verdict") == [half]
    until(lambda: not alive(pid), "the end of the half-made instance")
    own.client.wait_for(lambda: kept in own.client.latest.instances, "the adoption")
    found = own.client.instance(kept)
    assert isinstance(found.status, Running)
    assert [(one.pid, one.addresses) for one in found.ranks] == [(one.pid, one.addresses) for one in ranks]
    assert half not in own.client.latest.instances
    own.runner(kept, 1).kill()
    assert_blames(own.client.failure_of(kept), kind="rank-killed", rank=1, node="b", phase="running")
    own.clean(kept)


def test_a_coordinator_that_stood_still_does_not_take_its_nodes_for_lost(own: Stage) -> None:
    instance = own.client.create(group())
    own.client.ready(instance)
    coordinator = psutil.Process(own.cluster.members["coordinator"].process.pid)
    with stopped(coordinator), pytest.raises(AssertionError, match="not within"):
        own.client.wait_event(NodeLost, lambda lost: True, 2.0)  # twice the lease
    again = own.client.create(group())
    own.client.ready(again)
    assert not any(isinstance(event, NodeLost | InstanceFailed) for event in own.client.events)
    own.client.delete(again)
    own.clean(instance)


# --- SIGTERM ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [state for state in STATES if state != "loading"])
def test_sigterm_of_the_coordinator_ends_it_and_nothing_else(own: Stage, tmp_path: Path, state: str) -> None:
    with brought_to(own, state, tmp_path) as instance:
        member = own.cluster.members["coordinator"]
        member.process.send_signal(signal.SIGTERM)
        assert member.process.wait(10.0) == 0
        assert "Traceback" not in own.cluster.log_of("coordinator")
        assert all(own.cluster.members[node].process.poll() is None for node in ("a", "b"))
        start_again(own)
        if instance is not None:
            own.client.call(Delete(instance=instance))
            own.client.wait_for(lambda: instance not in own.client.latest.instances, "the end of the instance")
            own.assert_nothing_left(instance)


def test_a_second_coordinator_on_one_directory_is_refused_at_once(own: Stage) -> None:
    command = ["coordinator", "--port", "0", "--directory", str(own.cluster.directory / "coordinator")]
    second = subprocess.run([sys.executable, "-m", "muster", *command], capture_output=True, text=True, timeout=20)
    assert second.returncode == 1
    assert "state directory of its own" in second.stderr


# --- a full disk --------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system of 2 MiB."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("needs root on Linux to mount a small file system")
    directory = tmp_path / "cluster" / "coordinator"
    directory.mkdir(parents=True, mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=0700", "tmpfs", str(directory)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("may not mount a file system here")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


@pytest.fixture
def cramped(small_disk: Path) -> Iterator[Stage]:
    cluster = LocalCluster(small_disk.parent, coordinator_options=FAST_CLOCKS, node_options=COLD)
    with cluster, Client(cluster.address) as client:
        yield Stage(cluster, client)


def fill(disk: Path) -> None:
    with (disk / "ballast").open("ab", buffering=0) as ballast:
        for size in (64 * 1024, 4096, 1):
            try:
                while ballast.write(b"\0" * size):
                    pass
            except OSError:
                continue


def first_refusal(client: Client) -> tuple[Failure, list[InstanceId]]:
    """Create until the log cannot take it, which is soon; and those that were accepted before."""
    accepted: list[InstanceId] = []
    while len(accepted) < 50:
        match client.call(Create(spec=group())):
            case Created(instance=instance):
                accepted.append(instance)
            case Refused(failure=failure):
                return failure, accepted
            case reply:
                raise AssertionError(reply)
    raise AssertionError("the disk is full, and yet 50 instances were accepted")


def test_a_full_disk_refuses_requests_and_loses_nothing(cramped: Stage, small_disk: Path) -> None:
    client = cramped.client
    instance = client.create(group())
    client.ready(instance)
    fill(small_disk)
    failure, accepted = first_refusal(client)
    assert failure.kind == "log-unavailable"
    assert failure.retryable
    assert "Make room" in failure.remedy
    until(lambda: "cannot be written" in cramped.cluster.log_of("coordinator"), "a line about the disk")

    # A node is lost meanwhile, which the coordinator wants to log and cannot: it must not spin over it.
    cramped.cluster.kill("b")
    with pytest.raises(AssertionError, match="not within"):
        client.wait_event(NodeLost, lambda lost: lost.node == "b", 2.0)
    coordinator = cramped.cluster.members["coordinator"].process
    assert coordinator.poll() is None
    share = cpu_share(coordinator.pid)
    assert share < 0.5

    (small_disk / "ballast").unlink()
    client.wait_event(NodeLost, lambda lost: lost.node == "b")
    assert client.wait(InstanceFailed, instance).failure.kind == "node-lost"
    cramped.cluster.start_worker("b")
    until(lambda: "can be written again" in cramped.cluster.log_of("coordinator"), "a line about the disk")
    for one in [instance, *accepted]:
        client.delete(one)
    again = client.create(group())
    client.ready(again)
    cramped.clean(again)
    found = client.call(Query(after=client.envelopes[0].sequence - 1, limit=10_000))
    assert isinstance(found, Found)
    logged = [decode_envelope(envelope) for envelope in found.envelopes]
    assert client.envelopes == logged[: len(client.envelopes)]


def cpu_share(pid: int) -> float:
    """How much of one core a process uses, over one second."""
    return psutil.Process(pid).cpu_percent(interval=1.0) / 100
