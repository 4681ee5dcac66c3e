"""What `muster generate` prints of an answer, and what `muster delete` asks for."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import anyio
import pytest
from cluster_states import instance
from typer.testing import CliRunner

from muster.cli.app import app
from muster.cli.client import View
from muster.protocol import AnyRequest, Delete
from muster.replies import Accepted, AnyReply, Chunk, Done, Prefilled, Started
from muster.sampling import ToolCall
from muster.state import Running, State

CALL = ToolCall(id="1", name="look", arguments='{"at": "it"}')
DONE = Done(
    reason="tool_calls",
    prompt_tokens=9,
    completion_tokens=5,
    cached_tokens=4,
    seconds_to_first_token=0.1,
    seconds=0.2,
)
PIECES: tuple[AnyReply, ...] = (
    Started(prompt_tokens=9, cached_tokens=4),
    Prefilled(done=9, total=9),
    Chunk(reasoning="Well."),
    Chunk(tokens=(1,)),
    Chunk(text="I "),
    Chunk(text="look.", tool_calls=(CALL,)),
    DONE,
)


class Stream:
    """The replies to one call."""

    id = 7

    def __init__(self, replies: Iterable[AnyReply]) -> None:
        self._replies = replies

    async def __aenter__(self) -> AsyncIterator[AnyReply]:
        return self._all()

    async def __aexit__(self, *exception: object) -> None: ...

    async def _all(self) -> AsyncIterator[AnyReply]:
        for reply in self._replies:
            yield reply


class Client:
    """A coordinator that has one ready model and knows one answer."""

    def __init__(self) -> None:
        self.asked: list[AnyRequest] = []

    def stream(self, request: AnyRequest, *, timeout_seconds: float) -> Stream:
        del timeout_seconds
        self.asked.append(request)
        return Stream(PIECES)

    async def submit(self, request: AnyRequest, on_answer: object) -> int:
        del request, on_answer
        return 1

    async def ask(self, request: AnyRequest, timeout_seconds: float, kind: type[object]) -> AnyReply:
        del timeout_seconds, kind
        self.asked.append(request)
        assert isinstance(request, Delete)
        return Accepted(instance=instance(Running()).id, sequence=1)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    made = Client()

    def run(address: str, function: Callable[[Any], Awaitable[Any]]) -> Any:
        del address
        return anyio.run(function, made)

    async def view(client: Client) -> View:
        del client
        known = instance(Running())
        return View(state=State(instances={known.id: known}), beats=(), memory_bytes=0, log_bytes=0)

    monkeypatch.setattr("muster.cli.client.run", run)
    monkeypatch.setattr("muster.cli.client.view", view)
    return made


def test_the_text_goes_to_standard_output_and_the_thoughts_beside_it(client: Client) -> None:
    found = CliRunner().invoke(app, ["generate", "one", "hello"])
    assert found.exit_code == 0, found.output
    assert found.stdout == 'I look.\nlook({"at": "it"})\n'
    assert found.stderr == "Well."
    assert len(client.asked) == 1


def test_json_has_the_parts_of_the_answer_and_its_counts(client: Client) -> None:
    found = CliRunner().invoke(app, ["generate", "one", "hello", "--json"])
    assert json.loads(found.stdout) == {
        "text": "I look.",
        "reasoning": "Well.",
        "tool_calls": [{"name": "look", "arguments": '{"at": "it"}'}],
        "reason": "tool_calls",
        "prompt_tokens": 9,
        "cached_tokens": 4,
        "completion_tokens": 5,
        "seconds_to_first_token": 0.1,
        "seconds": 0.2,
    }
    assert found.stderr == ""
    assert client.asked


@pytest.mark.parametrize("now", [False, True])
def test_deleting_says_whether_answers_are_cut_off(client: Client, now: bool) -> None:
    name = instance(Running()).id
    found = CliRunner().invoke(app, ["delete", name, "--no-wait", *(["--now"] if now else [])])
    assert found.exit_code == 0, found.output
    assert client.asked == [Delete(instance=name, now=now)]
