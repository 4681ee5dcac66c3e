"""What clients of Anthropic's dialect send.

A field that Anthropic knows and muster cannot do is declared, and refused by name when it is set to anything but
what it means by default. `cache_control` changes nothing: prompts that begin alike share their cache by themselves.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from muster.api.bodies import Limit

Impossible = Any  #: declared so that it can be refused by name


class CacheControl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A wish to keep the prompt up to here in the cache."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


# --- the contents of a message ------------------------------------------------------------------------------


class TextBlock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="text"):
    """Text."""

    text: str
    cache_control: CacheControl | None = None
    citations: Impossible = None


class ThinkingBlock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="thinking"):
    """Reasoning of an earlier answer. The model's template decides whether it is shown again."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="tool_use"):
    """A call that the assistant made in an earlier turn."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Impossible = None
    toolset_name: Impossible = None


class ImageBlock(msgspec.Struct, frozen=True, tag="image"):
    """Refused: the model takes text only."""


class DocumentBlock(msgspec.Struct, frozen=True, tag="document"):
    """Refused: the model takes text only."""


class SearchResultBlock(msgspec.Struct, frozen=True, tag="search_result"):
    """Refused: nothing here cites."""


class RedactedThinkingBlock(msgspec.Struct, frozen=True, tag="redacted_thinking"):
    """Refused: only Anthropic can read it."""


class ToolResultBlock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="tool_result"):
    """What a call gave. The text of a result with `is_error` begins with "Error: " for the model."""

    tool_use_id: str
    content: str | tuple[TextBlock | ImageBlock | DocumentBlock | SearchResultBlock, ...] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: Impossible = None


Block = (
    TextBlock
    | ThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | RedactedThinkingBlock
)


class Turn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn. Turns of one role in a row are one."""

    role: Literal["user", "assistant", "system"]
    content: str | tuple[Block, ...]


# --- tools --------------------------------------------------------------------------------------------------


class ToolOffer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call. Tools that run on Anthropic's servers have another `type`."""

    type: Literal["custom"] | None = None
    name: Annotated[str, msgspec.Meta(min_length=1)]
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: CacheControl | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    allowed_callers: Impossible = None
    input_examples: Impossible = None


class AutoChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="auto"):
    """The model decides. With `disable_parallel_tool_use` only its first call counts."""

    disable_parallel_tool_use: bool | None = None


class NoChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="none"):
    """No tools."""


class AnyChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="any"):
    """The model must call one of the tools."""

    disable_parallel_tool_use: bool | None = None


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="tool"):
    """The model must call this tool."""

    name: str
    disable_parallel_tool_use: bool | None = None


# --- thinking and formats -----------------------------------------------------------------------------------


class ThinkingOn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="enabled"):
    """The template's `enable_thinking` is true. `max_tokens` bounds thinking and answer together."""

    budget_tokens: int | None = None
    display: str | None = None


class ThinkingAdaptive(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="adaptive"):
    """As the template has it."""

    display: str | None = None


class ThinkingOff(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="disabled"):
    """The template's `enable_thinking` is false."""


class SchemaFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer is JSON that follows the schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form of the answer."""

    format: SchemaFormat | None = None
    effort: Impossible = None


class Metadata(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The client's own label; no answer depends on it."""

    user_id: str | None = None


# --- bodies -------------------------------------------------------------------------------------------------


class CountTokensBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/messages/count_tokens`."""

    model: str
    messages: tuple[Turn, ...]
    system: str | tuple[TextBlock, ...] | None = None
    tools: tuple[ToolOffer, ...] | None = None
    tool_choice: AutoChoice | NoChoice | AnyChoice | ToolChoice | None = None
    thinking: ThinkingOn | ThinkingAdaptive | ThinkingOff | None = None
    output_config: OutputConfig | None = None
    output_format: SchemaFormat | None = None  #: the earlier place of `output_config.format`
    cache_control: CacheControl | None = None
    speed: str | None = None
    mcp_servers: Impossible = None
    context_management: Impossible = None

    @property
    def format(self) -> SchemaFormat | None:
        """The schema of the answer."""
        config = self.output_config
        return self.output_format if config is None or config.format is None else config.format


class MessagesBody(CountTokensBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/messages`.

    An absent `temperature` is 0, unlike Anthropic's 1: the likeliest token, and so the same answer each time.
    """

    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    stream: bool | None = None
    stop_sequences: tuple[str, ...] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: Impossible = None
    inference_geo: Impossible = None
    diagnostics: Impossible = None
    user_profile_id: Impossible = None
    fallbacks: Impossible = None
    compaction: Impossible = None
    thread: Impossible = None


COUNT_LIMITS = {
    "speed": Limit("there is one speed", ("standard",)),
    "mcp_servers": Limit("tools run at the client; offer them in tools", ([],)),
    "context_management": Limit("turns are not edited; send those that the model shall see"),
}
MESSAGES_LIMITS = COUNT_LIMITS | {
    "container": Limit("nothing runs code for an answer"),
    "inference_geo": Limit("the answer is made where the cluster is"),
    "diagnostics": Limit("answers are not kept, and cannot be compared"),
    "user_profile_id": Limit("there are no profiles"),
    "fallbacks": Limit("a request is for one model"),
    "compaction": Limit("turns are not edited; send those that the model shall see"),
    "thread": Limit("turns are not kept; send all of them"),
}
TOOL_LIMITS = {
    "strict": Limit("the arguments of calls are only constrained where tool_choice forces one", (False,)),
    "defer_loading": Limit("every tool is shown to the model", (False,)),
    "eager_input_streaming": Limit("a call is sent when it is whole", (False,)),
    "allowed_callers": Limit("only the model calls tools", (["direct"],)),
    "input_examples": Limit("chat templates have no place for them; put them in the description", ([],)),
}
USE_LIMITS = {
    "caller": Limit("only the model calls tools", ({"type": "direct"},)),
    "toolset_name": Limit("there are no toolsets"),
}
BLOCK_LIMITS = {"citations": Limit("nothing here cites", ([],))}
THINKING_LIMITS = {"display": Limit("thinking is shown as it is", ("summarized",))}
