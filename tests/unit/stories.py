"""Logged events of one instance, told in a few words, for the tests of state and trace."""

from __future__ import annotations

from typing import Literal

from muster.events import (
    Envelope,
    Event,
    InstanceCreated,
    RankConnected,
    RankFailed,
    RankGone,
    RankListening,
    RankLoaded,
    RankPrepared,
    RankReady,
    ReportId,
    encode_event,
)
from muster.spec import (
    COORDINATOR,
    Assignment,
    BootId,
    Failure,
    GroupWorkload,
    InstanceId,
    InstanceSpec,
    ModelWorkload,
    NodeId,
    NodeInfo,
    Phase,
    Workload,
)

MS = 1_000_000
ONE = InstanceId("one")
BOOT = BootId("boot")
NAMES = (NodeId("a"), NodeId("b"), NodeId("c"))
MODEL = ModelWorkload(model="some/model")
GROUP = GroupWorkload()

Step = Literal["prepared", "listening", "connected", "loaded", "ready", "failed", "gone"]


def info(node: NodeId = NAMES[0], boot: BootId = BOOT) -> NodeInfo:
    return NodeInfo(
        node=node,
        boot=boot,
        hostname="host",
        machine="m",
        pid=1,
        addresses=(),
        backends=("ring",),
        memory_bytes=1,
        max_ranks=8,
    )


def assignments(ranks: int, boot: BootId = BOOT) -> tuple[Assignment, ...]:
    return tuple(Assignment(rank=rank, node=NAMES[rank], boot=boot) for rank in range(ranks))


def created(ranks: int = 2, workload: Workload = GROUP, instance: InstanceId = ONE) -> InstanceCreated:
    spec = InstanceSpec(workload=workload, ranks=ranks)
    return InstanceCreated(instance=instance, attempt=1, spec=spec, assignments=assignments(ranks), backend="ring")


def failure(rank: int = 0, kind: str = "formation-failed", phase: Phase = Phase.FORMING) -> Failure:
    return Failure(kind=kind, message="the ring broke", remedy="Mend it.", phase=phase, rank=rank, node=NAMES[rank])


def rank_event(step: Step, rank: int, *, attempt: int = 1, boot: BootId = BOOT, instance: InstanceId = ONE) -> Event:
    node = NAMES[rank]
    match step:
        case "prepared":
            return RankPrepared(
                instance=instance, attempt=attempt, rank=rank, node=node, boot=boot, pid=7, process_started=1.5
            )
        case "listening":
            return RankListening(instance=instance, attempt=attempt, rank=rank, node=node, boot=boot)
        case "connected":
            return RankConnected(instance=instance, attempt=attempt, rank=rank, node=node, boot=boot, seconds=0.01)
        case "loaded":
            return RankLoaded(instance=instance, attempt=attempt, rank=rank, node=node, boot=boot, layers=(0, 2))
        case "ready":
            return RankReady(instance=instance, attempt=attempt, rank=rank, node=node, boot=boot)
        case "failed":
            return RankFailed(
                instance=instance, attempt=attempt, rank=rank, node=node, boot=boot, failure=failure(rank)
            )
        case "gone":
            return RankGone(instance=instance, attempt=attempt, rank=rank, node=node, boot=boot, exit_code=-9)


def envelope(sequence: int, event: Event, *, time_ns: int = 0, report: ReportId | None = None) -> Envelope:
    return Envelope(
        sequence=sequence, time_ns=time_ns, origin=COORDINATOR, cause=0, body=encode_event(event), report=report
    )


def logged(*events: tuple[float, Event]) -> list[Envelope]:
    """Envelopes in sequence from (milliseconds, event)."""
    return [
        envelope(sequence, event, time_ns=round(milliseconds * MS))
        for sequence, (milliseconds, event) in enumerate(events, start=1)
    ]
