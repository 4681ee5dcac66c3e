"""Log probabilities are the model's own, with the tokens' true bytes and the likeliest alternatives in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from chat_models import load_tokens_only, make_byte_level, make_sentencepiece

from muster.model.answer import Answer
from muster.model.load import LoadedModel
from muster.model.logprobs import token_logprob
from muster.model.request import prepare
from muster.model.tokens import token_texts
from muster.protocol import Generate
from muster.sampling import Message, SamplingParams


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory = tmp_path_factory.mktemp("tokens") / "m"
    make_byte_level(directory, markers=("<think>", "</think>", "<日Ġ>"))
    return load_tokens_only(directory)


def size(loaded: LoadedModel) -> int:
    assert loaded.vocabulary is not None
    return loaded.vocabulary


def logits_of(loaded: LoadedModel, *best: int) -> mx.array:
    """Logits `[1, vocabulary]` in which these tokens lead, in this order."""
    logits = mx.random.normal((1, size(loaded)), key=mx.random.key(1))
    for rank, token in enumerate(best):
        logits[0, token] = 20.0 - rank
    return logits


def normal(logits: mx.array) -> mx.array:
    return (logits - mx.logsumexp(logits, axis=-1, keepdims=True))[0]


def test_every_byte_has_its_byte_token(loaded: LoadedModel) -> None:
    texts = token_texts(loaded.tokenizer)
    assert {texts.of(token)[0] for token in range(256)} == {bytes((byte,)) for byte in range(256)}
    for token in loaded.tokenizer.encode("日", add_special_tokens=False):
        assert texts.of(token)[1] == "\ufffd"
    assert b"".join(texts.of(token)[0] for token in loaded.tokenizer.encode("a 日\n🙂")) == "a 日\n🙂".encode()


def test_added_tokens_are_their_text(loaded: LoadedModel) -> None:
    texts = token_texts(loaded.tokenizer)
    for text in ("<think>", "<日Ġ>", "<|end|>"):
        (token,) = loaded.tokenizer.encode(text, add_special_tokens=False)
        assert texts.of(token) == (text.encode(), text)


def test_ids_without_a_token_have_no_bytes(loaded: LoadedModel) -> None:
    assert token_texts(loaded.tokenizer).of(len(loaded.tokenizer) + 2) == (b"", "")


def test_sentencepiece_tokens(tmp_path: Path) -> None:
    make_sentencepiece(tmp_path / "m")
    tokenizer = load_tokens_only(tmp_path / "m").tokenizer
    texts = token_texts(tokenizer)
    ids: Any = tokenizer.convert_tokens_to_ids(["▁good", "<0xE6>", "日", "▁"])
    assert [texts.of(token)[0] for token in ids] == [b" good", b"\xe6", "日".encode(), b" "]


def test_other_tokenizers_are_asked_themselves(tmp_path: Path) -> None:
    make_sentencepiece(tmp_path / "m", plain_decoder=True)
    tokenizer = load_tokens_only(tmp_path / "m").tokenizer
    ids: Any = tokenizer.convert_tokens_to_ids(["▁good", "<0xE6>", "日"])
    assert [token_texts(tokenizer).of(token)[0] for token in ids] == [b" good", b"\xe6", "日".encode()]


def test_alternatives_come_best_first_and_may_leave_the_choice_out(loaded: LoadedModel) -> None:
    row = normal(logits_of(loaded, 73, 72, 74))
    one = token_logprob(80, row, 2, token_texts(loaded.tokenizer))
    assert [alternative.token for alternative in one.top] == [73, 72]
    assert one.logprob == pytest.approx(float(row[80].item()))  # pyright: ignore[reportArgumentType]
    assert one.top[0].logprob > one.top[1].logprob > one.logprob
    assert (one.token, one.data.decode()) == (80, one.text)


@pytest.mark.parametrize(("top", "count"), [(0, 0), (1, 1), (20, 20)])
def test_as_many_alternatives_as_asked_for(loaded: LoadedModel, top: int, count: int) -> None:
    row = normal(logits_of(loaded, 72))
    assert len(token_logprob(72, row, top, token_texts(loaded.tokenizer)).top) == count


def test_more_alternatives_than_tokens_are_all_of_them(loaded: LoadedModel) -> None:
    assert len(token_logprob(1, mx.array([-1.0, -2.0]), 20, token_texts(loaded.tokenizer)).top) == 2


def test_what_is_impossible_has_a_number_that_json_can_hold(loaded: LoadedModel) -> None:
    assert token_logprob(1, mx.array([0.0, -mx.inf]), 1, token_texts(loaded.tokenizer)).logprob == -9999.0


def answer(loaded: LoadedModel, **params: Any) -> Answer:
    sampling = SamplingParams(logprobs=True, **params)
    request = Generate(instance="m", messages=(Message(role="user", content="x"),), sampling=sampling)
    return Answer(loaded, prepare(loaded, request), sampling)


def test_an_answer_reports_its_tokens_but_not_the_end_token(loaded: LoadedModel) -> None:
    one = answer(loaded, top_logprobs=1)
    assert (one.needs_logprobs, one.processors) == (True, [])
    (token,) = loaded.tokenizer.encode("H")
    (end,) = loaded.tokenizer.eos_token_ids
    row = normal(logits_of(loaded, token))
    (entry,) = one.take(token, row, at_limit=False).logprobs
    assert (entry.token, entry.text, entry.data, len(entry.top)) == (token, "H", b"H", 1)
    assert one.take(end, row, at_limit=False).logprobs == ()


def test_only_the_content_s_tokens_are_reported(loaded: LoadedModel) -> None:
    one = answer(loaded)
    row = normal(logits_of(loaded))
    said = loaded.tokenizer.encode("a<think>b</think>c", add_special_tokens=False)
    reported = [one.take(token, row, at_limit=False).logprobs for token in said]
    assert [len(entries) for entries in reported] == [1, 0, 0, 0, 1]


@pytest.mark.parametrize(
    "params", [{"logit_bias": {72: -100.0}, "presence_penalty": 2.0}, {"presence_penalty": 2.0}, {}]
)
def test_biases_penalties_and_masks_do_not_show(loaded: LoadedModel, params: dict[str, Any]) -> None:
    """The batch runs a step ahead: a token is taken after the processors saw the next step's logits."""
    one = answer(loaded, top_logprobs=2, json_schema='{"type":"object"}', **params)
    first, second = logits_of(loaded, 72, 73), logits_of(loaded, 74)
    expected = normal(first), normal(second)
    (brace,) = loaded.tokenizer.encode("{")
    context = mx.array([72, 73])
    processed = first
    for process in one.processors:
        processed = process(context, processed)
    assert int(mx.argmax(processed).item()) == brace  # pyright: ignore[reportArgumentType]
    ahead = second
    for process in one.processors:
        ahead = process(mx.array([72, 73, brace]), ahead)
    mx.eval(processed, ahead)
    (entry,) = one.take(brace, normal(processed), at_limit=False).logprobs
    assert [alternative.token for alternative in entry.top] == [72, 73]
    assert entry.logprob == pytest.approx(float(expected[0][brace].item()), abs=1e-5)  # pyright: ignore[reportArgumentType]
    (quote,) = loaded.tokenizer.encode('"')
    (entry,) = one.take(quote, normal(ahead), at_limit=False).logprobs
    assert entry.logprob == pytest.approx(float(expected[1][quote].item()), abs=1e-5)  # pyright: ignore[reportArgumentType]


def test_without_logprobs_nothing_is_computed(loaded: LoadedModel) -> None:
    sampling = SamplingParams(logit_bias={1: 1.0})
    one = Answer(loaded, prepare(loaded, Generate(instance="m", prompt="x", sampling=sampling)), sampling)
    assert (one.needs_logprobs, len(one.processors)) == (False, 1)
    assert one.take(72, None, at_limit=False).logprobs == ()
