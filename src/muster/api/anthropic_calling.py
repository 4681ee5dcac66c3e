"""Calls that Anthropic's clients force, and how many they want.

A call that is forced comes as text that constrained decoding made: see `muster.api.calling`.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec

from muster.api.anthropic_bodies import AnyChoice, AutoChoice, NoChoice, ToolChoice
from muster.api.calling import Calling, calling, chosen
from muster.api.gather import Collected
from muster.replies import Chunk, Done, Prefilled
from muster.sampling import Tool, ToolCall


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What may be called, and how many calls the client wants at most."""

    calling: Calling
    most_calls: int | None = None

    @property
    def changes(self) -> bool:
        """Whether the answer is not simply what the model said."""
        return self.calling.must or self.most_calls is not None


def choice_of(tools: tuple[Tool, ...], wanted: AutoChoice | NoChoice | AnyChoice | ToolChoice | None) -> Choice:
    """What a `tool_choice` makes of the tools.

    Raises:
        ApiError: 400, the choice does not fit the tools.
    """
    match wanted:
        case None:
            return Choice(calling=Calling(tools=tools))
        case NoChoice():
            return Choice(calling=calling(tools, "none", None))
        case AutoChoice():
            made = calling(tools, "auto", None)
        case AnyChoice():
            made = calling(tools, "required", None)
        case ToolChoice(name=name):
            made = calling(tools, None, name)
    return Choice(calling=made, most_calls=1 if wanted.disable_parallel_tool_use else None)


def called_whole(choice: Choice, answer: Collected) -> Collected:
    """A whole answer, with the call that its text stands for."""
    if not choice.changes:
        return answer
    calls = answer.tool_calls[: choice.most_calls]
    if calls or not (choice.calling.must and answer.text):
        return msgspec.structs.replace(answer, tool_calls=calls)
    made = _made(choice, answer.text)
    return msgspec.structs.replace(
        answer, text=made.text, tool_calls=made.tool_calls, done=_ended(answer.done, called=bool(made.tool_calls))
    )


async def called_pieces(
    choice: Choice, pieces: AsyncIterator[Prefilled | Chunk | Done]
) -> AsyncGenerator[Prefilled | Chunk | Done]:
    """Pieces in which text that stands for a call is held back, and comes at the end as that call."""
    held: list[str] = []
    calls = 0
    async for piece in pieces:
        match piece:
            case Chunk():
                text = piece.text
                if choice.calling.must:
                    held.append(text)
                    text = ""
                wanted = piece.tool_calls[: None if choice.most_calls is None else choice.most_calls - calls]
                calls += len(wanted)
                yield msgspec.structs.replace(piece, text=text, tool_calls=wanted)
            case Done() if any(held) and not calls:
                made = _made(choice, "".join(held))
                yield made
                yield _ended(piece, called=bool(made.tool_calls))
            case _:
                yield piece


def _made(choice: Choice, text: str) -> Chunk:
    """The call that the text stands for; the text itself, where the limit cut it."""
    forced = choice.calling.forced
    if forced is None:
        return chosen(text)
    try:
        msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        return Chunk(text=text)
    return Chunk(tool_calls=(ToolCall(id=f"toolu_{secrets.token_hex(12)}", name=forced.name, arguments=text),))


def _ended(done: Done, *, called: bool) -> Done:
    return msgspec.structs.replace(done, reason="tool_calls") if called and done.reason == "stop" else done
