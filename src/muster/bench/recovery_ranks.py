"""Rounds in which one rank is killed or stopped."""

from __future__ import annotations

import os
import signal
import time

from muster.bench.ground import DEMO_MODEL, Ground, send_signal
from muster.bench.observer import BenchError, Seen
from muster.bench.recovery_figures import (
    GROUP_FAILED,
    GROUP_READY,
    KILLED_FAILED,
    KILLED_READY,
    MODEL_READY,
    STOPPED_FAILED,
    Findings,
    mistake,
)
from muster.events import InstanceFailed, InstanceReady
from muster.spec import Deadlines, GroupWorkload, InstanceSpec, ModelWorkload, NodeId, RestartOnFailure
from muster.state import Instance, Rank

_SECONDS = 60.0
NODES = (NodeId("a"), NodeId("b"))


def demo_spec(*, nodes: tuple[NodeId, ...] = NODES, deadlines: Deadlines | None = None) -> InstanceSpec:
    """The demo model on two ranks, brought up again after a failure as by default."""
    return InstanceSpec(
        workload=ModelWorkload(model=str(DEMO_MODEL), served_name="demo"),
        ranks=2,
        nodes=nodes,
        restart=RestartOnFailure(),
        deadlines=deadlines or Deadlines(),
    )


def group_spec(*, nodes: tuple[NodeId, ...] = NODES) -> InstanceSpec:
    """A bare group of two ranks, brought up again after a failure as by default."""
    return InstanceSpec(workload=GroupWorkload(), ranks=2, nodes=nodes, restart=RestartOnFailure())


async def kill_rank_decoding(ground: Ground, number: int, findings: Findings) -> None:
    """SIGKILL a rank of the demo model that answers, each in turn, until the next attempt is ready.

    Raises:
        BenchError: something else did not come up.
    """
    instance = await _bring_up(ground, demo_spec())
    decoding = await ground.decode(instance.id)
    rank = instance.ranks[number % 2]
    began = time.monotonic()
    os.kill(rank.pid, signal.SIGKILL)
    failed, ready = await _failed_and_ready(ground, instance)
    wrong = _wrong(failed, "rank-killed", rank)
    outcome = await decoding.end()
    if outcome in ("answer", "silence"):
        wrong = wrong or f"the request that was under way ended with: {outcome}"
    if wrong:
        findings.complain((KILLED_FAILED, KILLED_READY, MODEL_READY), number, wrong)
        return
    steps = {
        KILLED_FAILED: failed.arrived_seconds - began,
        MODEL_READY: ready.arrived_seconds - failed.arrived_seconds,
        KILLED_READY: ready.arrived_seconds - began,
    }
    findings.add("a rank of the demo model killed", number, steps)


async def kill_rank_of_group(ground: Ground, number: int, findings: Findings) -> None:
    """SIGKILL a rank of a bare group, each in turn, until the next attempt is ready.

    Raises:
        BenchError: something else did not come up.
    """
    instance = await _bring_up(ground, group_spec())
    rank = instance.ranks[number % 2]
    began = time.monotonic()
    os.kill(rank.pid, signal.SIGKILL)
    failed, ready = await _failed_and_ready(ground, instance)
    wrong = _wrong(failed, "rank-killed", rank)
    if wrong:
        findings.complain((GROUP_FAILED, GROUP_READY), number, wrong)
        return
    steps = {
        GROUP_FAILED: failed.arrived_seconds - began,
        GROUP_READY: ready.arrived_seconds - failed.arrived_seconds,
    }
    findings.add("a rank of a bare group killed", number, steps)


async def stop_rank_decoding(ground: Ground, number: int, findings: Findings, step_seconds: float) -> None:
    """SIGSTOP a rank of the demo model that answers, each in turn.

    Raises:
        BenchError: something else did not come up.
    """
    instance = await _bring_up(ground, demo_spec(deadlines=Deadlines(step_seconds=step_seconds)))
    decoding = await ground.decode(instance.id)
    rank = instance.ranks[number % 2]
    began = time.monotonic()
    os.kill(rank.pid, signal.SIGSTOP)
    try:
        failed = await ground.observer.next_event(instance.id, (InstanceFailed,), deadline_seconds=_SECONDS)
    finally:
        send_signal([rank.pid], signal.SIGCONT)
    wrong = _wrong(failed, "step-timeout", rank, saying="stopped")
    outcome = await decoding.end()
    if outcome in ("answer", "silence"):
        wrong = wrong or f"the request that was under way ended with: {outcome}"
    if wrong:
        findings.complain((STOPPED_FAILED,), number, wrong)
        return
    findings.add("a rank of the demo model stopped", number, {STOPPED_FAILED: failed.arrived_seconds - began})


async def _bring_up(ground: Ground, spec: InstanceSpec) -> Instance:
    await ground.forgive()
    await ground.settle()
    trial = await ground.observer.bring_up(spec, deadline_seconds=_SECONDS)
    # The pools fill up again: a failure does not find them empty.
    await ground.settle()
    return trial.instance


async def _failed_and_ready(ground: Ground, instance: Instance) -> tuple[Seen, Seen]:
    failed = await ground.observer.next_event(
        instance.id, (InstanceFailed,), attempt=instance.attempt, deadline_seconds=_SECONDS
    )
    ready = await ground.observer.next_event(
        instance.id, (InstanceReady,), attempt=instance.attempt + 1, deadline_seconds=_SECONDS
    )
    return failed, ready


def _wrong(failed: Seen, kind: str, rank: Rank, saying: str = "") -> str:
    if not isinstance(failed.event, InstanceFailed):
        raise BenchError(f"{type(failed.event).__name__} came instead of InstanceFailed")
    return mistake(failed.event.failure, kind=kind, rank=rank.rank, node=rank.node, saying=saying)
