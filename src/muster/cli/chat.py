"""A chat with a model over the control socket: its turns, and the streaming of one answer."""

from __future__ import annotations

import time
from typing import Any, Protocol

import msgspec

from muster.bus import ControlClient
from muster.cli.asking import generation
from muster.errors import RequestError
from muster.protocol import Generate
from muster.replies import Chunk, Done, Prefilled, Started
from muster.sampling import Message, SamplingParams
from muster.spec import ModelWorkload
from muster.state import Broken, Deleting, Running, State


class ChatSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What every question of a chat is asked with. `template` are variables of the chat template."""

    model: str
    system: str = ""
    sampling: SamplingParams = SamplingParams()
    template: dict[str, Any] = {}
    silence_seconds: float = 600.0  #: without any piece of an answer


class Conversation:
    """The turns so far. A question and its answer enter together: what failed can be asked again as it was."""

    def __init__(self, settings: ChatSettings) -> None:
        self.settings = settings
        self.system = settings.system
        self.turns: list[Message] = []
        self.prompt_tokens = 0
        self.completion_tokens = 0

    def request(self, question: str) -> Generate:
        """What to ask the coordinator."""
        return Generate(
            instance=self.settings.model,
            messages=(*self._head(), *self.turns, Message(role="user", content=question)),
            sampling=self.settings.sampling,
            template=self.settings.template,
        )

    def keep(self, question: str, answer: Answer) -> None:
        """The answer came, whole or up to where it was stopped."""
        self.turns.append(Message(role="user", content=question))
        self.turns.append(Message(role="assistant", content=answer.text))
        if answer.done is not None:
            self.prompt_tokens += answer.done.prompt_tokens
            self.completion_tokens += answer.done.completion_tokens

    def clear(self) -> None:
        """Forget the turns; the system prompt stays."""
        self.turns.clear()

    def as_json(self) -> bytes:
        """The messages as OpenAI's API takes them."""
        messages = [{"role": turn.role, "content": turn.content} for turn in (*self._head(), *self.turns)]
        return msgspec.json.format(msgspec.json.encode(messages), indent=2) + b"\n"

    def as_markdown(self) -> str:
        """The messages for a person."""
        return "\n".join(f"## {turn.role}\n\n{turn.content}\n" for turn in (*self._head(), *self.turns))

    def _head(self) -> tuple[Message, ...]:
        return (Message(role="system", content=self.system),) if self.system else ()


class Answer(msgspec.Struct, kw_only=True):
    """An answer as it comes; `done` is its end, `None` while there is none."""

    text: str = ""
    reasoning: str = ""
    started: Started | None = None
    done: Done | None = None
    began_seconds: float = msgspec.field(default_factory=time.monotonic)

    def sentence(self) -> str:
        """The numbers of a whole answer, for a person."""
        done = self.done
        if done is None:
            return ""
        after_first = max(done.seconds - done.seconds_to_first_token, 1e-9)
        cached = done.cached_tokens or (self.started.cached_tokens if self.started is not None else 0)
        parts = [
            f"{done.completion_tokens} tokens ({done.reason})",
            f"the first after {done.seconds_to_first_token:.2f} s",
            f"{(done.completion_tokens - 1) / after_first:.0f} tokens/s" if done.completion_tokens > 1 else "",
            f"prompt {done.prompt_tokens} tokens" + (f", {cached} of them cached" if cached else ""),
        ]
        return ", ".join(filter(None, parts))


class Screen(Protocol):
    """Shows an answer as it comes."""

    def reading(self, done: int, total: int) -> None:
        """So many tokens of the prompt are read."""
        ...

    def reasoning(self, piece: str) -> None:
        """What the model thinks to itself."""
        ...

    def text(self, piece: str) -> None:
        """What it says."""
        ...

    def end(self) -> None:
        """No more of this answer comes."""
        ...


async def ask(client: ControlClient, request: Generate, answer: Answer, screen: Screen, silence_seconds: float) -> None:
    """Stream one answer into `answer`, which has what came so far also when this is cancelled.

    Raises:
        RefusedError: the coordinator or rank 0 refused it, or the instance ended meanwhile.
        UnreachableError: nothing came for so long, or the coordinator is gone and does not come back.
        AnswerLostError: the coordinator ended after the first token.
        ProtocolError: something else came.
    """

    def take(piece: Started | Prefilled | Chunk) -> None:
        match piece:
            case Started():
                answer.started = piece
            case Prefilled(done=done, total=total):
                screen.reading(done, total)
            case Chunk(text=text, reasoning=reasoning):
                answer.text += text
                answer.reasoning += reasoning
                if reasoning:
                    screen.reasoning(reasoning)
                if text:
                    screen.text(text)

    try:
        answer.done = await generation(client, request, silence_seconds, take)
    finally:
        screen.end()


# --- which model --------------------------------------------------------------------------------------------


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A model to chat with. `ready` unless its first answer has to wait."""

    model: str
    ready: bool


def choices(state: State) -> list[Choice]:
    """The models that are served or will be, by name."""
    ready: dict[str, bool] = {}
    for instance in state.instances.values():
        over = isinstance(instance.status, Deleting) or (
            isinstance(instance.status, Broken) and instance.status.retry_at_ns is None
        )
        if isinstance(instance.spec.workload, ModelWorkload) and not over:
            name = instance.spec.workload.public_name
            ready[name] = ready.get(name, False) or isinstance(instance.status, Running)
    return [Choice(model=name, ready=ready[name]) for name in sorted(ready)]


def chosen(state: State, wanted: str) -> Choice:
    """The model, or the instance, of this name.

    Raises:
        RequestError: there is none; the message names those that there are.
    """
    known = choices(state)
    for choice in known:
        if choice.model == wanted:
            return choice
    models = [one for one in state.instances.values() if isinstance(one.spec.workload, ModelWorkload)]
    found = [one for one in models if wanted in (one.id, one.spec.name)]
    found = found or [one for one in models if wanted and one.id.startswith(wanted)]
    if len(found) == 1:
        return Choice(model=found[0].id, ready=isinstance(found[0].status, Running))
    if found:
        several = ", ".join(sorted(one.id for one in found))
        raise RequestError(f"{wanted!r} may be any of {several}", remedy="Give more of the id.")
    names = ", ".join(choice.model for choice in known) or "none"
    raise RequestError(f"no instance serves a model {wanted!r}; the models are: {names}", remedy="See: muster ps")


def no_models() -> RequestError:
    """Nothing is there to chat with."""
    return RequestError(
        "no model is served",
        remedy="Make one with `muster create MODEL --wait`; `muster serve MODEL` starts everything by itself.",
    )
