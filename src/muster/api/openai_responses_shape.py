"""What `/v1/responses` answers: the response, its items, and the events of its stream."""

from __future__ import annotations

import msgspec

from muster.api.gather import Collected
from muster.api.openai_bodies import ObjectFormat, TextFormat, ToolMode
from muster.api.openai_responses_bodies import FunctionChoice, Plan, ResponseBody, ResponseSchema, ResponseTool
from muster.api.openai_shape import TokenDetail, identity, now_seconds, token_details
from muster.replies import Done

# --- items --------------------------------------------------------------------------------------------------


class OutputText(msgspec.Struct, frozen=True, tag="output_text", tag_field="type"):
    """Text of an answer."""

    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[TokenDetail, ...] = ()


class ReasoningText(msgspec.Struct, frozen=True, tag="reasoning_text", tag_field="type"):
    """Reasoning, as the model wrote it."""

    text: str


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag="message", tag_field="type"):
    """The answer's text. `status` is "in_progress", "completed" or "incomplete", as in every item."""

    id: str
    status: str
    role: str = "assistant"
    content: tuple[OutputText, ...] = ()


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag="reasoning", tag_field="type"):
    """What the model thought before it answered."""

    id: str
    status: str
    summary: tuple[()] = ()
    content: tuple[ReasoningText, ...] = ()


class CallItem(msgspec.Struct, frozen=True, kw_only=True, tag="function_call", tag_field="type"):
    """A call that the model makes; answer it by `call_id`."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str = ""


OutputItem = MessageItem | ReasoningItem | CallItem


def message_item(identity: str, status: str, text: str, logprobs: tuple[TokenDetail, ...]) -> MessageItem:
    """A message of one text."""
    return MessageItem(id=identity, status=status, content=(OutputText(text, (), logprobs),))


def reasoning_item(identity: str, status: str, text: str) -> ReasoningItem:
    """Reasoning of one text."""
    return ReasoningItem(id=identity, status=status, content=(ReasoningText(text),))


# --- the response -------------------------------------------------------------------------------------------


class InputDetails(msgspec.Struct, frozen=True):
    """Of the input's tokens, those that came from the prompt cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True):
    """Of the output's tokens, those that were spent on reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    """Tokens of a request."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFailure(msgspec.Struct, frozen=True):
    """Why a response failed."""

    code: str
    message: str


class Incomplete(msgspec.Struct, frozen=True):
    """Why a response is not complete."""

    reason: str


class TextShape(msgspec.Struct, frozen=True):
    """The form of the text that was asked for."""

    format: TextFormat | ObjectFormat | ResponseSchema


class ReasoningShape(msgspec.Struct, frozen=True):
    """The effort that was asked for."""

    effort: str | None
    summary: None = None


class ResponseReply(msgspec.Struct, frozen=True, kw_only=True):
    """A response. `status` is "in_progress", "completed", "incomplete" or "failed"; `store` is always false."""

    id: str
    object: str = "response"
    created_at: int
    status: str
    background: bool = False
    error: ResponseFailure | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: tuple[OutputItem, ...] = ()
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: ReasoningShape
    service_tier: str = "default"
    store: bool = False
    temperature: float
    text: TextShape
    tool_choice: ToolMode | FunctionChoice
    tools: tuple[ResponseTool, ...]
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    metadata: dict[str, str]


def begun(body: ResponseBody, plan: Plan) -> ResponseReply:
    """The response before anything was generated."""
    sampling = plan.request.sampling
    wanted = body.text.format if body.text is not None else None
    return ResponseReply(
        id=identity("resp_"),
        created_at=now_seconds(),
        status="in_progress",
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        model=body.model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning=ReasoningShape(body.reasoning.effort if body.reasoning is not None else None),
        temperature=sampling.temperature,
        text=TextShape(wanted or TextFormat()),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or (),
        top_logprobs=sampling.top_logprobs,
        top_p=sampling.top_p,
        metadata=body.metadata or {},
    )


def ended(response: ResponseReply, output: tuple[OutputItem, ...], done: Done) -> ResponseReply:
    """The response after its last token."""
    cut = done.reason == "length"
    return msgspec.structs.replace(
        response,
        status="incomplete" if cut else "completed",
        incomplete_details=Incomplete("max_output_tokens") if cut else None,
        output=output,
        usage=ResponseUsage(
            done.prompt_tokens,
            InputDetails(done.cached_tokens),
            done.completion_tokens,
            OutputDetails(done.reasoning_tokens),
            done.prompt_tokens + done.completion_tokens,
        ),
    )


def output_of(plan: Plan, answer: Collected) -> tuple[OutputItem, ...]:
    """The items of a whole answer: reasoning, text, calls. Only the last can be cut by the limit."""
    items: list[OutputItem] = []
    last = "incomplete" if answer.done.reason == "length" else "completed"
    text, calls = answer.text, answer.tool_calls[: plan.most_calls]
    fills = plan.forced is not None and text and not calls
    if answer.reasoning:
        status = "completed" if text or calls else last
        items.append(reasoning_item(identity("rs_"), status, answer.reasoning))
    if text and not fills:
        status = "completed" if calls else last
        items.append(message_item(identity("msg_"), status, text, token_details(answer.logprobs)))
    if plan.forced is not None and fills:
        items.append(
            CallItem(id=identity("fc_"), status=last, call_id=identity("call_"), name=plan.forced, arguments=text)
        )
    items += (
        CallItem(id=identity("fc_"), status="completed", call_id=call.id, name=call.name, arguments=call.arguments)
        for call in calls
    )
    return tuple(items)
