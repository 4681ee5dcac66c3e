"""Real ring groups for the shard tests: one process per rank, frames of JSON over pipes, no pickle."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import psutil

from muster.group.ports import reserve
from muster.sampling import SamplingParams

DEADLINE_SECONDS = 60.0


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A request: it enters at step `enter` at the earliest, once `after` others have ended, and is removed once it
    has `cancel` tokens (0 already at its second step); by default never."""

    prompt: tuple[int, ...]
    count: int
    sampling: SamplingParams = SamplingParams()
    keep: tuple[int, ...] = ()
    enter: int = 0
    after: int = 0
    cancel: int = -1


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Load a model over the whole group and answer the requests.

    The weights of `spoiled_rank` are shifted after loading, as if its hardware computed otherwise.
    """

    path: str
    sharding: str
    asks: tuple[Ask, ...]
    split: tuple[int, ...] | None = None
    chunk_tokens: int = 4
    max_sequences: int = 8
    prompt_cache_bytes: int = 0
    spoiled_rank: int = -1
    agree: bool = True


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank saw; `error` instead of everything else.

    `tokens` are those of each request, as this rank heard them; `cached` how many of its prompt came from the cache,
    and `entries` how many prompts the cache holds in the end.
    """

    tokens: tuple[tuple[int, ...], ...] = ()
    cached: tuple[int, ...] = ()
    entries: int = 0
    steps: int = 0
    seconds: float = 0.0
    layers: tuple[int, int] = (0, 0)
    progress: tuple[tuple[int, int], ...] = ()
    read_bytes: int = 0
    resident_bytes: int = 0
    peak_bytes: int = 0
    served_bytes: int = 0  #: weights and cache in memory after the generation
    error: str = ""


class Ranks:
    """A formed ring group on loopback. Call `close` in the end."""

    def __init__(self, size: int, directory: Path) -> None:
        context = multiprocessing.get_context("spawn")
        held = reserve("127.0.0.1", size)
        ports = held.ports
        relays = [context.Pipe(duplex=False) for _ in range(size - 1)]
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(size):
            hostfile = directory / f"ring-{rank}.json"
            hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
            ends: Any = context.Pipe()
            ours, theirs = ends
            relay = [sender for _, sender in relays] if rank == 0 else [relays[rank - 1][0]]
            process = context.Process(target=_rank_main, args=(rank, size, str(hostfile), theirs, relay), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        for receiver, sender in relays:
            receiver.close()
            sender.close()
        for pipe in self._pipes:
            _receive(pipe)
        for rank in range(size - 1):
            self._pipes[rank].send_bytes(b"form")
            _wait_until(lambda rank=rank: _listens(self._processes[rank].pid, ports[rank]))
        self._pipes[-1].send_bytes(b"form")  # the last rank dials at once, the others accept first
        for pipe in self._pipes:
            _receive(pipe)
        held.close()

    def run(self, job: Job) -> list[Outcome]:
        """Every rank's outcome, by rank."""
        for pipe in self._pipes:
            pipe.send_bytes(msgspec.json.encode(job))
        return [msgspec.json.decode(_receive(pipe), type=Outcome) for pipe in self._pipes]

    def close(self) -> None:
        """End the processes that this group started."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(DEADLINE_SECONDS)


def _listens(pid: int, port: int) -> bool:
    connections = psutil.Process(pid).net_connections("tcp")
    return any(entry.status == psutil.CONN_LISTEN and entry.laddr[1] == port for entry in connections)


def _wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < end, "deadline passed"
        time.sleep(0.002)


def _receive(pipe: Connection) -> bytes:
    assert pipe.poll(DEADLINE_SECONDS), "a rank did not answer in time"
    return pipe.recv_bytes()


def _rank_main(rank: int, size: int, hostfile: str, pipe: Connection, relay: list[Connection]) -> None:
    os.environ.update(MLX_HOSTFILE=hostfile, MLX_RANK=str(rank))
    import mlx.core as mx

    importlib.import_module("muster.model.batch")  # before the group forms, so that no rank waits for it

    pipe.send_bytes(b"imported")
    pipe.recv_bytes()
    group = mx.distributed.init(strict=True, backend="ring")
    assert (group.rank(), group.size()) == (rank, size)
    pipe.send_bytes(b"formed")
    while True:
        job = msgspec.json.decode(pipe.recv_bytes(), type=Job)
        pipe.send_bytes(msgspec.json.encode(_run(job, rank, group, relay)))


def _run(job: Job, rank: int, group: Any, relay: list[Connection]) -> Outcome:
    import mlx.core as mx

    from muster.errors import MusterError
    from muster.model.files import inspect
    from muster.model.load import load_shard
    from muster.model.plan import plan, supports

    path = Path(job.path)
    progress: list[tuple[int, int]] = []
    mx.clear_cache()
    mx.reset_peak_memory()
    idle_bytes, read_before = mx.get_active_memory(), _read_bytes()
    try:
        files = inspect(path)
        shards = plan(files, job.sharding, group.size(), supports(files), split=job.split)  # pyright: ignore[reportArgumentType]
        loaded = load_shard(path, shards, rank, group, on_layer=lambda done, total: progress.append((done, total)))
    except MusterError as error:
        return Outcome(error=str(error))
    outcome = Outcome(
        layers=(shards.layers_of(rank).start, shards.layers_of(rank).stop),
        progress=tuple(progress),
        read_bytes=_read_bytes() - read_before,
        resident_bytes=loaded.bytes,
        peak_bytes=mx.get_peak_memory() - idle_bytes,
    )
    outcome = answer(job, loaded, group, relay, outcome)
    return msgspec.structs.replace(outcome, served_bytes=mx.get_active_memory() - idle_bytes)


def run_alone(job: Job) -> Outcome:
    """The job on one rank, in this process."""
    from muster.model.files import inspect
    from muster.model.load import load_shard
    from muster.model.plan import Supports, plan

    path = Path(job.path)
    shards = plan(inspect(path), "auto", 1, Supports(tensor=False, pipeline=False))
    loaded = load_shard(path, shards, 0, None, on_layer=lambda done, total: None)
    return answer(job, loaded, None, [], Outcome())


def answer(job: Job, loaded: Any, group: Any, relay: list[Connection], outcome: Outcome) -> Outcome:
    """This rank's part in answering the job's requests, rank 0's steps going through `relay`."""
    import mlx.core as mx
    from mlx.utils import tree_map

    from muster.model.batch import Batch
    from muster.rank_protocol import Step

    if loaded.rank == job.spoiled_rank:
        mx.random.seed(7)
        loaded.model.update(tree_map(_shifted, loaded.model.parameters()))
        mx.eval(loaded.model.parameters())
    batch = Batch(
        loaded,
        group,
        max_sequences=job.max_sequences,
        prefill_chunk_tokens=job.chunk_tokens,
        prompt_cache_bytes=job.prompt_cache_bytes,
    )
    if not job.agree:
        batch._group = None  # pyright: ignore[reportPrivateUsage]
    batch.warm_up()
    lead = _Lead(job, batch)
    begin = time.perf_counter()
    steps = 0
    while True:
        if loaded.rank == 0:
            step = lead.decide(steps)
            body = msgspec.msgpack.encode(step)
            for pipe in relay:
                pipe.send_bytes(body)
        else:
            step = msgspec.msgpack.decode(relay[0].recv_bytes(), type=Step)
        if step.step < 0:
            break
        steps += 1
        lead.hear(step, batch.run(step))
    batch.settle()
    return msgspec.structs.replace(
        outcome,
        tokens=tuple(tuple(tokens) for tokens in lead.tokens),
        cached=tuple(lead.cached),
        entries=len(batch.prefix),
        steps=steps,
        seconds=time.perf_counter() - begin,
    )


def _shifted(weight: Any) -> Any:
    import mlx.core as mx

    return weight + 0.2 * mx.random.normal(weight.shape)


class _Lead:
    """Decides the steps on rank 0; on every rank, gathers what they bring."""

    def __init__(self, job: Job, batch: Any) -> None:
        self._job = job
        self._batch = batch
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self.tokens: list[list[int]] = [[] for _ in job.asks]
        self.cached = [0] * len(job.asks)

    def decide(self, steps: int) -> Any:
        from muster.model.choose import make_draw, make_processors
        from muster.model.guard import Choice
        from muster.rank_protocol import Step

        batch = self._batch
        remove = [
            number
            for number in self._begun - self._ended
            if 0 <= self._job.asks[number].cancel <= len(self.tokens[number])
        ]
        self._ended.update(remove)
        entries = batch.prefix.excess()
        admit: list[Any] = []
        for number, ask in enumerate(self._job.asks):
            waits = number in self._begun or ask.enter > steps or ask.after > len(self._ended)
            if waits or len(batch) - len(remove) + len(admit) >= batch.max_sequences:
                continue
            self._begun.add(number)
            choice = Choice(number, make_draw(ask.sampling), make_processors(ask.sampling))
            admit.append(batch.admission(number, ask.prompt, keep=ask.keep, max_tokens=ask.count, choice=choice))
        over = len(self._begun) == len(self._job.asks) and not (remove or admit or len(batch) or entries is not None)
        return Step(step=-1 if over else steps + 1, remove=tuple(remove), admit=tuple(admit), cache_entries=entries)

    def hear(self, step: Any, brought: Any) -> None:
        for admission in step.admit:
            self.cached[admission.sequence] = admission.cached_tokens
        for token in brought.tokens:
            self.tokens[token.sequence].append(token.token)
            if token.last is not None:
                self._ended.add(token.sequence)


def _read_bytes() -> int:
    """Bytes that this process read from files so far; 0 where the system does not say."""
    io = Path("/proc/self/io")
    return int(io.read_text().split()[1]) if io.exists() else 0
