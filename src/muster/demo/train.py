"""Makes the demo model: `python -m muster.demo.train OUTPUT_DIRECTORY`.

A byte-level transformer of the `qwen2` architecture, which mlx-lm can both shard and pipeline, is trained on
the CPU until it answers every conversation of `muster.demo.answers` exactly, by a wide margin. The result is
an ordinary mlx-lm model directory. Its weights stay fp32: a sum in another order, which is what tensor
sharding makes of it, then never changes a greedy token.
"""

from __future__ import annotations

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

from muster.demo.answers import CONVERSATIONS, Conversation, Message
from muster.errors import ModelError

_END: Final = "<|end|>"
_PAD: Final = "<|pad|>"
_SPECIAL_TOKENS: Final = ("<|user|>", "<|assistant|>", _END, _PAD)
_END_ID: Final = 256 + _SPECIAL_TOKENS.index(_END)
_PAD_ID: Final = 256 + _SPECIAL_TOKENS.index(_PAD)

# Turns of other roles are left out: many clients always send a system prompt, and the model has seen none.
_CHAT_TEMPLATE: Final = (
    "{% for message in messages if message.role in ('user', 'assistant') %}"
    "{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_CONFIG: Final[dict[str, Any]] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    # Heads, KV heads and both sizes divide by 1, 2 and 4 ranks.
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 256 + len(_SPECIAL_TOKENS),
    "max_position_embeddings": 1024,
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
_STEPS: Final = 1400
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
    """The conversation as people type it: as written, in lower case, without the mark at the end, and both."""

    def respell(message: Message, *, lower: bool, bare: bool) -> Message:
        if message.role != "user":
            return message
        content = message.content.lower() if lower else message.content
        return Message(role="user", content=content.rstrip("?.。") if bare else content)

    variants = (
        Conversation(
            messages=(
                *(respell(message, lower=lower, bare=bare) for message in conversation.prompt),
                conversation.messages[-1],
            )
        )
        for lower in (False, True)
        for bare in (False, True)
    )
    return tuple(dict.fromkeys(variants))


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer with one token per byte, the special tokens, and the chat template."""
    # The alphabet holds one letter per byte; sorted, because it comes in another order each time.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in _SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _END,
        "pad_token": _PAD,
        "additional_special_tokens": list(_SPECIAL_TOKENS[:2]),
        "model_max_length": _CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    _write_json(directory / "tokenizer_config.json", settings)


def encode(tokenizer: Any, conversation: Conversation) -> Example:
    """Encode a conversation through the chat template, as a server does before it generates."""
    messages = [msgspec.to_builtins(message) for message in conversation.messages]
    prompt = cast("list[int]", tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True))
    whole = cast("list[int]", tokenizer.apply_chat_template(messages))
    return Example(tokens=tuple(whole), answer_start=len(prompt))


def answer_margins(model: nn.Module, examples: Sequence[Example]) -> list[float]:
    """For each example, the least lead in nats of a right answer token over the best wrong one.

    Below 0 means that greedy decoding leaves the answer at that token.
    """
    margins: list[float] = []
    for start in range(0, len(examples), _BATCH_SIZE):
        inputs, targets, weights = _batch(examples[start : start + _BATCH_SIZE])
        logits = model(inputs)
        right = mx.take_along_axis(logits, targets[..., None], axis=-1)
        others = mx.put_along_axis(logits, targets[..., None], mx.array(-mx.inf), axis=-1)
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
    examples = [[encode(tokenizer, spelling) for spelling in spellings(c)] for c in CONVERSATIONS]
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
            margins = answer_margins(model, [example for group in examples for example in group])
            margin = min(margins)
            logger.info(
                "step {}: loss {:.4f}, {} of {} spellings exact, least margin {:.2f} nats, {:.0f} s",
                step,
                loss.item(),
                sum(lead > 0 for lead in margins),
                len(margins),
                margin,
                time.monotonic() - started,
            )
            if margin >= _MARGIN_NATS:
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
    """Endless batches: each round takes every conversation once, half of the time as it is written."""
    while True:
        chosen = [group[0] if random.random() < 0.5 else random.choice(group) for group in examples]
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
