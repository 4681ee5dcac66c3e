"""From a request to token ids and whatever else its answer needs, checked against what the model can take.

Everything here runs in a preparing thread of rank 0 while the main thread uses the same tokenizer: a fast tokenizer
is only read, and nothing here touches the model.

The `field` of an error is the name in `muster.protocol.Generate` or `muster.sampling.SamplingParams`, such as
"messages", "tools", "prompt", "template", "logit_bias" or "json_schema".
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from mlx_lm.tokenizer_utils import TokenizerWrapper

from muster.errors import ContextError, RequestError
from muster.model.grammar import Grammar, compile_schema
from muster.model.load import LoadedModel
from muster.model.prompt import Prompt, Reasoning, encode_chat, encode_text
from muster.protocol import Generate
from muster.sampling import SamplingParams


class PreparedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that rank 0 can admit to the batch.

    `prompt_text` is the prompt decoded, where it was given as ids. `keep` are positions in `tokens`, ascending, at
    which the cache is worth keeping: other prompts begin with the same tokens up to there. `limit` is the most tokens
    that may be generated; 0 asks only for the count of the prompt's tokens.

    The rest is for `muster.model.answer.Answer`: `chat` tells turns from plain text, in which no marker means
    anything; `reasoning` is what of a block of reasoning the prompt ends with; `tools` are in OpenAI's form.
    """

    tokens: tuple[int, ...]
    limit: int
    prompt_text: str | None = None
    keep: tuple[int, ...] = ()
    chat: bool = False
    reasoning: Reasoning = "none"
    tools: tuple[dict[str, Any], ...] = ()
    grammar: Grammar | None = None


def prepare(loaded: LoadedModel, generate: Generate) -> PreparedRequest:
    """Encode and check a request. Thread-safe.

    Raises:
        RequestError: the request asks for what this model cannot do; `field` names what of it.
        ContextError: the prompt leaves no room for an answer in the model's context.
    """
    params = generate.sampling
    prompt = _prompt(loaded, generate)
    if not prompt.tokens:
        raise RequestError("the prompt encodes to no tokens", remedy="send some text", field=_source(generate))
    _check_tokens(loaded, prompt.tokens, _source(generate))
    _check_bias(loaded, params)
    grammar = None
    if params.json_schema is not None:
        grammar = compile_schema(loaded, params.json_schema, calls_tools=bool(generate.tools))
    return PreparedRequest(
        tokens=prompt.tokens,
        limit=_limit(loaded, prompt.tokens, params, _source(generate)),
        prompt_text=prompt.text,
        keep=prompt.keep,
        chat=generate.prompt is None,
        reasoning=prompt.reasoning,
        tools=prompt.tools,
        grammar=grammar,
    )


def _source(generate: Generate) -> str:
    return "messages" if generate.prompt is None else "prompt"


def _check_size(loaded: LoadedModel, generate: Generate) -> None:
    """Refuse what cannot fit whatever its tokens are, before much time goes into finding them."""
    context = loaded.context_tokens
    if context is None or isinstance(generate.prompt, tuple):
        return
    texts = [generate.prompt] if generate.prompt is not None else [message.content for message in generate.messages]
    characters = sum(map(len, texts))
    least = max(len(generate.messages), -(-characters // _longest_token(loaded.tokenizer)))
    if least > context:
        raise ContextError(
            f"the prompt has {characters} characters in {len(texts)} texts, at least {least} tokens, and the model's "
            f"context only {context}",
            remedy="shorten the prompt",
            field=_source(generate),
        )


#: By tokenizer: characters of its longest token. A token has at most as many characters as letters in its spelling.
_longest: WeakKeyDictionary[TokenizerWrapper, int] = WeakKeyDictionary()


def _longest_token(tokenizer: TokenizerWrapper) -> int:
    found = _longest.get(tokenizer)
    if found is None:
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        found = _longest[tokenizer] = max(map(len, vocabulary), default=1) or 1
    return found


def _prompt(loaded: LoadedModel, generate: Generate) -> Prompt:
    _check_size(loaded, generate)
    if generate.prompt is None:
        return encode_chat(loaded.tokenizer, generate.messages, generate.tools, generate.template)
    for field, value in (("messages", generate.messages), ("tools", generate.tools), ("template", generate.template)):
        if value:
            raise RequestError(
                f"{field} is set, but a plain prompt has none", remedy="send either a prompt or messages", field=field
            )
    if isinstance(generate.prompt, str):
        return encode_text(loaded.tokenizer, generate.prompt)
    _check_tokens(loaded, generate.prompt, "prompt")  # before decoding, which may fail on foreign ids
    return Prompt(tokens=generate.prompt, text=loaded.tokenizer.decode(list(generate.prompt)))


def _check_tokens(loaded: LoadedModel, tokens: tuple[int, ...], field: str) -> None:
    size = loaded.vocabulary
    for token in (min(tokens, default=0), max(tokens, default=0)):
        if token < 0 or (size is not None and token >= size):
            raise RequestError(
                f"token {token} is outside the model's vocabulary of {size}",
                remedy="use the tokenizer that belongs to the model",
                field=field,
            )


def _check_bias(loaded: LoadedModel, params: SamplingParams) -> None:
    size = loaded.vocabulary if loaded.vocabulary is not None else len(loaded.tokenizer)
    for token in params.logit_bias:
        if not 0 <= token < size:
            raise RequestError(
                f"logit_bias names token {token}, which is outside the model's vocabulary of {size}",
                remedy="name tokens by their ids in this model's tokenizer",
                field="logit_bias",
            )


def _limit(loaded: LoadedModel, tokens: tuple[int, ...], params: SamplingParams, field: str) -> int:
    """How many tokens may be generated. Counting alone needs no room."""
    context = loaded.context_tokens
    if context is None or params.max_tokens == 0:
        return params.max_tokens
    if len(tokens) >= context:
        raise ContextError(
            f"the prompt has {len(tokens)} tokens and the model's context only {context}",
            remedy=f"shorten the prompt to at most {context - 1} tokens",
            field=field,
        )
    return min(params.max_tokens, context - len(tokens))
