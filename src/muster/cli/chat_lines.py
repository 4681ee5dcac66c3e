"""`muster chat` in a pipe: a question per line in, plain answers out."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import AsyncIterator

import anyio
import anyio.lowlevel
import msgspec

from muster.bus import ControlClient
from muster.cli.chat import Answer, ChatSettings, Choice, Conversation, ask, choices, chosen, no_models
from muster.cli.client import run, view
from muster.cli.errors import EXIT_FAILED, show_error
from muster.errors import MusterError, RequestError
from muster.state import State

_READ_BYTES = 65_536


def run_lines(address: str, settings: ChatSettings) -> int:
    """Answer every line of standard input; the exit code.

    Raises:
        RequestError: there is no such model, or it was not said which of several.
        UnreachableError: no coordinator is there.
    """

    async def work(client: ControlClient) -> int:
        choice = the_model((await view(client)).state, settings.model)
        conversation = Conversation(msgspec.structs.replace(settings, model=choice.model))
        return await answer_lines(client, conversation, lines_of(sys.stdin.fileno()))

    return run(address, work)


def the_model(state: State, wanted: str) -> Choice:
    """The model that is meant where nobody can be asked.

    Raises:
        RequestError: there is no such model, none at all, or several and none is named.
    """
    if wanted:
        return chosen(state, wanted)
    known = choices(state)
    if not known:
        raise no_models()
    if len(known) > 1:
        names = ", ".join(choice.model for choice in known)
        raise RequestError(f"several models are served: {names}", remedy="Say which, as in `muster chat MODEL`.")
    return known[0]


async def answer_lines(client: ControlClient, conversation: Conversation, lines: AsyncIterator[str]) -> int:
    """Answer each line that is not empty; the exit code is 1 if one was not answered."""
    code = 0
    async for line in lines:
        if not line.strip():
            continue
        answer = Answer()
        try:
            await ask(client, conversation.request(line), answer, PlainScreen(), conversation.settings.silence_seconds)
        except MusterError as error:
            show_error(error)
            code = EXIT_FAILED
            continue
        conversation.keep(line, answer)
    return code


class PlainScreen:
    """Carries out `muster.cli.chat.Screen`: the text alone, as it is."""

    def __init__(self) -> None:
        self._last = "\n"

    def reading(self, done: int, total: int) -> None:
        """Nothing."""

    def reasoning(self, piece: str) -> None:
        """Nothing: it is no part of the answer."""

    def text(self, piece: str) -> None:
        """Write it."""
        self._last = piece
        sys.stdout.write(piece)
        sys.stdout.flush()

    def end(self) -> None:
        """The next answer begins on a line of its own."""
        if not self._last.endswith("\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()


async def lines_of(descriptor: int) -> AsyncIterator[str]:
    """The lines of a file, a pipe or a terminal, each as soon as it is there; a signal can end the wait."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    text = ""
    while True:
        try:
            await anyio.wait_readable(descriptor)
        except PermissionError:
            await anyio.lowlevel.checkpoint()  # epoll takes no ordinary file, and none makes a reader wait
        data = os.read(descriptor, _READ_BYTES)
        *whole, text = (text + decoder.decode(data, final=not data)).split("\n")
        for line in whole:
            yield line.removesuffix("\r")
        if not data:
            break
    if text:
        yield text
