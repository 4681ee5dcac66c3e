"""What passes between a rank and the rest: generation, steps, and the frames between worker and runner.

Tagged Structs in msgpack, with the evolution rules of `muster.events`.
"""

from __future__ import annotations

import msgspec

from muster.protocol import Chunk, Done, Generate, Refused
from muster.spec import (
    Failure,
    InstanceId,
    Phase,
    Workload,
)

# --- generation socket: rank-0 runner ↔ coordinator ---------------------------------------------------------


class Piece(msgspec.Struct, frozen=True, kw_only=True, tag="piece"):
    """A reply of the runner to the request `request`: a `Chunk`, a `Done`, or a `Refused`."""

    request: int
    reply: Chunk | Done | Refused


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


class Insert(msgspec.Struct, frozen=True, kw_only=True, tag="insert"):
    """A sequence enters: run the prompt `tokens` through the model."""

    step: int
    sequence: int
    tokens: tuple[int, ...]


class Advance(msgspec.Struct, frozen=True, kw_only=True, tag="advance"):
    """Each sequence (id, token) goes one token further, with rank 0's token."""

    step: int
    tokens: tuple[tuple[int, int], ...]


class Remove(msgspec.Struct, frozen=True, kw_only=True, tag="remove"):
    """The sequences leave; their caches are dropped."""

    step: int
    sequences: tuple[int, ...]


class WarmUp(msgspec.Struct, frozen=True, kw_only=True, tag="warm-up"):
    """Every rank has loaded: run a few tokens, so that the first request finds compiled kernels."""

    step: int


Step = Insert | Advance | Remove | WarmUp


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


class Form(msgspec.Struct, frozen=True, kw_only=True, tag="form"):
    """Form the group with this payload (msgpack of `muster.group.payload.Payload`; `None` for one rank alone),
    verify it, then load, warm up, and serve. `steps` is rank 0's steps address."""

    payload: bytes | None = None
    steps: str | None = None


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """End now, politely."""


ToRank = Prepare | Form | Stop


# --- runner frames: runner → worker -------------------------------------------------------------------------


class WarmFrame(msgspec.Struct, frozen=True, kw_only=True, tag="warm"):
    """The runner is up; what it imported is in memory."""

    seconds: float
    memory_bytes: int
    backends: tuple[str, ...]
    versions: dict[str, str]


class PreparedFrame(msgspec.Struct, frozen=True, kw_only=True, tag="prepared"):
    """The workload was looked at and can be run here."""

    steps: str | None = None


class ConnectedFrame(msgspec.Struct, frozen=True, kw_only=True, tag="connected"):
    """The group is formed and verified."""

    seconds: float


class ProgressFrame(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """Something moved: resets the phase's clock where it counts from the last progress."""

    phase: Phase
    done: int
    total: int
    unit: str


class LoadedFrame(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    """The shard is in memory."""

    layers: tuple[int, int] | None
    sharding: str
    weights_bytes: int
    seconds: float


class ReadyFrame(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Warm, or, for a script, about to run."""


class FailedFrame(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The runner cannot go on, and ends."""

    failure: Failure


FromRank = WarmFrame | PreparedFrame | ConnectedFrame | ProgressFrame | LoadedFrame | ReadyFrame | FailedFrame
