"""The input of `/v1/responses`: its items, and how they become the turns of a chat."""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from muster.api.errors import invalid, unsupported
from muster.api.openai_bodies import Impossible, Label, RefusalPart, TextPart
from muster.api.openai_prompt import TEXT_ONLY, tool_call
from muster.sampling import Message, Role, ToolCall

T = TypeVar("T")

STATELESS = "nothing is kept between requests; send the whole conversation as input"


class InputText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="input_text"):
    """Text of a message, or of what a function gave back."""

    text: str


class OutputText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="output_text"):
    """Text of an earlier answer."""

    text: str
    annotations: Label = None
    logprobs: Label = None
    parsed: Label = None  #: of the official client's own classes


class SummaryText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="summary_text"):
    """A summary of earlier reasoning, that another server made."""

    text: str


class ReasoningText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="reasoning_text"):
    """Earlier reasoning."""

    text: str


class InputImage(msgspec.Struct, frozen=True, tag="input_image"):
    """Refused: the model takes text only."""


class InputAudio(msgspec.Struct, frozen=True, tag="input_audio"):
    """Refused: the model takes text only."""


class InputFile(msgspec.Struct, frozen=True, tag="input_file"):
    """Refused: the model takes text only."""


Part = (
    InputText | OutputText | TextPart | RefusalPart | SummaryText | ReasoningText | InputImage | InputAudio | InputFile
)
Content = str | tuple[Part, ...]


class Item(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One item of the input: a message, a call, what a call gave back, or earlier reasoning.

    Items of earlier answers are taken as they were given; their ids and states change nothing.
    """

    type: Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None
    summary: tuple[Part, ...] = ()
    id: Label = None
    status: Label = None
    phase: Label = None
    parsed_arguments: Label = None  #: of the official client's own classes
    encrypted_content: Impossible = None
    namespace: Impossible = None
    caller: Impossible = None
    async_: Impossible = None  #: so spelled by the official client's `model_dump`


def messages_of(instructions: str | None, given: str | tuple[Item, ...]) -> tuple[Message, ...]:
    """The turns of the conversation: the instructions first, then the input.

    Raises:
        ApiError: 400 with the place of what is wrong, such as "input[2].call_id".
    """
    turns = _Turns()
    if instructions:
        turns.add(Message(role="system", content=instructions))
    if isinstance(given, str):
        turns.add(Message(role="user", content=given))
    else:
        if not given:
            raise invalid("input is empty; send a text, or at least one item", "input")
        for index, item in enumerate(given):
            _take(item, f"input[{index}]", turns)
    return turns.all()


class _Turns:
    """Gathers an assistant's reasoning, text and calls, which are items of their own, into one turn."""

    def __init__(self) -> None:
        self._turns: list[Message] = []
        self._names: dict[str, str] = {}
        self._open: Message | None = None

    def add(self, message: Message) -> None:
        """A whole turn."""
        self._close()
        self._turns.append(message)

    def reason(self, text: str) -> None:
        """The assistant's reasoning: it stands before what it led to."""
        turn = self._open
        if turn is None or turn.content or turn.tool_calls:
            self._close()
            turn = Message(role="assistant")
        self._open = msgspec.structs.replace(turn, reasoning=turn.reasoning + text)

    def say(self, text: str) -> None:
        """The assistant's text."""
        turn = self._open
        if turn is None or turn.content or turn.tool_calls:
            self._close()
            turn = Message(role="assistant")
        self._open = msgspec.structs.replace(turn, content=text)

    def call(self, call: ToolCall) -> None:
        """A call of the assistant's."""
        turn = self._open or Message(role="assistant")
        self._names[call.id] = call.name
        self._open = msgspec.structs.replace(turn, tool_calls=(*turn.tool_calls, call))

    def answer(self, call: str, text: str) -> None:
        """What a call gave back."""
        self.add(Message(role="tool", content=text, tool_call_id=call, name=self._names.get(call, "")))

    def all(self) -> tuple[Message, ...]:
        """Every turn."""
        self._close()
        return tuple(self._turns)

    def _close(self) -> None:
        if self._open is not None:
            self._turns.append(self._open)
            self._open = None


def _take(item: Item, place: str, turns: _Turns) -> None:
    for field, value in (("namespace", item.namespace), ("caller", item.caller), ("async_", item.async_)):
        if value is not None:
            raise unsupported(f"{place}.{field}", "tools are plain functions of the client's")
    match item.type:
        case "message":
            if item.role is None:
                raise invalid(f"{place}.role is missing", f"{place}.role")
            text = _text(_needed(item.content, f"{place}.content"), f"{place}.content")
            if item.role == "assistant":
                turns.say(text)
            else:
                role: Role = "system" if item.role == "developer" else item.role
                turns.add(Message(role=role, content=text))
        case "function_call":
            call = _needed(item.call_id, f"{place}.call_id")
            name = _needed(item.name, f"{place}.name")
            arguments = _needed(item.arguments, f"{place}.arguments")
            turns.call(tool_call(call, name, arguments, f"{place}.arguments"))
        case "function_call_output":
            call = _needed(item.call_id, f"{place}.call_id")
            turns.answer(call, _text(_needed(item.output, f"{place}.output"), f"{place}.output"))
        case "reasoning":
            if item.encrypted_content and not item.content:
                raise unsupported(f"{place}.encrypted_content", "what another server encrypted cannot be read")
            turns.reason(_text(item.content or item.summary, place))
        case "item_reference":
            raise unsupported(f"{place}.type", STATELESS)


def _needed(value: T | None, place: str) -> T:
    if value is None:
        raise invalid(f"{place} is missing", place)
    return value


def _text(content: Content, place: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for index, part in enumerate(content):
        match part:
            case InputImage() | InputAudio() | InputFile():
                raise unsupported(f"{place}[{index}]", TEXT_ONLY)
            case RefusalPart():
                texts.append(part.refusal)
            case _:
                texts.append(part.text)
    return "".join(texts)
