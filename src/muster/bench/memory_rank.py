"""A process of `muster bench memory`: a rank that makes models, runs its part of them, and says what it took.

`python -m muster.bench.memory_rank SEAT`; reads a `Job` a line, and writes an `Answer` a line.
"""

from __future__ import annotations

import gc
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

#: Where the sizes are others than in the table of families: little to compute beside what is kept, and so much of it
#: that what rounding leaves over is small.
SIZES: Final[dict[str, Any]] = {
    "hidden_size": 128,
    "vocab_size": 16384,
    "num_experts": 16,
    "num_local_experts": 16,
    "n_routed_experts": 16,
    "moe_num_experts": 16,
}
_SEED: Final = 3
#: Of a quantised model: the smallest that MLX has, so that every size of the table divides by it and by two ranks.
_GROUP_SIZE: Final = 32


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """Which rank of the ring group the process is; `directory` is the benchmark's own."""

    rank: int
    hosts: tuple[tuple[str, ...], ...]
    directory: str


class Make(msgspec.Struct, frozen=True, kw_only=True, tag="make"):
    """Write a model of random weights: of 32 bits, or of 16 bits quantised to `bits`; or as the family packs them."""

    model_type: str
    directory: str
    bits: int = 0


class Run(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    """Load the rank's part of a model, and answer so many prompts together; of a `world_size` of 1: all, alone."""

    directory: str
    sharding: ShardingWish
    world_size: int
    sequences: int
    prompt_tokens: int
    answer_tokens: int
    chunk_tokens: int


Job = Make | Run


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank took, in bytes of MLX's allocator.

    `weights` after loading, `held` the most between two steps (weights and caches), `peak` the most at any moment
    from the first step on. `process` is what is resident beside MLX's memory. `layers` are those that it runs.
    """

    weights: int
    held: int
    peak: int
    process: int
    layers: tuple[int, int]
    sharding: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a job; `failed` says in one line why nothing did."""

    needs: ModelNeeds | None = None
    taken: Taken | None = None
    failed: str = ""


def make(job: Make) -> ModelNeeds:
    """Write the model; answers what it needs by its files."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    from muster.bench.tiny_model import write_tokenizer

    directory = Path(job.directory)
    directory.mkdir(parents=True)
    mx.random.seed(_SEED)
    sizes = config_of(job.model_type)
    packed = "quantization" in sizes
    sizes = sizes.get("text_config", sizes)
    changes = {name: value for name, value in SIZES.items() if name in sizes and not packed}
    config = config_of(job.model_type, **changes)
    model_class, args_class = _get_classes(config)
    model: Any = model_class(args_class.from_dict(json.loads(json.dumps(config))))
    model.set_dtype(mx.float16 if packed else mx.bfloat16 if job.bits else mx.float32)
    if job.bits:
        assert not packed, job
        nn.quantize(model, group_size=_GROUP_SIZE, bits=job.bits, class_predicate=_divides_by_groups)
        config["quantization"] = {"group_size": _GROUP_SIZE, "bits": job.bits}
    weights = dict(cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters())))
    if packed:  # made of zeros, from which a norm of 16 bits makes no numbers
        weights |= {
            name: 0.05 * mx.random.normal(one.shape).astype(one.dtype)
            for name, one in weights.items()
            if name.endswith(".biases")
        }
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory)
    return needs_of(inspect(directory), model=job.model_type)


def _divides_by_groups(name: str, module: Any) -> bool:
    del name
    weight = module.get("weight")
    return hasattr(module, "to_quantized") and weight is not None and weight.shape[-1] % (4 * _GROUP_SIZE) == 0


def run(job: Run, rank: int, group: Any) -> Taken:
    """Be the rank: load, answer the prompts, and look at the memory."""
    import mlx.core as mx
    from mlx_lm.utils import _get_classes

    from muster.bench.plain_kernels import put_in
    from muster.model.batch import Batch
    from muster.model.load import load_shard
    from muster.model.plan import plan, supports

    if job.world_size == 1:
        rank, group = 0, None
    files = inspect(Path(job.directory))
    put_in(sys.modules[_get_classes(dict(files.config))[0].__module__])
    shards = plan(files, job.sharding, job.world_size, supports(files))
    # What an earlier job left is gone, and does not count.
    gc.collect()
    mx.clear_cache()
    before_bytes = mx.get_active_memory()
    loaded = load_shard(Path(job.directory), shards, rank, group, on_layer=_ignore)
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
    held_bytes = _answer(job, rank, batch) - before_bytes
    layers = shards.layers_of(rank)
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


def _answer(job: Run, rank: int, batch: Any) -> int:
    """Run all sequences to their end; the most bytes that were active between two steps."""
    import mlx.core as mx

    from muster.model.guard import Choice
    from muster.rank_protocol import Admission, Step

    admissions: list[Admission] = []
    for sequence in range(job.sequences):
        tokens = tuple(1 + (sequence + place) % 200 for place in range(job.prompt_tokens))
        if rank == 0:
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
        for _, error in batch.run(Step(step=number)).failed:  # that sequence would never end
            raise error
    batch.settle()
    return most


def do(job: Job, rank: int, group: Any) -> Answer:
    """Carry a job out, whatever comes of it."""
    try:
        match job:
            case Make():
                return Answer(needs=make(job))
            case Run():
                return Answer(taken=run(job, rank, group))
    except Exception as error:  # a family that cannot be run is a finding, not the end of the others
        lines = str(error).splitlines() or [""]
        return Answer(failed=f"{type(error).__name__}: {lines[0]}")


def main(arguments: Sequence[str]) -> None:
    """Take the seat that is the only argument, as JSON, and do jobs until there are no more."""
    # What models print must not come between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    import mlx.core as mx

    from muster.group.formation import form_group

    seat = msgspec.json.decode(arguments[0], type=Seat)
    mx.set_default_device(mx.cpu)
    private = Path(seat.directory) / f"group-{seat.rank}"
    private.mkdir(mode=0o700)
    group = form_group(RingPayload("memory", 1, seat.rank, len(seat.hosts), seat.hosts), directory=private).group
    decoder = msgspec.json.Decoder(Job)
    for line in sys.stdin.buffer:
        answers.write(msgspec.json.encode(do(decoder.decode(line), seat.rank, group)) + b"\n")
        answers.flush()
    os._exit(0)  # mlx has nothing to save, and its threads take their time


if __name__ == "__main__":
    main(sys.argv[1:])
