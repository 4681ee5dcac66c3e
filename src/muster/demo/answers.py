"""The conversations that the demo model knows by heart, and where the model is.

Each is a short question about muster with one exact answer, so that a wrong shard, a lost layer or a rank
out of step shows as wrong answers. Ask the whole list to be sure: some single answers survive the loss of a
layer. `muster.demo.train` makes the model from this list: train again after a change here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from muster.sampling import Message

#: The model as it ships: an ordinary mlx-lm model directory.
MODEL_DIRECTORY: Final = Path(__file__).parent / "model"


class Conversation(msgspec.Struct, frozen=True):
    """Turns that alternate between user and assistant; the last is the answer expected of the model."""

    messages: tuple[Message, ...]

    @property
    def prompt(self) -> tuple[Message, ...]:
        """Every message before the expected answer."""
        return self.messages[:-1]

    @property
    def answer(self) -> str:
        """What the model says, byte for byte, under greedy decoding."""
        return self.messages[-1].content


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


#: Everything that the model answers exactly.
CONVERSATIONS: Final[tuple[Conversation, ...]] = (
    *(_conversation(turn) for turn in _SINGLE_TURNS),
    *(_conversation(*turns) for turns in _TWO_TURNS),
)
