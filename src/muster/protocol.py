"""What passes between the coordinator and its workers and clients: control, telemetry, and the events socket.

All are tagged Structs in msgpack, with the evolution rules of `muster.events`. A `Call` on the control socket is
answered by one or more `Answer`s with the same `id`; the last one has `last` set.
"""

from __future__ import annotations

from typing import Any

import msgspec

from muster.sampling import Message, SamplingParams, TokenLogprob, Tool, ToolCall
from muster.spec import (
    BootId,
    Failure,
    InstanceId,
    InstanceSpec,
    NodeId,
    NodeInfo,
    Phase,
)

# --- control: worker or client → coordinator ----------------------------------------------------------------


class Request(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of what a worker or a client asks the coordinator."""


class Hello(Request, frozen=True, kw_only=True, tag="hello"):
    """I am here; answer `Welcome`. `info` is `None` for an observer, which is no node."""

    info: NodeInfo | None = None


class Replay(Request, frozen=True, kw_only=True, tag="replay"):
    """Send the events after `after`; answer `Replayed`, or `Welcome` where the log no longer goes back so far."""

    after: int


class Report(Request, frozen=True, kw_only=True, tag="report"):
    """The `n`-th thing that happened in this boot of a node; answer `Acked`. Sent again until acknowledged.

    `event` is any `muster.events.Event`, or one of a newer worker, which is kept and skipped.
    `cause` is the sequence of the event that led to it. `oldest` is the lowest number that was not acknowledged
    when this was sent: everything below it is settled, also for a coordinator that was started since.
    """

    node: NodeId
    boot: BootId
    n: int
    oldest: int = 1
    cause: int
    event: msgspec.Raw


class Output(Request, frozen=True, kw_only=True, tag="output"):
    """Lines that a rank printed; `n` and `oldest` as in `Report`, answered the same way. Kept in memory, not logged."""

    node: NodeId
    boot: BootId
    n: int
    oldest: int = 1
    instance: InstanceId
    attempt: int
    rank: int
    lines: tuple[str, ...]


class Beat(Request, frozen=True, kw_only=True, tag="beat"):
    """A node's heartbeat; not answered. Carries the latest values that nobody needs a history of."""

    node: NodeId
    boot: BootId
    memory_available_bytes: int = 0
    memory_used_bytes: int = 0  #: resident size of the worker itself
    warm_runners: int = 0
    warm_memory_bytes: int = 0  #: resident size of one warm runner
    progress: tuple[Progress, ...] = ()


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a rank is within a phase: `done` of `total` units ("layers", "bytes")."""

    instance: InstanceId
    attempt: int
    rank: int
    phase: Phase
    done: int
    total: int
    unit: str


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
    """The current state; answer `Snapshot`."""


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
    Hello | Replay | Report | Output | Beat | Create | Delete | Get | Query | ReadOutput | Generate | CancelGenerate
)


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A request on the control socket. `id` is the caller's own, unique on its connection."""

    id: int
    request: AnyRequest


# --- control: coordinator → worker or client ----------------------------------------------------------------


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of what the coordinator answers."""


class Welcome(Reply, frozen=True, kw_only=True, tag="welcome"):
    """The state up to its sequence, as msgpack of `muster.state.State`, and where to find the other sockets.

    Endpoints are ports on the host that the caller reached the control socket at.
    """

    epoch: str
    coordinator_boot: BootId
    version: str
    state: msgspec.Raw
    events_port: int
    generation_port: int
    http_port: int | None = None
    heartbeat_seconds: float
    lease_seconds: float


class Replayed(Reply, frozen=True, kw_only=True, tag="replayed"):
    """Encoded envelopes in sequence, without a gap; `head` is the last sequence of the log."""

    envelopes: tuple[bytes, ...]
    head: int


class Acked(Reply, frozen=True, kw_only=True, tag="acked"):
    """Report `n` and all before it are safe; the worker may forget them."""

    n: int


class Created(Reply, frozen=True, kw_only=True, tag="created"):
    """The request was accepted. `sequence` is that of its `InstanceCreated` event."""

    instance: InstanceId
    sequence: int


class Accepted(Reply, frozen=True, kw_only=True, tag="accepted"):
    """The request was carried out, or is being carried out. `sequence` is that of its event."""

    instance: InstanceId
    sequence: int


class Refused(Reply, frozen=True, kw_only=True, tag="refused"):
    """The request was not accepted, and changed nothing."""

    failure: Failure


class Snapshot(Reply, frozen=True, kw_only=True, tag="snapshot"):
    """The state, as msgpack of `muster.state.State`, with what is not logged: node telemetry and progress."""

    state: msgspec.Raw
    beats: tuple[Beat, ...] = ()
    memory_bytes: int = 0  #: resident size of the coordinator itself
    log_bytes: int = 0


class Found(Reply, frozen=True, kw_only=True, tag="found"):
    """Encoded envelopes in sequence; `oldest` is the first sequence that the log still has."""

    envelopes: tuple[bytes, ...]
    head: int
    oldest: int


class Outputs(Reply, frozen=True, kw_only=True, tag="outputs"):
    """Printed lines, in the order of their arrival; `position` is where to read on, `dropped` how many were lost
    because the store is bounded."""

    lines: tuple[OutputLine, ...]
    position: int
    dropped: int = 0


class OutputLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line that a rank printed."""

    attempt: int
    rank: int
    text: str


class Started(Reply, frozen=True, kw_only=True, tag="started"):
    """The request is encoded and entered the batch. `cached_tokens` of the prompt need no computing.

    `prompt` is the prompt's text where it was given as token ids.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    prompt: str | None = None


class Prefilled(Reply, frozen=True, kw_only=True, tag="prefilled"):
    """How many of the prompt's tokens are done, those from the cache included."""

    done: int
    total: int


class Chunk(Reply, frozen=True, kw_only=True, tag="chunk"):
    """What some generated tokens add to the answer: text, reasoning, and whole tool calls; often nothing yet."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


class Done(Reply, frozen=True, kw_only=True, tag="done"):
    """The generation ended. `reason` is a `muster.sampling.FinishReason` or "cancelled"; `stop` is the stop string.

    `reasoning_tokens` are those of the completion that were spent on reasoning. Seconds count from the runner's
    receipt of the request.
    """

    reason: str
    prompt_tokens: int
    completion_tokens: int
    seconds_to_first_token: float
    seconds: float
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    stop: str | None = None


#: What a generation is answered with; the last two end it.
AnyPiece = Started | Prefilled | Chunk | Done | Refused

AnyReply = (
    Welcome
    | Replayed
    | Acked
    | Created
    | Accepted
    | Refused
    | Snapshot
    | Found
    | Outputs
    | Started
    | Prefilled
    | Chunk
    | Done
)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A reply to the call with the same `id`."""

    id: int
    reply: AnyReply
    last: bool = True


# --- events socket ------------------------------------------------------------------------------------------

TOPIC_EVENT = b"event"  #: second frame: an encoded envelope
TOPIC_BEAT = b"beat"  #: second frame: a `Pulse`


class Pulse(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator's heartbeat: a subscriber whose sequence is behind `head` asks for a replay."""

    epoch: str
    coordinator_boot: BootId
    head: int
    time_ns: int
