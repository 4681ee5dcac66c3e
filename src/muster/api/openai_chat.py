"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from muster.api.backend import Backend
from muster.api.bodies import read_body, refuse
from muster.api.calling import Calling, answer_schema, calling, choose, choosing
from muster.api.errors import in_words_of, invalid
from muster.api.gather import Collected
from muster.api.http import ApiRoute, EventStream, Operation, endpoint, json_response
from muster.api.openai_answers import begin_all, gather_all, variants
from muster.api.openai_bodies import CHAT_LIMITS, DEFAULT_ANSWER_TOKENS, ChatBody, NamedChoice
from muster.api.openai_chat_stream import ChatChunk, Plan, events
from muster.api.openai_prompt import messages_of, schema_of, template_of, tools_of
from muster.api.openai_shape import (
    DIALECT,
    FINGERPRINT,
    LogprobList,
    MadeCall,
    MadeFunction,
    Usage,
    finish_of,
    identity,
    made_call,
    now_seconds,
    token_details,
    usage_of,
)
from muster.protocol import Generate

# --- replies ------------------------------------------------------------------------------------------------


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. `content` is null where it consists of calls only."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: tuple[MadeCall, ...] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of the answers."""

    index: int
    message: AssistantMessage
    logprobs: LogprobList | None
    finish_reason: str


class ChatReply(msgspec.Struct, frozen=True, kw_only=True):
    """What a chat completion is answered with."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: tuple[ChatChoice, ...]
    usage: Usage
    system_fingerprint: str = FINGERPRINT


# --- the request --------------------------------------------------------------------------------------------


def plan_of(body: ChatBody) -> Plan:
    """Translate a body.

    Raises:
        ApiError: 400, it asks for something that does not fit together, or that cannot be done.
    """
    refuse(body, CHAT_LIMITS)
    body.check_stream()
    choice = _calling(body)
    schema = answer_schema(choice, schema_of(body.response_format), "response_format")
    limit, name = _limit(body)
    sampling = body.sampling(
        {"max_tokens": name},
        max_tokens=limit,
        logprobs=bool(body.logprobs),
        top_logprobs=body.top_logprobs,
        json_schema=schema,
    )
    request = Generate(
        instance=body.model,
        messages=messages_of(body.messages),
        tools=choice.tools,
        template=template_of(body.reasoning_effort, body.chat_template_kwargs),
        sampling=sampling,
    )
    return Plan(
        requests=variants(request, body.answers),
        forced=choice.forced.name if choice.forced is not None else None,
        any_call=choice.any,
        most_calls=1 if body.parallel_tool_calls is False else None,
        include_usage=body.include_usage,
        names={
            "json_schema": "tool_choice" if choice.must else "response_format",
            "template": "reasoning_effort" if body.chat_template_kwargs is None else "chat_template_kwargs",
        },
    )


def _calling(body: ChatBody) -> Calling:
    tools = tools_of((tool.function for tool in body.tools or ()), "tools")
    if isinstance(body.tool_choice, NamedChoice):
        return calling(tools, None, body.tool_choice.function.name)
    return calling(tools, body.tool_choice, None)


def _limit(body: ChatBody) -> tuple[int, str]:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid(f"max_tokens is {old} and max_completion_tokens {new}; send one of them", "max_tokens")
    if new is not None:
        return new, "max_completion_tokens"
    return (DEFAULT_ANSWER_TOKENS if old is None else old), "max_tokens"


# --- the answer at once -------------------------------------------------------------------------------------


def _reply(body: ChatBody, plan: Plan, answers: Sequence[Collected]) -> ChatReply:
    return ChatReply(
        id=identity("chatcmpl-"),
        created=now_seconds(),
        model=body.model,
        choices=tuple(_choice(index, plan, answer) for index, answer in enumerate(answers)),
        usage=usage_of((answer.done for answer in answers), len(answers)),
    )


def _choice(index: int, plan: Plan, answer: Collected) -> ChatChoice:
    calls = tuple(map(made_call, answer.tool_calls[: plan.most_calls]))
    text = answer.text
    if plan.forced is not None and text and not calls:
        calls = (MadeCall(identity("call_"), "function", MadeFunction(plan.forced, text)),)
        text = ""
    message = AssistantMessage(
        content=text if text or not calls else None,
        reasoning_content=answer.reasoning or msgspec.UNSET,
        tool_calls=calls or msgspec.UNSET,
    )
    logprobs = plan.requests[index].sampling.logprobs
    return ChatChoice(
        index=index,
        message=message,
        logprobs=LogprobList(token_details(answer.logprobs)) if logprobs else None,
        finish_reason=finish_of(answer.done, bool(calls)),
    )


def routes(backend: Backend) -> list[ApiRoute]:
    """The route of chat completions."""

    async def complete(request: Request) -> Response:
        body = await read_body(request, ChatBody)
        plan = plan_of(body)
        with in_words_of(plan.names):
            if not body.stream:
                whole = await gather_all(backend, plan.requests)
                return json_response(_reply(body, plan, [choose(each) for each in whole] if plan.any_call else whole))
            answers = await begin_all(backend, plan.requests)
        pieces = choosing(answers) if plan.any_call else answers
        return EventStream(DIALECT, events(body.model, plan, pieces), streams=answers.streams)

    operation = Operation(
        method="POST",
        path="/v1/chat/completions",
        summary="Answer a chat (OpenAI)",
        body=ChatBody,
        reply=ChatReply,
        events=ChatChunk,
    )
    return [ApiRoute(operation, endpoint(DIALECT, complete))]
