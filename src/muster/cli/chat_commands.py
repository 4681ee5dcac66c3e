"""`muster chat`."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from muster.cli.options import (
    DEFAULT_ADDRESS,
    CoordinatorOption,
    ModelArgument,
    check_positive,
    input_errors,
)
from muster.errors import RequestError

#: More than models write in one turn; the room in the context limits it further.
_MAX_TOKENS = 8192


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("chat")(chat)


def chat(
    instance: ModelArgument = None,
    system: Annotated[str | None, typer.Option(help="The system prompt.", metavar="TEXT")] = None,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(help="Tokens of one answer at most.", metavar="N")] = _MAX_TOKENS,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answers.")] = None,
    think: Annotated[
        bool | None,
        typer.Option("--think/--no-think", help="Whether the model reasons first, where its template has the choice."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds of silence to bear.", metavar="SECONDS")] = 600.0,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
) -> None:
    """Talk with a served model.

    Enter asks; Alt-Enter, or a backslash at the end of the line, begins another line. Ctrl-C stops the answer, Ctrl-D
    leaves; /help says what else there is. Where standard input is no terminal, each line of it is a question, the
    answers are printed plainly, and the exit code is 1 if one of them failed.
    """
    from muster.cli.chat import ChatSettings
    from muster.sampling import SamplingParams

    check_positive("--timeout", timeout)
    if max_tokens < 1:
        raise RequestError(
            f"--max-tokens is {max_tokens}", remedy="Give how many tokens an answer may have, from 1 on."
        )
    template: dict[str, Any] = {} if think is None else {"enable_thinking": think}
    with input_errors():
        settings = ChatSettings(
            model=instance or "",
            system=system or "",
            sampling=SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed),
            template=template,
            silence_seconds=timeout,
        )
    if sys.stdin.isatty() and sys.stdout.isatty():
        from muster.cli.chat_terminal import run_terminal

        raise typer.Exit(run_terminal(coordinator, settings))
    from muster.cli.chat_lines import run_lines

    raise typer.Exit(run_lines(coordinator, settings))
