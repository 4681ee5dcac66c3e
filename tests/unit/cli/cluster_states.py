"""Small states of a cluster, as the command line shows them."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType

from muster.events import Envelope, Event, encode_event
from muster.spec import (
    COORDINATOR,
    Address,
    BootId,
    Failure,
    InstanceId,
    InstanceSpec,
    ModelWorkload,
    NodeId,
    NodeInfo,
    Phase,
    Workload,
)
from muster.state import (
    Instance,
    InstanceStatus,
    Node,
    Prepared,
    Rank,
    RankState,
    Running,
    State,
)

SECOND = 1_000_000_000
NOW = 1_700_000_000 * SECOND
ONE = InstanceId("one-1a2b3c")
BOOT = BootId("boot")
MODEL = ModelWorkload(model="/models/tiny")
FAILURE = Failure(
    kind="script-failed",
    message="the script ended with exit code 3",
    remedy="See its output: muster logs",
    phase=Phase.RUNNING,
    rank=1,
    node=NodeId("b"),
    exit_code=3,
    log_tail=("before", "ValueError: \x1b[31mbad"),
)


def rank(number: int, state: RankState | None = None) -> Rank:
    return Rank(
        rank=number,
        node=NodeId("ab"[number]),
        boot=BOOT,
        state=state or Prepared(),
        since_ns=NOW - 5 * SECOND,
        pid=100 + number,
        addresses=(Address("10.0.0.1", 5000 + number, "10.0.0.0/24"),),
        layers=(number * 2, number * 2 + 2),
        sharding="pipeline",
        weights_bytes=3 * 2**20,
    )


def instance(
    status: InstanceStatus | None = None, *states: RankState, workload: Workload = MODEL, name: str | None = None
) -> Instance:
    ranks = tuple(rank(number, state) for number, state in enumerate(states)) or (rank(0), rank(1))
    current = status or Running()
    failure = getattr(current, "failure", None)
    return Instance(
        id=ONE,
        spec=InstanceSpec(workload=workload, ranks=len(ranks), name=name, memory_bytes=2**30),
        created_ns=NOW - 90 * SECOND,
        attempt=1,
        backend="ring",
        status=current,
        since_ns=NOW - 10 * SECOND,
        ranks=ranks,
        created_by=4,
        caused_by=4,
        failures=() if failure is None else (failure,),
        failed_attempts=0 if failure is None else 1,
    )


def node(name: str, lost: str | None = None) -> Node:
    info = NodeInfo(
        node=NodeId(name),
        boot=BOOT,
        hostname=f"host-{name}",
        machine=name,
        pid=1,
        addresses=(),
        backends=("ring",),
        memory_bytes=8 * 2**30,
        max_ranks=32,
        versions={"mlx": "0.32.4"},
    )
    return Node(info=info, since_ns=NOW - 3600 * SECOND, lost=lost)


def state(*instances: Instance, nodes: tuple[Node, ...] = ()) -> State:
    return State(
        sequence=9,
        nodes={item.info.node: item for item in nodes},
        instances={item.id: item for item in instances},
    )


def envelope(event: Event) -> Envelope:
    return Envelope(sequence=12, time_ns=NOW, origin=COORDINATOR, cause=3, body=encode_event(event))


def text_of(renderable: RenderableType, width: int = 300) -> str:
    """What is seen on a terminal of so many columns."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
