"""Anthropic's and Ollama's own clients, and curl, against the demo model on one rank and on two."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Any, cast

import anthropic
import ollama
import pytest
from kit.serving import (
    CONTEXT_TOKENS,
    ENDLESS,
    Serving,
    anthropic_messages,
    anthropic_tools,
    calls_of,
    ollama_messages,
    openai_tools,
    prompt_tokens,
    serving,
)

from muster.demo.answers import (
    CONVERSATIONS,
    JSON_CONVERSATIONS,
    REASONING_CONVERSATIONS,
    TOOL_CONVERSATIONS,
    TOOLS,
    Conversation,
)

pytestmark = [pytest.mark.process, pytest.mark.mlx, pytest.mark.timeout(90)]

ARROWS = next(each for each in CONVERSATIONS if "→" in each.answer)
PLAIN = CONVERSATIONS[0]
THOUGHT = REASONING_CONVERSATIONS[0]
#: Where two ranks could make no difference.
ONE = pytest.mark.parametrize("model", ["one"])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("dialects")) as made:
        yield made


@pytest.fixture(scope="module")
def claude(served: Serving) -> anthropic.Anthropic:
    return served.anthropic()


@pytest.fixture(scope="module")
def llama(served: Serving) -> ollama.Client:
    return served.ollama()


@pytest.fixture(params=["one", "two"])
def model(request: pytest.FixtureRequest) -> str:
    return request.param


def _question(conversation: Conversation) -> str:
    return conversation.prompt[-1].content


# --- Anthropic ----------------------------------------------------------------------------------------------


def message(client: anthropic.Anthropic, model: str, conversation: Conversation, **options: Any) -> Any:
    options = {"max_tokens": 200, **options}
    return client.messages.create(model=model, messages=anthropic_messages(conversation.prompt), **options)


def test_message_and_its_events(claude: anthropic.Anthropic, model: str) -> None:
    reply = message(claude, model, ARROWS, system="Be brief.")
    assert (reply.role, reply.stop_reason, reply.model) == ("assistant", "end_turn", model)
    assert [(block.type, block.text) for block in reply.content] == [("text", ARROWS.answer)]
    read = reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0)
    assert (read, reply.usage.output_tokens) == (prompt_tokens(ARROWS.prompt), len(ARROWS.answer.encode()) + 1)

    messages = anthropic_messages(ARROWS.prompt)
    with claude.messages.stream(model=model, max_tokens=200, messages=messages) as stream:
        kinds = [event.type for event in stream]
        final: Any = stream.get_final_message()
    plain = [kind for kind in kinds if kind not in ("ping", "text")]
    assert plain[:2] == ["message_start", "content_block_start"]
    assert plain[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(plain[2:-3]) == {"content_block_delta"}
    assert (final.content[0].text, final.stop_reason) == (ARROWS.answer, "end_turn")
    assert final.usage.output_tokens == reply.usage.output_tokens


def test_message_is_cut_by_its_limit_and_by_stop_sequences(claude: anthropic.Anthropic) -> None:
    cut = message(claude, "one", PLAIN, max_tokens=1)
    assert (cut.content[0].text, cut.stop_reason) == (PLAIN.answer[0], "max_tokens")
    stopped = message(claude, "one", ARROWS, stop_sequences=["nowhere", "→ con"])
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == (
        ARROWS.answer.split("→ con")[0],
        "stop_sequence",
        "→ con",
    )


#: One call; the answer to two; text and a call; none.
CALLERS = [TOOL_CONVERSATIONS[number] for number in (0, 3, 5, 6)]


@pytest.mark.parametrize("conversation", [*CALLERS, TOOL_CONVERSATIONS[2]], ids=_question)
def test_message_with_tools(claude: anthropic.Anthropic, conversation: Conversation) -> None:
    model = "two" if conversation is CALLERS[0] else "one"
    tools = anthropic_tools(TOOLS)
    whole = message(claude, model, conversation, tools=tools)
    messages = anthropic_messages(conversation.prompt)
    with claude.messages.stream(model=model, max_tokens=200, messages=messages, tools=tools) as stream:
        pieced = stream.get_final_message()
    for reply in (whole, pieced):
        uses = [block for block in reply.content if block.type == "tool_use"]
        assert [(use.name, use.input) for use in uses] == calls_of(conversation)
        assert "".join(block.text for block in reply.content if block.type == "text") == conversation.answer
        assert reply.stop_reason == ("tool_use" if conversation.tool_calls else "end_turn")


@ONE
def test_thinking_is_a_block_of_its_own(claude: anthropic.Anthropic, model: str) -> None:
    on = message(claude, model, THOUGHT, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2000)
    assert [block.type for block in on.content] == ["thinking", "text"]
    assert (on.content[0].thinking, on.content[1].text) == (THOUGHT.reasoning, THOUGHT.answer)
    off = message(claude, model, THOUGHT, thinking={"type": "disabled"})
    assert [(block.type, block.text) for block in off.content] == [("text", THOUGHT.answer)]
    messages = anthropic_messages(THOUGHT.prompt)
    with claude.messages.stream(model=model, max_tokens=200, messages=messages) as stream:
        pieced = stream.get_final_message()
    assert [block.type for block in pieced.content] == ["thinking", "text"]
    # A client sends the blocks back with its next turn.
    again = claude.messages.create(
        model=model,
        max_tokens=100,
        messages=[
            *messages,
            {"role": "assistant", "content": on.content},
            *anthropic_messages(PLAIN.prompt),
        ],
    )
    assert again.stop_reason in ("end_turn", "max_tokens")


def test_tokens_are_counted_without_an_answer(claude: anthropic.Anthropic, model: str) -> None:
    messages = anthropic_messages(PLAIN.prompt)
    assert claude.messages.count_tokens(model=model, messages=messages).input_tokens == prompt_tokens(PLAIN.prompt)
    with_tools = claude.messages.count_tokens(model=model, messages=messages, tools=anthropic_tools(TOOLS))
    names = ", ".join(tool.name for tool in TOOLS)
    assert with_tools.input_tokens == prompt_tokens(PLAIN.prompt) + len(names) + 2


def test_anthropics_models_are_listed(claude: anthropic.Anthropic) -> None:
    assert sorted(each.id for each in claude.models.list()) == ["one", "two"]


def test_anthropics_errors_are_exceptions_of_its_own(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="one"):
        message(claude, "nobody", PLAIN)
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        claude.messages.create(model="one", max_tokens=10, messages=[])
    with pytest.raises(anthropic.BadRequestError, match="image"):
        image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
        claude.messages.create(model="one", max_tokens=10, messages=[{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.BadRequestError, match=str(CONTEXT_TOKENS)):
        claude.messages.create(model="one", max_tokens=10, messages=[{"role": "user", "content": "x" * CONTEXT_TOKENS}])
    with pytest.raises(anthropic.APIStatusError) as caught:
        claude.messages.create(model="one", max_tokens=10, messages=[{"role": "user", "content": "x" * 10_600_000}])
    assert caught.value.status_code == 413
    assert cast("Any", caught.value.body)["error"]["type"] == "request_too_large"


# --- Ollama -------------------------------------------------------------------------------------------------


def test_ollamas_chat_whole_and_in_pieces(llama: ollama.Client, model: str) -> None:
    messages = ollama_messages(ARROWS.prompt)
    reply = llama.chat(model, messages)
    assert (reply.message.content, reply.done, reply.done_reason) == (ARROWS.answer, True, "stop")
    assert (reply.prompt_eval_count, reply.eval_count) == (
        prompt_tokens(ARROWS.prompt),
        len(ARROWS.answer.encode()) + 1,
    )
    parts = list(llama.chat(model, messages, stream=True))
    assert "".join(part.message.content or "" for part in parts) == ARROWS.answer
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    cut = llama.chat(model, messages, options={"num_predict": 3, "temperature": 0})
    assert (cut.message.content, cut.done_reason) == (ARROWS.answer[:3], "length")


@ONE
def test_ollamas_generate_and_raw(llama: ollama.Client, model: str) -> None:
    question = _question(PLAIN)
    assert llama.generate(model, question).response == PLAIN.answer
    parts = list(llama.generate(model, question, stream=True))
    assert "".join(part.response or "" for part in parts) == PLAIN.answer
    raw = llama.generate(model, f"<|user|>{question}<|end|><|assistant|>", raw=True)
    assert raw.response == PLAIN.answer


@pytest.mark.parametrize("conversation", CALLERS, ids=_question)
def test_ollamas_tools(llama: ollama.Client, conversation: Conversation) -> None:
    messages, tools = ollama_messages(conversation.prompt), openai_tools(TOOLS)
    parts = list(llama.chat("one", messages, tools=tools, stream=True))
    for replies in ([llama.chat("one", messages, tools=tools)], parts):
        calls = [call.function for reply in replies for call in reply.message.tool_calls or []]
        assert [(call.name, dict(call.arguments)) for call in calls] == calls_of(conversation)
        assert "".join(reply.message.content or "" for reply in replies) == conversation.answer


def test_ollama_thinks_unless_told_not_to(llama: ollama.Client) -> None:
    messages = ollama_messages(THOUGHT.prompt)
    on, off = (llama.chat("one", messages, think=think).message for think in (True, False))
    assert (on.thinking, on.content) == (THOUGHT.reasoning, THOUGHT.answer)
    assert (off.thinking or "", off.content) == ("", THOUGHT.answer)


def test_ollamas_format(llama: ollama.Client) -> None:
    conversation = JSON_CONVERSATIONS[0]
    schema = json.loads(conversation.json_schema)
    by_heart = llama.chat("one", ollama_messages(conversation.prompt), format=schema)
    assert json.loads(by_heart.message.content or "") == json.loads(conversation.answer)
    bound = llama.chat("one", ollama_messages(PLAIN.prompt), format={"enum": ["yes", "no"]})
    assert json.loads(bound.message.content or "") in ("yes", "no")


def test_ollamas_list_names_models_and_its_errors_are_its_own(llama: ollama.Client) -> None:
    assert sorted(each.model or "" for each in llama.list().models) == ["one", "two"]
    with pytest.raises(ollama.ResponseError, match="one") as caught:
        llama.chat("nobody", ollama_messages(PLAIN.prompt))
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="num_ctx") as caught:
        llama.chat("one", ollama_messages(PLAIN.prompt), options={"num_ctx": 4096})
    assert caught.value.status_code == 400


# --- curl ---------------------------------------------------------------------------------------------------


@pytest.fixture
def curl() -> str:
    found = shutil.which("curl")
    if found is None:
        pytest.skip("there is no curl here: apt-get install curl")
    return found


def test_curl_sees_events_as_they_come(curl: str, served: Serving, model: str) -> None:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": _question(PLAIN)}],
        "stream": True,
        "max_tokens": 1000,
        "logit_bias": ENDLESS,
    }
    command = [curl, "-sN", f"{served.url}/v1/chat/completions", "-H", "content-type: application/json"]
    with subprocess.Popen([*command, "-d", json.dumps(body)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines = (line for line in process.stdout if line.startswith(b"data: {"))
        text = ""
        for _ in range(5):
            delta = json.loads(next(lines).removeprefix(b"data: "))["choices"][0]["delta"]
            text += delta.get("content") or ""
        assert text
        assert (PLAIN.answer + text).startswith(text[: len(PLAIN.answer)])
        assert process.poll() is None  # the answer goes on
        process.terminate()
    served.wait_free(model)


def test_curl_reads_a_whole_answer_and_an_error(curl: str, served: Serving) -> None:
    def asked(*options: str) -> tuple[int, Any]:
        found = subprocess.run(
            [curl, "-sN", "-w", "\\n%{http_code}", *options], capture_output=True, text=True, timeout=30, check=True
        )
        content, _, status = found.stdout.rpartition("\n")
        return int(status), json.loads(content)

    body = json.dumps({"model": "one", "messages": [{"role": "user", "content": _question(PLAIN)}]})
    headers = ("-H", "content-type: application/json")
    status, reply = asked(f"{served.url}/v1/chat/completions", *headers, "-d", body)
    assert (status, reply["choices"][0]["message"]["content"]) == (200, PLAIN.answer)
    status, reply = asked(f"{served.url}/v1/nowhere")
    assert (status, "error" in reply) == (404, True)
    status, _ = asked(f"{served.url}/health")
    assert status == 200


def test_ready_comes_from_a_token_and_not_from_a_constant(served: Serving) -> None:
    begin = time.monotonic()
    reply = served.http.get("/ready", params={"model": "two"})
    assert reply.status_code == 200, reply.text
    assert time.monotonic() - begin < 5
    assert served.http.get("/ready", params={"model": "nobody"}).status_code in (404, 503)
