"""What clients send to `/v1/responses`, OpenAI's newer endpoint, and how it becomes a generation request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from muster.api.bodies import Limit, refuse, sampling_params
from muster.api.calling import Calling, answer_schema, calling
from muster.api.errors import invalid, unsupported
from muster.api.openai_bodies import (
    CACHE_OPTIONS,
    DEFAULT_ANSWER_TOKENS,
    MODERATION,
    RETENTION,
    TIER,
    VERBOSITY,
    Impossible,
    Label,
    ObjectFormat,
    StreamOptions,
    TextFormat,
    ToolMode,
)
from muster.api.openai_prompt import ANY_OBJECT, template_of
from muster.api.openai_responses_input import STATELESS, Item, messages_of
from muster.protocol import Generate
from muster.sampling import SamplingParams, Tool


class ResponseTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function on offer; see `muster.api.openai_bodies.FunctionTool` on `strict`."""

    type: Literal["function"]
    name: Annotated[str, msgspec.Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one function that the model must call."""

    type: Literal["function"]
    name: str


class ResponseSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="json_schema"):
    """JSON that follows a schema, with `strict` and without."""

    name: str = ""
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form of the answer's text."""

    format: TextFormat | ObjectFormat | ResponseSchema | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`effort` is a variable of the model's chat template. Reasoning is given as it is, never as a summary."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: Impossible = None
    mode: str | None = None


class ResponseBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/responses`.

    Nothing is kept between requests: the client sends the whole conversation each time. So `store` may be left out,
    null or false, the answer says `"store": false`, and `previous_response_id` and `conversation` are refused.
    Absent sampling options are as for `/v1/chat/completions`; so is the limit of an answer without
    `max_output_tokens`. `include` may ask for "message.output_text.logprobs", and for "reasoning.encrypted_content",
    which changes nothing: reasoning is given in the clear and taken back like that.
    """

    model: str
    input: str | tuple[Item, ...]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: tuple[ResponseTool, ...] | None = None
    tool_choice: ToolMode | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: tuple[Literal["message.output_text.logprobs", "reasoning.encrypted_content"], ...] | None = None
    metadata: dict[str, str] | None = None
    user: Label = None
    safety_identifier: Label = None
    prompt_cache_key: Label = None
    store: bool | None = None
    service_tier: str | None = None
    truncation: str | None = None
    background: bool | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Impossible = None
    previous_response_id: Impossible = None
    conversation: Impossible = None
    prompt: Impossible = None
    max_tool_calls: Impossible = None
    moderation: Impossible = None
    context_management: Impossible = None


LIMITS: Mapping[str, Limit] = {
    "store": Limit("answers are not kept; leave it out, or set it to false", (False,)),
    "service_tier": TIER,
    "truncation": Limit("nothing of the input is dropped to make it fit", ("disabled",)),
    "background": Limit(STATELESS, (False,)),
    "prompt_cache_retention": RETENTION,
    "prompt_cache_options": CACHE_OPTIONS,
    "previous_response_id": Limit(STATELESS),
    "conversation": Limit(STATELESS),
    "prompt": Limit("there are no stored prompts; send the text as instructions and input"),
    "max_tool_calls": Limit("it is about tools that the server runs, and it runs none"),
    "moderation": MODERATION,
    "context_management": Limit("nothing of the input is dropped or summarised to make it fit", ((), [])),
}
_TEXT_LIMITS = {"verbosity": VERBOSITY}
_SUMMARY = Limit("reasoning is given as it is, and there is no model that sums it up", ("auto",))
_REASONING_LIMITS = {
    "summary": _SUMMARY,
    "generate_summary": _SUMMARY,
    "context": Limit("which earlier reasoning the model sees is up to its chat template", ("auto",)),
    "mode": Limit("there is one mode", ("standard",)),
}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to ask the backend, and how to read what it answers."""

    request: Generate
    forced: str | None  #: the function whose arguments the text is
    any_call: bool  #: the text stands for a call of any tool
    most_calls: int | None
    names: dict[str, str]  #: of fields in errors, where the dialect has its own


def plan_of(body: ResponseBody) -> Plan:
    """Translate a body.

    Raises:
        ApiError: 400, it asks for something that does not fit together, or that cannot be done.
    """
    _check(body)
    choice = _calling(body)
    request = Generate(
        instance=body.model,
        messages=messages_of(body.instructions, body.input),
        tools=choice.tools,
        template=template_of(body.reasoning.effort if body.reasoning is not None else None, None),
        sampling=_sampling(body, answer_schema(choice, _schema(body), "text.format")),
    )
    return Plan(
        request=request,
        forced=choice.forced.name if choice.forced is not None else None,
        any_call=choice.any,
        most_calls=1 if body.parallel_tool_calls is False else None,
        names={
            "json_schema": "tool_choice" if choice.must else "text.format",
            "template": "reasoning.effort",
            "messages": "input",
        },
    )


def _check(body: ResponseBody) -> None:
    refuse(body, LIMITS)
    for name, options, limits in (("text", body.text, _TEXT_LIMITS), ("reasoning", body.reasoning, _REASONING_LIMITS)):
        if options is not None:
            refuse(options, limits, name)
    if body.stream_options is not None:
        if not body.stream:
            raise invalid("stream_options is only for stream: true", "stream_options")
        if body.stream_options.include_usage is not None:
            raise invalid("stream_options.include_usage is not a field of this endpoint", "stream_options")
        if body.stream_options.include_obfuscation:
            raise unsupported("stream_options.include_obfuscation", "events carry nothing that would need padding")


def _sampling(body: ResponseBody, schema: str | None) -> SamplingParams:
    wanted = "message.output_text.logprobs" in (body.include or ()) or bool(body.top_logprobs)
    values = {
        "max_tokens": DEFAULT_ANSWER_TOKENS if body.max_output_tokens is None else body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "logprobs": wanted,
        "top_logprobs": body.top_logprobs,
        "json_schema": schema,
    }
    return sampling_params(values, {"max_tokens": "max_output_tokens"})


def _schema(body: ResponseBody) -> str | None:
    match body.text.format if body.text is not None else None:
        case ObjectFormat():
            return ANY_OBJECT
        case ResponseSchema(schema=schema):
            return msgspec.json.encode(schema).decode()
        case _:
            return None


def _calling(body: ResponseBody) -> Calling:
    tools: dict[str, Tool] = {}
    for index, tool in enumerate(body.tools or ()):
        if tool.name in tools:
            raise invalid(f"tools[{index}] has the name {tool.name!r} of one before it", f"tools[{index}]")
        tools[tool.name] = Tool(name=tool.name, description=tool.description or "", parameters=tool.parameters or {})
    if isinstance(body.tool_choice, FunctionChoice):
        return calling(tuple(tools.values()), None, body.tool_choice.name)
    return calling(tuple(tools.values()), body.tool_choice, None)
