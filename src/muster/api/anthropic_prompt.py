"""From a body of Anthropic's dialect to what the coordinator is asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import assert_never

import msgspec

from muster.api.anthropic_bodies import (
    BLOCK_LIMITS,
    COUNT_LIMITS,
    MESSAGES_LIMITS,
    THINKING_LIMITS,
    TOOL_LIMITS,
    USE_LIMITS,
    Block,
    CountTokensBody,
    DocumentBlock,
    ImageBlock,
    MessagesBody,
    RedactedThinkingBlock,
    SearchResultBlock,
    TextBlock,
    ThinkingAdaptive,
    ThinkingBlock,
    ThinkingOff,
    ThinkingOn,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from muster.api.anthropic_calling import Choice, choice_of
from muster.api.bodies import Limit, refuse, sampling_params
from muster.api.calling import answer_schema
from muster.api.errors import invalid, unsupported
from muster.protocol import Generate
from muster.sampling import Message, SamplingParams, Tool, ToolCall

#: The dialect's names of what the coordinator calls otherwise.
NAMES = {
    "instance": "model",
    "stop": "stop_sequences",
    "json_schema": "output_config.format.schema",
    "template": "thinking",
}


class Asked(msgspec.Struct, frozen=True):
    """What the coordinator is asked, and what its answer may call."""

    request: Generate
    choice: Choice

    @property
    def names(self) -> dict[str, str]:
        """The dialect's names of what the coordinator calls otherwise."""
        return NAMES | {"json_schema": "tool_choice"} if self.choice.calling.must else NAMES


def generate_of(body: MessagesBody) -> Asked:
    """The request for an answer.

    Raises:
        ApiError: 400, the body asks for something that cannot be.
    """
    refuse(body, MESSAGES_LIMITS)
    choice = choice_of(_tools(body), body.tool_choice)
    wanted = None if body.format is None else msgspec.json.encode(body.format.schema).decode()
    values = {
        "max_tokens": body.max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": body.stop_sequences,
        "json_schema": answer_schema(choice.calling, wanted, "output_config.format"),
    }
    return _asked(body, choice, sampling_params(values, NAMES))


def count_of(body: CountTokensBody) -> Asked:
    """The request for the length of the prompt.

    Raises:
        ApiError: 400, the body asks for something that cannot be.
    """
    refuse(body, COUNT_LIMITS)
    return _asked(body, choice_of(_tools(body), body.tool_choice), SamplingParams(max_tokens=0))


def _asked(body: CountTokensBody, choice: Choice, sampling: SamplingParams) -> Asked:
    if body.output_config is not None:
        refuse(body.output_config, {"effort": Limit("chat templates do not know it")}, "output_config")
    request = Generate(
        instance=body.model,
        messages=messages_of(body),
        tools=choice.calling.tools,
        template=_template(body),
        sampling=sampling,
    )
    return Asked(request, choice)


def _template(body: CountTokensBody) -> dict[str, bool]:
    match body.thinking:
        case None:
            return {}
        case ThinkingOff():
            return {"enable_thinking": False}
        case ThinkingAdaptive() as thinking:
            refuse(thinking, THINKING_LIMITS, "thinking")
            return {}
        case ThinkingOn() as thinking:
            refuse(thinking, THINKING_LIMITS, "thinking")
            if thinking.budget_tokens is not None and thinking.budget_tokens < 1:
                raise invalid("thinking.budget_tokens must be at least 1", "thinking.budget_tokens")
            return {"enable_thinking": True}
        case _:
            assert_never(body.thinking)


def _tools(body: CountTokensBody) -> tuple[Tool, ...]:
    tools: list[Tool] = []
    for number, tool in enumerate(body.tools or ()):
        refuse(tool, TOOL_LIMITS, f"tools[{number}]")
        tools.append(Tool(name=tool.name, description=tool.description or "", parameters=tool.input_schema))
    return tuple(tools)


# --- turns --------------------------------------------------------------------------------------------------


def messages_of(body: CountTokensBody) -> tuple[Message, ...]:
    """The turns as chat templates know them: the system prompt first, each tool's result a turn of its own.

    Raises:
        ApiError: 400, there is no turn, the last is the assistant's, or a block is one that no model here can read.
    """
    if not body.messages:
        raise invalid("messages is empty; it must hold at least one turn", "messages")
    if body.messages[-1].role == "assistant":
        raise unsupported(
            f"messages[{len(body.messages) - 1}].role",
            "an answer begins anew; it cannot go on from the assistant's turn",
        )
    found: list[Message] = []
    if body.system:
        texts = body.system if isinstance(body.system, str) else _joined(body.system, "system")
        found.append(Message(role="system", content=texts))
    for number, turn in enumerate(body.messages):
        for message in _turn(turn, f"messages[{number}]"):
            _append(found, message)
    return tuple(found)


def _append(found: list[Message], message: Message) -> None:
    """Add a turn; one of the same role as that before belongs to it."""
    last = found[-1] if found else None
    if last is None or last.role != message.role or message.role in {"tool", "system"}:
        found.append(message)
        return
    found[-1] = Message(
        role=last.role,
        content="\n".join(text for text in (last.content, message.content) if text),
        reasoning="\n".join(text for text in (last.reasoning, message.reasoning) if text),
        tool_calls=last.tool_calls + message.tool_calls,
    )


def _turn(turn: Turn, path: str) -> Iterator[Message]:
    if isinstance(turn.content, str):
        yield Message(role=turn.role, content=turn.content)
    elif turn.role == "assistant":
        yield _assistant(turn.content, path)
    else:
        yield from _user(turn, turn.content, path)


def _assistant(blocks: Iterable[Block], path: str) -> Message:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    for number, block in enumerate(blocks):
        place = f"{path}.content[{number}]"
        match block:
            case TextBlock():
                refuse(block, BLOCK_LIMITS, place)
                texts.append(block.text)
            case ThinkingBlock():
                reasoning.append(block.thinking)
            case ToolUseBlock():
                refuse(block, USE_LIMITS, place)
                arguments = msgspec.json.encode(block.input).decode()
                calls.append(ToolCall(id=block.id, name=block.name, arguments=arguments))
            case ToolResultBlock():
                raise invalid(f"{place}: a tool_result belongs to the user's turn", f"{place}.type")
            case _:
                raise _unreadable(block, place)
    # The texts of one answer were written in one go.
    return Message(role="assistant", content="".join(texts), reasoning="\n".join(reasoning), tool_calls=tuple(calls))


def _user(turn: Turn, blocks: Iterable[Block], path: str) -> Iterator[Message]:
    for number, block in enumerate(blocks):
        place = f"{path}.content[{number}]"
        match block:
            case TextBlock():
                refuse(block, BLOCK_LIMITS, place)
                yield Message(role=turn.role, content=block.text)
            case ToolResultBlock():
                if turn.role != "user":
                    raise invalid(f"{place}: a tool_result belongs to the user's turn", f"{place}.type")
                yield Message(role="tool", content=_result(block, place), tool_call_id=block.tool_use_id)
            case ToolUseBlock() | ThinkingBlock():
                raise invalid(f"{place}: it belongs to the assistant's turn", f"{place}.type")
            case _:
                raise _unreadable(block, place)


def _result(block: ToolResultBlock, path: str) -> str:
    refuse(block, {"toolset_name": USE_LIMITS["toolset_name"]}, path)
    content = block.content or ""
    text = content if isinstance(content, str) else _joined(content, f"{path}.content")
    return f"Error: {text}" if block.is_error else text


def _joined(blocks: Iterable[Block], path: str) -> str:
    texts: list[str] = []
    for number, block in enumerate(blocks):
        if not isinstance(block, TextBlock):
            raise _unreadable(block, f"{path}[{number}]")
        refuse(block, BLOCK_LIMITS, f"{path}[{number}]")
        texts.append(block.text)
    return "\n".join(texts)


def _unreadable(block: Block, path: str) -> Exception:
    match block:
        case ImageBlock():
            reason = "the model reads text only, and this is an image"
        case DocumentBlock():
            reason = "the model reads text only, and this is a document; send its text"
        case SearchResultBlock():
            reason = "nothing here cites; send the text of the result"
        case RedactedThinkingBlock():
            reason = "only Anthropic can read it; leave it out"
        case _:
            reason = "a block of this type has no place here"
    return unsupported(f"{path}.type", reason)
