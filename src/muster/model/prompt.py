"""From a prompt or chat messages to token ids, checked against what the model can take."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import TemplateError
from mlx_lm.tokenizer_utils import TokenizerWrapper

from muster.errors import RequestError
from muster.model.load import LoadedModel
from muster.model.params import Message


def encode(tokenizer: TokenizerWrapper, prompt: str | None, messages: tuple[Message, ...] | None) -> list[int]:
    """Token ids of a plain `prompt`, or of `messages` through the model's chat template, ready for an answer.

    Raises:
        RequestError: not exactly one of the two, no chat template, a template that refuses the messages, or
            nothing to encode.
    """
    if prompt is not None and messages is None:
        # As mlx-lm does: a prompt that begins with the begin token gets no second one.
        begin = tokenizer.bos_token
        special = begin is None or not prompt.startswith(begin)
        tokens = list(tokenizer.encode(prompt, add_special_tokens=special))
    elif messages is not None and prompt is None:
        tokens = _encode_chat(tokenizer, messages)
    else:
        raise RequestError(
            "a request needs either a prompt or messages, and not both", remedy="send exactly one of them"
        )
    if not tokens:
        raise RequestError("the prompt encodes to no tokens", remedy="send some text")
    return tokens


def check_prompt(loaded: LoadedModel, tokens: Sequence[int]) -> None:
    """Refuse token ids that the model cannot take. Rank 0 does it before the others hear of the request.

    Raises:
        RequestError: no room for even one new token in the model's context, or ids beyond its vocabulary.
    """
    if not tokens:
        raise RequestError("the prompt has no tokens", remedy="send some text")
    limit = loaded.context_tokens
    if limit is not None and len(tokens) >= limit:
        raise RequestError(
            f"the prompt has {len(tokens)} tokens and the model's context only {limit} (max_position_embeddings)",
            remedy=f"shorten the prompt to at most {limit - 1} tokens",
        )
    size = loaded.vocabulary
    strange = [token for token in tokens if token < 0 or (size is not None and token >= size)]
    if strange:
        raise RequestError(
            f"token {strange[0]} is outside the model's vocabulary of {size}",
            remedy="use the tokenizer that belongs to the model",
        )


def _encode_chat(tokenizer: TokenizerWrapper, messages: tuple[Message, ...]) -> list[int]:
    if not messages:
        raise RequestError("messages is empty", remedy="send at least one message")
    if not tokenizer.has_chat_template:
        raise RequestError("the model has no chat template", remedy="send a plain prompt instead of messages")
    turns = [{"role": message.role, "content": message.content} for message in messages]
    try:
        return list(tokenizer.apply_chat_template(turns, tokenize=True, add_generation_prompt=True))
    except TemplateError as error:
        raise RequestError(
            f"the model's chat template refuses the messages: {error}",
            remedy="check the roles and their order",
        ) from error
