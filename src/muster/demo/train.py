"""Makes the demo model: `python -m muster.demo.train OUTPUT_DIRECTORY`.

A byte-level transformer of the `qwen2` architecture, which mlx-lm can both shard and pipeline, is trained on
the CPU until it answers every conversation of `muster.demo.answers` exactly, by a wide margin, whatever the order
of the tools and with thinking forbidden or not. The result is
an ordinary mlx-lm model directory. Its weights stay fp32: a sum in another order, which is what tensor
sharding makes of it, then never changes a greedy token.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, cast

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import msgspec
from loguru import logger
from mlx.utils import tree_flatten
from mlx_lm.models import qwen2
from mlx_lm.utils import load_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from muster.demo.answers import ALL_CONVERSATIONS, Conversation
from muster.errors import ModelError
from muster.sampling import Message

_END: Final = "<|end|>"
_PAD: Final = "<|pad|>"
#: Marks of turns; a decoder leaves them out of the text.
_SPECIAL_TOKENS: Final = (
    "<|user|>",
    "<|assistant|>",
    _END,
    _PAD,
    "<|tool|>",
    "<|tools|>",
    # So that the vocabulary divides by 4 ranks.
    "<|reserved_0|>",
    "<|reserved_1|>",
)
#: Marks inside an answer, by which mlx-lm knows a model that thinks and calls tools; they are part of the text.
_ANSWER_TOKENS: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_END_ID: Final = 256 + _SPECIAL_TOKENS.index(_END)
_PAD_ID: Final = 256 + _SPECIAL_TOKENS.index(_PAD)

# System turns are left out: many clients always send a system prompt, and the model has seen none.
# The model decides whether it thinks. `enable_thinking` false is the closed thought that forbids it, as in Qwen's
# template; `open_thinking` is the open thought that demands it, as in those of models that always think.
# mlx-lm looks for the names `<tool_call>` and `tool_call.name`.
_CHAT_TEMPLATE: Final = (
    "{% if tools %}<|tools|>"
    "{% for tool in tools %}{{ (tool.function or tool).name }}{{ '' if loop.last else ', ' }}{% endfor %}"
    "<|end|>{% endif %}"
    "{% for message in messages if message.role in ('user', 'assistant', 'tool') %}"
    "{{ '<|' + message.role + '|>' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}{% set tool_call = call.function or call %}"
    """{{ '<tool_call>{"name": "' + tool_call.name + '", "arguments": ' }}"""
    "{{ tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}"
    "{{ '}</tool_call>' }}{% endfor %}"
    "<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if open_thinking %}<think>{% elif enable_thinking is false %}<think></think>{% endif %}"
    "{% endif %}"
)

_CONFIG: Final[dict[str, Any]] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    # Heads, KV heads and both sizes divide by 1, 2 and 4 ranks.
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 256 + len(_SPECIAL_TOKENS) + len(_ANSWER_TOKENS),
    # Far more than any conversation needs: what an answer takes can be watched, and cut.
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": _END_ID,
    "pad_token_id": _PAD_ID,
    "torch_dtype": "float32",
}

_SEED: Final = 7
_BATCH_SIZE: Final = 4
_STEPS: Final = 2200
_STEPS_PER_CHECK: Final = 100
_WARMUP_STEPS: Final = 20
_PEAK_LEARNING_RATE: Final = 5e-3
#: How far, in nats, every right token must stand above the next best one before training may stop.
_MARGIN_NATS: Final = 3.0


class Example(msgspec.Struct, frozen=True):
    """Token ids of a conversation; those from `answer_start` on are the answer, the end token included."""

    tokens: tuple[int, ...]
    answer_start: int


def spellings(conversation: Conversation) -> tuple[Conversation, ...]:
    """The conversation as people type it: as written, in lower case, without the mark at the end, and both.

    Each also with thinking forbidden, which leaves the reasoning out of the answer.
    """
    found: list[Conversation] = []
    for lower in (False, True):
        for bare in (False, True):
            spelt = _respell(conversation, lower=lower, bare=bare)
            found += [variant for variant in (spelt, _without_thinking(spelt)) if variant not in found]
    return tuple(found)


def _respell(conversation: Conversation, *, lower: bool, bare: bool) -> Conversation:
    def respell(message: Message) -> Message:
        if message.role != "user":
            return message
        content = message.content.lower() if lower else message.content
        return Message(role="user", content=content.rstrip("?.。") if bare else content)

    prompt = (respell(message) for message in conversation.prompt)
    return msgspec.structs.replace(conversation, messages=(*prompt, conversation.messages[-1]))


def _without_thinking(conversation: Conversation) -> Conversation:
    answer = msgspec.structs.replace(conversation.messages[-1], reasoning="")
    return msgspec.structs.replace(conversation, messages=(*conversation.prompt, answer), thinking=False)


def offers(conversation: Conversation) -> tuple[Conversation, ...]:
    """The conversation with its tools in every order, and with no more than those that it calls."""
    called = {call.name for message in conversation.messages for call in message.tool_calls}
    orders = list(itertools.permutations(conversation.tools))
    if called:
        orders.append(tuple(tool for tool in conversation.tools if tool.name in called))
    return tuple(msgspec.structs.replace(conversation, tools=order) for order in orders)


def variants(conversation: Conversation) -> tuple[Conversation, ...]:
    """All that the model learns to answer alike, first the conversation as it is."""
    return (*spellings(conversation), *offers(conversation)[1:])


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer with one token per byte, the special tokens, and the chat template."""
    # The alphabet holds one letter per byte; sorted, because it comes in another order each time.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in _SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in _ANSWER_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _END,
        "pad_token": _PAD,
        "additional_special_tokens": [token for token in _SPECIAL_TOKENS if token not in (_END, _PAD)],
        "model_max_length": _CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    _write_json(directory / "tokenizer_config.json", settings)


def encode(tokenizer: Any, conversation: Conversation) -> Example:
    """Encode a conversation through the chat template, as a server does before it generates."""
    prompt = encode_prompt(tokenizer, conversation)
    answer = cast("list[int]", tokenizer.encode(conversation.raw, add_special_tokens=False))
    return Example(tokens=(*prompt, *answer, _END_ID), answer_start=len(prompt))


def encode_prompt(tokenizer: Any, conversation: Conversation, **variables: Any) -> list[int]:
    """Token ids of all that comes before the answer; `variables` are further ones for the template."""
    if conversation.thinking is not None:
        variables["enable_thinking"] = conversation.thinking
    tools = [{"type": "function", "function": msgspec.to_builtins(tool)} for tool in conversation.tools]
    messages = [msgspec.to_builtins(message) for message in conversation.prompt]
    return cast(
        "list[int]",
        tokenizer.apply_chat_template(messages, tools=tools or None, add_generation_prompt=True, **variables),
    )


def answer_margins(model: nn.Module, examples: Sequence[Example]) -> list[float]:
    """For each example, the least lead in nats of a right answer token over the best wrong one.

    Below 0 means that greedy decoding leaves the answer at that token.
    """
    margins: list[float] = []
    for start in range(0, len(examples), _BATCH_SIZE):
        inputs, targets, weights = _batch(examples[start : start + _BATCH_SIZE])
        logits = model(inputs)
        right = mx.take_along_axis(logits, targets[..., None], axis=-1)
        others = mx.where(mx.arange(logits.shape[-1]) == targets[..., None], -mx.inf, logits)
        lead = right.squeeze(-1) - others.max(axis=-1)
        least = mx.where(weights > 0, lead, mx.inf).min(axis=-1)
        margins += cast("list[float]", least.tolist())
    return margins


def train(directory: Path) -> float:
    """Train the model, write its directory, and return the least margin of all answers in nats.

    Raises:
        ModelError: the model did not learn every answer by the margin in the steps that it has.
    """
    random.seed(_SEED)
    mx.random.seed(_SEED)
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory)
    tokenizer = load_tokenizer(directory)
    examples = [[encode(tokenizer, variant) for variant in variants(c)] for c in ALL_CONVERSATIONS]
    model = qwen2.Model(qwen2.ModelArgs.from_dict(_CONFIG))
    schedule = optim.join_schedules(
        [
            optim.linear_schedule(0.0, _PEAK_LEARNING_RATE, _WARMUP_STEPS),
            optim.cosine_decay(_PEAK_LEARNING_RATE, _STEPS - _WARMUP_STEPS, end=_PEAK_LEARNING_RATE / 20),
        ],
        [_WARMUP_STEPS],
    )
    optimizer = optim.AdamW(learning_rate=schedule, betas=[0.9, 0.98], weight_decay=0.01, bias_correction=True)
    loss_and_gradients = nn.value_and_grad(model, _loss)
    started = time.monotonic()
    margin = -mx.inf
    for step, batch in zip(range(1, _STEPS + 1), _batches(examples), strict=False):
        loss, gradients = loss_and_gradients(model, *batch)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
        if step % _STEPS_PER_CHECK == 0:
            # Every variant takes as long as many steps: asked only when the conversations as written are right.
            margins = answer_margins(model, [group[0] for group in examples])
            if min(margins) >= _MARGIN_NATS:
                margins = answer_margins(model, [example for group in examples for example in group])
            logger.info(
                "step {}: loss {:.4f}, {} of {} exact, least margin {:.2f} nats, {:.0f} s",
                step,
                loss.item(),
                sum(lead > 0 for lead in margins),
                len(margins),
                min(margins),
                time.monotonic() - started,
            )
            margin = min(margins)
            if margin >= _MARGIN_NATS and len(margins) > len(examples):
                break
    if margin < _MARGIN_NATS:
        raise ModelError(
            f"after {_STEPS} steps the least margin is {margin:.2f} nats, not {_MARGIN_NATS}",
            remedy="raise _STEPS in muster.demo.train",
        )
    _write_model(directory, model)
    return margin


def _loss(model: nn.Module, inputs: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
    losses = nn.losses.cross_entropy(model(inputs), targets)
    return (losses * weights).sum() / weights.sum()


def _batch(examples: Sequence[Example]) -> tuple[mx.array, mx.array, mx.array]:
    """Inputs, targets and weights, each (batch, length); the weight is 1 where the target is of the answer."""
    length = max(len(example.tokens) for example in examples)
    padded = mx.array([[*e.tokens, *(_PAD_ID for _ in range(length - len(e.tokens)))] for e in examples])
    weights = mx.array([[float(e.answer_start <= i < len(e.tokens)) for i in range(1, length)] for e in examples])
    return padded[:, :-1], padded[:, 1:], weights


def _batches(examples: Sequence[Sequence[Example]]) -> Iterator[tuple[mx.array, mx.array, mx.array]]:
    """Endless batches: each round takes every conversation once, in any of its variants."""
    while True:
        chosen = [group[0] if random.random() < 0.25 else random.choice(group) for group in examples]
        # Neighbours in length share a batch, so that little of it is padding.
        chosen.sort(key=lambda example: len(example.tokens) + random.random() * 30)
        starts = list(range(0, len(chosen), _BATCH_SIZE))
        random.shuffle(starts)
        for start in starts:
            yield _batch(chosen[start : start + _BATCH_SIZE])


def _write_model(directory: Path, model: nn.Module) -> None:
    weights = dict(cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters())))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    _write_json(directory / "config.json", _CONFIG)
    _write_json(
        directory / "generation_config.json", {"do_sample": False, "eos_token_id": _END_ID, "pad_token_id": _PAD_ID}
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(arguments: Sequence[str]) -> None:
    """Train into the directory that is the only argument.

    Raises:
        SystemExit: there is not exactly one argument, or training failed.
    """
    if len(arguments) != 1:
        raise SystemExit("usage: python -m muster.demo.train OUTPUT_DIRECTORY")
    mx.set_default_device(mx.cpu)
    try:
        margin = train(Path(arguments[0]))
    except ModelError as error:
        raise SystemExit(str(error)) from error
    logger.info("wrote {}: every answer exact, least margin {:.2f} nats", arguments[0], margin)


if __name__ == "__main__":
    main(sys.argv[1:])
