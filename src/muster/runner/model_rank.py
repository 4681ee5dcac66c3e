"""A rank that holds a shard of a model and generates in step with the others."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import msgspec
import zmq

from muster.errors import ModelError, ProtocolError
from muster.model import files, hub
from muster.model.batch import Batch
from muster.model.load import LoadedModel, load_shard
from muster.model.plan import ShardPlan, plan, supports
from muster.rank_protocol import Form, LoadedFrame, PreparedFrame, ProgressFrame, ReadyFrame, Redial, Stop, WarmUp
from muster.runner.context import RankContext
from muster.runner.following import Following
from muster.runner.line import GenerationLine
from muster.runner.serving import Serving
from muster.runner.steps import StepSink, StepSource
from muster.spec import ModelWorkload, Phase

#: How long the last messages may take on their way out.
_LINGER_MS = 500


class ModelRank:
    """The `model` workload of one rank."""

    def __init__(self, context: RankContext, workload: ModelWorkload) -> None:
        self._context = context
        self._workload = workload
        self._zmq = zmq.Context[zmq.Socket[bytes]]()
        self._source: StepSource | None = None

    def prepare(self) -> PreparedFrame:
        """Find the model, check its files, and decide how it is sharded; rank 0 binds the steps socket.

        Raises:
            ModelError: the files are missing, incomplete or inconsistent.
            ShardingError: it cannot be sharded as asked.
        """
        prepare = self._context.prepare
        self._path: Path = hub.resolve(self._workload.model, self._workload.revision, on_progress=self._downloaded)
        found = files.inspect(self._path)
        self._plan: ShardPlan = plan(found, self._workload.sharding, prepare.world_size, supports(found))
        self._fingerprint = files.fingerprint(self._path)
        if prepare.rank == 0 and prepare.world_size > 1:
            self._source = StepSource(self._zmq, prepare.host, prepare.instance, prepare.attempt)
            return PreparedFrame(steps=self._source.address)
        return PreparedFrame()

    def fingerprint(self) -> str:
        """Digest of the model's files and of the sharding."""
        split = "-".join(str(layers) for layers in self._plan.split)
        return f"{self._fingerprint}:{self._plan.sharding}:{split}"

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
            self._path, self._plan, self._context.prepare.rank, cast(Any, group), on_layer=self._layer_loaded
        )
        if files.fingerprint(self._path) != self._fingerprint:
            raise ModelError(
                f"the files in {self._path} changed while they were loaded",
                remedy="Leave a model's files alone while an instance comes up, and create it again.",
            )
        layers = self._plan.layers_of(self._context.prepare.rank)
        self._context.channel.send(
            LoadedFrame(
                layers=(layers.start, layers.stop),
                sharding=self._plan.sharding,
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
        self._progress(Phase.LOADING, done, total, "layers")

    def _downloaded(self, done: int, total: int) -> None:
        self._progress(Phase.PREPARING, done, total, "bytes")

    def _progress(self, phase: Phase, done: int, total: int, unit: str) -> None:
        self._context.channel.send(ProgressFrame(phase=phase, done=done, total=total, unit=unit))
