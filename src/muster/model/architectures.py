"""What the installed mlx-lm can do with an architecture, read from its source: MLX is never imported.

An architecture is a module `mlx_lm/models/<name>.py` with a class `Model`. It can be sharded by tensors if `Model` has
a method `shard` that knows its layers, and run as a pipeline if `Model.model` is an object with a method `pipeline`;
`muster.model.plan` asks the same of the built model, and a test compares both for every architecture.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path
from typing import Any

import msgspec

from muster.errors import ModelError
from muster.model.config import architecture_names
from muster.model.mlx_source import Source, divided_names, parse
from muster.model.windows import Windows, windows_of


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """One module of mlx-lm.

    `divided` are the names of modules and arrays that its `shard` divides, such as `q_proj`, and `summed` those of
    them whose output is summed over the ranks, so that their bias stays whole. `even_pipeline`: its `pipeline` takes no
    split. `rotating`: layers may keep a window only, and `windows` tells which. `latent`: its latent attention caches
    the latent, not the heads.
    `sees`: it keeps the vision tower of a checkpoint. `dequantises`: FP8 weights become bfloat16. `solo`: mlx-lm
    cannot batch it. `tied` is what `tie_word_embeddings` is where a config does not say; `None` where there is no
    such setting.
    """

    name: str
    tensor: bool
    pipeline: bool
    even_pipeline: bool
    divided: frozenset[str]
    summed: frozenset[str]
    rotating: bool
    windows: Windows
    latent: bool
    sees: bool
    dequantises: bool
    solo: bool
    tied: bool | None


def architecture_of(config: dict[str, Any]) -> Architecture:
    """The architecture that mlx-lm takes for a config.json.

    Raises:
        ModelError: the installed mlx-lm has none for its `model_type`, or is not installed.
    """
    directory = _models_directory()
    name = _module_name(config)
    file = directory / f"{name}.py"
    if not name.isascii() or not name.replace("-", "_").replace(".", "_").isidentifier() or not file.is_file():
        raise ModelError(
            f"the installed mlx-lm has no model type {config.get('model_type')!r}",
            remedy="use a model that the installed mlx-lm supports, or upgrade mlx-lm",
        )
    return _read(directory, name)


def known_architectures() -> tuple[str, ...]:
    """The names of all modules of mlx-lm that define or re-export a `Model`."""
    directory = _models_directory()
    names = sorted(file.stem for file in directory.glob("*.py"))
    source = _source(directory)
    return tuple(name for name in names if source.find_class(name, "Model") is not None)


@functools.cache
def _models_directory() -> Path:
    spec = importlib.util.find_spec("mlx_lm")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not places:
        raise ModelError("mlx-lm is not installed here", remedy="run `pip install mlx-lm` in muster's environment")
    return Path(places[0]) / "models"


@functools.cache
def _source(directory: Path) -> Source:
    return Source(directory)


def _module_name(config: dict[str, Any]) -> str:
    """mlx-lm's module for a config. Source: `_get_classes` in mlx_lm/utils.py."""
    model_type = str(config.get("model_type"))
    by_type, by_architecture = _remappings(_models_directory())
    for architecture in architecture_names(config):
        if (found := by_architecture.get((model_type, architecture))) is not None:
            return found
    return by_type.get(model_type, model_type)


@functools.cache
def _remappings(directory: Path) -> tuple[dict[str, str], dict[tuple[str, str], str]]:
    tables: dict[str, Any] = {}
    for statement in parse(directory.parent / "utils.py").body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            if name in ("MODEL_REMAPPING", "MODEL_ARCHITECTURE_REMAPPING"):
                tables[name] = ast.literal_eval(statement.value)
    return tables.get("MODEL_REMAPPING", {}), tables.get("MODEL_ARCHITECTURE_REMAPPING", {})


@functools.cache
def _read(directory: Path, name: str) -> Architecture:
    source = _source(directory)
    model = source.find_class(name, "Model")
    if model is None:
        raise ModelError(f"mlx-lm's module {name} has no class Model", remedy="upgrade mlx-lm")
    shard = source.method(model, "shard")
    if shard is not None and shard.module != name and _packs_itself(source, name):
        shard = None
    stack = source.attribute(model, "model")
    pipeline = source.method(stack, "pipeline") if stack is not None else None
    divided, summed = divided_names(source.with_delegates(shard)) if shard is not None else (frozenset(), frozenset())
    text = "\n".join(source.text(module) for module in source.family(name))
    caches = source.text(model.module) if source.method(model, "make_cache") is not None else ""
    return Architecture(
        name=name,
        tensor=shard is not None,
        pipeline=pipeline is not None,
        even_pipeline=pipeline is not None and "split" not in pipeline.arguments,
        divided=divided,
        summed=summed,
        rotating=bool(caches) and "RotatingKVCache(" in text,
        windows=windows_of(source, name),
        latent="embed_q" in text,
        sees="self.vision_tower = " in text,
        dequantises="from_fp8(" in text and "weight_scale_inv" in text,
        solo=_ignores_lengths(source, text, source.lineage(model)) or _own_cache(source, model.module),
        tied=source.default_of(name, "tie_word_embeddings"),
    )


def _packs_itself(source: Source, module: str) -> bool:
    """Whether it has layers of its own for packed weights, which a `shard` that was written elsewhere does not know."""
    return any("quantized_matmul(" in source.class_text(module, one) for one in source.classes(module))


def _ignores_lengths(source: Source, text: str, lineage: tuple[str, ...]) -> bool:
    """Whether its layers carry a state from token to token that padding would flow into; as `solo.batchable`."""
    return "ArraysCache(" in text and not any(".lengths" in source.text(module) for module in lineage)


def _own_cache(source: Source, module: str) -> bool:
    """Whether the architecture caches in a class of its own that cannot be merged into a batch."""
    own = [one for one in source.classes(module) if one.endswith("Cache")]
    return any("def merge" not in source.class_text(module, one) for one in own)
