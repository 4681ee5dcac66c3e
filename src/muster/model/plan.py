"""Decides how a model is shared out over ranks, before anything is loaded. Pure, apart from `supports`."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from muster.errors import ModelError, ShardingError
from muster.model.files import ModelFiles
from muster.model.sizes import group_size, shared_sizes
from muster.needs import even_split, indivisible, split_fault
from muster.spec import ShardingWish

Sharding = Literal["none", "pipeline", "tensor"]

#: What the models' own code raises on a config that it cannot take.
_MODEL_ERRORS: Final = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    ImportError,
    MemoryError,
    RuntimeError,
)


class Supports(msgspec.Struct, frozen=True, kw_only=True):
    """What the installed mlx-lm can do with an architecture. `vocabulary`: tensor sharding splits the head too."""

    tensor: bool
    pipeline: bool
    vocabulary: bool = False


class ShardPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How a model of `layers` layers is shared out over `world_size` ranks.

    `split` is how many layers each rank holds. In a pipeline **rank 0 holds the last ones** and they add up to
    `layers`; otherwise every rank holds (a slice of) all of them.
    """

    sharding: Sharding
    world_size: int
    layers: int
    split: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.split) == self.world_size >= 1, self
        if self.sharding == "pipeline":
            assert min(self.split) >= 1, self
            held = [layer for rank in reversed(range(self.world_size)) for layer in self.layers_of(rank)]
            assert held == list(range(self.layers)), self
        else:
            assert set(self.split) == {self.layers}, self
            assert (self.sharding == "none") == (self.world_size == 1), self

    def layers_of(self, rank: int) -> range:
        """The layers that `rank` runs."""
        assert 0 <= rank < self.world_size, (rank, self.world_size)
        if self.sharding != "pipeline":
            return range(self.layers)
        start = sum(self.split[rank + 1 :])
        return range(start, start + self.split[rank])


def plan(
    files: ModelFiles,
    sharding: ShardingWish,
    world_size: int,
    supports: Supports,
    *,
    split: tuple[int, ...] | None = None,
) -> ShardPlan:
    """Share `files` out over `world_size` ranks.

    Args:
        files: the model.
        sharding: what the user asks for; "auto" takes tensor if everything divides, else pipeline.
        world_size: number of ranks; one rank is never sharded, whatever `sharding` says.
        supports: what `supports` found for this architecture.
        split: layers per rank for a pipeline, rank 0 first; by default even, with the low ranks taking one more.

    Raises:
        ShardingError: it cannot be done; the message names the field and its value, the remedy a way that works.
    """
    if world_size < 1:
        raise ShardingError(f"world size is {world_size}", remedy="use at least 1 rank")
    if world_size == 1:
        return ShardPlan(sharding="none", world_size=1, layers=files.layers, split=(files.layers,))
    no_tensor = _against_tensor(files, world_size, supports)
    no_pipeline = _against_pipeline(files, world_size, supports, split)
    match sharding:
        case "tensor" if no_tensor is None:
            return _tensor_plan(files, world_size)
        case "pipeline" if no_pipeline is None:
            return _pipeline_plan(files, world_size, split)
        case "auto" if no_tensor is None and split is None:
            return _tensor_plan(files, world_size)
        case "auto" if no_pipeline is None:
            return _pipeline_plan(files, world_size, split)
        case _:
            pass
    reasons = {
        "tensor": f"tensor sharding is impossible: {no_tensor}",
        "pipeline": f"a pipeline is impossible: {no_pipeline}",
        "auto": f"tensor sharding is impossible: {no_tensor}; a pipeline is impossible: {no_pipeline}",
    }
    raise ShardingError(
        f"model type {files.model_type} on {world_size} ranks: {reasons[sharding]}",
        remedy=_way_out(files, sharding, world_size, supports),
    )


def _tensor_plan(files: ModelFiles, world_size: int) -> ShardPlan:
    return ShardPlan(sharding="tensor", world_size=world_size, layers=files.layers, split=(files.layers,) * world_size)


def _pipeline_plan(files: ModelFiles, world_size: int, split: tuple[int, ...] | None) -> ShardPlan:
    split = split or even_split(files.layers, world_size)
    return ShardPlan(sharding="pipeline", world_size=world_size, layers=files.layers, split=split)


def _against_pipeline(
    files: ModelFiles, world_size: int, supports: Supports, split: tuple[int, ...] | None
) -> str | None:
    """Why this model cannot run as a pipeline; `None` if it can."""
    if not supports.pipeline:
        return "mlx-lm has no pipeline for this architecture"
    return split_fault(files.layers, world_size, split) or None


def _against_tensor(files: ModelFiles, world_size: int, supports: Supports) -> str | None:
    """Why this model cannot be sharded by tensors; `None` if it can."""
    if not supports.tensor:
        return "mlx-lm has no tensor sharding for this architecture"
    sizes = shared_sizes(files, vocabulary=supports.vocabulary)
    return indivisible(sizes, group_size(files), world_size) or None


def _way_out(files: ModelFiles, sharding: ShardingWish, world_size: int, supports: Supports) -> str:
    ways: list[str] = []
    fits = [
        ranks
        for ranks in range(2, world_size)
        if (sharding != "pipeline" and _against_tensor(files, ranks, supports) is None)
        or (sharding != "tensor" and _against_pipeline(files, ranks, supports, None) is None)
    ]
    ways.append(f"use {fits[-1]} ranks" if fits else "use 1 rank")
    if sharding == "tensor" and _against_pipeline(files, world_size, supports, None) is None:
        ways.append("--sharding pipeline")
    if sharding == "pipeline" and _against_tensor(files, world_size, supports) is None:
        ways.append("--sharding tensor")
    return " or ".join(ways)


class _OnlyRank:
    """Stands for a group of one: sharding by it changes the kinds of layers, not their sizes."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def supports(files: ModelFiles) -> Supports:
    """Ask the installed mlx-lm what it can do with this architecture. Imports mlx-lm; reads no weights.

    The model is built from its config alone, lazily: nothing is computed.

    Raises:
        ModelError: mlx-lm does not know the architecture, or cannot build it from this config.
    """
    from mlx_lm.utils import _get_classes

    try:
        model_class, args_class = _get_classes(dict(files.config))
        model: Any = model_class(args_class.from_dict(dict(files.config)))
    except _MODEL_ERRORS as error:
        raise ModelError(
            f"mlx-lm cannot build model type {files.model_type!r} from {files.directory}/config.json: {error}",
            remedy="use a model that the installed mlx-lm supports, or upgrade mlx-lm",
        ) from error
    pipeline = hasattr(model, "model") and hasattr(model.model, "pipeline")
    try:
        changed = _shard_for_one(model) if hasattr(model, "shard") else None
    except _MODEL_ERRORS:  # a config that the architecture's own sharding cannot take, even for one rank
        changed = None
    # MLX would put a plain layer in the place of an architecture's own, whose tokens were others without an error.
    if changed is None or any(before.__module__.startswith("mlx_lm.models.") for before, _ in changed.values()):
        return Supports(tensor=False, pipeline=pipeline)
    heads = [after for name, (_, after) in changed.items() if name.rsplit(".", 1)[-1] == "lm_head"]
    return Supports(tensor=True, pipeline=pipeline, vocabulary=any("AllToSharded" in head.__name__ for head in heads))


def _shard_for_one(model: Any) -> dict[str, tuple[type, type]]:
    """Shard `model` for one rank; answers the modules that became others: their classes before and after, by name."""
    before = {name: type(module) for name, module in model.named_modules()}
    model.shard(_OnlyRank())
    after = {name: type(module) for name, module in model.named_modules()}
    return {name: (kind, after[name]) for name, kind in before.items() if after.get(name, kind) is not kind}
