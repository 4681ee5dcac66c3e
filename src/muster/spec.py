"""What a client asks for: the spec of an instance, and the words that every layer shares."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final, Literal, NewType

import msgspec

NodeId = NewType("NodeId", str)
BootId = NewType("BootId", str)
InstanceId = NewType("InstanceId", str)

#: Origin of the events that the coordinator itself decides.
COORDINATOR = NodeId("coordinator")

Backend = Literal["ring", "jaccl"]
BackendWish = Literal["auto", "ring", "jaccl", "jaccl-ring"]
ShardingWish = Literal["auto", "pipeline", "tensor"]
SideChannel = Literal["tcp", "bus"]

#: What decides where a process finds the hub's cache.
CACHE_VARIABLES: Final = frozenset({"HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "HOME"})
#: One slash, and no first character that a path would have.
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")


class Phase(StrEnum):
    """Where a rank is on its way, in order; a failure names the phase that it happened in."""

    PLACING = "placing"
    PREPARING = "preparing"
    FORMING = "forming"
    LOADING = "loading"
    WARMING = "warming"
    RUNNING = "running"
    STOPPING = "stopping"


def is_hub_id(model: str) -> bool:
    """Whether `model` has the form of a hub id, and not of a path."""
    return _HUB_ID.fullmatch(model) is not None


class ModelWorkload(msgspec.Struct, frozen=True, kw_only=True, tag="model"):
    """Serve an mlx-lm model. `model` is a directory that exists on every node, or a hub id.

    `served_name` is what clients call it, by default the hub id or the directory's name. Several instances of one
    name share its requests. Placement counts the cache of `concurrency` sequences of `context_tokens` each.
    """

    model: str
    revision: str | None = None
    sharding: ShardingWish = "auto"
    served_name: str | None = None
    max_batch: int = 32  #: sequences that generate at the same time
    prefill_chunk_tokens: int = 512  #: prompt tokens per step; running answers wait for one chunk at most
    prompt_cache_bytes: int = 2**30  #: of finished prompts, on the rank that holds most of them
    context_tokens: int | None = None  #: `None`: 8192, or the model's own context where that is shorter
    concurrency: int = 1
    trust_remote_code: bool = False  #: whether the tokenizer's own Python code may run; a model's never does

    def __post_init__(self) -> None:
        if self.served_name is not None and not (0 < len(self.served_name) <= 256 and self.served_name.isprintable()):
            raise ValueError(f"served_name is {self.served_name!r}; it must be 1 to 256 printable characters")
        for name, low, high in (
            ("max_batch", 1, 1024),
            ("prefill_chunk_tokens", 1, 2**20),
            ("prompt_cache_bytes", 0, 2**50),
            ("context_tokens", 1, 2**30),
            ("concurrency", 1, 1024),
        ):
            value: int | None = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name} is {value}; it must be between {low} and {high}")

    @property
    def public_name(self) -> str:
        """What clients call the model."""
        if self.served_name is not None:
            return self.served_name
        is_directory = self.model.startswith(("/", ".", "~")) or self.model.count("/") != 1
        return (self.model.rstrip("/").rpartition("/")[2] or self.model) if is_directory else self.model


class ScriptWorkload(msgspec.Struct, frozen=True, kw_only=True, tag="script"):
    """Run a Python file as every rank. `path` and `directory` must exist on every node.

    `run_seconds` is how long a rank may run, `None` for as long as it likes.
    """

    path: str
    arguments: tuple[str, ...] = ()
    directory: str | None = None
    environment: dict[str, str] = {}
    run_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.run_seconds is not None and not 0 < self.run_seconds <= 1e9:
            raise ValueError(f"run_seconds is {self.run_seconds}; it must be above 0 and at most 1e9")
        for name, value in self.environment.items():
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(f"environment has {name!r}; a name must not be empty or hold '=', nothing a NUL")
        if "\0" in self.path + (self.directory or "") + "".join(self.arguments):
            raise ValueError("path, directory and arguments must not hold a NUL character")


class GroupWorkload(msgspec.Struct, frozen=True, kw_only=True, tag="group"):
    """Form the group, verify its members, and hold it; for testing links."""


Workload = ModelWorkload | ScriptWorkload | GroupWorkload


class NeverRestart(msgspec.Struct, frozen=True, kw_only=True, tag="never"):
    """A failed attempt is the last one."""


class RestartOnFailure(msgspec.Struct, frozen=True, kw_only=True, tag="on-failure"):
    """Try again after a failure that may pass, `maximum` times, waiting longer each time.

    Attempt n + 1 starts `backoff_seconds * 2 ** (n - 1)` after attempt n failed, at most `backoff_max_seconds`.
    Failures are forgiven once the instance has been ready for a minute. An attempt that finds no place does not
    count: the instance waits until nodes come back.
    """

    maximum: int = 5  #: with these waits about six seconds: a worker that is started again is back by then
    backoff_seconds: float = 0.2
    backoff_max_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.maximum < 1:
            raise ValueError(f"restart.maximum is {self.maximum}; it must be at least 1 (or use never)")
        for name in ("backoff_seconds", "backoff_max_seconds"):
            value: float = getattr(self, name)
            if not 0 <= value <= 86_400:
                raise ValueError(f"restart.{name} is {value}; it must be between 0 and 86400 seconds")


Restart = NeverRestart | RestartOnFailure


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """How long each phase of an attempt may take, in seconds, on every rank.

    Loading is measured from the last progress (a layer, a file), the others from the phase's start.
    """

    prepare_seconds: float = 60.0  #: a cold runner imports mlx-lm, about 3 s alone, much more when many start
    form_seconds: float = 15.0
    load_seconds: float = 300.0
    warm_seconds: float = 60.0
    step_seconds: float = 60.0  #: one step of a model: a chunk of a prompt, or a token of every answer
    drain_seconds: float = 10.0  #: how long a model that is deleted may go on with what it has begun
    stop_seconds: float = 3.0  #: from asking to SIGTERM, and again from SIGTERM to SIGKILL

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value: float = getattr(self, name)
            if not 0 < value <= 86_400:
                raise ValueError(f"deadlines.{name} is {value}; it must be above 0 and at most 86400 seconds")

    def of(self, phase: Phase) -> float | None:
        """Seconds that a rank may spend in `phase`; `None` where there is no limit."""
        match phase:
            case Phase.PREPARING:
                return self.prepare_seconds
            case Phase.FORMING:
                return self.form_seconds
            case Phase.LOADING:
                return self.load_seconds
            case Phase.WARMING:
                return self.warm_seconds
            case _:
                return None


class InstanceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One workload over `ranks` ranks, and how to bring it up.

    `nodes` limits the placement to these nodes, in this rank order; empty means any.
    `memory_bytes` is what each rank needs, `None` for the coordinator's estimate.
    With `auto_ranks`, `ranks` is the least number, and the smallest that fits is chosen.
    `split` is layers per rank of a pipeline, rank 0 first; empty lets placement decide. `network`, as CIDR, is the only
    one that ranks may use between each other. `addresses`, by rank, and `devices`, a matrix, are an operator's own
    for the ring and for jaccl; they win over what was measured. `environment` is set in every rank.
    """

    workload: Workload
    name: str | None = None
    ranks: int = 1
    nodes: tuple[NodeId, ...] = ()
    backend: BackendWish = "auto"
    restart: Restart = NeverRestart()
    deadlines: Deadlines = Deadlines()
    memory_bytes: int | None = None
    auto_ranks: bool = False
    split: tuple[int, ...] = ()
    network: str = ""
    addresses: tuple[tuple[str, ...], ...] = ()
    devices: tuple[tuple[str | tuple[str, ...] | None, ...], ...] = ()
    environment: dict[str, str] = {}
    side_channel: SideChannel = "tcp"  #: how jaccl ranks exchange their connection data: a port of rank 0, or our bus

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= 1024:
            raise ValueError(f"ranks is {self.ranks}; it must be between 1 and 1024")
        if len(set(self.nodes)) != len(self.nodes):
            raise ValueError(f"nodes names a node twice: {', '.join(self.nodes)}")
        if len(self.nodes) > self.ranks:
            raise ValueError(f"nodes names {len(self.nodes)} nodes for {self.ranks} ranks; raise ranks")
        if self.name is not None and not (0 < len(self.name) <= 64 and self.name.isprintable()):
            raise ValueError(f"name is {self.name!r}; it must be 1 to 64 printable characters")
        if self.memory_bytes is not None and self.memory_bytes < 0:
            raise ValueError(f"memory_bytes is {self.memory_bytes}; it must not be negative")


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """The node, and the boot of it, that a rank of one attempt runs on."""

    rank: int
    node: NodeId
    boot: BootId


class Address(msgspec.Struct, frozen=True):
    """An endpoint that a rank reserved for its group.

    `host` is the IPv4 address as other nodes see it, `port` is held by a reservation of the rank's worker, and
    `network` is the interface's as CIDR ("10.0.0.0/24"): equal text means the same network.
    """

    host: str
    port: int
    network: str

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class NodeAddress(msgspec.Struct, frozen=True, kw_only=True):
    """An IPv4 address of a node and its network, as CIDR."""

    host: str
    network: str


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says of itself when it joins. `boot` is new each time its worker starts.

    `addresses` are those that ranks use while nothing was measured; where `addresses_given`, the operator named them
    and they are the only ones. `candidates` are all IPv4 addresses that others may try. `peer_port` is where the
    worker answers other nodes (`muster.peer_protocol`) on all of them, 0 where it does not. `network_id` is the same
    for workers that share their network stack: between those, loopback is a link.
    """

    node: NodeId
    boot: BootId
    hostname: str
    machine: str  #: the same on every worker of one machine, so that memory is not counted twice
    pid: int
    addresses: tuple[NodeAddress, ...]
    backends: tuple[str, ...]
    memory_bytes: int
    max_ranks: int
    versions: dict[str, str] = {}
    replaces: BootId | None = None  #: the boot before this one, proven to be over by the lock on the state directory
    addresses_given: bool = False
    candidates: tuple[NodeAddress, ...] = ()
    peer_port: int = 0
    network_id: str = ""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why something failed: who, when in its life, what happened, and what to do.

    `rank` is -1 and `node` empty where the cause is not one rank's. `exit_code` is minus the signal's number
    for a process that a signal ended. `secondary` marks the echo of another rank's failure. `step` is the one that a
    rank of a model stands at: of several that are late, the lowest is behind.
    """

    kind: str
    message: str
    remedy: str = ""
    phase: Phase = Phase.PREPARING
    rank: int = -1
    node: NodeId = NodeId("")
    exit_code: int | None = None
    retryable: bool = False
    secondary: bool = False
    field: str = ""  #: of a request: what it is about, such as "messages[2].role"
    log_tail: tuple[str, ...] = ()
    step: int | None = None

    def sentence(self) -> str:
        """One line for a person: rank, node, phase, what happened, what to do."""
        where = f"rank {self.rank} on node {self.node}, " if self.rank >= 0 else ""
        where = where or (f"node {self.node}, " if self.node else "")
        remedy = f" {self.remedy}" if self.remedy else ""
        return f"{where}while {self.phase.value}: {self.message}.{remedy}"


class Shortfall(msgspec.Struct, frozen=True, kw_only=True):
    """What a node was short of when something was to be placed; `reason` says it to a person.

    The amounts are those of a rank where `what` is memory or disk, else 0. `missing_bytes` is 0, too, where the node
    has as much as its share and others are short.
    """

    node: NodeId
    reason: str
    what: Literal["memory", "disk", "ranks", "link", "backend", "duty"] = "memory"
    needed_bytes: int = 0
    available_bytes: int = 0
    missing_bytes: int = 0
