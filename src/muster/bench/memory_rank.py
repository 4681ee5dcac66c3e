"""One process of `muster bench memory`: makes a model, or is one rank of it and says what it took.

`python -m muster.bench.memory_rank JOB`; prints a `Taken`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import psutil

from muster.bench.families import config_of
from muster.group.shapes import RingPayload
from muster.model.files import inspect
from muster.model.needs import needs_of
from muster.needs import ModelNeeds
from muster.spec import ShardingWish

#: Larger than in the table of families: what rounding leaves over should be small beside the weights.
LARGER: Final[dict[str, Any]] = {
    "vocab_size": 16384,
    "num_experts": 16,
    "num_local_experts": 16,
    "n_routed_experts": 16,
    "moe_num_experts": 16,
}
_SEED: Final = 3


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What the process does: `hosts` is empty for one rank alone; without a `world_size` it makes the model."""

    model_type: str
    directory: str
    bits: int = 0  #: 0 for float32, which a CPU computes fastest
    sharding: ShardingWish = "auto"
    rank: int = 0
    world_size: int = 0
    hosts: tuple[tuple[str, ...], ...] = ()
    sequences: int = 2
    prompt_tokens: int = 300
    answer_tokens: int = 4
    chunk_tokens: int = 128


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank took, in bytes of MLX's allocator.

    `weights` after loading, `held` the most between two steps (weights and caches), `peak` at any moment. `process` is
    what is resident beside MLX's memory. `layers` are those that it runs.
    """

    weights: int = 0
    held: int = 0
    peak: int = 0
    process: int = 0
    layers: tuple[int, int] = (0, 0)
    sharding: str = "none"
    needs: ModelNeeds | None = None


def make(job: Job) -> Taken:
    """Write a model with random weights of the family."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    from muster.bench.tiny_model import write_tokenizer

    directory = Path(job.directory)
    directory.mkdir(parents=True)
    mx.random.seed(_SEED)
    config = config_of(job.model_type)
    sizes: dict[str, Any] = config.get("text_config", config)
    sizes.update({name: value for name, value in LARGER.items() if name in sizes})
    model_class, args_class = _get_classes(config)
    model: Any = model_class(args_class.from_dict(json.loads(json.dumps(config))))
    model.set_dtype(mx.bfloat16 if job.bits else mx.float32)
    if job.bits:
        nn.quantize(model, group_size=32, bits=job.bits, class_predicate=_divides_by_groups)
        config["quantization"] = {"group_size": 32, "bits": job.bits}
    weights = dict(cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters())))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory)
    return Taken(needs=needs_of(inspect(directory), model=job.model_type))


def _divides_by_groups(name: str, module: Any) -> bool:
    del name
    weight = module.get("weight")
    return hasattr(module, "to_quantized") and weight is not None and weight.shape[-1] % 128 == 0


def take_part(job: Job) -> Taken:
    """Be a rank: load, answer `sequences` prompts together, and look at the memory."""
    import mlx.core as mx

    from muster.group.formation import form_group
    from muster.model.batch import Batch
    from muster.model.load import load_shard
    from muster.model.plan import plan, supports

    group: Any = None
    if job.hosts:
        payload = RingPayload("memory", 1, job.rank, job.world_size, job.hosts)
        private = Path(job.directory).parent / f"group-{job.model_type}-{job.sharding}-{job.rank}"
        private.mkdir(mode=0o700)
        group = form_group(payload, directory=private).group
    files = inspect(Path(job.directory))
    shards = plan(files, job.sharding, job.world_size, supports(files))
    mx.clear_cache()
    before_bytes = mx.get_active_memory()
    loaded = load_shard(Path(job.directory), shards, job.rank, group, on_layer=_ignore)
    batch = Batch(
        loaded,
        group,
        max_sequences=job.sequences,
        prefill_chunk_tokens=job.chunk_tokens,
        prompt_cache_bytes=0,
    )
    batch.warm_up()
    # What a pipeline leaves unread until the first pass is read now.
    weights_bytes = mx.get_active_memory() - before_bytes
    mx.clear_cache()
    mx.reset_peak_memory()
    held_bytes = _answer(job, batch) - before_bytes
    layers = shards.layers_of(job.rank)
    return Taken(
        weights=weights_bytes,
        held=held_bytes,
        peak=mx.get_peak_memory() - before_bytes,
        process=max(0, psutil.Process().memory_info().rss - mx.get_active_memory() - mx.get_cache_memory()),
        layers=(layers.start, layers.stop),
        sharding=shards.sharding,
    )


def _ignore(done: int, total: int) -> None:
    del done, total


def _answer(job: Job, batch: Any) -> int:
    """Run all sequences to their end; the most bytes that were active between two steps."""
    import mlx.core as mx

    from muster.model.guard import Choice
    from muster.rank_protocol import Admission, Step

    admissions: list[Admission] = []
    for sequence in range(batch.max_sequences):
        tokens = tuple(1 + (sequence + place) % 200 for place in range(job.prompt_tokens))
        if job.rank == 0:
            choice = Choice(sequence, None, ())
            admissions.append(batch.admission(sequence, tokens, keep=(), max_tokens=job.answer_tokens, choice=choice))
        else:
            admissions.append(
                Admission(sequence=sequence, tokens=tokens, max_tokens=job.answer_tokens, segments=(len(tokens),))
            )
    most, number = 0, 1
    batch.run(Step(step=number, admit=tuple(admissions)))
    while len(batch):
        batch.settle()
        most = max(most, mx.get_active_memory())
        number += 1
        batch.run(Step(step=number))
    batch.settle()
    return most


def main(arguments: Sequence[str]) -> None:
    """Do the job that is the only argument, as JSON."""
    import mlx.core as mx

    job = msgspec.json.decode(arguments[0], type=Job)
    mx.set_default_device(mx.cpu)
    taken = take_part(job) if job.world_size else make(job)
    sys.stdout.buffer.write(msgspec.json.encode(taken) + b"\n")
    sys.stdout.flush()
    os._exit(0)  # mlx has nothing to save, and its threads take their time


if __name__ == "__main__":
    main(sys.argv[1:])
