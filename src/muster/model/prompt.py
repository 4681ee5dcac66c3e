"""From plain text, or from the turns of a chat through the model's template, to token ids."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec
from jinja2 import TemplateError
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase

from muster.errors import RequestError
from muster.sampling import Message, Tool

#: What templates, and the custom renderers of some tokenizers, raise on turns that they cannot render.
_TEMPLATE_ERRORS: Final = (TemplateError, TypeError, ValueError, LookupError, AttributeError, AssertionError)

#: What the renderer itself is called with. The rest of a request's `template` are variables of the template.
_RESERVED: Final = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}

#: Fewer tokens than this cost less to compute again than a pass of their own and a copy of the cache.
_KEEP_TOKENS: Final = 32

#: Mistral's templates refuse call ids of any other length.
_MISTRAL_CALL: Final = "[TOOL_CALLS]"
_MISTRAL_ID_LENGTH: Final = 9

#: What a prompt appends for the answer: an open block of reasoning, one that is closed already, or neither.
Reasoning = Literal["open", "closed", "none"]


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt as token ids, with what was learnt while it was encoded; see `muster.model.request.PreparedRequest`."""

    tokens: tuple[int, ...]
    text: str | None = None
    keep: tuple[int, ...] = ()
    reasoning: Reasoning = "none"
    tools: tuple[dict[str, Any], ...] = ()


def encode_text(tokenizer: TokenizerWrapper, text: str) -> Prompt:
    """Token ids of a plain prompt, as mlx-lm encodes it: one that begins with the begin token gets no second one."""
    begin = tokenizer.bos_token
    special = begin is None or not text.startswith(begin)
    return Prompt(tokens=tuple(tokenizer.encode(text, add_special_tokens=special)))


def encode_chat(
    tokenizer: TokenizerWrapper, messages: Sequence[Message], tools: Sequence[Tool], variables: dict[str, Any]
) -> Prompt:
    """Token ids of `messages` through the model's chat template, ready for an answer.

    Raises:
        RequestError: no messages, no chat template, no parser for tool calls, a reserved variable, or a template that
            refuses the messages.
    """
    if not messages:
        raise RequestError("messages is empty", remedy="send at least one message", field="messages")
    if not tokenizer.has_chat_template:
        raise RequestError(
            "the model has no chat template", remedy="send a plain prompt instead of messages", field="messages"
        )
    if tools and not tokenizer.has_tool_calling:
        raise RequestError(
            "the model has no tool calls that mlx-lm can parse", remedy="leave the tools out", field="tools"
        )
    if reserved := sorted(_RESERVED & variables.keys()):
        raise RequestError(
            f"template sets {reserved[0]!r}, which the request itself decides",
            remedy="pass only variables of the model's chat template",
            field="template",
        )
    chat = _Chat(tokenizer, messages, tools, variables)
    text = chat.render(messages)
    encoded = tokenizer._tokenizer(text, add_special_tokens=False)  # pyright: ignore[reportPrivateUsage]
    tokens = tuple(encoded["input_ids"])
    return Prompt(
        tokens=tokens,
        keep=_positions(encoded, len(tokens), chat.shared_prefixes(messages, text)),
        reasoning=chat.reasoning(messages, text),
        tools=chat.tools,
    )


class _Chat:
    """Renders turns with the variables and tools of one request."""

    def __init__(
        self,
        tokenizer: TokenizerWrapper,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        variables: dict[str, Any],
    ) -> None:
        self._tokenizer = tokenizer
        self._variables = variables
        self._arguments_as_text = False
        self._names = {call.id: call.name for message in messages for call in message.tool_calls}
        self._system = [message for message in messages if message.role == "system"]
        self.tools: tuple[dict[str, Any], ...] = tuple(_tool(tool) for tool in tools)

    def render(self, messages: Sequence[Message]) -> str:
        """The text of the turns with the beginning of an answer.

        Raises:
            RequestError: the template refuses the turns.
        """
        try:
            try:
                return self._apply(messages, answer=True)
            except TypeError:
                if not self._names:
                    raise
                # Some templates join the arguments to text, which only their JSON text allows (DeepSeek's).
                self._arguments_as_text = True
                return self._apply(messages, answer=True)
        except _TEMPLATE_ERRORS as error:
            raise RequestError(
                f"the model's chat template refuses the messages: {error}",
                remedy="check the roles, their order and the template's variables",
                field="messages",
            ) from error

    def shared_prefixes(self, messages: Sequence[Message], text: str) -> tuple[int, ...]:
        """Lengths in characters of what later prompts will have in common with `text`, where that can be foreseen.

        One is the system part with the tools. The other is where the next turn of this chat will part from it: a
        template leaves out of earlier turns what it appends for the answer to come, such as an opened or an empty
        block of reasoning.
        """
        found: list[int] = []
        leading = [message for message, system in zip(messages, self._system, strict=False) if message is system]
        probes: list[list[Message]] = []
        if leading or self.tools:
            probes.append([*leading, Message(role="user", content="")])
        probes.append([*messages, Message(role="assistant", content="."), Message(role="user", content=".")])
        for probe in probes:
            try:
                other = self._apply(probe, answer=False)
            except _TEMPLATE_ERRORS:
                continue
            found.append(_common_length(text, other))
        return tuple(found)

    def reasoning(self, messages: Sequence[Message], text: str) -> Reasoning:
        """What of a block of reasoning the template appends for the answer."""
        start, end = self._tokenizer.think_start, self._tokenizer.think_end
        if start is None or end is None:
            return "none"
        try:
            turns = self._apply(messages, answer=False)
        except _TEMPLATE_ERRORS:
            turns = ""
        appended = text.removeprefix(turns)
        opened, closed = appended.rfind(start), appended.rfind(end)
        return "open" if opened > closed else "closed" if closed >= 0 else "none"

    def _apply(self, messages: Sequence[Message], *, answer: bool) -> str:
        text: Any = self._tokenizer.apply_chat_template(
            [self._turn(message) for message in messages],
            tools=list(self.tools) or None,
            tokenize=False,
            add_generation_prompt=answer,
            **self._variables,
        )
        return text

    def _turn(self, message: Message) -> dict[str, Any]:
        """A turn in the form that templates know, with nothing in it that the message does not have."""
        turn: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning:
            turn["reasoning_content"] = message.reasoning
        if message.tool_calls:
            turn["tool_calls"] = [
                {
                    "id": self._call_id(call.id),
                    "type": "function",
                    "function": {"name": call.name, "arguments": self._arguments(call.arguments)},
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id:
            turn["tool_call_id"] = self._call_id(message.tool_call_id)
        if name := message.name or self._names.get(message.tool_call_id, ""):
            turn["name"] = name
        return turn

    def _call_id(self, name: str) -> str:
        return name[-_MISTRAL_ID_LENGTH:] if self._tokenizer.tool_call_start == _MISTRAL_CALL else name

    def _arguments(self, text: str) -> Any:
        """Most templates turn an object into JSON themselves; text would come out as a quoted string."""
        if self._arguments_as_text:
            return text
        try:
            return msgspec.json.decode(text) if text.strip() else {}
        except msgspec.DecodeError as error:
            raise RequestError(
                f"the arguments of a tool call are no JSON: {error}",
                remedy="send the arguments as JSON text of an object",
                field="messages",
            ) from error


def _tool(tool: Tool) -> dict[str, Any]:
    parameters = tool.parameters or {"type": "object", "properties": {}}
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": parameters},
    }


def _common_length(text: str, other: str) -> int:
    """How many characters the two begin with in common: by halves, since comparing slices is fast and loops are not."""
    low, high = 0, min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if text[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _positions(encoded: Any, size: int, lengths: Sequence[int]) -> tuple[int, ...]:
    """The token positions that lie wholly within prefixes of so many characters; empty for a slow tokenizer."""
    if not encoded.is_fast:
        return ()
    found: set[int] = set()
    for length in lengths:
        position = encoded.char_to_token(length)
        if position is not None and _KEEP_TOKENS <= position < size:
            found.add(position)
    return tuple(sorted(found))
