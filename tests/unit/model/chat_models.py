"""Tokenizers with markers for reasoning and tool calls, made for a test, in a model that is never run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import load
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from muster.model.load import LoadedModel
from muster.model.plan import ShardPlan

END = "<|end|>"
#: As Qwen's: an object for the arguments, reasoning of earlier turns left out, an empty block to switch it off.
TEMPLATE = """\
{%- if messages[0].role == 'system' or tools %}<|system|>
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- for tool in tools or [] %}
{{ tool | tojson }}{% endfor %}<|end|>{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|tool|>{{ message.name }}={{ message.content }}<|end|>
{%- elif message.role != 'system' %}<|{{ message.role }}|>{{ message.content }}
{%- for tool_call in message.tool_calls or [] %}
{%- set tool_call = tool_call.function %}<tool_call>
{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}
</tool_call>{% endfor %}<|end|>
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{%- if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% elif force %}<think>
{% endif %}{% endif %}"""

SPECIAL = (END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def make_byte_level(
    directory: Path,
    *,
    template: str | None = TEMPLATE,
    markers: tuple[str, ...] = MARKERS,
    merges: tuple[str, ...] = (),
) -> None:
    """Ids 0 to 255 are bytes in the order of their letters; `merges` are further tokens of the plain alphabet."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    pairs: list[tuple[str, str]] = []
    for word in merges:
        for size in range(2, len(word) + 1):
            if word[:size] not in vocabulary:
                vocabulary[word[:size]] = len(vocabulary)
                pairs.append((word[: size - 1], word[size - 1]))
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    _save(directory, tokenizer, template, markers)


def make_sentencepiece(directory: Path, *, plain_decoder: bool = False) -> None:
    """Byte tokens as sentencepiece writes them, and some words. mlx-lm does not know the `plain_decoder`."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "▁good", "day", "日"]
    tokenizer: Any = Tokenizer(
        models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[], byte_fallback=True)
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if plain_decoder:
        steps.reverse()
    else:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    _save(directory, tokenizer, None, ())


def _save(directory: Path, tokenizer: Any, template: str | None, markers: tuple[str, ...]) -> None:
    directory.mkdir(parents=True)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in markers])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def load_tokens_only(directory: Path, **defaults: str) -> LoadedModel:
    """A `LoadedModel` around the tokenizer in `directory`; its vocabulary is a little larger than the tokenizer's.

    `defaults` are what mlx-lm knows of some models beside their files.
    """
    tokenizer = load(directory, defaults=defaults)
    return LoadedModel(
        model=None,
        tokenizer=tokenizer,
        config={},
        plan=ShardPlan(sharding="none", world_size=1, layers=1, split=(1,)),
        rank=0,
        bytes=0,
        context_tokens=4096,
        vocabulary=len(tokenizer) + 7,
    )
