"""Tokens become text: whole characters, nothing of a stop string, no end token, and nothing lost at the end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from chat_models import load_tokens_only, make_byte_level, make_sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st

from muster.model.answer import Answer
from muster.model.load import LoadedModel
from muster.model.request import prepare
from muster.protocol import Generate
from muster.replies import Chunk
from muster.sampling import SamplingParams

MERGES = ("abc", "bc", "cab", "aa", "ba")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory = tmp_path_factory.mktemp("tokens") / "m"
    make_byte_level(directory, merges=MERGES)
    return load_tokens_only(directory)


def answer(loaded: LoadedModel, **params: object) -> Answer:
    sampling = SamplingParams(**params)  # pyright: ignore[reportArgumentType]
    return Answer(loaded, prepare(loaded, Generate(instance="m", prompt="x", sampling=sampling)), sampling)


def take_all(one: Answer, tokens: Sequence[int], *, limit: int = 1_000_000) -> list[Chunk]:
    chunks: list[Chunk] = []
    for token in tokens:
        chunks.append(one.take(token, None, at_limit=len(chunks) + 1 >= limit))
        if one.finish is not None:
            break
    return chunks


def text_of(chunks: Sequence[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def byte_tokens(loaded: LoadedModel, text: str | bytes) -> list[int]:
    """One token per byte."""
    data = text.encode() if isinstance(text, str) else text
    letters = dict(zip((bytes((byte,)) for byte in range(256)), _letter_ids(loaded), strict=True))
    return [letters[bytes((byte,))] for byte in data]


def _letter_ids(loaded: LoadedModel) -> list[int]:
    from muster.model.tokens import token_texts

    texts = token_texts(loaded.tokenizer)
    known = {texts.of(token)[0]: token for token in range(256)}
    return [known[bytes((byte,))] for byte in range(256)]


def first_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """What comes before the stop string that is complete first, and which it was."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


# --- ends ---------------------------------------------------------------------------------------------------


def test_an_end_token_ends_and_does_not_show(loaded: LoadedModel) -> None:
    (end,) = loaded.tokenizer.eos_token_ids
    one = answer(loaded)
    chunks = take_all(one, [*byte_tokens(loaded, "Hi."), end])
    assert (text_of(chunks), one.finish, one.stop, one.completion_tokens) == ("Hi.", "stop", None, 4)
    assert chunks[-1].tokens == ()
    assert [chunk.tokens for chunk in chunks[:-1]] == [(token,) for token in byte_tokens(loaded, "Hi.")]


def test_the_limit_ends_with_its_last_token(loaded: LoadedModel) -> None:
    one = answer(loaded)
    assert text_of(take_all(one, byte_tokens(loaded, "Hello"), limit=3)) == "Hel"
    assert (one.finish, one.completion_tokens) == ("length", 3)


def test_an_end_token_at_the_limit_is_a_stop(loaded: LoadedModel) -> None:
    (end,) = loaded.tokenizer.eos_token_ids
    one = answer(loaded)
    take_all(one, [end], limit=1)
    assert one.finish == "stop"


def test_nothing_is_taken_after_the_end(loaded: LoadedModel) -> None:
    one = answer(loaded)
    take_all(one, byte_tokens(loaded, "a"), limit=1)
    with pytest.raises(AssertionError):
        one.take(65, None, at_limit=False)


def test_ids_that_the_tokenizer_does_not_have_add_no_text(loaded: LoadedModel, tmp_path: Path) -> None:
    make_sentencepiece(tmp_path / "m")
    for model in (loaded, load_tokens_only(tmp_path / "m")):
        one = answer(model)
        chunk = one.take(len(model.tokenizer) + 3, None, at_limit=False)
        assert (chunk.text, one.finish) == ("", None)


# --- characters ---------------------------------------------------------------------------------------------


def test_a_character_over_several_tokens_comes_whole(loaded: LoadedModel) -> None:
    one = answer(loaded)
    chunks = take_all(one, byte_tokens(loaded, "a日é"))
    assert [chunk.text for chunk in chunks] == ["a", "", "", "日", "", "é"]


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_character_that_the_limit_cuts_does_not_come(loaded: LoadedModel, cut: int) -> None:
    data = "é日🙂".encode()
    one = answer(loaded)
    assert text_of(take_all(one, byte_tokens(loaded, data), limit=cut)) == data[:cut].decode("utf-8", "ignore")


def test_bytes_that_are_no_text_are_not_held_back_for_ever(loaded: LoadedModel) -> None:
    one = answer(loaded)
    chunks = take_all(one, byte_tokens(loaded, b"\xff" * 100 + b"ok"))
    assert chunks[31].text == "\ufffd" * 32
    assert text_of(chunks) == "\ufffd" * 100 + "ok"


def test_a_space_that_is_held_back_comes_at_the_end(loaded: LoadedModel) -> None:
    one = answer(loaded)
    chunks = take_all(one, byte_tokens(loaded, "a "), limit=2)
    assert [chunk.text for chunk in chunks] == ["a", " "]


def test_sentencepiece_byte_tokens_make_characters(tmp_path: Path) -> None:
    make_sentencepiece(tmp_path / "m")
    loaded = load_tokens_only(tmp_path / "m")
    ids = loaded.tokenizer.convert_tokens_to_ids(["▁good", "<0xE6>", "<0x97>", "<0xA5>", "day"])
    one = answer(loaded)
    assert [chunk.text for chunk in take_all(one, ids)] == [" good", "", "", "日", "day"]


# --- stop strings -------------------------------------------------------------------------------------------


def test_a_stop_string_over_several_tokens_never_shows_a_part(loaded: LoadedModel) -> None:
    one = answer(loaded, stop=("END", "never"))
    chunks = take_all(one, byte_tokens(loaded, "the ENd, the END and more"))
    assert text_of(chunks) == "the ENd, the "
    assert (one.finish, one.stop, one.completion_tokens) == ("stop", "END", 16)


def test_what_looked_like_a_stop_string_comes_at_the_end(loaded: LoadedModel) -> None:
    one = answer(loaded, stop=("END",))
    assert text_of(take_all(one, byte_tokens(loaded, "aEN"), limit=3)) == "aEN"
    (end,) = loaded.tokenizer.eos_token_ids
    one = answer(loaded, stop=("END",))
    assert text_of(take_all(one, [*byte_tokens(loaded, "aEN"), end])) == "aEN"
    assert one.stop is None


def test_a_stop_string_at_the_limit_is_a_stop(loaded: LoadedModel) -> None:
    one = answer(loaded, stop=("b",))
    take_all(one, byte_tokens(loaded, "ab"), limit=2)
    assert (one.finish, one.stop) == ("stop", "b")


def test_a_stop_string_in_the_middle_of_a_token_cuts_it(loaded: LoadedModel) -> None:
    one = answer(loaded, stop=("b",))
    abc = loaded.tokenizer.convert_tokens_to_ids("abc")
    assert text_of(take_all(one, [abc])) == "a"
    assert one.stop == "b"


pieces = st.lists(st.sampled_from([*MERGES, "a", "b", "c", "é", "日", "🙂"]), max_size=30)


@settings(deadline=None, max_examples=200)
@given(
    words=pieces,
    split=st.randoms(use_true_random=False),
    stops=st.lists(st.text("abcé日", min_size=1, max_size=4), max_size=4),
)
def test_any_tokens_and_stops_give_what_a_plain_search_gives(
    loaded: LoadedModel, words: list[str], split: object, stops: list[str]
) -> None:
    text = "".join(words)
    tokens: list[int] = []
    for word in words:
        known = loaded.tokenizer.convert_tokens_to_ids(word) if word in MERGES else None
        whole = known is not None and split.random() < 0.7  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
        tokens.extend([known] if whole else byte_tokens(loaded, word))  # pyright: ignore[reportArgumentType]
    one = answer(loaded, stop=tuple(stops))
    chunks = take_all(one, tokens, limit=len(tokens))
    expected, stop = first_stop(text, stops)
    assert (text_of(chunks), one.stop) == (expected, stop)
    if tokens:
        assert one.finish == ("stop" if stop is not None else "length")


@settings(deadline=None, max_examples=200)
@given(data=st.binary(max_size=25))
@example(data=b" a")
def test_any_bytes_give_what_decoding_them_at_once_gives(loaded: LoadedModel, data: bytes) -> None:
    # mlx-lm's detokenizer takes the byte 0 for a letter.
    data = data.replace(b"\0", b"")
    one = answer(loaded)
    chunks = take_all(one, byte_tokens(loaded, data), limit=len(data))
    assert text_of(chunks) == data.decode("utf-8", "replace").rstrip("\ufffd")
