"""What the model may call, or must: a call that is forced is made by constrained decoding.

The model is shown the tools that it may choose from, and can only call one in its own syntax or answer with JSON
that follows a schema. That JSON is then given to the client as a call.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, cast

import msgspec

from muster.api.errors import invalid
from muster.api.gather import Collected
from muster.api.openai_answers import Indexed
from muster.api.openai_bodies import ToolMode
from muster.api.openai_shape import identity
from muster.replies import Chunk, Done
from muster.sampling import Tool, ToolCall


class Calling(msgspec.Struct, frozen=True, kw_only=True):
    """What the model may call.

    Where it must call `forced`, text that it answers is that function's arguments. Where it must call any, text is
    the name and the arguments of one.
    """

    tools: tuple[Tool, ...] = ()
    forced: Tool | None = None
    any: bool = False

    @property
    def must(self) -> bool:
        """Whether the answer has to be a call."""
        return self.any or self.forced is not None

    @property
    def json_schema(self) -> str | None:
        """What text of the answer must follow."""
        if self.forced is not None:
            return msgspec.json.encode(_parameters(self.forced)).decode()
        return msgspec.json.encode(_any_of(self.tools)).decode() if self.any else None


def calling(tools: tuple[Tool, ...], mode: ToolMode | None, name: str | None) -> Calling:
    """What `tool_choice` makes of the tools: a mode, or the `name` of the function to be called.

    Raises:
        ApiError: 400, the choice does not fit the tools.
    """
    if name is not None:
        forced = next((tool for tool in tools if tool.name == name), None)
        if forced is None:
            known = ", ".join(tool.name for tool in tools) or "none"
            raise invalid(f"tool_choice names {name!r}, which is not among the tools: {known}", "tool_choice")
        return Calling(tools=(forced,), forced=forced)
    match mode:
        case "none":
            return Calling()
        case "required" if not tools:
            raise invalid("tool_choice requires a call, but there are no tools", "tool_choice")
        case "required" if len(tools) == 1:
            return Calling(tools=tools, forced=tools[0])
        case "required":
            return Calling(tools=tools, any=True)
        case _:
            return Calling(tools=tools)


def answer_schema(calling: Calling, wanted: str | None, field: str) -> str | None:
    """The schema that decoding must follow: of the format, or of the call that must be made.

    With a format and tools, the answer follows the schema or calls a tool.

    Raises:
        ApiError: 400, a format is asked for and a call is forced.
    """
    if wanted is not None and calling.must:
        raise invalid(f"{field} asks for JSON and tool_choice for a call; an answer cannot be both", field)
    return wanted if wanted is not None else calling.json_schema


# --- a call of any tool -------------------------------------------------------------------------------------


class Filled(msgspec.Struct, frozen=True):
    """What the model answers where it may choose the function."""

    name: str
    arguments: msgspec.Raw


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.parameters or {"type": "object"}


def _any_of(tools: tuple[Tool, ...]) -> dict[str, Any]:
    """The schema of `Filled` for these tools: the name comes first, and decides on the arguments."""
    choices = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "arguments": {"$ref": f"#/$defs/tool_{index}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    definitions = {f"tool_{index}": _moved(_parameters(tool), f"tool_{index}") for index, tool in enumerate(tools)}
    return {"anyOf": choices, "$defs": definitions}


def _moved(schema: Any, name: str) -> Any:
    """The schema, with its references to parts of itself as they are where it stands among others."""
    if isinstance(schema, list):
        return [_moved(item, name) for item in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, name) for key, value in cast("dict[str, Any]", schema).items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#/$defs/{name}{reference[1:]}"
    return moved


def chosen(text: str) -> Chunk:
    """The call that the text stands for; the text itself, where the limit cut it."""
    try:
        filled = msgspec.json.decode(text, type=Filled)
    except msgspec.DecodeError:
        return Chunk(text=text)
    call = ToolCall(id=identity("call_"), name=filled.name, arguments=bytes(filled.arguments).decode())
    return Chunk(tool_calls=(call,))


def choose(answer: Collected) -> Collected:
    """A whole answer, with the call that its text stands for."""
    if answer.tool_calls:
        return answer
    chunk = chosen(answer.text)
    return msgspec.structs.replace(answer, text=chunk.text, tool_calls=chunk.tool_calls)


async def choosing(answers: AsyncIterator[Indexed]) -> AsyncGenerator[Indexed]:
    """Pieces in which the text of each answer is held back, and comes at its end as the call that it stands for."""
    held: dict[int, str] = {}
    async for index, piece in answers:
        if isinstance(piece, Chunk) and piece.text:
            held[index] = held.get(index, "") + piece.text
            yield index, msgspec.structs.replace(piece, text="")
            continue
        if isinstance(piece, Done) and index in held:
            yield index, chosen(held[index])
        yield index, piece
