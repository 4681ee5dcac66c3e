"""Plain completions, OpenAI's older endpoint."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from fake_backend import MODEL, answer, done, refused, started
from openai_kit import Kit, asking, events, refusal

from muster.api.openai_completions import DEFAULT_COMPLETION_TOKENS
from muster.protocol import Generate
from muster.replies import AnyPiece, Chunk, Prefilled, Started
from muster.sampling import Alternative, SamplingParams, TokenLogprob

LOGPROBS = (
    TokenLogprob(token=1, text="\ufffd", data=b"\xc3", logprob=-0.5, top=(Alternative(4, "a", -1.5),)),
    TokenLogprob(token=2, text="\ufffd", data=b"\xa9", logprob=-0.25, top=(Alternative(2, "\ufffd", -0.25),)),
    TokenLogprob(token=3, text=" x", data=b" x", logprob=-0.125, top=()),
    TokenLogprob(token=3, text="!", data=b"!", logprob=-0.125, top=()),
)


def test_a_completion_with_its_usage() -> None:
    with asking(answer("Good", " day.")) as kit:
        reply = kit.client.completions.create(model=MODEL, prompt="Say hello.")
    assert (reply.object, reply.model) == ("text_completion", MODEL)
    assert reply.id.startswith("cmpl-")
    (choice,) = reply.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, "Good day.", "stop", None)
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (7, 2, 9)
    assert kit.asked == Generate(
        instance=MODEL, prompt="Say hello.", sampling=SamplingParams(max_tokens=DEFAULT_COMPLETION_TOKENS)
    )


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [(1, 2)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
    ],
)
def test_each_form_of_a_prompt(prompt: object, prompts: list[object]) -> None:
    with asking() as kit:
        assert kit.complete(prompt=prompt).status_code == 200
    assert [request.prompt for request in kit.backend.requests] == prompts


def test_answers_to_several_prompts_count_each_prompt_once() -> None:
    def script(request: Generate) -> list[AnyPiece]:
        return answer(f"{request.prompt}{request.sampling.seed}")

    with asking(script) as kit:
        reply = kit.client.completions.create(model=MODEL, prompt=["a", "b"], n=2, best_of=2, seed=3)
    assert [choice.text for choice in reply.choices] == ["a3", "a4", "b3", "b4"]
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (14, 4)


def test_echo_of_a_text_and_of_ids() -> None:
    with asking(lambda _: [Started(prompt_tokens=2, prompt="ids"), Chunk(text="!"), done()]) as kit:
        texts = [kit.complete(prompt=prompt, echo=True).json()["choices"][0]["text"] for prompt in ("Hi", [1, 2])]
        streamed = events(kit.complete(prompt=[1, 2], echo=True, stream=True))
    assert texts == ["Hi!", "ids!"]
    assert [chunk["choices"][0]["text"] for chunk in streamed] == ["ids", "!", ""]


@pytest.mark.parametrize(("echo", "text"), [(True, "Hi"), (False, ""), (None, "")])
def test_no_tokens_at_all(echo: bool | None, text: str) -> None:
    with asking(answer(reason="length")) as kit:
        reply = kit.complete(max_tokens=0, echo=echo).json()
    assert kit.asked.sampling.max_tokens == 0
    assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == (text, "length")
    assert reply["usage"]["completion_tokens"] == 0


def test_one_token() -> None:
    with asking(answer("x", reason="length")) as kit:
        reply = kit.complete(max_tokens=1).json()
    assert kit.asked.sampling.max_tokens == 1
    assert reply["choices"][0]["finish_reason"] == "length"


def test_log_probabilities_in_the_older_form() -> None:
    with asking([started(), Chunk(text="é x!", logprobs=LOGPROBS), done()]) as kit:
        reply = kit.client.completions.create(model=MODEL, prompt="Hi", logprobs=1)
        plain = kit.complete(logprobs=0).json()["choices"][0]["logprobs"]
    assert [request.sampling.top_logprobs for request in kit.backend.requests] == [1, 0]
    assert all(request.sampling.logprobs for request in kit.backend.requests)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["\ufffd", "\ufffd", " x", "!"]
    assert logprobs.token_logprobs == [-0.5, -0.25, -0.125, -0.125]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"a": -1.5, "\ufffd": -0.5}
    assert logprobs.text_offset == [0, 0, 1, 3]
    assert plain["top_logprobs"] is None


def test_offsets_go_on_from_one_event_to_the_next() -> None:
    pieces = [
        Chunk(logprobs=LOGPROBS[:1]),
        Chunk(text="é x", logprobs=LOGPROBS[1:3]),
        Chunk(text="!", logprobs=LOGPROBS[3:]),
    ]
    with asking([started(), *pieces, done()]) as kit:
        chunks = events(kit.complete(logprobs=1, stream=True))
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks[:-1]] == [[0], [0, 1], [3]]


def test_a_stream_with_its_usage() -> None:
    script = [started(), Prefilled(done=1, total=7), Chunk(tokens=(1,)), Chunk(text="Hi"), done("length")]
    with asking(script) as kit:
        response = kit.complete(stream=True, stream_options={"include_usage": True})
        texts = [
            chunk.choices[0].text for chunk in kit.client.completions.create(model=MODEL, prompt="Hi", stream=True)
        ]
    chunks = events(response)
    assert ": prefill 1/7" in response.text
    assert response.text.endswith("data: [DONE]\n\n")
    assert [chunk["choices"][0] for chunk in chunks[:-1]] == [
        {"index": 0, "text": "Hi", "logprobs": None, "finish_reason": None},
        {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"},
    ]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None, None]
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["total_tokens"]) == ([], 9)
    assert texts == ["Hi", ""]


def test_several_streamed_answers() -> None:
    with asking(lambda request: answer(str(request.prompt), str(request.sampling.seed))) as kit:
        chunks = events(kit.complete(prompt=["a", "b"], n=2, seed=0, echo=True, stream=True))
    texts = [""] * 4
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["aa0", "aa1", "bb0", "bb1"]


def test_an_error_in_a_stream_reaches_the_client() -> None:
    script = [started(), Chunk(text="Hel"), refused("answer-lost", "rank 1 ended")]
    texts: list[str] = []
    with asking(script) as kit, pytest.raises(openai.APIError, match="rank 1 ended"):
        for chunk in kit.client.completions.create(model=MODEL, prompt="Hi", stream=True):
            texts.append(chunk.choices[0].text)
    assert texts == ["Hel"]


@pytest.fixture(scope="module")
def kit() -> Any:
    with asking() as kit:
        yield kit


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", ""),
        ({"prompt": None}, "prompt", ""),
        ({"prompt": ["a", 1]}, "prompt", "mixes"),
        ({"prompt": [[1], "a"]}, "prompt", "mixes"),
        ({"prompt": [-1]}, "prompt", "-1"),
        ({"prompt": [1.5]}, "prompt", ""),
        ({"prompt": ["x"] * 129}, "prompt", "128"),
        ({"suffix": "end"}, "suffix", "end of a prompt"),
        ({"best_of": 3}, "best_of", "n (1)"),
        ({"n": 2, "best_of": 1}, "best_of", "n (2)"),
        ({"echo": True, "logprobs": 1}, "echo", "logprobs"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"logprobs": True}, "logprobs", "int"),
        ({"messages": []}, "messages", "known"),
        ({"max_completion_tokens": 5}, "max_completion_tokens", "known"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_completion_is_refused(kit: Kit, fields: dict[str, object], field: str, words: str) -> None:
    named, message = refusal(kit.complete(**fields))
    assert named.startswith(field), message
    assert words in message
    assert kit.backend.requests == []


def test_what_changes_nothing_is_accepted(kit: Kit) -> None:
    assert kit.complete(suffix="", best_of=1, n=1, user="x", echo=False, logprobs=None).status_code == 200
    kit.backend.requests.clear()
