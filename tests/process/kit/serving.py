"""The demo model behind the HTTP API of a real cluster, and how clients of each dialect spell its conversations."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import anthropic
import httpx
import msgspec
import ollama
import openai

from kit.client import Client
from kit.cluster import Stage, stage
from kit.specs import DEMO_MODEL
from kit.waiting import DEADLINE_SECONDS, until
from muster.demo.answers import Conversation
from muster.sampling import Message, Tool
from muster.spec import InstanceId, InstanceSpec, ModelWorkload

#: The id of the token that ends the demo model's answers. Forbidden, they go on to their limit.
END_TOKEN = 258
#: What the demo model can hold, prompt and answer together.
CONTEXT_TOKENS = 2048
#: With this bias an answer ends only at its limit.
ENDLESS: dict[str, int] = {str(END_TOKEN): -1000}


class Serving:
    """A cluster with instances of the demo model that clients reach as "one" (one rank) and "two" (two ranks)."""

    def __init__(self, own: Stage, clients: contextlib.ExitStack) -> None:
        self.stage = own
        self.url = own.cluster.http
        self.instances: dict[str, InstanceId] = {}
        self._clients = clients
        self.http = clients.enter_context(httpx.Client(base_url=self.url, timeout=DEADLINE_SECONDS))
        self.openai = clients.enter_context(
            openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_SECONDS)
        )

    def anthropic(self) -> anthropic.Anthropic:
        """A client of Anthropic's own; closed with the cluster."""
        return self._clients.enter_context(
            anthropic.Anthropic(base_url=self.url, api_key="none", max_retries=0, timeout=DEADLINE_SECONDS)
        )

    def ollama(self) -> ollama.Client:
        """A client of Ollama's own; closed with the cluster."""
        client = ollama.Client(host=self.url, timeout=DEADLINE_SECONDS)
        self._clients.callback(client.close)
        return client

    def create(self, name: str, ranks: int, spec: dict[str, Any] | None = None, **options: Any) -> InstanceId:
        """An instance that clients call `name`, not ready yet; `spec` are further fields of `InstanceSpec`."""
        options.setdefault("sharding", "pipeline")
        workload = ModelWorkload(model=str(DEMO_MODEL), served_name=name, **options)
        self.instances[name] = self.client.create(InstanceSpec(workload=workload, ranks=ranks, **(spec or {})))
        return self.instances[name]

    @property
    def client(self) -> Client:
        """The client of the control socket, that sees every event."""
        return self.stage.client

    # --- what clients and operators see -------------------------------------------------------------------

    def running(self, model: str) -> tuple[int, int]:
        """How many requests of a model run, and how many wait, as its cluster says."""
        listed = self.http.get("/api/models").raise_for_status().json()
        models = listed if isinstance(listed, list) else listed["models"]
        (found,) = [each for each in models if each["name"] == model]
        return found["running_requests"], found["waiting_requests"]

    def wait_free(self, model: str, seconds: float = DEADLINE_SECONDS) -> None:
        """Until no request of a model is left."""
        until(lambda: self.running(model) == (0, 0), f"no request of {model} left", seconds)

    def wait_running(self, model: str, count: int = 1) -> None:
        """Until so many requests of a model run."""
        until(lambda: self.running(model)[0] >= count, f"{count} running requests of {model}")

    def ask(self, model: str, conversation: Conversation, **options: Any) -> str:
        """The text that a plain chat is answered with."""
        reply = self.openai.chat.completions.create(
            model=model, messages=openai_messages(conversation.prompt), **options
        )
        return reply.choices[0].message.content or ""


@contextlib.contextmanager
def serving(
    directory: Path, models: Sequence[tuple[str, int]] = (("one", 1), ("two", 2)), **options: Any
) -> Generator[Serving]:
    """A cluster of two nodes that serves the demo model under these names, on so many ranks each; all are ready.

    The options are of `ModelWorkload`.
    """
    with stage(directory) as own, contextlib.ExitStack() as clients:
        made = Serving(own, clients)
        for name, ranks in models:
            made.create(name, ranks, **options)
        for instance in made.instances.values():
            own.client.ready(instance)
        yield made


# --- conversations as clients spell them --------------------------------------------------------------------


def openai_messages(messages: Sequence[Message]) -> list[Any]:
    """The turns, as OpenAI's clients send them."""
    return [_openai_message(message) for message in messages]


def _openai_message(message: Message) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.role == "tool":
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["content"] = message.content or None
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return turn


def openai_tools(tools: Sequence[Tool]) -> list[Any]:
    """The tools, as OpenAI's and Ollama's clients send them."""
    return [{"type": "function", "function": msgspec.to_builtins(tool)} for tool in tools]


def anthropic_messages(messages: Sequence[Message]) -> list[Any]:
    """The turns, as Anthropic's clients send them: what tools answered is the user's."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        if message.role == "tool":
            block = {"type": "tool_result", "tool_use_id": message.tool_call_id, "content": message.content}
            if turns[-1]["role"] == "user":
                turns[-1]["content"].append(block)
            else:
                turns.append({"role": "user", "content": [block]})
            continue
        blocks: list[dict[str, Any]] = [{"type": "text", "text": message.content}] if message.content else []
        blocks += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": msgspec.json.decode(call.arguments)}
            for call in message.tool_calls
        ]
        turns.append({"role": message.role, "content": blocks})
    return turns


def anthropic_tools(tools: Sequence[Tool]) -> list[Any]:
    """The tools, as Anthropic's clients send them."""
    return [{"name": tool.name, "description": tool.description, "input_schema": tool.parameters} for tool in tools]


def ollama_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The turns, as Ollama's clients send them: arguments are objects, and what tools answer comes in order."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        turn: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.tool_calls:
            turn["tool_calls"] = [
                {"function": {"name": call.name, "arguments": msgspec.json.decode(call.arguments)}}
                for call in message.tool_calls
            ]
        if message.role == "tool":
            turn["tool_name"] = next(
                call.name for made in messages for call in made.tool_calls if call.id == message.tool_call_id
            )
        turns.append(turn)
    return turns


def prompt_tokens(messages: Sequence[Message]) -> int:
    """Tokens of a plain chat's prompt: one per byte, and marks around each turn and before the answer."""
    return sum(len(message.content.encode()) + 2 for message in messages) + 1


def calls_of(conversation: Conversation) -> list[tuple[str, Any]]:
    """Names and decoded arguments of the calls that the model answers with."""
    return [(call.name, msgspec.json.decode(call.arguments)) for call in conversation.tool_calls]


def token_ids(text: str) -> list[int]:
    """Token ids of ASCII text: the alphabet of the byte-level tokenizer begins with "!", and a space is its 221st."""
    return [220 if letter == " " else ord(letter) - ord("!") for letter in text]
