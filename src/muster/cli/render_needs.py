"""What a model needs, for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import PurePath
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from muster.cli.render import printable, size
from muster.needs import ModelNeeds, against_pipeline, against_tensor, even_split, layers_of
from muster.predict import RankMemory, Sharding, quantised_token_bytes, rank_cache, rank_memory

#: Different sizes of layers that are listed; more are given as a range.
_KINDS = 4

#: What mlx-lm quantises caches to.
_QUANTISED_BITS = (8, 4)


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """What memory is predicted for."""

    context_tokens: int
    sequences: int
    prefill_chunk_tokens: int


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """One way to share a model out: `why_not`, or what each rank takes, rank 0 first."""

    ranks: int
    sharding: Sharding
    why_not: str = ""
    split: tuple[int, ...] = ()
    by_rank: tuple[RankMemory, ...] = ()

    def document(self) -> dict[str, Any]:
        """As --json prints it."""
        return msgspec.to_builtins(self) | {
            "by_rank": [msgspec.to_builtins(one) | {"total": one.total} for one in self.by_rank]
        }


def forecasts(needs: ModelNeeds, ranks: Sequence[int], asked: Forecast) -> list[Prediction]:
    """What each number of ranks would take, by tensor sharding and as a pipeline."""
    found: list[Prediction] = []
    for number in ranks:
        if number == 1:
            memory = _memory(needs, "none", 1, range(len(needs.layers)), asked)
            found.append(Prediction(ranks=1, sharding="none", by_rank=(memory,)))
            continue
        reason = against_tensor(needs, number)
        memory = _memory(needs, "tensor", number, range(len(needs.layers)), asked)
        by_rank = () if reason else (memory,) * number
        found.append(Prediction(ranks=number, sharding="tensor", why_not=reason, by_rank=by_rank))
        reason = against_pipeline(needs, number)
        split = () if reason else even_split(len(needs.layers), number)
        by_rank = tuple(_memory(needs, "pipeline", number, layers_of(split, rank), asked) for rank in range(len(split)))
        found.append(Prediction(ranks=number, sharding="pipeline", why_not=reason, split=split, by_rank=by_rank))
    return found


def needs_view(needs: ModelNeeds, found: Sequence[Prediction], asked: Forecast) -> RenderableType:
    """The lines and the table of `muster model`."""
    name = needs.model if needs.model.count("/") == 1 else PurePath(needs.model).name or needs.model
    lines = [
        f"{printable(name)}: {printable(needs.model_type)}, {_count(needs.parameters)} parameters of {needs.bits:g} "
        f"bits, {size(needs.weights_bytes)}",
        _layers(needs),
        _sizes(needs),
        *_cache(needs, asked),
        *_ways(needs),
        "",
        f"Memory of a rank, for {asked.sequences} {'sequence' if asked.sequences == 1 else 'sequences'} of "
        f"{asked.context_tokens} tokens:",
    ]
    impossible = _impossible(needs, found)
    after = ["", "Impossible:", *(f"  {line}" for line in impossible)] if impossible else []
    return Group(*map(Text, lines), _table(found), *map(Text, after))


def _count(parameters: int) -> str:
    for limit, unit in ((10**9, "billion"), (10**6, "million")):
        if parameters >= limit:
            return f"{parameters / limit:.3g} {unit}"
    return str(parameters)


def _layers(needs: ModelNeeds) -> str:
    kinds = Counter(layer.weights_bytes for layer in needs.layers)
    each = ", ".join(f"{count} of {size(weights)}" for weights, count in kinds.items())
    layers = f"{size(min(kinds))} each" if len(kinds) == 1 else each if len(kinds) <= _KINDS else _range(needs)
    divided = sum(layer.tensor_bytes for layer in needs.layers) + needs.outside_tensor_bytes
    share = f"; tensor sharding divides {divided / max(1, needs.weights_bytes):.0%} of all" if needs.tensor else ""
    tied = ", the head tied to the embedding" if needs.tied else ""
    return f"{len(needs.layers)} layers: {layers}; {size(needs.outside_bytes)} outside of them{tied}{share}"


def _range(needs: ModelNeeds) -> str:
    weights = [layer.weights_bytes for layer in needs.layers]
    return f"{size(min(weights))} to {size(max(weights))} each"


def _sizes(needs: ModelNeeds) -> str:
    named = {
        "hidden size": needs.hidden_size,
        "heads": needs.heads,
        "KV heads": needs.kv_heads,
        "experts": needs.experts,
        "vocabulary": needs.vocabulary,
        "context": needs.context_tokens or 0,
    }
    return ", ".join(f"{name} {value}" for name, value in named.items() if value)


def _cache(needs: ModelNeeds, asked: Forecast) -> list[str]:
    def cache(tokens: int) -> str:
        return f"{size(rank_cache(needs, 'none', 1, range(len(needs.layers)), tokens, 1))} at {tokens} tokens"

    tokens = dict.fromkeys((asked.context_tokens, needs.context_tokens or asked.context_tokens))
    lines = [f"cache of a sequence: {needs.kv_token_bytes / 1024:g} KiB a token; {', '.join(map(cache, tokens))}"]
    quantised = [(bits, found) for bits in _QUANTISED_BITS if (found := quantised_token_bytes(needs, bits)) is not None]
    if quantised:
        amounts = ", ".join(f"{found / 1024:g} KiB at {bits} bits" for bits, found in quantised)
        lines.append(f"  quantised it would be {amounts}; ranks keep it whole, for mlx-lm cannot batch it otherwise")
    windows = [layer.window for layer in needs.layers if layer.window]
    states = sum(layer.state_bytes > 0 for layer in needs.layers)
    if windows:
        lines.append(f"  {len(windows)} layers keep a window of {max(windows)} tokens only")
    if states:
        lines.append(f"  {states} layers keep a state of {size(max(layer.state_bytes for layer in needs.layers))}")
    if needs.solo:
        lines.append("  mlx-lm cannot batch it: sequences run one by one")
    return lines


def _ways(needs: ModelNeeds) -> list[str]:
    layers = len(needs.layers)
    sizes = ", ".join(map(str, needs.tensor_sizes))
    tensor = f"over {sizes} ranks" if sizes else f"impossible: {against_tensor(needs, 2) or 'no size divides'}"
    pipeline = f"impossible: {against_pipeline(needs, 2)}"
    if needs.pipeline and layers > 1:
        pipeline = f"over 2 to {layers} ranks" + (", layers in equal parts only" if needs.even_pipeline else "")
    return [f"tensor sharding: {tensor}", f"pipeline: {pipeline}"]


def _table(found: Sequence[Prediction]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("RANKS", "SHARDING", "LAYERS", "WEIGHTS", "CACHE", "WORKSPACE", "PROCESS", "TOTAL"):
        table.add_column(column, justify="left" if column in ("SHARDING", "LAYERS") else "right", no_wrap=True)
    for one in found:
        if one.why_not:
            continue
        most = max(one.by_rank, key=lambda memory: memory.total)
        figures = (most.weights, most.cache, most.workspace, most.process, most.total)
        table.add_row(str(one.ranks), one.sharding, _split(one.split), *map(size, figures))
    return table


def _split(split: tuple[int, ...]) -> str:
    """Layers by rank, those of equal ones after each other once: "1 x 16, 3 x 15"."""
    return ", ".join(f"{len(list(run))} x {layers}" for layers, run in groupby(split))


def _impossible(needs: ModelNeeds, found: Sequence[Prediction]) -> list[str]:
    """What was asked for and cannot be, unless it was said before that it never can."""
    able = {"tensor": bool(needs.tensor_sizes), "pipeline": needs.pipeline}
    return [
        f"{one.sharding} over {one.ranks} ranks: {one.why_not}" for one in found if one.why_not and able[one.sharding]
    ]


def _memory(needs: ModelNeeds, sharding: Sharding, world_size: int, layers: range, asked: Forecast) -> RankMemory:
    return rank_memory(
        needs,
        sharding,
        world_size,
        layers,
        context_tokens=asked.context_tokens,
        sequences=asked.sequences,
        prefill_chunk_tokens=asked.prefill_chunk_tokens,
    )
