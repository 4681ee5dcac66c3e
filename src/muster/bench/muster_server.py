"""muster as a server: a cluster with its HTTP API, and a model instance on it."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import msgspec

from muster.bench.load import Target
from muster.bench.observer import Observer, observing
from muster.bench.peer_server import Running
from muster.local import LocalCluster
from muster.spec import InstanceSpec, ModelWorkload
from muster.state import Instance

_NODES = ("a", "b")
#: Warm runners on each node, as `muster up` has them.
_POOL = 2
_READY_SECONDS = 60.0
_NAME = "bench"
_CALL_SECONDS = 10.0


class _Model(msgspec.Struct, frozen=True):
    running_requests: int
    waiting_requests: int


class _Models(msgspec.Struct, frozen=True):
    models: list[_Model]


_models_decoder = msgspec.json.Decoder(_Models)


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster that is up. `roots` are its processes by name, without the runners below them."""

    observer: Observer
    port: int
    roots: dict[str, int]

    def open_requests(self) -> int:
        """How many requests run or wait, by the coordinator's own account; blocks."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/models", timeout=_CALL_SECONDS) as answer:
            models = _models_decoder.decode(answer.read()).models
        return sum(model.running_requests + model.waiting_requests for model in models)

    async def settle(self) -> None:
        """Wait until every warm runner is there: making them takes the machine."""
        await self.observer.wait_warm(_POOL)


@asynccontextmanager
async def cluster(directory: Path) -> AsyncGenerator[Host]:
    """A coordinator with HTTP and two workers.

    Raises:
        UnreachableError: a process did not come up.
    """
    local = LocalCluster(directory, _NODES, node_options=("--pool", str(_POOL)), log_level="warning")
    try:
        await anyio.to_thread.run_sync(local.start)
        async with observing(local.address) as observer:
            port = urlsplit(local.http).port
            assert port is not None
            yield Host(
                observer=observer,
                port=port,
                roots={name: member.process.pid for name, member in local.members.items()},
            )
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(local.stop)


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is ready, as a server among others, and its instance."""

    running: Running
    instance: Instance


@asynccontextmanager
async def serving(
    host: Host, model: Path, ranks: int, *, prompt_cache_bytes: int | None = None
) -> AsyncGenerator[Served]:
    """The model on so many ranks, cut by tensor, from a warm pool; deleted in the end.

    Raises:
        BenchError: it does not become ready, or the pool not warm.
    """
    await host.settle()
    workload = ModelWorkload(model=str(model), sharding="tensor" if ranks > 1 else "auto", served_name=_NAME)
    if prompt_cache_bytes is not None:
        workload = msgspec.structs.replace(workload, prompt_cache_bytes=prompt_cache_bytes)
    began = time.perf_counter()
    try:
        trial = await host.observer.bring_up(
            InstanceSpec(workload=workload, ranks=ranks), deadline_seconds=_READY_SECONDS
        )
        running = Running(
            name=f"muster on {ranks}",
            target=Target(port=host.port, model=_NAME),
            roots=tuple(host.roots.values()),
            began_seconds=began,
        )
        yield Served(running=running, instance=trial.instance)
    finally:
        with anyio.CancelScope(shield=True):
            await host.observer.delete_all()
