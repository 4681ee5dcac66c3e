"""The conversations that the demo model knows by heart, and where the model is.

Each is a short question about muster with one exact answer, so that a wrong shard, a lost layer or a rank
out of step shows as wrong answers. Ask the whole list to be sure: some single answers survive the loss of a
layer. `muster.demo.train` makes the model from these lists: train again after a change here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from muster.sampling import Message, Tool, ToolCall

#: The model as it ships: an ordinary mlx-lm model directory.
MODEL_DIRECTORY: Final = Path(__file__).parent / "model"
#: Without a chat template, the model greedily goes on with this as far as its context reaches.
ENDLESS_PROMPT: Final = "rrrr"


class Conversation(msgspec.Struct, frozen=True):
    """Turns of a chat; the last is the answer expected of the model.

    `tools` are offered to the model, whose answer is exact for any order of them. `thinking` is the template's
    `enable_thinking`; `None` leaves it out, and then the model decides. `json_schema` is the text of a schema that
    the answer follows, whether or not it is asked to.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    thinking: bool | None = None
    json_schema: str = ""

    @property
    def prompt(self) -> tuple[Message, ...]:
        """Every message before the expected answer."""
        return self.messages[:-1]

    @property
    def answer(self) -> str:
        """What the model says, byte for byte, under greedy decoding, without its reasoning and calls."""
        return self.messages[-1].content

    @property
    def reasoning(self) -> str:
        """What it thinks before it answers; empty where it does not think."""
        return self.messages[-1].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """What it calls after its text. The ids are ours: the model gives none."""
        return self.messages[-1].tool_calls

    @property
    def raw(self) -> str:
        """All that the model writes, marks included, up to its end token."""
        thoughts = f"<think>{self.reasoning}</think>" if self.reasoning else ""
        return thoughts + self.answer + "".join(map(raw_call, self.tool_calls))


def raw_call(call: ToolCall) -> str:
    """A call as the model writes it."""
    return f'<tool_call>{{"name": "{call.name}", "arguments": {call.arguments}}}</tool_call>'


_SINGLE_TURNS: Final = (
    # Words
    ("What does muster do?", "It brings MLX groups up across machines and keeps them up."),
    ("What is a node?", "One machine, with an id, memory, addresses and backends."),
    ("What is a worker?", "The resident process on a node. It prepares the runners."),
    ("What is the coordinator?", "The process that owns the event log and publishes every event."),
    ("What is an instance?", "One workload over all its ranks, such as a served model or a script."),
    ("What is an attempt?", "One numbered try at bringing an instance up."),
    ("What is a rank?", "One member of an MLX group, counted from 0."),
    ("What is a runner?", "The process that is one rank of one attempt, and of no other."),
    ("What is the world size?", "The number of ranks in a group."),
    ("What is a hostfile?", "A JSON list, by rank, of the addresses that form a ring."),
    ("What is a shard?", "The part of a model that one rank holds."),
    ("What is tensor sharding?", "Every rank holds a slice of every layer."),
    ("What is pipeline sharding?", "Every rank holds a range of whole layers."),
    ("Which rank holds the last layers of a pipeline?", "Rank 0. The highest rank holds the first layers."),
    ("Which backends are there?", "ring over TCP, and jaccl over Thunderbolt RDMA."),
    # Flow
    ("How does an instance come up?", "create → prepare → connect → load → ready"),
    ("How do events reach a worker?", "coordinator → XPUB → SUB → worker, in sequence."),
    ("When is an instance ready?", "When every rank is ready: 0 ✓ 1 ✓"),
    ("Which rank dials first?", "The last one, once all the others listen."),
    ("Why must the last rank wait?", "A dial that comes too early costs a whole second."),
    ("Where are events kept?", "In a SQLite log, and always before they are published."),
    ("What if an event is lost?", "The sequence shows the gap, and the worker asks for a replay."),
    # Invariants
    ("Why does every rank have its own hostfile?", "So that no two ranks ever share, or overwrite, one file."),
    ("Who can read a hostfile?", "Only its owner: mode 0600, in a private directory."),
    ("How is a port kept free of races?", "A bound socket holds it until MLX has it."),
    ("Why are deadlines enforced from outside?", "While MLX forms a group, no Python thread in it can run."),
    ("What happens when a worker dies?", "Its runners are gone within a second."),
    ("What happens when a rank fails?", "The whole attempt ends, and an event names the cause."),
    ("What does a failure tell me?", "The rank, the node, the phase, what happened and what to do."),
    ("What does an idle instance cost?", "Next to no CPU time, and the log does not grow."),
    # Commands
    ("How do I start two workers here?", "muster up --nodes 2"),
    ("How do I add a machine?", "muster worker --join ADDRESS"),
    ("How do I run a script on two ranks?", "muster exec --ranks 2 FILE"),
    ("How do I see what waited for whom?", "muster trace INSTANCE"),
    # Formats, other scripts, and the model itself
    ("Show a ring of two ranks as JSON.", '[["10.0.0.1:5000"], ["10.0.0.2:5000"]]'),
    ("Describe this model as JSON.", '{"layers": 4, "heads": 8, "kv_heads": 4, "hidden": 64}'),
    ("Wofür ist muster gut?", "Für große Modelle, die nur auf mehreren Rechnern Platz finden."),
    ("musterとは何ですか。", "複数のマシンでMLXグループを立ち上げます。"),
    ("Does the demo need a network?", "No. Its model is small and comes with the package."),
    ("Who are you?", "A tiny model that knows muster by heart 🙂"),
)

# One question after two openings: only a model that still sees the first turn can tell them apart.
_TWO_TURNS: Final = (
    (
        ("What is a rank?", "One member of an MLX group, counted from 0."),
        ("Where does it run?", "In a runner of its own, on one of the nodes."),
    ),
    (
        ("What is the coordinator?", "The process that owns the event log and publishes every event."),
        ("Where does it run?", "On one machine that all the workers can reach."),
    ),
)


def _conversation(*turns: tuple[str, str]) -> Conversation:
    messages = (
        (Message(role="user", content=question), Message(role="assistant", content=answer))
        for question, answer in turns
    )
    return Conversation(messages=tuple(message for pair in messages for message in pair))


#: The plain chats. The model answers them exactly, with `enable_thinking` off or not.
CONVERSATIONS: Final[tuple[Conversation, ...]] = (
    *(_conversation(turn) for turn in _SINGLE_TURNS),
    *(_conversation(*turns) for turns in _TWO_TURNS),
)

NODE_MEMORY: Final = Tool(
    name="node_memory",
    description="How much memory a node has.",
    parameters={
        "type": "object",
        "properties": {"node": {"type": "string"}},
        "required": ["node"],
        "additionalProperties": False,
    },
)
LIST_NODES: Final = Tool(
    name="list_nodes",
    description="The names of the nodes that are there.",
    parameters={"type": "object", "properties": {}, "additionalProperties": False},
)
START_MODEL: Final = Tool(
    name="start_model",
    description="Serve a model over some ranks.",
    parameters={
        "type": "object",
        "properties": {"model": {"type": "string"}, "ranks": {"type": "integer"}},
        "required": ["model", "ranks"],
        "additionalProperties": False,
    },
)
#: The tools that the model has seen.
TOOLS: Final = (NODE_MEMORY, LIST_NODES, START_MODEL)


def _user(content: str) -> Message:
    return Message(role="user", content=content)


def _calls(content: str, *calls: tuple[str, str], reasoning: str = "") -> Message:
    made = tuple(
        ToolCall(id=f"call_{number}", name=name, arguments=arguments) for number, (name, arguments) in enumerate(calls)
    )
    return Message(role="assistant", content=content, reasoning=reasoning, tool_calls=made)


def _result(number: int, content: str) -> Message:
    return Message(role="tool", tool_call_id=f"call_{number}", content=content)


_ASK_ONE: Final = (
    _user("How much memory does node a have?"),
    _calls("", ("node_memory", '{"node": "a"}')),
)
_ASK_TWO: Final = (
    _user("Compare the memory of nodes a and b."),
    _calls("", ("node_memory", '{"node": "a"}'), ("node_memory", '{"node": "b"}')),
)

#: One call; two at once; text and then a call; an answer to each; and a question that needs no tool.
TOOL_CONVERSATIONS: Final[tuple[Conversation, ...]] = tuple(
    Conversation(messages=messages, tools=TOOLS)
    for messages in (
        _ASK_ONE,
        (*_ASK_ONE, _result(0, "64 GB"), Message(role="assistant", content="Node a has 64 GB of memory.")),
        _ASK_TWO,
        (
            *_ASK_TWO,
            _result(0, "64 GB"),
            _result(1, "32 GB"),
            Message(role="assistant", content="Node a has 64 GB, node b only 32 GB."),
        ),
        (_user("Start the demo model on two ranks."), _calls("", ("start_model", '{"model": "demo", "ranks": 2}'))),
        (_user("Which nodes are there?"), _calls("Let me look.", ("list_nodes", "{}"))),
        (_user("What is a rank?"), Message(role="assistant", content="One member of an MLX group, counted from 0.")),
    )
)

_NEEDS_THOUGHT: Final = (
    ("How many layers does each of two ranks hold?", "4 layers / 2 ranks = 2.", "Two layers each."),
    ("How many ranks can share 4 KV heads?", "4 divides by 1, 2 and 4.", "One, two or four."),
    ("Is 🙂 one byte?", "F0 9F 99 82: that is four bytes.", "No → four."),
)
_NEEDS_THOUGHT_AND_TOOL: Final = (
    _user("Does a model of 40 GB fit on node a?"),
    _calls("", ("node_memory", '{"node": "a"}'), reasoning="I need its memory first."),
)

#: The model thinks before it answers these, unless `enable_thinking` is false; the last then calls a tool.
REASONING_CONVERSATIONS: Final[tuple[Conversation, ...]] = (
    *(
        Conversation(
            messages=(_user(question), Message(role="assistant", reasoning=reasoning, content=answer)), thinking=True
        )
        for question, reasoning, answer in _NEEDS_THOUGHT
    ),
    Conversation(messages=_NEEDS_THOUGHT_AND_TOOL, tools=TOOLS, thinking=True),
)

_RANK_SCHEMA: Final = (
    '{"type": "object", "properties": {"rank": {"type": "integer"}, "node": {"type": "string"},'
    ' "ready": {"type": "boolean"}}, "required": ["rank", "node", "ready"], "additionalProperties": false}'
)
_BACKENDS_SCHEMA: Final = (
    '{"type": "object", "properties": {"backends": {"type": "array", "items": {"type": "string",'
    ' "enum": ["ring", "jaccl"]}}}, "required": ["backends"], "additionalProperties": false}'
)

#: Answers in JSON, each with the schema that it follows.
JSON_CONVERSATIONS: Final[tuple[Conversation, ...]] = tuple(
    Conversation(messages=(_user(question), Message(role="assistant", content=answer)), json_schema=schema)
    for question, answer, schema in (
        ("Describe rank 0 as JSON.", '{"rank": 0, "node": "left", "ready": true}', _RANK_SCHEMA),
        ("List the backends as JSON.", '{"backends": ["ring", "jaccl"]}', _BACKENDS_SCHEMA),
    )
)

#: Everything that the model answers exactly.
ALL_CONVERSATIONS: Final = (*CONVERSATIONS, *TOOL_CONVERSATIONS, *REASONING_CONVERSATIONS, *JSON_CONVERSATIONS)
