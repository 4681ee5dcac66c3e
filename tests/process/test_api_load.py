"""Many clients at once, slow ones and such as leave: each gets its own answer, and the model is free again."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest
from kit.serving import CONTEXT_TOKENS, ENDLESS, Serving, openai_messages, serving

from muster.demo.answers import CONVERSATIONS

pytestmark = [pytest.mark.process, pytest.mark.mlx, pytest.mark.timeout(90)]

PLAIN = CONVERSATIONS[0]
#: Long enough that its steps can be watched and cut: 64 tokens a step.
CHUNK_TOKENS = 64


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    models = (("one", 1), ("two", 2))
    with serving(tmp_path_factory.mktemp("load"), models, prefill_chunk_tokens=CHUNK_TOKENS) as made:
        yield made


@pytest.fixture(params=["one", "two"])
def model(request: pytest.FixtureRequest) -> str:
    return request.param


def endless(model: str, **options: Any) -> dict[str, Any]:
    """A body whose answer goes on to its limit."""
    messages = openai_messages(PLAIN.prompt)
    return {"model": model, "messages": messages, "stream": True, "max_tokens": 1900, "logit_bias": ENDLESS, **options}


def long_prompt(salt: str, tokens: int = CONTEXT_TOKENS - 100) -> str:
    """A prompt that no cache knows."""
    return (salt * tokens)[:tokens]


def answers_at_once(served: Serving, model: str) -> None:
    """The model is free for the next request, and no earlier one is left."""
    served.wait_free(model, 10)
    assert served.ask(model, PLAIN) == PLAIN.answer


# --- many ---------------------------------------------------------------------------------------------------


def mixed_body(number: int) -> dict[str, Any]:
    """Long and short prompts, answers of 1 to 96 tokens, greedy and drawn with a seed."""
    piece = ("rank ", "✓ → ", "muster? ", "x")[number % 4]
    body: dict[str, Any] = {"prompt": f"{number} " + piece * (1 + number**2 % 60), "max_tokens": 1 + number * 7 % 96}
    if number % 3 == 0:
        body |= {"temperature": 2.0, "seed": number}
    if number % 2:
        body |= {"logit_bias": ENDLESS}
    return body


def ask_mixed(served: Serving, model: str, number: int) -> tuple[str, int]:
    """The text, and how many tokens it took."""
    reply = served.http.post("/v1/completions", json={"model": model, **mixed_body(number)}).raise_for_status().json()
    return reply["choices"][0]["text"], reply["usage"]["completion_tokens"]


@pytest.fixture(scope="module")
def alone(served: Serving) -> list[tuple[str, int]]:
    """What each is answered while nothing else runs, on one rank."""
    return [ask_mixed(served, "one", number) for number in range(32)]


def test_requests_of_very_different_lengths_answer_as_they_do_alone(
    served: Serving, alone: list[tuple[str, int]], model: str
) -> None:
    with ThreadPoolExecutor(len(alone)) as pool:
        together = list(pool.map(partial(ask_mixed, served, model), range(len(alone))))
    assert together == alone
    served.wait_free(model)


def test_short_request_does_not_wait_for_a_long_one(served: Serving, model: str) -> None:
    with served.http.stream("POST", "/v1/chat/completions", json=endless(model)) as reply:
        lines = reply.iter_lines()
        next(lines)
        assert served.ask(model, PLAIN) == PLAIN.answer
        assert served.running(model)[0] == 1  # it goes on
    answers_at_once(served, model)


def test_second_turn_of_a_chat_reuses_the_first(served: Serving, model: str) -> None:
    question = {"role": "user", "content": "Tell me. " * 40 + model}
    first = served.openai.chat.completions.create(model=model, messages=[question], max_tokens=20)  # type: ignore[list-item]
    assert first.usage is not None
    said = {"role": "assistant", "content": first.choices[0].message.content}
    turns: Any = [question, said, {"role": "user", "content": "And then?"}]
    second = served.openai.chat.completions.create(model=model, messages=turns, max_tokens=20)
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens or 0
    assert first.usage.prompt_tokens - 8 <= cached < second.usage.prompt_tokens
    # What the cache held changes no answer.
    again = served.openai.chat.completions.create(model=model, messages=turns, max_tokens=20)
    assert again.choices[0].message.content == second.choices[0].message.content


# --- slow readers, and clients that leave -------------------------------------------------------------------


def test_slow_reader_gets_everything_and_holds_nobody_up(served: Serving) -> None:
    # With alternatives to every token, the answer is larger than what sockets hold.
    body = endless("one", max_tokens=300, logprobs=True, top_logprobs=20)
    with _raw_post(served, body) as connection:
        served.wait_running("one")
        served.wait_free("one")  # the whole answer was made while nothing of it was read
        assert served.ask("one", PLAIN) == PLAIN.answer
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
        received = b""
        while got := connection.recv(2**16):
            received += got
    events = [json.loads(line[6:]) for line in received.splitlines() if line.startswith(b"data: {")]
    choices = [event["choices"][0] for event in events]
    tokens = [token["token"] for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]]
    whole = served.http.post("/v1/chat/completions", json=body | {"stream": False}).json()["choices"][0]
    assert tokens == [token["token"] for token in whole["logprobs"]["content"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == whole["message"]["content"]


def test_client_that_leaves_in_mid_answer_frees_the_model(served: Serving, model: str) -> None:
    for streamed in (True, False):
        connection = _raw_post(served, endless(model, stream=streamed))
        served.wait_running(model)
        if streamed:
            assert connection.recv(4096)
        connection.close()
        answers_at_once(served, model)


def test_client_that_leaves_during_a_long_prefill_frees_the_model(served: Serving, model: str) -> None:
    body = {"model": model, "prompt": long_prompt(f"{model} prefill "), "max_tokens": 90, "stream": True}
    connection = _raw_post(served, body | {"logit_bias": ENDLESS}, "/v1/completions")
    served.wait_running(model)
    connection.close()
    answers_at_once(served, model)


def test_client_that_leaves_before_its_request_was_begun_frees_the_model(served: Serving, model: str) -> None:
    for number in range(4):
        _raw_post(served, endless(model, seed=number)).close()
    answers_at_once(served, model)


def test_clients_that_leave_a_full_batch_leave_the_others_their_answers(served: Serving, model: str) -> None:
    leavers = [_raw_post(served, endless(model)) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        staying = [pool.submit(partial(served.ask, model), each) for each in CONVERSATIONS[:8]]
        for connection in leavers:
            connection.close()
        assert [each.result() for each in staying] == [each.answer for each in CONVERSATIONS[:8]]
    answers_at_once(served, model)


def _raw_post(served: Serving, body: dict[str, Any], path: str = "/v1/chat/completions") -> socket.socket:
    """A request on a bare connection with a small window, so that nothing is read unless the test reads it."""
    url = httpx.URL(served.url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.settimeout(20)
    connection.connect((url.host, url.port or 80))
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {url.host}\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}connection: close\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)
    return connection
