"""What passes between a rank and the rest: generation, steps, and the frames between worker and runner.

Tagged Structs in msgpack, with the evolution rules of `muster.events`.
"""

from __future__ import annotations

import msgspec

from muster.facts import Device
from muster.layout import Layout
from muster.protocol import Generate
from muster.replies import AnyPiece
from muster.spec import (
    Failure,
    InstanceId,
    Phase,
    SideChannel,
    Workload,
)

# --- generation socket: rank-0 runner ↔ coordinator ---------------------------------------------------------


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A reply of the runner to the request `request`."""

    request: int
    reply: AnyPiece


#: One message of the runner: everything that one step brought, for all requests.
Pieces = tuple[Piece, ...]


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag="ask"):
    """A request for rank 0, numbered by the coordinator."""

    request: int
    generate: Generate


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Nobody waits for the request any more."""

    request: int


ToRunner = Ask | Cancel


# --- steps socket: rank 0 → the other ranks -----------------------------------------------------------------


class JoinSteps(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """A rank tells rank 0 that it listens to the steps of this attempt."""

    instance: InstanceId
    attempt: int
    rank: int


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence that enters the batch with the prompt `tokens`.

    `cached_tokens` of them come from this rank's prompt cache, which must agree. `segments` are the lengths that
    the rest of the prompt is cut into: at the end of each but the last, the cache is kept for later requests.
    """

    sequence: int
    tokens: tuple[int, ...]
    max_tokens: int
    cached_tokens: int = 0
    segments: tuple[int, ...] = ()


class Step(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """First `remove`, then `admit`, then so many forward `passes` over whatever is in the batch.

    `cache_entries` limits the prompt cache before the pass, where rank 0 says so: it alone counts bytes, and all
    ranks forget the same prompts.
    """

    step: int
    remove: tuple[int, ...] = ()
    admit: tuple[Admission, ...] = ()
    cache_entries: int | None = None
    passes: int = 1


class WarmUp(msgspec.Struct, frozen=True, kw_only=True, tag="warm-up"):
    """Every rank has loaded: run a few tokens, so that the first request finds compiled kernels."""

    step: int


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag="leave"):
    """Rank 0 has finished what was under way and ends; so do the others."""

    step: int


AnyStep = Step | WarmUp | Leave


# --- runner frames: worker → runner -------------------------------------------------------------------------


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag="prepare"):
    """Take this rank: look at the workload, bind what must be bound on `host`, and answer `PreparedFrame`.

    `generation` is the coordinator's generation endpoint ("tcp://host:port"), for rank 0 of a model.
    `shared_seconds` is the deadline of the C-level watchdog around formation.
    """

    instance: InstanceId
    attempt: int
    rank: int
    world_size: int
    workload: Workload
    host: str
    directory: str
    generation: str
    shared_seconds: float
    layout: Layout = Layout()
    side_channel: SideChannel = "tcp"
    environment: dict[str, str] = {}
    models_directory: str = ""  #: where files that are copied from other nodes go; empty: the hub's cache alone
    offline: bool = False  #: whether the hub must not be asked


class Form(msgspec.Struct, frozen=True, kw_only=True, tag="form"):
    """Form the group with this payload (msgpack of `muster.group.payload.Payload`; `None` for one rank alone),
    verify it, then load, warm up, and serve. `steps` is rank 0's steps address."""

    payload: bytes | None = None
    steps: str | None = None


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """End politely: take nothing new, and finish what is under way within `drain_seconds`."""

    drain_seconds: float = 0.0


class Redial(msgspec.Struct, frozen=True, kw_only=True, tag="redial"):
    """Another coordinator has taken over: take requests from its generation endpoint. For rank 0 of a model."""

    generation: str


class GatheredFrame(msgspec.Struct, frozen=True, kw_only=True, tag="gathered"):
    """The parts of all ranks in answer to a `GatherFrame`; empty, with the reason, where some did not come."""

    parts: tuple[bytes, ...] = ()
    failure: Failure | None = None


ToRank = Prepare | Form | Stop | Redial | GatheredFrame


# --- runner frames: runner → worker -------------------------------------------------------------------------


class WarmFrame(msgspec.Struct, frozen=True, kw_only=True, tag="warm"):
    """The runner is up; what it imported is in memory."""

    seconds: float
    memory_bytes: int
    backends: tuple[str, ...]
    versions: dict[str, str]
    memory_gbps: float | None = None  #: see `muster.facts.NodeFacts`; only of the runner that is asked to measure
    device: Device = ""  #: the same


class PreparedFrame(msgspec.Struct, frozen=True, kw_only=True, tag="prepared"):
    """The workload was looked at and can be run here."""

    steps: str | None = None


class FetchedFrame(msgspec.Struct, frozen=True, kw_only=True, tag="fetched"):
    """The runner brought files of the model to this node; see `muster.events.RankFetched`."""

    source: str
    files: int
    bytes: int
    seconds: float


class GatherFrame(msgspec.Struct, frozen=True, kw_only=True, tag="gather"):
    """This rank's part of an exchange over the bus; the worker answers `GatheredFrame`."""

    round: int
    data: bytes


class ConnectedFrame(msgspec.Struct, frozen=True, kw_only=True, tag="connected"):
    """The group is formed and verified."""

    seconds: float


class ProgressFrame(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """Something moved: resets the phase's clock where it counts from the last progress.

    `rate` is in units per second, 0 where it says nothing; `note` is what moves, for people.
    """

    phase: Phase
    done: int
    total: int
    unit: str
    rate: float = 0.0
    note: str = ""


class LoadedFrame(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    """The shard is in memory."""

    layers: tuple[int, int] | None
    sharding: str
    weights_bytes: int
    seconds: float


class ReadyFrame(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Warm, or, for a script, about to run."""


class StepFrame(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """The rank is at step `step` with `active` sequences; 0 means that it waits for requests.

    Sent when a rank becomes busy or idle, and about once a second in between: a busy rank that is silent is stuck.
    """

    step: int
    active: int


class FailedFrame(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The runner cannot go on, and ends."""

    failure: Failure


FromRank = (
    WarmFrame
    | PreparedFrame
    | FetchedFrame
    | GatherFrame
    | ConnectedFrame
    | ProgressFrame
    | LoadedFrame
    | ReadyFrame
    | StepFrame
    | FailedFrame
)
