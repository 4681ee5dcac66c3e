"""From a body of Ollama's dialect to what the coordinator is asked."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from muster.api.bodies import refuse, sampling_params
from muster.api.errors import invalid
from muster.api.ollama_bodies import (
    GENERATE_LIMITS,
    OPTION_LIMITS,
    REPEAT_LAST_N,
    TURN_LIMITS,
    Asked,
    ChatBody,
    GenerateBody,
    Options,
    Turn,
)
from muster.protocol import Generate
from muster.sampling import Message, SamplingParams, Tool, ToolCall

#: Tokens of an answer where the client names no limit: enough for a long one, and an end for one that repeats itself.
_DEFAULT_ANSWER_TOKENS = 8192
_ALL = 2**31 - 1
_ANY_OBJECT = '{"type":"object"}'
#: The dialect's names of what the coordinator calls otherwise.
NAMES = {
    "instance": "model",
    "template": "think",
    "max_tokens": "options.num_predict",
    "stop": "options.stop",
    "temperature": "options.temperature",
    "top_p": "options.top_p",
    "top_k": "options.top_k",
    "min_p": "options.min_p",
    "seed": "options.seed",
    "repetition_penalty": "options.repeat_penalty",
    "presence_penalty": "options.presence_penalty",
    "frequency_penalty": "options.frequency_penalty",
    "penalty_context_tokens": "options.repeat_last_n",
    "json_schema": "format",
}


def of_chat(body: ChatBody, model: str) -> Generate:
    """The request for an answer to a chat.

    Raises:
        ApiError: 400, the body asks for something that cannot be.
    """
    return Generate(
        instance=model,
        messages=_messages(body.messages or ()),
        tools=tuple(
            Tool(
                name=tool.function.name,
                description=tool.function.description or "",
                parameters=tool.function.parameters or {},
            )
            for tool in body.tools or ()
        ),
        template=_template(body),
        sampling=_sampling(body),
    )


def of_prompt(body: GenerateBody, model: str) -> Generate:
    """The request for an answer to a prompt.

    Raises:
        ApiError: 400, the body asks for something that cannot be.
    """
    refuse(body, GENERATE_LIMITS)
    prompt = body.prompt or ""
    if body.raw:
        for name in ("system", "think"):
            if getattr(body, name):
                raise invalid(f"{name} is given to a raw prompt, which has no template to put it in", name)
        return Generate(instance=model, prompt=prompt, sampling=_sampling(body))
    system = (Message(role="system", content=body.system),) if body.system else ()
    return Generate(
        instance=model,
        messages=(*system, Message(role="user", content=prompt)),
        template=_template(body),
        sampling=_sampling(body),
    )


def _template(body: Asked) -> dict[str, object]:
    match body.think:
        case None:
            return {}
        case bool():
            return {"enable_thinking": body.think}
        case level:
            return {"enable_thinking": True, "reasoning_effort": level}


def _sampling(body: Asked) -> SamplingParams:
    options = body.options or Options()
    refuse(options, OPTION_LIMITS, "options")
    if body.keep_alive in {0, "0", "0s", "0m"}:
        raise invalid("keep_alive is 0, but a model stays as long as its instance; delete that", "keep_alive")
    limit = _DEFAULT_ANSWER_TOKENS if options.num_predict is None else options.num_predict
    last = REPEAT_LAST_N if options.repeat_last_n is None else options.repeat_last_n
    values = {
        "max_tokens": _ALL if limit < 0 else limit,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "min_p": options.min_p,
        "seed": options.seed,
        "stop": (options.stop,) if isinstance(options.stop, str) else options.stop,
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs,
        "json_schema": _schema(body),
    }
    if last != 0:
        values |= {
            "repetition_penalty": options.repeat_penalty,
            "presence_penalty": options.presence_penalty,
            "frequency_penalty": options.frequency_penalty,
            "penalty_context_tokens": _ALL if last < 0 else last,
        }
    return sampling_params(values, NAMES)


def _schema(body: Asked) -> str | None:
    match body.format:
        case None | "":
            return None
        case "json":
            return _ANY_OBJECT
        case schema:
            return msgspec.json.encode(schema).decode()


def _messages(turns: Iterable[Turn]) -> tuple[Message, ...]:
    """The turns, with ids for calls that have none, so that results find their calls."""
    found: list[Message] = []
    waiting: list[ToolCall] = []
    for number, turn in enumerate(turns):
        refuse(turn, TURN_LIMITS, f"messages[{number}]")
        calls = tuple(
            ToolCall(
                id=call.id or f"call_{number}_{place}",
                name=call.function.name,
                arguments=msgspec.json.encode(call.function.arguments).decode(),
            )
            for place, call in enumerate(turn.tool_calls or ())
        )
        waiting += calls
        answered = _answered(turn, waiting) if turn.role == "tool" else ""
        waiting = [call for call in waiting if call.id != answered]
        found.append(
            Message(
                role=turn.role,
                content=turn.content or "",
                reasoning=turn.thinking or "",
                tool_calls=calls,
                tool_call_id=answered,
                name=turn.tool_name or "",
            )
        )
    return tuple(found)


def _answered(turn: Turn, waiting: list[ToolCall]) -> str:
    """The id of the call that a tool's turn answers, "" where there is none."""
    if turn.tool_call_id is not None:
        return turn.tool_call_id
    fitting = [call.id for call in waiting if turn.tool_name in (None, call.name)]
    return fitting[0] if fitting else ""
