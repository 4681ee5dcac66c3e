"""From the messages, tools and formats of OpenAI's dialect to those of a generation request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, assert_never

import msgspec

from muster.api.errors import invalid, unsupported
from muster.api.openai_bodies import (
    AudioPart,
    Call,
    ChatMessage,
    Content,
    FilePart,
    FunctionTool,
    ImagePart,
    ObjectFormat,
    RefusalPart,
    SchemaFormat,
    TextFormat,
    TextPart,
)
from muster.sampling import Message, Role, Tool, ToolCall

TEXT_ONLY = "the model takes text only"
ANY_OBJECT = '{"type":"object"}'


def messages_of(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """The turns of a chat. A tool's turn without a name gets that of the call it answers.

    Raises:
        ApiError: 400 with the place of what is wrong, such as "messages[2].tool_call_id".
    """
    if not messages:
        raise invalid("messages is empty; send at least one message", "messages")
    names: dict[str, str] = {}
    turns: list[Message] = []
    for index, message in enumerate(messages):
        turn = _turn(message, f"messages[{index}]", names)
        names.update((call.id, call.name) for call in turn.tool_calls)
        turns.append(turn)
    return tuple(turns)


def _turn(message: ChatMessage, place: str, names: dict[str, str]) -> Message:
    for field, value in (("audio", message.audio), ("function_call", message.function_call)):
        if value is not None:
            raise unsupported(f"{place}.{field}", TEXT_ONLY if field == "audio" else "send tool_calls instead")
    role: Role = "system" if message.role == "developer" else message.role
    calls = _calls(message.tool_calls or (), f"{place}.tool_calls")
    if calls and role != "assistant":
        raise invalid(f"{place}.tool_calls belongs to a message of the assistant, not of role {role}", place)
    if message.content is None and role != "assistant":
        raise invalid(f"{place}.content is missing", f"{place}.content")
    if role == "tool" and not message.tool_call_id:
        raise invalid(f"{place}.tool_call_id is missing; it names the call that is answered", f"{place}.tool_call_id")
    if role != "tool" and message.tool_call_id is not None:
        raise invalid(f"{place}.tool_call_id belongs to a message of role tool, not {role}", f"{place}.tool_call_id")
    called = message.tool_call_id or ""
    return Message(
        role=role,
        content=text_of(message.content or message.refusal or "", f"{place}.content"),
        reasoning=message.reasoning_content or message.reasoning or "",
        tool_calls=calls,
        tool_call_id=called,
        name=message.name or names.get(called, ""),
    )


def text_of(content: Content, place: str) -> str:
    """The text of a content; its parts follow each other without a gap, as mlx_lm.server joins them.

    Raises:
        ApiError: 400, a part is no text.
    """
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for index, part in enumerate(content):
        match part:
            case TextPart():
                texts.append(part.text)
            case RefusalPart():
                texts.append(part.refusal)
            case ImagePart() | AudioPart() | FilePart():
                raise unsupported(f"{place}[{index}]", TEXT_ONLY)
            case _:
                assert_never(part)
    return "".join(texts)


def _calls(calls: Iterable[Call], place: str) -> tuple[ToolCall, ...]:
    return tuple(
        tool_call(call.id, call.function.name, call.function.arguments, f"{place}[{index}].function.arguments")
        for index, call in enumerate(calls)
    )


def tool_call(identity: str, name: str, arguments: str, place: str) -> ToolCall:
    """A call of an earlier turn; no text at all stands for no arguments.

    Raises:
        ApiError: 400, the arguments are not the JSON of an object.
    """
    text = arguments if arguments.strip() else "{}"
    try:
        msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise invalid(f"{place} is not the JSON of an object: {error}", place) from None
    return ToolCall(id=identity, name=name, arguments=text)


def tools_of(functions: Iterable[FunctionTool], place: str) -> tuple[Tool, ...]:
    """The functions on offer.

    Raises:
        ApiError: 400, two have the same name.
    """
    tools: dict[str, Tool] = {}
    for index, function in enumerate(functions):
        if function.name in tools:
            raise invalid(f"{place}[{index}] has the name {function.name!r} of one before it", f"{place}[{index}]")
        tools[function.name] = Tool(
            name=function.name, description=function.description or "", parameters=function.parameters or {}
        )
    return tuple(tools.values())


def schema_of(format: TextFormat | ObjectFormat | SchemaFormat | None) -> str | None:
    """JSON text of the schema that the answer must follow, or `None` for free text."""
    match format:
        case None | TextFormat():
            return None
        case ObjectFormat():
            return ANY_OBJECT
        case SchemaFormat():
            return msgspec.json.encode(format.json_schema.schema).decode()
        case _:
            assert_never(format)


def template_of(effort: str | None, variables: dict[str, Any] | None) -> dict[str, Any]:
    """Variables for the chat template; those that the client names itself win."""
    template: dict[str, Any] = {}
    if effort is not None:
        template["reasoning_effort"] = effort
        if effort == "none":
            template["enable_thinking"] = False
    return template | (variables or {})
