"""Real ring groups for the shard tests: one process per rank, frames of JSON over pipes, no pickle."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import psutil

DEADLINE_SECONDS = 40.0


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Load a model over the whole group and generate greedily."""

    path: str
    sharding: str
    prompt: tuple[int, ...]
    count: int
    split: tuple[int, ...] | None = None
    chunk_tokens: int = 4


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank saw. `tokens` and `text` come from rank 0 only; `error` instead of everything else."""

    tokens: tuple[int, ...] = ()
    text: str = ""
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
        ports = _free_ports(size)
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


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(server.getsockname()[1]) for server in held]
    for server in held:
        server.close()
    return ports


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

    importlib.import_module("muster.model.generate")  # before the group forms, so that no rank waits for it

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
    from muster.model.generate import Decoder, warm_up
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
    warm_up(loaded)
    decoder = Decoder(loaded, prefill_chunk_tokens=job.chunk_tokens)
    if rank != 0:
        decoder.prefill(job.prompt)
        while token := int.from_bytes(relay[0].recv_bytes(), "little"):
            decoder.step(token - 1)
    else:
        outcome = _lead(job, loaded, decoder, relay, outcome)
    return msgspec.structs.replace(outcome, served_bytes=mx.get_active_memory() - idle_bytes)


def _lead(job: Job, loaded: Any, decoder: Any, relay: list[Connection], outcome: Outcome) -> Outcome:
    from muster.model.generate import Generation
    from muster.model.params import Piece, SamplingParams

    def tell(number: int) -> None:
        for pipe in relay:
            pipe.send_bytes(number.to_bytes(4, "little"))

    generation = Generation(loaded, job.prompt, SamplingParams(max_tokens=job.count))
    logits = decoder.prefill(job.prompt)
    pieces: list[Piece] = []
    while True:
        piece = generation.advance(logits)
        pieces.append(piece)
        if piece.finish is not None:
            break
        tell(piece.token + 1)  # 0 means the end
        logits = decoder.step(piece.token)
    tell(0)
    return msgspec.structs.replace(
        outcome, tokens=tuple(piece.token for piece in pieces), text="".join(piece.text for piece in pieces)
    )


def _read_bytes() -> int:
    """Bytes that this process read from files so far; 0 where the system does not say."""
    io = Path("/proc/self/io")
    return int(io.read_text().split()[1]) if io.exists() else 0
