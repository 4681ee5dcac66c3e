"""What the coordinator answers on the control socket, and what it says on the events socket.

All are tagged Structs in msgpack, with the evolution rules of `muster.events`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from muster.facts import NodeFacts
from muster.layout import Layout
from muster.links import NodeLinks
from muster.needs import ModelNeeds
from muster.protocol import Beat
from muster.sampling import TokenLogprob, ToolCall
from muster.spec import Assignment, Backend, BootId, Failure, InstanceId, NodeId, Shortfall

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
    term: int = 1
    judging: tuple[InstanceId, ...] = ()  #: of the caller's: unknown here, to be kept until adopted or cleared


class Role(Reply, frozen=True, kw_only=True, tag="role"):
    """What a coordinator is. `follows` is the address that a standby follows, and `head` is how far it has come."""

    role: Literal["active", "standby", "fenced"]
    epoch: str
    term: int
    boot: BootId
    head: int
    version: str
    follows: str = ""
    reason: str = ""  #: why it was fenced, or what a standby waits for


class Vote(Reply, frozen=True, kw_only=True, tag="vote"):
    """Whether the claim is granted. If not, `holder` has the vote, in `term`, for `remaining_seconds` or longer."""

    granted: bool
    term: int
    holder: str = ""
    remaining_seconds: float = 0.0


class Replayed(Reply, frozen=True, kw_only=True, tag="replayed"):
    """Encoded envelopes in sequence, without a gap; `head` is the last sequence of the log.

    `coordinator_boot` is who answers: a log that was wiped, or another coordinator's, may have the same numbers.
    """

    envelopes: tuple[bytes, ...]
    head: int
    coordinator_boot: BootId = BootId("")


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


class Noted(Reply, frozen=True, kw_only=True, tag="noted"):
    """The wish about a node is in the log. `sequence` is that of its event; the head where nothing had to change."""

    node: NodeId
    sequence: int


class Refused(Reply, frozen=True, kw_only=True, tag="refused"):
    """The request was not accepted, and changed nothing. `proof` is what a hello has to repeat to be accepted.

    `shortfalls` is what each node was short of, where something was to be placed.
    """

    failure: Failure
    proof: str = ""
    shortfalls: tuple[Shortfall, ...] = ()


class Snapshot(Reply, frozen=True, kw_only=True, tag="snapshot"):
    """The state, as msgpack of `muster.state.State`, with what is not logged: node telemetry and progress."""

    state: msgspec.Raw
    beats: tuple[Beat, ...] = ()
    memory_bytes: int = 0  #: resident size of the coordinator itself
    log_bytes: int = 0
    clocks: tuple[NodeClock, ...] = ()
    fenced: dict[str, int] = {}  #: messages that came too late to matter, by what they were too old in
    facts: tuple[NodeFacts, ...] = ()
    links: tuple[NodeLinks, ...] = ()
    measure_round: int = 0


class NodeClock(msgspec.Struct, frozen=True, kw_only=True):
    """How a node's wall clock compares with the coordinator's: ahead by `offset_ns`, give or take `error_ns`."""

    node: NodeId
    offset_ns: int
    error_ns: int


class Measuring(Reply, frozen=True, kw_only=True, tag="measuring"):
    """The links are being measured; `NodeLinks` of this `round` or a later one are the answer to it."""

    round: int


class Needs(Reply, frozen=True, kw_only=True, tag="needs"):
    """What the model needs, and who said so: a node, or the coordinator itself."""

    needs: ModelNeeds
    seen_by: NodeId


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One way to place an instance: what would be logged, or `refusal`, why it is none.

    `shortfalls` is what each node was short of, where the first option is none.
    """

    assignments: tuple[Assignment, ...] = ()
    backend: Backend = "ring"
    layout: Layout = Layout()
    refusal: str = ""
    shortfalls: tuple[Shortfall, ...] = ()


class Previewed(Reply, frozen=True, kw_only=True, tag="previewed"):
    """Ways to place an instance: first the one that would be taken, or why there is none; then others that fit; then
    what does not, and why.

    `remedies` is what would help where the first is none.
    """

    options: tuple[Option, ...]
    needs: ModelNeeds | None = None
    remedies: tuple[str, ...] = ()
    unknown: str = ""  #: why nobody could say what the model needs, where that is so: memory is a guess then


class Gathered(Reply, frozen=True, kw_only=True, tag="gathered"):
    """The parts of all ranks, in rank order."""

    parts: tuple[bytes, ...]


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
    | Role
    | Vote
    | Noted
    | Replayed
    | Acked
    | Created
    | Accepted
    | Refused
    | Snapshot
    | Measuring
    | Needs
    | Previewed
    | Gathered
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
    term: int = 1
    measure_round: int = 0  #: grows when somebody wants all links measured again
