"""Editing a question: Emacs keys, history, several lines."""

from __future__ import annotations

from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.filters import is_searching
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output

_PROMPT = "> "
_CONTINUATION = "… "


class LineEditor:
    """Asks on the terminal; `input` and `output` are others in tests."""

    def __init__(self, history: Path, *, input: Input | None = None, output: Output | None = None) -> None:
        self._questions: PromptSession[str] = PromptSession(
            history=FileHistory(str(history)),
            key_bindings=_bindings(),
            multiline=True,
            prompt_continuation=lambda width, line, wrapped: "" if wrapped else _CONTINUATION,
            input=input,
            output=output,
        )
        self._others: PromptSession[str] = PromptSession(input=input, output=output)

    async def question(self) -> str:
        """The next question; see `muster.cli.chat_terminal.Editor`."""
        # The signal itself is taken elsewhere: while a line is edited, Ctrl-C is a key.
        return await self._questions.prompt_async(FormattedText([("bold", _PROMPT)]), handle_sigint=False)

    async def answer_to(self, asked: str) -> str:
        """A line that is not kept in the history."""
        return await self._others.prompt_async(asked, handle_sigint=False)


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter", filter=~is_searching)
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if ends_open(buffer):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @bindings.add("c-c", filter=~is_searching)
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.text:
            buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    return bindings


def ends_open(buffer: Buffer) -> bool:
    """Whether the cursor is behind a backslash that ends the text: another line follows."""
    return buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\")
