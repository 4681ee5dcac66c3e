"""What clients of OpenAI's dialect send: the parts that its endpoints share, and the body of a chat completion.

A field that OpenAI knows and muster cannot do is declared, and refused by name when it is set to anything but what
it means by default. A field that nobody knows is refused by msgspec.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from muster.api.bodies import Limit, sampling_params
from muster.api.errors import invalid, unsupported
from muster.sampling import SamplingParams

#: Tokens that a chat may generate where the client names no limit; the model's context may leave less.
#: Enough for a long answer with its reasoning, and an end for a small model that repeats itself.
DEFAULT_ANSWER_TOKENS = 8192
#: Most answers to one prompt.
MAX_N = 16

#: For the client's own books.
Label = Annotated[Any, msgspec.Meta(description="Accepted; no answer depends on it.")]
#: Declared so that it can be refused by name.
Impossible = Annotated[Any, msgspec.Meta(description="Refused when it is set, with the reason.")]


# --- the contents of a message ------------------------------------------------------------------------------


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="text"):
    """Text of a message."""

    text: str


class RefusalPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="refusal"):
    """An assistant's refusal, from an earlier turn."""

    refusal: str


class ImagePart(msgspec.Struct, frozen=True, tag="image_url"):
    """Refused: the model takes text only."""


class AudioPart(msgspec.Struct, frozen=True, tag="input_audio"):
    """Refused: the model takes text only."""


class FilePart(msgspec.Struct, frozen=True, tag="file"):
    """Refused: the model takes text only."""


Part = TextPart | RefusalPart | ImagePart | AudioPart | FilePart
Content = str | tuple[Part, ...]


class CalledFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call's function, and its arguments as JSON text of an object."""

    name: str
    arguments: str
    parsed_arguments: Label = None  #: of the official client's own classes


class Call(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call that the assistant made in an earlier turn."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None  #: of a streamed call, that some clients send back


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn. "developer" is OpenAI's newer name of "system"."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: tuple[Call, ...] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  #: another name of `reasoning_content`, that other servers use
    refusal: str | None = None
    audio: Impossible = None
    function_call: Impossible = None
    annotations: Label = None
    parsed: Label = None  #: of the official client's own classes


# --- tools --------------------------------------------------------------------------------------------------


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function on offer. `strict` is a promise of the client's schema; the model writes the arguments freely,
    unless `tool_choice` names the function: then they follow `parameters`."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool on offer."""

    function: FunctionTool
    type: Literal["function"] = "function"


class ChosenFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The name of a function."""

    name: str


class NamedChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one function that the model must call."""

    function: ChosenFunction
    type: Literal["function"]


ToolMode = Literal["none", "auto", "required"]


# --- formats ------------------------------------------------------------------------------------------------


class NamedSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A JSON Schema. The answer always follows it, with `strict` and without."""

    name: str = ""
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="text"):
    """Text as it comes."""


class ObjectFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="json_object"):
    """Any JSON object."""


class SchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="json_schema"):
    """JSON that follows a schema."""

    json_schema: NamedSchema


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`include_usage`: a last chunk with the usage, before the end of the stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


# --- bodies -------------------------------------------------------------------------------------------------


class Sampled(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What chat and plain completions share.

    An absent `temperature` is 0, as with mlx_lm.server and unlike OpenAI's 1: the likeliest token, and so the same
    answer each time. `top_p` is then 1, and all else is off. The penalties look at the last 20 tokens
    (`repetition_context_size`, mlx_lm.server's name, for all three). With `seed` and `n`, answer i has seed + i.
    """

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_N)] | None = None
    stop: str | tuple[str, ...] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  #: 0 or -1: off
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_context_size: int | None = None
    logit_bias: dict[str, float] | None = None  #: by token ids, which JSON writes as strings
    user: Label = None

    @property
    def answers(self) -> int:
        """How many answers to a prompt."""
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage is True

    def check_stream(self) -> None:
        """Refuse options of a stream where there is none, or that a stream here does not have."""
        if self.stream_options is None:
            return
        if not self.stream:
            raise invalid("stream_options is only for stream: true", "stream_options")
        if self.stream_options.include_obfuscation:
            raise unsupported("stream_options.include_obfuscation", "events carry nothing that would need padding")

    def sampling(self, names: dict[str, str], **more: object) -> SamplingParams:
        """The sampling parameters, with those that the endpoint spells in its own way.

        Raises:
            ApiError: 400, a value is out of range.
        """
        values = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "min_p": self.min_p,
            "seed": self.seed,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "penalty_context_tokens": self.repetition_context_size,
            "logit_bias": _bias(self.logit_bias or {}),
            "stop": (self.stop,) if isinstance(self.stop, str) else self.stop,
        }
        return sampling_params(values | more, {"penalty_context_tokens": "repetition_context_size"} | names)


def _bias(given: dict[str, float]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for token, value in given.items():
        if not (token.isascii() and token.isdigit()):
            raise invalid(f"logit_bias has the key {token!r}; it must be a token id, such as '42'", "logit_bias")
        bias[int(token)] = value
    return bias


class ChatBody(Sampled, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/chat/completions`.

    Without `max_tokens` or its newer name `max_completion_tokens`, an answer has at most 8192 tokens, and no more
    than the model's context has room for. `reasoning_effort` and `chat_template_kwargs` are variables of the
    model's chat template; "none" also sets `enable_thinking` to false.
    """

    messages: tuple[ChatMessage, ...]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    tools: tuple[ChatTool, ...] | None = None
    tool_choice: ToolMode | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: TextFormat | ObjectFormat | SchemaFormat | None = None
    metadata: Label = None
    safety_identifier: Label = None
    prompt_cache_key: Label = None
    store: bool | None = None
    service_tier: str | None = None
    modalities: tuple[str, ...] | None = None
    verbosity: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Impossible = None
    audio: Impossible = None
    prediction: Impossible = None
    web_search_options: Impossible = None
    moderation: Impossible = None
    functions: Impossible = None
    function_call: Impossible = None


TIER = Limit('every request is served alike; leave it out, or set "auto" or "default"', ("auto", "default"))
VERBOSITY = Limit("no chat template knows it; ask for a short or a long answer in the messages", ("medium",))
RETENTION = Limit("how long a prompt stays cached is up to the instance", ("in_memory",))
CACHE_OPTIONS = Limit("prompts are cached by themselves, wherever they begin alike")
MODERATION = Limit("there is no moderation model")

CHAT_LIMITS: Mapping[str, Limit] = {
    "store": Limit("answers are not kept", (False,)),
    "service_tier": TIER,
    "modalities": Limit("the model answers in text only", (("text",), ())),
    "verbosity": VERBOSITY,
    "prompt_cache_retention": RETENTION,
    "prompt_cache_options": CACHE_OPTIONS,
    "audio": Limit("the model answers in text only"),
    "prediction": Limit("answers are not predicted from a draft of the client's"),
    "web_search_options": Limit("there is no web search; offer a tool of your own"),
    "moderation": MODERATION,
    "functions": Limit("OpenAI replaced it by tools; send those", ([],)),
    "function_call": Limit("OpenAI replaced it by tool_choice; send that", ("none",)),
}
