"""Rounds in which a node is cut off, or its worker killed."""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

import anyio
import psutil

from muster.bench.ground import Ground, below, node_of, send_signal
from muster.bench.leftovers import is_alive
from muster.bench.recovery_figures import (
    CUT_FAILED,
    CUT_PLACED,
    CUT_READY,
    RUNNERS_GONE,
    Findings,
    mistake,
)
from muster.bench.recovery_ranks import NODES, demo_spec, group_spec
from muster.bench.relay import Relay, has_address
from muster.events import AttemptStarted, InstanceFailed, InstanceReady

_SECONDS = 60.0
#: Between two looks for processes that are going.
_POLL_SECONDS = 0.002
#: Three nodes, so that one is free.
CUT_NODES = ("a", "b", "c")
#: Each worker reaches the coordinator by an address of its own, which can be cut.
_HOSTS = {"a": "127.0.0.2", "b": "127.0.0.3", "c": "127.0.0.4"}

Relays = Mapping[str, Relay]


@asynccontextmanager
async def cuttable(ground: Ground) -> AsyncGenerator[Relays]:
    """Start the workers, each behind a link that can be cut; without further loopback addresses there is no link.

    Raises:
        UnreachableError: a worker did not come up.
    """
    relays: dict[str, Relay] = {}
    if all(has_address(host) for host in _HOSTS.values()):
        relays = {node: Relay(host, ground.ports) for node, host in _HOSTS.items()}
    for relay in relays.values():
        await ground.tasks.start(relay.run)
    # The last --join counts.
    options = {
        node: ("--join", f"{relay.host}:{ground.ports[0]}", "--address", "127.0.0.1") for node, relay in relays.items()
    }
    await ground.start_workers(CUT_NODES, options)
    yield relays
    for relay in relays.values():
        relay.heal()


def how_cut(relays: Relays) -> str:
    """A sentence for the report: what the cut was."""
    if relays:
        return "A node is cut off by a relay between it and the coordinator that lets no byte pass either way."
    return (
        "A node is cut off by SIGSTOP of its worker and all its runners, for want of further loopback addresses: "
        "its kernel still answers, and nothing is sent."
    )


async def cut_node(ground: Ground, number: int, findings: Findings, relays: Relays) -> None:
    """Cut the node of one of two ranks off, each in turn, until the instance is ready on the others; then heal it.

    Raises:
        BenchError: something else did not come up.
    """
    observer = ground.observer
    await ground.forgive()
    await ground.settle()
    trial = await observer.bring_up(group_spec(nodes=()), deadline_seconds=_SECONDS)
    await ground.settle()
    instance = trial.instance
    rank = instance.ranks[number % 2]
    relay = relays.get(rank.node)
    pids = [ground.pid(rank.node), *(pid for pid, _ in below(ground.pid(rank.node)))]
    began = time.monotonic()
    if relay is not None:
        relay.cut()
    else:
        send_signal(pids, signal.SIGSTOP)
    try:
        failed = await observer.next_event(instance.id, (InstanceFailed,), deadline_seconds=_SECONDS)
        placed = await observer.next_event(instance.id, (AttemptStarted,), deadline_seconds=_SECONDS)
        ready = await observer.next_event(instance.id, (InstanceReady,), attempt=2, deadline_seconds=_SECONDS)
    finally:
        if relay is not None:
            relay.heal()
        send_signal(pids, signal.SIGCONT)
    assert isinstance(failed.event, InstanceFailed)
    assert isinstance(placed.event, AttemptStarted)
    wrong = mistake(failed.event.failure, kind="node-lost", node=rank.node)
    if any(one.node == rank.node for one in placed.event.assignments):
        wrong = wrong or f"it was placed on {rank.node} again, which is cut off"
    await ground.all_serve()
    if not await gone({(rank.pid, rank.process_started)}, _SECONDS):
        wrong = wrong or f"rank {rank.rank} of the lost attempt still runs on {rank.node} after it is back"
    if wrong:
        findings.complain((CUT_PLACED, CUT_FAILED, CUT_READY), number, wrong)
        return
    steps = {
        CUT_FAILED: failed.arrived_seconds - began,
        CUT_PLACED: placed.arrived_seconds - began,
        CUT_READY: ready.arrived_seconds - began,
    }
    findings.add("a node cut off", number, steps)


async def kill_worker(ground: Ground, number: int, findings: Findings) -> None:
    """SIGKILL a worker with a model, a group and warm runners, each in turn; then start it again.

    Raises:
        BenchError: something else did not come up.
    """
    observer = ground.observer
    await ground.forgive()
    await ground.settle()
    for spec in (demo_spec(), group_spec()):
        await observer.bring_up(spec, deadline_seconds=_SECONDS)
    await ground.settle()
    node = node_of(NODES, number)
    processes = below(ground.pid(node))
    began = time.monotonic()
    send_signal([ground.pid(node)], signal.SIGKILL)
    all_gone = await gone(processes, _SECONDS)
    seconds = time.monotonic() - began
    await ground.kill(node)
    await ground.start_workers([node])
    await ground.all_serve()
    if not all_gone:
        findings.complain((RUNNERS_GONE,), number, f"processes of {node} are left after {_SECONDS:g} s")
        return
    findings.add("a worker killed", number, {RUNNERS_GONE: seconds})


async def gone(processes: set[tuple[int, float]], seconds: float) -> bool:
    """Whether all of these processes have ended in time."""
    with anyio.move_on_after(seconds):
        while True:
            processes = {one for one in processes if _runs(*one)}
            if not processes:
                return True
            await anyio.sleep(_POLL_SECONDS)
    return False


def _runs(pid: int, started: float) -> bool:
    """`is_alive`, at the price of one system call for most of those that are gone."""
    return psutil.pid_exists(pid) and is_alive(pid, started)
