"""Rank 0's serving loop in a thread, with this test as its gateway and its worker."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import msgspec
import zmq

from muster.model.batch import Batch
from muster.model.files import inspect
from muster.model.load import LoadedModel, load_shard
from muster.model.plan import Supports, plan
from muster.model.request import PreparedRequest, prepare
from muster.protocol import Generate
from muster.rank_protocol import AnyStep, Ask, Cancel, FromRank, Pieces, Prepare, StepFrame, Stop
from muster.replies import AnyPiece, Chunk, Done, Refused
from muster.runner.context import RankContext
from muster.runner.frames import HEADER_BYTES, Channel, encode_frame, frame_length
from muster.runner.line import GenerationLine
from muster.runner.preparing import Preparer
from muster.runner.serving import Serving
from muster.runner.steps import StepSource
from muster.sampling import SamplingParams
from muster.spec import InstanceId, ModelWorkload

DEADLINE_SECONDS = 30.0


def of(prompt: bytes | str, count: int = 8, **sampling: Any) -> Generate:
    """A request with a plain prompt: bytes are token ids, as in the tests' tokenizers."""
    given = prompt if isinstance(prompt, str) else tuple(prompt)
    return Generate(instance="m", prompt=given, sampling=SamplingParams(max_tokens=count, **sampling))


class Server:
    """One rank that serves `path`; a context manager. `prepare_request` may stand in for the real one."""

    def __init__(
        self,
        path: Path,
        *,
        sequences: int = 4,
        chunk: int = 8,
        cache_bytes: int = 0,
        prepare_request: Callable[[LoadedModel, Generate], PreparedRequest] = prepare,
        followed: bool = False,
    ) -> None:
        self._path = path
        self._followed = followed
        self.steps: list[AnyStep] = []  #: what the other ranks were told, where it is `followed`
        self._bounds = {
            "max_sequences": sequences,
            "prefill_chunk_tokens": chunk,
            "prompt_cache_bytes": cache_bytes,
        }
        self._prepare_request = prepare_request
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._router = self._context.socket(zmq.ROUTER)
        self._port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._worker, self._theirs = socket.socketpair()
        self._worker.settimeout(DEADLINE_SECONDS)
        self._channel = Channel(self._theirs)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._up = threading.Event()
        self.batch: Batch
        self.line: GenerationLine
        self.code: int | None = None
        self.error: BaseException | None = None
        self.messages: list[Pieces] = []
        self._frames: list[FromRank] = []
        self._numbers = 0

    def _serve(self) -> None:
        try:
            shards = plan(inspect(self._path), "auto", 1, Supports(tensor=False, pipeline=False))
            loaded = load_shard(self._path, shards, 0, None, on_layer=lambda done, total: None)
            workload = ModelWorkload(model=str(self._path))
            rank = RankContext(
                self._channel,
                Prepare(
                    instance=InstanceId("one"),
                    attempt=1,
                    rank=0,
                    world_size=1,
                    workload=workload,
                    host="127.0.0.1",
                    directory="",
                    generation=f"tcp://127.0.0.1:{self._port}",
                    shared_seconds=1.0,
                ),
            )
            self.batch = Batch(loaded, None, **self._bounds)
            self.line = GenerationLine(self._context, rank.prepare.generation, InstanceId("one"), 1)
            chunk: int = self._bounds["prefill_chunk_tokens"]
            preparer = Preparer(loaded, self._prepare_request)
            steps = self._source() if self._followed else None
            serving = Serving(rank, loaded, self.batch, self.line, steps, chunk_tokens=chunk, preparer=preparer)
            self._up.set()
            self.code = serving.run()
        except BaseException as error:
            self.error = error
            self._up.set()

    def _source(self) -> StepSource:
        """Steps that nobody joins, kept."""
        source = StepSource(self._context, "127.0.0.1", InstanceId("one"), 1)
        send = source.send

        def keep(step: AnyStep) -> None:
            self.steps.append(step)
            send(step)

        source.send = keep
        return source

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._up.wait(DEADLINE_SECONDS)
        assert self.error is None, self.error
        return self

    def __exit__(self, *exception: object) -> None:
        if self._thread.is_alive():
            self.stop()
        self.ended()
        self._worker.close()
        self._theirs.close()
        self._context.destroy(linger=0)

    # --- as the worker ---------------------------------------------------------------------------------------

    def stop(self, drain_seconds: float = 0.0) -> None:
        """Tell the runner to end."""
        self._worker.sendall(encode_frame(Stop(drain_seconds=drain_seconds)))

    def ended(self) -> int | None:
        """Wait for the end of the loop; answers its exit code."""
        self._thread.join(DEADLINE_SECONDS)
        assert not self._thread.is_alive(), "the serving loop did not end"
        return self.code

    def frame(self) -> StepFrame:
        """The next frame that the runner sent to its worker."""
        body = self._read(frame_length(self._read(HEADER_BYTES)))
        return msgspec.msgpack.decode(body, type=StepFrame)

    def idle(self) -> list[StepFrame]:
        """The frames up to the one that says that nothing is to do."""
        frames = [self.frame()]
        while frames[-1].active:
            frames.append(self.frame())
        return frames

    def silent(self) -> bool:
        """Whether no frame waits."""
        self._worker.setblocking(False)
        try:
            return not self._worker.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        finally:
            self._worker.settimeout(DEADLINE_SECONDS)

    def _read(self, count: int) -> bytes:
        body = bytearray()
        while len(body) < count:
            piece = self._worker.recv(count - len(body))
            assert piece, "the runner closed its line"
            body += piece
        return bytes(body)

    # --- as the gateway --------------------------------------------------------------------------------------

    def ask(self, generate: Generate) -> int:
        """Send a request; answers its number."""
        self._numbers += 1
        self._send(Ask(request=self._numbers, generate=generate))
        return self._numbers

    def cancel(self, request: int) -> None:
        """Nobody waits for it any more."""
        self._send(Cancel(request=request))

    def _send(self, message: Ask | Cancel) -> None:
        self._router.send_multipart((b"one/1", msgspec.msgpack.encode(message)))

    def replies(self, request: int) -> list[AnyPiece]:
        """What has been answered to a request so far."""
        return [piece.reply for message in self.messages for piece in message if piece.request == request]

    def until(self, holds: Callable[[], Any]) -> None:
        """Take messages until something holds."""
        while not holds():
            assert self.error is None, self.error
            assert self._router.poll(int(DEADLINE_SECONDS * 1000)), "nothing came in time"
            self.messages.append(msgspec.msgpack.decode(self._router.recv_multipart()[1], type=Pieces))

    def until_reply(self, request: int, *kinds: type[AnyPiece]) -> AnyPiece:
        """The first reply of one of these kinds."""
        found: list[AnyPiece] = []

        def holds() -> bool:
            found[:] = [reply for reply in self.replies(request) if isinstance(reply, kinds)]
            return bool(found)

        self.until(holds)
        return found[0]

    def end_of(self, request: int) -> Done:
        """How the answer ended, if it was not refused."""
        end = self.until_reply(request, Done, Refused)
        assert isinstance(end, Done), end
        assert self.replies(request)[-1] is end or self.replies(request)[-1] == end
        return end

    def refusal_of(self, request: int) -> Refused:
        """Why it was refused."""
        end = self.until_reply(request, Done, Refused)
        assert isinstance(end, Refused), end
        return end

    def tokens(self, request: int) -> tuple[int, ...]:
        """The tokens so far."""
        return tuple(token for reply in self.replies(request) if isinstance(reply, Chunk) for token in reply.tokens)
