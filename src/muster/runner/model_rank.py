"""A rank that holds a shard of a model and generates in step with the others."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import zmq

from muster.errors import ModelError, ProtocolError
from muster.fetch.choice import owners, shard_files
from muster.fetch.obtain import Wish, obtain
from muster.fetch.progress import Brought, Moved
from muster.layout import RankLayout
from muster.model import files
from muster.model.batch import Batch
from muster.model.load import LoadedModel, load_shard
from muster.model.plan import ShardPlan, plan, supports
from muster.rank_protocol import (
    FetchedFrame,
    Form,
    LoadedFrame,
    PreparedFrame,
    ProgressFrame,
    ReadyFrame,
    Redial,
    Stop,
    WarmUp,
)
from muster.runner.context import RankContext
from muster.runner.following import Following
from muster.runner.line import GenerationLine
from muster.runner.pulse import note_memory
from muster.runner.serving import Serving
from muster.runner.steps import StepSink, StepSource
from muster.spec import CACHE_VARIABLES, ModelWorkload, Phase

#: How long the last messages may take on their way out.
_LINGER_MS = 500


class ModelRank:
    """The `model` workload of one rank."""

    def __init__(self, context: RankContext, workload: ModelWorkload) -> None:
        self._context = context
        self._workload = workload
        self._zmq = zmq.Context[zmq.Socket[bytes]]()
        self._source: StepSource | None = None
        self._plan: ShardPlan | None = None
        self._needed: frozenset[str] | None = None  #: weight files, where not all have to be here

    def prepare(self) -> PreparedFrame:
        """Find or bring the model, check its files, and decide how it is sharded; rank 0 binds the steps socket.

        Raises:
            ModelError: the files are missing, incomplete or inconsistent.
            FetchError: they could not be brought now.
            DiskFullError: there is no room for them.
            ShardingError: it cannot be sharded as asked.
        """
        prepare = self._context.prepare
        self._path: Path = obtain(self._wish(), self._choose, self._moved, self._brought, self._share)
        found = files.inspect(self._path, self._needed)
        self._plan = self._plan or self._planned(found)
        self._fingerprint = files.fingerprint(self._path)
        if self._workload.trust_remote_code:
            self._fingerprint += files.code_fingerprint(self._path)
        self._sample = files.sample(self._path, self._needed)
        if prepare.rank == 0 and prepare.world_size > 1:
            self._source = StepSource(self._zmq, prepare.host, prepare.instance, prepare.attempt)
            return PreparedFrame(steps=self._source.address)
        return PreparedFrame()

    def _wish(self) -> Wish:
        prepare, workload = self._context.prepare, self._workload
        ranks = prepare.layout.ranks
        own = ranks[prepare.rank] if prepare.rank < len(ranks) else RankLayout()
        return Wish(
            model=workload.model,
            revision=workload.revision,
            commit=prepare.layout.commit,
            sources=own.sources,
            # Workers give what lies in their own cache: where the ranks have another one, nobody would see it come.
            sharers=own.sharers if CACHE_VARIABLES.isdisjoint(prepare.environment) else (),
            copies=Path(prepare.models_directory) if prepare.models_directory else None,
            offline=prepare.offline,
            code=workload.trust_remote_code,
            who=f"rank {prepare.rank} of {prepare.instance}",
        )

    def _choose(self, path: Path, weights: Collection[str]) -> Collection[str]:
        """The weight files that this rank loads from, known from config.json and the index."""
        found = files.inspect(path, ())
        self._plan = self._planned(found)
        self._needed = self._needed_by(self._context.prepare.rank, files.read_index(path), weights)
        return self._needed

    def _share(self, path: Path, weights: Collection[str]) -> Mapping[str, int]:
        """By name the rank that downloads the file."""
        indexed = files.read_index(path)
        return owners([self._needed_by(rank, indexed, weights) for rank in range(self._planned_shard.world_size)])

    def _needed_by(self, rank: int, indexed: Mapping[str, str], weights: Collection[str]) -> frozenset[str]:
        plan = self._planned_shard
        layers = plan.layers_of(rank) if plan.sharding == "pipeline" else None
        return shard_files(indexed, weights, layers, plan.layers)

    def _planned(self, found: files.ModelFiles) -> ShardPlan:
        """As placement laid the model out; as the workload wishes where it did not."""
        layout, world_size = self._context.prepare.layout, self._context.prepare.world_size
        wish = layout.sharding if layout.sharding in ("pipeline", "tensor") else self._workload.sharding
        return plan(found, wish, world_size, supports(found), split=layout.split or None)

    @property
    def _planned_shard(self) -> ShardPlan:
        assert self._plan is not None, "the rank is prepared"
        return self._plan

    def fingerprint(self) -> str:
        """Digest of the model's files and of the sharding."""
        split = "-".join(str(layers) for layers in self._planned_shard.split)
        return f"{self._fingerprint}:{self._planned_shard.sharding}:{split}"

    def run(self, group: object | None, form: Form) -> int:
        """Load the shard, warm up in step, and generate until told to stop."""
        prepare = self._context.prepare
        loaded = self._load(group)
        batch = Batch(
            loaded,
            group,
            max_sequences=self._workload.max_batch,
            prefill_chunk_tokens=self._workload.prefill_chunk_tokens,
            prompt_cache_bytes=self._workload.prompt_cache_bytes,
        )
        self._context.phase = Phase.WARMING
        if prepare.rank == 0:
            return self._lead(loaded, batch)
        if form.steps is None:
            raise ProtocolError("rank 0 has not said where its steps are")
        return self._follow(batch, form.steps)

    def _load(self, group: object | None) -> LoadedModel:
        self._context.phase = Phase.LOADING
        begin = time.perf_counter()
        # The group is opaque to every layer but this one and `group`.
        loaded = load_shard(
            self._path,
            self._planned_shard,
            self._context.prepare.rank,
            cast(Any, group),
            on_layer=self._layer_loaded,
            trust_remote_code=self._workload.trust_remote_code,
        )
        if files.sample(self._path, self._needed) != self._sample:
            raise ModelError(
                f"the files in {self._path} changed while they were loaded",
                remedy="Leave a model's files alone while an instance comes up, and create it again.",
            )
        layers = self._planned_shard.layers_of(self._context.prepare.rank)
        self._context.channel.send(
            LoadedFrame(
                layers=(layers.start, layers.stop),
                sharding=self._planned_shard.sharding,
                weights_bytes=loaded.bytes,
                seconds=time.perf_counter() - begin,
            )
        )
        return loaded

    def _lead(self, loaded: LoadedModel, batch: Batch) -> int:
        """Rank 0: wait for the others without touching the group, warm up together, serve."""
        prepare, source = self._context.prepare, self._source
        if source is not None and not self._wait_for_others(source):
            return 0
        if source is not None:
            source.send(WarmUp(step=1))
        batch.warm_up()
        note_memory(self._context.counter)
        self._context.phase = Phase.RUNNING
        line = GenerationLine(self._zmq, self._context.prepare.generation, prepare.instance, prepare.attempt)
        serving = Serving(self._context, loaded, batch, line, source, chunk_tokens=self._workload.prefill_chunk_tokens)
        self._context.channel.send(ReadyFrame())
        code = serving.run()
        # The process ends without a teardown: what was said last must be on its way before.
        self._zmq.destroy(linger=_LINGER_MS)
        return code

    def _wait_for_others(self, source: StepSource) -> bool:
        """Whether all have joined; `False` when the worker wants the end first."""
        poller = zmq.Poller()
        poller.register(source.socket, zmq.POLLIN)
        poller.register(self._context.channel.fileno(), zmq.POLLIN)
        while not source.joined(self._context.prepare.world_size):
            ready = dict(poller.poll())
            if self._context.channel.fileno() in ready and self._told_to_stop():
                return False
            source.take_join()
        return True

    def _follow(self, batch: Batch, address: str) -> int:
        """Another rank: replay rank 0's steps."""
        prepare = self._context.prepare
        sink = StepSink(self._zmq, address, prepare.instance, prepare.attempt, prepare.rank)
        return Following(self._context, batch, sink).run()

    def _told_to_stop(self) -> bool:
        frame = self._context.channel.receive()
        if isinstance(frame, Redial):
            self._context.prepare = msgspec.structs.replace(self._context.prepare, generation=frame.generation)
        return frame is None or isinstance(frame, Stop)

    def _layer_loaded(self, done: int, total: int) -> None:
        note_memory(self._context.counter)
        self._progress(Phase.LOADING, done, total, "layers")

    def _moved(self, moved: Moved) -> None:
        frame = ProgressFrame(
            phase=Phase.PREPARING,
            done=moved.done,
            total=moved.total,
            unit="bytes",
            rate=moved.rate,
            note=moved.note,
        )
        self._context.channel.send(frame)

    def _brought(self, brought: Brought) -> None:
        frame = FetchedFrame(source=brought.source, files=brought.files, bytes=brought.bytes, seconds=brought.seconds)
        self._context.channel.send(frame)

    def _progress(self, phase: Phase, done: int, total: int, unit: str) -> None:
        self._context.channel.send(ProgressFrame(phase=phase, done=done, total=total, unit=unit))
