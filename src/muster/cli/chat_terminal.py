"""`muster chat` on a terminal: line editing with history, answers as they come, and commands that begin with `/`."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import anyio
import anyio.abc
import msgspec

from muster import paths
from muster.bus import ControlClient, parse_endpoints
from muster.cli.chat import Answer, ChatSettings, Choice, Conversation, ask, choices, chosen, no_models
from muster.cli.chat_prompt import LineEditor
from muster.cli.client import view
from muster.cli.errors import InterruptedBySignalError, bare_errors, show_error
from muster.cli.reaching import reach
from muster.errors import MusterError
from muster.state import State

_LEAVE_HINT = "Ctrl-D leaves the chat."
_HELP = """\
Enter asks. Alt-Enter, or a backslash at the end of the line, begins another line; pasted lines stay together.
Ctrl-C stops an answer. Ctrl-D leaves.

/clear          forget the conversation; the system prompt stays
/system [TEXT]  show the system prompt, or set it (/system - removes it)
/save FILE      write the conversation to a new file: JSON for FILE.json, else Markdown
/tokens         what the conversation has cost so far
/help           this
/exit           leave
"""
#: A prompt that takes longer than this to read is worth a word about how far it is.
_READING_SECONDS = 1.0
_DIM, _PLAIN, _CLEAR_LINE = "\x1b[2m", "\x1b[0m", "\r\x1b[K"


class Editor(Protocol):
    """Where the person's lines come from."""

    async def question(self) -> str:
        """The next question.

        Raises:
            EOFError: they leave.
            KeyboardInterrupt: Ctrl-C, with nothing typed.
        """
        ...

    async def answer_to(self, asked: str) -> str:
        """A line that is no question; raises as `question` does."""
        ...


def history_file() -> Path:
    """The file of what was asked before, made private: it holds what people typed."""
    directory = paths.home()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / "chat_history"
    descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)
    return path


def run_terminal(address: str, settings: ChatSettings) -> int:
    """Chat until the person leaves; the exit code.

    Raises:
        RequestError: there is no such model, or none at all.
        UnreachableError: no coordinator is there.
        InterruptedBySignalError: SIGTERM, or the terminal is gone.
    """
    return anyio.run(_run, address, settings, LineEditor(history_file()))


async def _run(address: str, settings: ChatSettings, editor: Editor) -> int:
    endpoints = parse_endpoints(address)
    interrupts = Interrupts()
    with bare_errors():
        # The client stays outside of what a signal cancels: telling the runner to stop still needs it.
        async with anyio.create_task_group() as group, ControlClient(endpoints) as client:
            await group.start(interrupts.watch)
            with interrupts.whole:
                await reach(client)
                choice = await _choose((await view(client)).state, settings.model, editor)
                if choice is not None:
                    _greet(choice)
                    conversation = Conversation(msgspec.structs.replace(settings, model=choice.model))
                    await Session(client, conversation, editor, interrupts).run()
            group.cancel_scope.cancel()
    if interrupts.ended_by is not None:
        raise InterruptedBySignalError(interrupts.ended_by)
    return 0


class Interrupts:
    """What signals mean: Ctrl-C ends the answer under way, the others end the chat."""

    def __init__(self) -> None:
        self.whole = anyio.CancelScope()
        self.ended_by: int | None = None
        self._answer: anyio.CancelScope | None = None

    async def watch(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Take the signals until cancelled."""
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
            task_status.started()
            async for number in signals:
                if number != signal.SIGINT:
                    self.ended_by = number
                    self.whole.cancel()
                elif self._answer is not None:
                    self._answer.cancel()

    async def stoppable(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Run it until its end or Ctrl-C; whether Ctrl-C came."""
        with anyio.CancelScope() as scope:
            self._answer = scope
            try:
                await work()
            finally:
                self._answer = None
        return scope.cancelled_caught


async def _choose(state: State, wanted: str, editor: Editor) -> Choice | None:
    """The model; `None` where the person leaves instead of choosing.

    Raises:
        RequestError: there is no such model, or none at all.
    """
    if wanted:
        return chosen(state, wanted)
    known = choices(state)
    if not known:
        raise no_models()
    if len(known) == 1:
        return known[0]
    for number, choice in enumerate(known, 1):
        _say(f"{number}  {clean(choice.model)}" + ("" if choice.ready else "  (not ready yet)"))
    while True:
        try:
            text = (await editor.answer_to(f"Which one, 1 to {len(known)}? ")).strip()
        except (EOFError, KeyboardInterrupt):
            return None
        named = [one for number, one in enumerate(known, 1) if text in (str(number), one.model)]
        if named:
            return named[0]


def _greet(choice: Choice) -> None:
    waits = "" if choice.ready else " It is not ready yet: the first answer waits for it."
    _say(f"{_DIM}{clean(choice.model)}. /help says what there is; {_LEAVE_HINT}{waits}{_PLAIN}")


class Session:
    """Question after question, until the person leaves."""

    def __init__(
        self, client: ControlClient, conversation: Conversation, editor: Editor, interrupts: Interrupts
    ) -> None:
        self._client = client
        self._conversation = conversation
        self._editor = editor
        self._interrupts = interrupts
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/clear": self._clear,
            "/system": self._system,
            "/save": self._save,
            "/tokens": self._tokens,
        }

    async def run(self) -> None:
        """Chat."""
        while True:
            try:
                text = await self._editor.question()
            except EOFError:
                return
            except KeyboardInterrupt:
                _say(_LEAVE_HINT)
                continue
            word, _, rest = text.strip().partition(" ")
            if word in ("/exit", "/quit", "/bye"):
                return
            if word in self._commands:
                self._commands[word](rest.strip())
            elif word.startswith("/") and word[1:].isalpha():
                _say(f"There is no {clean(word)}; see /help. A space before it makes it a question.")
            elif word:
                await self._ask(text)

    async def _ask(self, question: str) -> None:
        answer = Answer()
        silence = self._conversation.settings.silence_seconds
        request = self._conversation.request(question)

        async def work() -> None:
            await ask(self._client, request, answer, TerminalScreen(), silence)

        try:
            stopped = await self._interrupts.stoppable(work)
        except MusterError as error:
            show_error(error)
            return
        if answer.text or not stopped:
            self._conversation.keep(question, answer)
        _say(f"{_DIM}{'stopped' if stopped else answer.sentence()}{_PLAIN}")

    # --- commands -----------------------------------------------------------------------------------------

    def _help(self, rest: str) -> None:
        del rest
        _say(_HELP.rstrip())

    def _clear(self, rest: str) -> None:
        del rest
        self._conversation.clear()
        _say("The conversation is forgotten.")

    def _system(self, rest: str) -> None:
        if rest:
            self._conversation.system = "" if rest == "-" else rest
        _say(f"System prompt: {clean(self._conversation.system) or 'none'}")

    def _save(self, rest: str) -> None:
        if not rest:
            _say("Give a file, as in /save chat.md")
            return
        path = Path(rest).expanduser()
        as_json = path.suffix == ".json"
        content = self._conversation.as_json() if as_json else self._conversation.as_markdown().encode()
        try:
            with path.open("xb") as file:
                file.write(content)
        except OSError as error:
            _say(f"{clean(rest)} cannot be written: {(error.strerror or str(error)).lower()}")
            return
        _say(f"Written to {clean(str(path))}.")

    def _tokens(self, rest: str) -> None:
        del rest
        conversation = self._conversation
        answers = len(conversation.turns) // 2
        _say(
            f"{answers} {'answer' if answers == 1 else 'answers'}, {conversation.completion_tokens} tokens generated, "
            f"{conversation.prompt_tokens} tokens of prompts."
        )


class TerminalScreen:
    """Carries out `muster.cli.chat.Screen`: reasoning is dim, and what could steer the terminal is left out."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._status = False
        self._dim = False
        self._column_0 = True

    def reading(self, done: int, total: int) -> None:
        """On one line that is written over, once it takes a while."""
        if done < total and time.monotonic() - self._began > _READING_SECONDS:
            self._write(f"{_CLEAR_LINE}{_DIM}reading the prompt, {done} of {total} tokens{_PLAIN}")
            self._status = True

    def reasoning(self, piece: str) -> None:
        """Dim."""
        self._show(piece, dim=True)

    def text(self, piece: str) -> None:
        """As it is; below its reasoning."""
        if self._dim and not self._column_0:
            self._show("\n", dim=True)
        self._show(piece, dim=False)

    def end(self) -> None:
        """The prompt begins on a line of its own."""
        self._show("" if self._column_0 else "\n", dim=False)

    def _show(self, piece: str, *, dim: bool) -> None:
        style = ("" if dim == self._dim else _DIM if dim else _PLAIN) if piece else (_PLAIN if self._dim else "")
        self._dim = dim and bool(piece)
        before = _CLEAR_LINE if self._status else ""
        self._status = False
        if piece:
            self._column_0 = piece.endswith("\n")
        self._write(before + style + clean(piece))

    def _write(self, text: str) -> None:
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()


def clean(text: str) -> str:
    """The text without what could steer the terminal."""
    return "".join(one if one.isprintable() or one in "\n\t" else "�" for one in text)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
