"""What clients of Ollama's dialect send.

A field or an option that Ollama knows and muster cannot do is declared, and refused by name when it is set to
anything but what it means by default.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from muster.api.bodies import Limit

Impossible = Any  #: declared so that it can be refused by name

#: Tokens that the penalties look at where `repeat_last_n` is not given. Source: Ollama's Modelfile reference.
REPEAT_LAST_N = 64


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to choose tokens.

    An absent `temperature` is 0, unlike Ollama's 0.8: the likeliest token, and so the same answer each time.
    `num_predict` of -1 or -2 is as much as the model's context has room for; absent it is 8192. `repeat_last_n` is
    how many of the last tokens the three penalties look at: 0 switches them off, -1 is all, absent it is 64.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    num_predict: Annotated[int, msgspec.Meta(ge=-2)] | None = None
    stop: str | tuple[str, ...] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    num_ctx: Impossible = None
    num_keep: Impossible = None
    num_batch: Impossible = None
    num_gpu: Impossible = None
    num_thread: Impossible = None
    main_gpu: Impossible = None
    numa: Impossible = None
    low_vram: Impossible = None
    f16_kv: Impossible = None
    logits_all: Impossible = None
    vocab_only: Impossible = None
    use_mmap: Impossible = None
    use_mlock: Impossible = None
    embedding_only: Impossible = None
    tfs_z: Impossible = None
    typical_p: Impossible = None
    mirostat: Impossible = None
    mirostat_tau: Impossible = None
    mirostat_eta: Impossible = None
    penalize_newline: Impossible = None


_LOADING = Limit("how a model is loaded is up to its instance", (False,))
_MIROSTAT = Limit("there is no Mirostat sampling", (0,))
OPTION_LIMITS = {
    "num_ctx": Limit("a request may use the whole context of the model"),
    "num_keep": Limit("a prompt that is too long is refused and not cut"),
    **dict.fromkeys(("num_batch", "num_gpu", "num_thread", "main_gpu", "numa", "low_vram", "f16_kv"), _LOADING),
    **dict.fromkeys(("logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only"), _LOADING),
    "tfs_z": Limit("there is no tail-free sampling", (1,)),
    "typical_p": Limit("there is no typical sampling", (1,)),
    **dict.fromkeys(("mirostat", "mirostat_tau", "mirostat_eta"), _MIROSTAT),
    "penalize_newline": Limit("penalties make no difference between tokens", (True,)),
}


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function that was called; `index` is its place among the calls."""

    name: str
    arguments: dict[str, Any] = {}
    index: int | None = None


class Call(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call that the assistant made in an earlier turn."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] | None = None


class Turn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn. A tool's turn without `tool_call_id` answers the next open call of `tool_name`."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Impossible = None
    tool_calls: tuple[Call, ...] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class Function(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function on offer."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolOffer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool on offer."""

    function: Function
    type: Literal["function"] | None = None


class Asked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What chats and plain prompts share.

    `format` is "json" for any object, or a JSON Schema. `think` sets the template's `enable_thinking`, and a level
    its `reasoning_effort` too. `keep_alive` changes nothing unless it is 0: a model stays with its instance.
    """

    model: Annotated[str, msgspec.Meta(min_length=1)]
    stream: bool | None = None  #: absent it is true
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class ChatBody(Asked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /api/chat`. Without messages it asks whether the model is there."""

    messages: tuple[Turn, ...] | None = None
    tools: tuple[ToolOffer, ...] | None = None


class GenerateBody(Asked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /api/generate`. `prompt` becomes a user's turn, or with `raw` is the text to go on from.

    Without a prompt it asks whether the model is there.
    """

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: Impossible = None
    template: Impossible = None
    context: Impossible = None
    images: Impossible = None
    width: Impossible = None
    height: Impossible = None
    steps: Impossible = None


_TEXT_ONLY = Limit("the model reads and writes text only", ([],))
GENERATE_LIMITS = {
    "suffix": Limit("the model does not fill in the middle", ("",)),
    "template": Limit("the model's own chat template is used; set raw to use none", ("",)),
    "context": Limit("Ollama replaced it by /api/chat; send the messages there", ([],)),
    **dict.fromkeys(("images", "width", "height", "steps"), _TEXT_ONLY),
}
TURN_LIMITS = {"images": _TEXT_ONLY}


class ShowBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /api/show`. `name` is the earlier name of `model`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
