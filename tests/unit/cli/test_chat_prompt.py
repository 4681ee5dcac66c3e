"""Keys of the line editor, typed into a pipe instead of a terminal."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import anyio
import pytest
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from muster.cli.chat_prompt import LineEditor

CTRL_C, CTRL_D, ALT_ENTER = "\x03", "\x04", "\x1b\r"


@pytest.fixture
def keys() -> Generator[PipeInput]:
    with create_pipe_input() as made:
        yield made


def typed(keys: PipeInput, text: str, directory: Path) -> str:
    async def run() -> str:
        keys.send_text(text)
        with anyio.fail_after(10):
            return await LineEditor(directory / "history", input=keys, output=DummyOutput()).question()

    return anyio.run(run)


@pytest.mark.parametrize(
    ("pressed", "question"),
    [
        ("hello\r", "hello"),
        ("one" + ALT_ENTER + "two\r", "one\ntwo"),
        ("one\\\rtwo\r", "one\ntwo"),
        ("a\\b\r", "a\\b"),
        ("\x1b[200~one\ntwo\x1b[201~\r", "one\ntwo"),
        ("wrong" + CTRL_C + "right\r", "right"),
    ],
)
def test_keys_make_a_question(keys: PipeInput, tmp_path: Path, pressed: str, question: str) -> None:
    assert typed(keys, pressed, tmp_path) == question


def test_a_backslash_continues_only_at_the_end(keys: PipeInput, tmp_path: Path) -> None:
    assert typed(keys, "one\\" + "\x01" + "\r", tmp_path) == "one\\"  # the cursor is at the beginning


@pytest.mark.parametrize(("key", "error"), [(CTRL_D, EOFError), (CTRL_C, KeyboardInterrupt)])
def test_keys_that_leave(keys: PipeInput, tmp_path: Path, key: str, error: type[BaseException]) -> None:
    with pytest.raises(error):
        typed(keys, key, tmp_path)


def test_questions_are_found_again_with_all_their_lines(keys: PipeInput, tmp_path: Path) -> None:
    assert typed(keys, "one" + ALT_ENTER + "two\r", tmp_path) == "one\ntwo"
    assert typed(keys, "\x1b[A" + "\r", tmp_path) == "one\ntwo"
