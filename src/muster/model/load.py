"""Loads one rank's shard of a model with mlx-lm, and refuses every weight that is missing, foreign or misshapen."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import _get_classes, load_model, load_tokenizer, maybe_set_recommended_wired_limit

from muster.errors import ModelError, ShardingError
from muster.model.config import text_config, tokenizer_code, whole
from muster.model.files import weight_files
from muster.model.plan import ShardPlan

#: Called with (layers loaded, layers of this rank), first with 0 loaded.
LayerProgress = Callable[[int, int], None]

#: What mlx-lm and the models' own code raise on files and configs that do not fit; anything else is a bug of ours.
_LOAD_ERRORS: Final = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RuntimeError,
    OSError,
    ImportError,
)

_LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_NAMES_SHOWN: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """One rank's part of a model, and the whole tokenizer.

    Everything that touches `model` must run in the thread that loaded it: MLX streams belong to threads, and in a
    pipeline the embedding and the head stay unread until a forward pass of this rank needs them.

    `bytes` are the weights in memory after loading. `context_tokens` and `vocabulary` are `None` where the config
    does not say.
    """

    model: Any
    tokenizer: TokenizerWrapper
    config: dict[str, Any]
    plan: ShardPlan
    rank: int
    bytes: int
    context_tokens: int | None
    vocabulary: int | None


def load_shard(
    path: Path,
    plan: ShardPlan,
    rank: int,
    group: mx.distributed.Group | None,
    *,
    on_layer: LayerProgress,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load what `rank` needs of the model in `path`. Reads only weights that the rank keeps, or slices.

    Weights are lazy arrays: names and shapes are checked, layers of other ranks dropped and slices taken before
    anything is read. Then it reads layer by layer, so that with tensor sharding at most one layer is in memory
    whole. No collective operation runs in here: the ranks need not load at the same speed.

    Args:
        path: a directory that `files.inspect` accepted. In a pipeline, weight files with layers of other ranks alone
            may be absent.
        plan: the same on every rank.
        rank: this rank.
        group: the formed group of `plan.world_size` members; `None` for one rank.
        on_layer: called after every layer that was read.
        trust_remote_code: whether Python code among the tokenizer's files may run; a model's never does.

    Raises:
        ModelError: the files do not fit the architecture.
        ShardingError: mlx-lm would shard the model unevenly or other than planned; nothing was read yet.
    """
    members, own = (group.size(), group.rank()) if group is not None else (1, 0)
    if (members, own) != (plan.world_size, rank):
        raise ShardingError(
            f"rank {rank} of {plan.world_size} was given rank {own} of a group of {members}",
            remedy="this is a bug of muster: please report it",
        )
    model, config = _load_lazily(path, plan, rank)
    _shard(model, plan, rank, group)
    tokenizer = _load_tokenizer(path, config, trust_remote_code)
    before_bytes = mx.get_active_memory()
    _read_layers(path, model, plan, rank, on_layer)
    # Metal would page weights out between requests without it; elsewhere there is no such limit.
    maybe_set_recommended_wired_limit()
    text = text_config(config)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=config,
        plan=plan,
        rank=rank,
        bytes=max(0, mx.get_active_memory() - before_bytes),
        context_tokens=whole(text, "max_position_embeddings", "n_positions", "max_seq_len"),
        vocabulary=whole(text, "vocab_size"),
    )


def _load_lazily(path: Path, plan: ShardPlan, rank: int) -> tuple[Any, dict[str, Any]]:
    held = plan.layers_of(rank) if plan.sharding == "pipeline" and _is_partial(path) else None

    def classes(config: dict[str, Any]) -> tuple[type[Any], type[Any]]:
        return _checked_classes(config, held)

    try:
        return load_model(path, lazy=True, strict=True, get_model_classes=classes)
    except _LOAD_ERRORS as error:
        raise ModelError(
            f"mlx-lm cannot load the model in {path}: {_said(error)}",
            remedy="check that the weights belong to this config.json, or upgrade mlx-lm",
        ) from error


def _is_partial(path: Path) -> bool:
    return any(not (path / name).is_file() for name in weight_files(path))


def _checked_classes(config: dict[str, Any], held: range | None) -> tuple[type[Any], type[Any]]:
    """The architecture's classes, with weights checked by us where mlx-lm hands them to the model.

    That is after the model renamed and stacked them (`sanitize`) and after its layers became quantised ones. Of other
    layers than those `held` weights may be missing; `None` wants those of all.
    """
    model_class, args_class = _get_classes(config)

    def load_weights(self: Any, weights: Sequence[tuple[str, mx.array]], strict: bool = True) -> Any:
        wanted: dict[str, mx.array] = dict(tree_flatten(self.parameters()))
        _check_weights({name: weight for name, weight in wanted.items() if _is_held(name, held)}, dict(weights), wanted)
        return model_class.load_weights(self, weights, strict=strict and held is None)

    checked = type(
        model_class.__name__, (model_class,), {"load_weights": load_weights, "__module__": model_class.__module__}
    )
    return checked, args_class


def _is_held(name: str, held: range | None) -> bool:
    """Whether the weight is of one of the layers `held`, or of none."""
    match = _LAYER.search(name)
    return held is None or match is None or int(match.group(1)) in held


def _check_weights(wanted: dict[str, mx.array], found: dict[str, mx.array], known: Collection[str]) -> None:
    """Compare what the model needs with what the files hold; `known` are all weights of the architecture.

    Raises:
        ModelError: names the first few weights that are missing, unknown or misshapen, and how many there are.
    """
    faults = {
        "missing": sorted(wanted.keys() - found.keys()),
        "unknown to the architecture": sorted(found.keys() - set(known)),
        "of the wrong shape": [
            f"{name} {list(found[name].shape)} instead of {list(weight.shape)}"
            for name, weight in sorted(wanted.items())
            if name in found and found[name].shape != weight.shape
        ],
    }
    sentences = [f"{len(names)} weights are {fault}: {_some(names)}" for fault, names in faults.items() if names]
    if sentences:
        raise ModelError(
            "; ".join(sentences), remedy="use the weights that belong to this config.json, all files of them"
        )


def _shard(model: Any, plan: ShardPlan, rank: int, group: mx.distributed.Group | None) -> None:
    match plan.sharding:
        case "none":
            return
        case "pipeline":
            _shard_pipeline(model, plan, rank, group)
        case "tensor":
            _shard_tensor(model, plan, group)


def _shard_pipeline(model: Any, plan: ShardPlan, rank: int, group: mx.distributed.Group | None) -> None:
    stack = model.model
    try:
        if "split" in inspect.signature(stack.pipeline).parameters:
            stack.pipeline(group, list(plan.split))
        else:
            stack.pipeline(group)  # chooses the split itself; whether it is the planned one is checked below
    except _LOAD_ERRORS as error:
        raise ShardingError(
            f"mlx-lm refuses the split {list(plan.split)}: {_said(error)}", remedy="use --sharding tensor"
        ) from error
    planned = plan.layers_of(rank)
    actual = range(stack.start_idx, stack.end_idx)
    if actual != planned or len(_layers(model)) != len(planned):
        raise ShardingError(
            f"mlx-lm gives rank {rank} the layers {actual.start} to {actual.stop - 1}, "
            f"the plan says {planned.start} to {planned.stop - 1}",
            remedy="use a number of ranks that divides the layers",
        )


def _shard_tensor(model: Any, plan: ShardPlan, group: mx.distributed.Group | None) -> None:
    """Shard, then compare every size before and after: an uneven division would give wrong tokens without an error."""
    before = _sizes(model)
    try:
        model.shard(group)
    except _LOAD_ERRORS as error:
        raise ShardingError(
            f"mlx-lm refuses to shard the model over {plan.world_size} ranks: {_said(error)}",
            remedy="use fewer ranks or --sharding pipeline",
        ) from error
    # A slice that is a view would keep what it was cut from in memory: DeepSeek's latent projections are such.
    model.update(tree_map(mx.contiguous, model.parameters()))
    after = _sizes(model)
    uneven = [
        f"{name} is {before[name]} whole and {size} on a rank"
        for name, size in sorted(after.items())
        if name in before and size != before[name] and size * plan.world_size != before[name]
    ]
    if uneven:
        raise ShardingError(
            f"{len(uneven)} sizes do not divide by {plan.world_size} ranks: {_some(uneven)}",
            remedy="use fewer ranks or --sharding pipeline",
        )


def _sizes(model: Any) -> dict[str, int]:
    """Every whole-number attribute of every module, and the number of elements of every weight, by name."""
    sizes: dict[str, int] = {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, int) and not isinstance(value, bool)
    }
    weights: Any = tree_flatten(model.parameters())
    sizes.update((name, math.prod(weight.shape)) for name, weight in weights)
    return sizes


def _layers(model: Any) -> list[Any]:
    return [layer for layer in getattr(model, "layers", ()) if layer is not None]


def _read_layers(path: Path, model: Any, plan: ShardPlan, rank: int, on_layer: LayerProgress) -> None:
    layers = _layers(model)
    on_layer(0, len(layers))
    try:
        for done, layer in enumerate(layers, start=1):
            mx.eval(layer.parameters())
            on_layer(done, len(layers))
        if plan.sharding != "pipeline":
            mx.eval(model.parameters())
    except (RuntimeError, ValueError, OSError) as error:
        raise ModelError(
            f"the weights in {path} cannot be read by rank {rank}: {_said(error)}",
            remedy="check this node's memory and disk, and the files",
        ) from error
    mx.clear_cache()


def _load_tokenizer(path: Path, config: dict[str, Any], trust_remote_code: bool) -> TokenizerWrapper:
    # False, not absent: absent makes transformers ask on standard input, and mlx-lm's own default is True.
    options = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    try:
        tokenizer = load_tokenizer(path, options, eos_token_ids=config.get("eos_token_id"))
        words = len(tokenizer.get_vocab())
    except _LOAD_ERRORS as error:
        own = ", ".join(tokenizer_code(path))
        remedy = "download or copy the tokenizer's files again"
        if own and not trust_remote_code:
            remedy = f"it has code of its own, {own}: read it, and where you trust it create with --trust-remote-code"
        raise ModelError(f"the tokenizer in {path} cannot be loaded: {_said(error)}", remedy=remedy) from error
    if words <= 1:
        raise ModelError(
            f"the tokenizer in {path} has a vocabulary of {words}", remedy="copy tokenizer.json beside config.json"
        )
    return tokenizer


def _some(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


def _said(error: BaseException) -> str:
    """The error's kind and the first line of what it says: some list thousands of names."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
