"""What workers and clients ask of the coordinator, on the control socket; `muster.replies` is what it answers.

All are tagged Structs in msgpack, with the evolution rules of `muster.events`. A `Call` is answered by one or more
`muster.replies.Answer`s with the same `id`; the last one has `last` set.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from muster.events import AdoptedRank
from muster.facts import NodeFacts
from muster.layout import Layout
from muster.links import NodeLinks
from muster.needs import ModelNeeds
from muster.sampling import Message, SamplingParams, Tool
from muster.spec import (
    Backend,
    BootId,
    InstanceId,
    InstanceSpec,
    NodeId,
    NodeInfo,
    Phase,
)

# --- control: worker or client → coordinator ----------------------------------------------------------------


_INSTANCE = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


def check_term(term: int) -> None:
    """Raises `ValueError` unless so many promotions can have been: a term grows by one with each."""
    if not 0 <= term < 2**31:
        raise ValueError(f"term is {term}; it must be between 0 and 2**31 - 1")


class Request(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of what a worker or a client asks the coordinator."""


class Hello(Request, frozen=True, kw_only=True, tag="hello"):
    """I am here; answer `Welcome`. `info` is `None` for an observer, which is no node.

    `holds` are the live ranks of this worker: a coordinator whose log does not know an instance learns of it here.
    `epoch` and `term` are the highest that the caller has followed: a coordinator with a lower term of the same epoch
    is fenced by that.
    """

    info: NodeInfo | None = None
    holds: tuple[Held, ...] = ()
    epoch: str = ""
    term: int = 0
    proof: str = ""  #: from the refusal of the hello before: the caller hears what it is told

    def __post_init__(self) -> None:
        check_term(self.term)


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """A live rank of a worker, with what is needed to adopt it. `ready` is whether it and all its siblings were."""

    instance: InstanceId
    attempt: int
    spec: InstanceSpec
    backend: Backend
    world_size: int
    rank: AdoptedRank
    ready: bool
    key: str = ""
    ended: tuple[AdoptedRank, ...] = ()  #: ranks of a script that have ended with 0
    layout: Layout = Layout()
    needs: ModelNeeds | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.world_size <= 1024 or self.world_size != self.spec.ranks:
            raise ValueError(f"world_size is {self.world_size}; it must be that of the spec, {self.spec.ranks}")
        if not 1 <= self.attempt < 2**31:
            raise ValueError(f"attempt is {self.attempt}; it must be at least 1 and below 2**31")
        if any(not 0 <= rank.rank < self.world_size for rank in (self.rank, *self.ended)):
            raise ValueError(f"a rank is not below the world size {self.world_size}")
        if not _INSTANCE.fullmatch(self.instance):
            raise ValueError(f"instance is {self.instance!r}; an id is of lower-case letters, digits and '-'")


class Replay(Request, frozen=True, kw_only=True, tag="replay"):
    """Send the events after `after`; answer `Replayed`, or `Welcome` where the log no longer goes back so far."""

    after: int


class Who(Request, frozen=True, kw_only=True, tag="who"):
    """Who are you; answer `Role`. Also answered by a standby, and by a coordinator that was fenced."""


class Promote(Request, frozen=True, kw_only=True, tag="promote"):
    """Take over from the coordinator that you follow; answer `Role` or `Refused`.

    Refused while that coordinator answers, unless `force`.
    """

    force: bool = False


class Claim(Request, frozen=True, kw_only=True, tag="claim"):
    """Let `holder` be the active coordinator of the epoch, in this term, for `seconds` from now on; answer `Vote`.

    Asked of the witness, and by the active one of its standby. `holder` is a coordinator's name for itself, which a
    restart does not change.
    """

    epoch: str
    term: int
    holder: str
    seconds: float

    def __post_init__(self) -> None:
        check_term(self.term)
        if not 0 < self.seconds <= 86_400:
            raise ValueError(f"seconds is {self.seconds}; it must be above 0 and at most 86400")


class Drain(Request, frozen=True, kw_only=True, tag="drain"):
    """Give a node nothing new, and place what it has elsewhere; answer `Noted` or `Refused`. See `NodeDraining`."""

    node: NodeId
    reason: str = ""
    now: bool = False

    def __post_init__(self) -> None:
        if len(self.reason) > 500:
            raise ValueError(f"reason has {len(self.reason)} characters; at most 500 are kept")


class Resume(Request, frozen=True, kw_only=True, tag="resume"):
    """Let a node that was drained or set aside take instances again; answer `Noted` or `Refused`."""

    node: NodeId


class Retry(Request, frozen=True, kw_only=True, tag="retry"):
    """Try a failed instance (by id or name) again, now and with its whole budget; answer `Accepted` or `Refused`.

    `move` ends the attempt of one that starts or runs, and places it afresh: back on its nodes, for example.
    """

    instance: str
    move: bool = False


class Report(Request, frozen=True, kw_only=True, tag="report"):
    """The `n`-th thing that happened in this boot of a node; answer `Acked`. Sent again until acknowledged.

    `event` is any `muster.events.Event`, or one of a newer worker, which is kept and skipped.
    `cause` is the sequence of the event that led to it. `oldest` is the lowest number that was not acknowledged
    when this was sent: everything below it is settled, also for a coordinator that was started since.
    `happened_ns` is the worker's wall clock when it happened. `to` is the boot of the coordinator that the worker
    last synchronised with: for any other the numbers may not yet be the right ones, and it refuses them for now.
    """

    node: NodeId
    boot: BootId
    n: int
    oldest: int = 1
    cause: int
    event: msgspec.Raw
    happened_ns: int = 0
    to: BootId = BootId("")


class Output(Request, frozen=True, kw_only=True, tag="output"):
    """Lines that a rank printed; `n`, `oldest` and `to` as in `Report`, answered the same way.

    Kept in memory, not logged.
    """

    node: NodeId
    boot: BootId
    n: int
    oldest: int = 1
    instance: InstanceId
    attempt: int
    rank: int
    lines: tuple[str, ...]
    to: BootId = BootId("")


class Beat(Request, frozen=True, kw_only=True, tag="beat"):
    """A node's heartbeat; not answered. Carries the latest values that nobody needs a history of."""

    node: NodeId
    boot: BootId
    memory_available_bytes: int = 0
    memory_used_bytes: int = 0  #: resident size of the worker itself
    warm_runners: int = 0
    warm_memory_bytes: int = 0  #: resident size of one warm runner
    progress: tuple[Progress, ...] = ()
    time_ns: int = 0  #: the worker's wall clock when it sent this
    pulse_ns: int = 0  #: `time_ns` of the last `Pulse` that it heard
    pulse_age_ns: int = 0  #: how long ago that was, on a clock that does not jump
    ranks_memory_bytes: int = 0  #: of all runners that hold a rank, with what MLX has allocated
    ranks: tuple[RankUse, ...] = ()


class RankUse(msgspec.Struct, frozen=True, kw_only=True):
    """How much memory the runner of a rank has in use: what is resident, or what MLX has allocated if that is more."""

    instance: InstanceId
    attempt: int
    rank: int
    memory_bytes: int


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a rank is within a phase: `done` of `total` units ("layers", "bytes"), `rate` of them per second.

    `note` says what moves, such as "from node b".
    """

    instance: InstanceId
    attempt: int
    rank: int
    phase: Phase
    done: int
    total: int
    unit: str
    rate: float = 0.0
    note: str = ""


class TellFacts(Request, frozen=True, kw_only=True, tag="facts"):
    """What a node knows of its machine now; not answered, not logged, replaces what it told before."""

    facts: NodeFacts


class TellLinks(Request, frozen=True, kw_only=True, tag="links"):
    """What a node measured; not answered, not logged, replaces what it told before."""

    links: NodeLinks


class Measure(Request, frozen=True, kw_only=True, tag="measure"):
    """Measure all links again; answer `Measuring`. Every worker is told with the next heartbeat."""


class Inspect(Request, frozen=True, kw_only=True, tag="inspect"):
    """What a model needs, seen by the coordinator or by a node that has it; answer `Needs` or `Refused`."""

    model: str
    revision: str = ""


class Preview(Request, frozen=True, kw_only=True, tag="preview"):
    """Where an instance of this spec would go, and what else would do; answer `Previewed` or `Refused`.

    Nothing is created, logged or reserved.
    """

    spec: InstanceSpec


class Gather(Request, frozen=True, kw_only=True, tag="gather"):
    """A rank's part of an exchange between all ranks of an attempt; answer `Gathered` once all parts are in.

    After `seconds`, `Refused` with the ranks that are missing. `round` counts the exchanges of the attempt from 0.
    """

    instance: InstanceId
    attempt: int
    rank: int
    world_size: int
    round: int
    data: bytes
    seconds: float = 15.0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size <= 1024:
            raise ValueError(f"rank {self.rank} is out of range for world size {self.world_size}")
        if len(self.data) > 2**20:
            raise ValueError(f"data has {len(self.data)} bytes; at most 1 MiB is exchanged")
        if not 0 < self.seconds <= 86_400:
            raise ValueError(f"seconds is {self.seconds}; it must be above 0 and at most 86400")


class Create(Request, frozen=True, kw_only=True, tag="create"):
    """Create an instance; answer `Created` or `Refused`. The same `key` again gives the same instance."""

    spec: InstanceSpec
    key: str = ""


class Delete(Request, frozen=True, kw_only=True, tag="delete"):
    """Delete an instance (by id or name); answer `Accepted` or `Refused`.

    A model first finishes the requests that it has begun, as long as its spec allows; `now` cuts them off.
    """

    instance: str
    now: bool = False


class Get(Request, frozen=True, kw_only=True, tag="get"):
    """The current state; answer `Snapshot`. Measured links grow with the square of the nodes, and may be left out."""

    links: bool = True


class Query(Request, frozen=True, kw_only=True, tag="query"):
    """Events of the log; answer `Found`. Empty filters match all; `kinds` are tags or prefixes ("rank.")."""

    after: int = 0
    instance: str | None = None
    node: NodeId | None = None
    kinds: tuple[str, ...] = ()
    since_ns: int = 0
    until_ns: int | None = None
    limit: int = 1000
    newest: bool = False  #: the last `limit` of them instead of the first; still in order


class ReadOutput(Request, frozen=True, kw_only=True, tag="read-output"):
    """What the ranks of an instance printed, from position `after` on; answer `Outputs`.

    Where there is nothing new, the answer waits up to `wait_seconds` for a line or for the end of the instance.
    """

    instance: str
    after: int = 0
    rank: int | None = None
    wait_seconds: float = 0.0


class Generate(Request, frozen=True, kw_only=True, tag="generate"):
    """Ask a model; answers are `Started`, `Prefilled`s, `Chunk`s and at last `Done` or `Refused`.

    `instance` is the name of a served model, or the name or id of an instance. `prompt` is text or token ids;
    exactly one of `prompt` and `messages` is given. `template` are further variables for the chat template.
    Without a first token after `wait_seconds` the request is refused, whatever it waits for.
    """

    instance: str
    prompt: str | tuple[int, ...] | None = None
    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    template: dict[str, Any] = {}
    sampling: SamplingParams = SamplingParams()
    wait_seconds: float = 600.0

    def __post_init__(self) -> None:
        if not 0 < self.wait_seconds <= 86_400:
            raise ValueError(f"wait_seconds is {self.wait_seconds}; it must be above 0 and at most 86400 seconds")


class CancelGenerate(Request, frozen=True, kw_only=True, tag="cancel-generate"):
    """Stop the generation that was asked for under the call `id`; not answered itself."""

    id: int


AnyRequest = (
    Hello
    | Who
    | Promote
    | Claim
    | Replay
    | Report
    | Output
    | Beat
    | TellFacts
    | TellLinks
    | Measure
    | Inspect
    | Preview
    | Gather
    | Create
    | Delete
    | Drain
    | Resume
    | Retry
    | Get
    | Query
    | ReadOutput
    | Generate
    | CancelGenerate
)


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A request on the control socket. `id` is the caller's own, unique on its connection."""

    id: int
    request: AnyRequest
