"""mlx-lm without any server, in a process of its own: `python -m muster.bench.inprocess JOB`; prints a `Speeds`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import anyio
import msgspec

from muster.bench.observer import BenchError
from muster.bench.shapes import prompt

_SECONDS = 300.0


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked; a request's prompt is `muster.bench.shapes.prompt` of its number."""

    model: str
    streams: int
    answer_tokens: int
    singles: int
    waves: int


class Speeds(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens per second with the prompt's time counted, and seconds to the first token, once for each try."""

    single_tokens_per_second: tuple[float, ...]
    first_seconds: tuple[float, ...]
    batch_tokens_per_second: tuple[float, ...]


async def in_child(job: Job, environment: dict[str, str]) -> Speeds:
    """Measure in a child process.

    Raises:
        BenchError: the child failed.
    """
    command = [sys.executable, "-m", "muster.bench.inprocess", msgspec.json.encode(job).decode()]
    with anyio.fail_after(_SECONDS):
        done = await anyio.run_process(command, check=False, env=environment, stderr=subprocess.PIPE)
    if done.returncode != 0:
        tail = "\n".join(done.stderr.decode(errors="replace").splitlines()[-6:])
        raise BenchError(f"mlx-lm in a process of its own ended with {done.returncode}:\n{tail}")
    return msgspec.json.decode(done.stdout, type=Speeds)


def measure(job: Job) -> Speeds:
    """Measure here: `stream_generate` for one stream, `BatchGenerator` for several."""
    import mlx_lm

    model, tokenizer = mlx_lm.load(job.model)[:2]
    encode = _encoder(tokenizer)
    singles = [_single(model, tokenizer, encode(number), job.answer_tokens) for number in range(job.singles + 1)]
    numbers = iter(range(1000, 10_000))
    batches = [
        _batch(model, [encode(next(numbers)) for _ in range(job.streams)], job.answer_tokens)
        for _ in range(job.waves + 1)
    ]
    # The first of each warms up.
    return Speeds(
        single_tokens_per_second=tuple(rate for rate, _ in singles[1:]),
        first_seconds=tuple(first for _, first in singles[1:]),
        batch_tokens_per_second=tuple(batches[1:]),
    )


def _encoder(tokenizer: Any) -> Any:
    def encode(number: int) -> list[int]:
        messages = [{"role": "user", "content": prompt(number)}]
        return cast("list[int]", tokenizer.apply_chat_template(messages, add_generation_prompt=True))

    return encode


def _single(model: Any, tokenizer: Any, tokens: list[int], max_tokens: int) -> tuple[float, float]:
    import mlx_lm

    began = time.perf_counter()
    first = 0.0
    count = 0
    for _ in mlx_lm.stream_generate(model, tokenizer, tokens, max_tokens=max_tokens):
        first = first or time.perf_counter() - began
        count += 1
    return count / (time.perf_counter() - began), first


def _batch(model: Any, prompts: list[list[int]], max_tokens: int) -> float:
    from mlx_lm.generate import BatchGenerator

    generator = BatchGenerator(model)
    began = time.perf_counter()
    generator.insert(prompts, [max_tokens] * len(prompts))
    left = len(prompts)
    count = 0
    while left:
        _, responses = cast("tuple[Any, list[Any]]", generator.next())
        count += len(responses)
        left -= sum(response.finish_reason is not None for response in responses)
    seconds = time.perf_counter() - began
    generator.close()
    return count / seconds


def main(arguments: Sequence[str]) -> None:
    """Measure the job that is the only argument, as JSON."""
    job = msgspec.json.decode(arguments[0], type=Job)
    speeds = measure(msgspec.structs.replace(job, model=str(Path(job.model))))
    sys.stdout.buffer.write(msgspec.json.encode(speeds) + b"\n")
    sys.stdout.flush()
    os._exit(0)  # mlx has nothing to save, and its threads take their time


if __name__ == "__main__":
    main(sys.argv[1:])
